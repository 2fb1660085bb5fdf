"""``LogMax``: a loss scale predicted from how large gradients have been."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from narrowcast.errors import ScaleError
from narrowcast.scaling._range import SMALLEST_SCALE, check_limits, is_number, is_whole, to_float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMax:
    """The largest scale at which a step's gradients overflow about once in a thousand steps.

    With x = log2(amax) of each step, mu a running mean of x and sigma a running deviation, each corrected for
    having started at 0:

        scale = 2 ** (largest_log2 - (mu + deviations * sigma)), within min_scale and max_scale

    rounded to float32. There is no waiting: the scale follows the gradients at every step, up and down.

    A step with an overflow has no amax. OpenSeq2Seq feeds x = 2**largest_log2, that is 65536, as though it
    were not a logarithm, which holds the scale at its minimum for thousands of steps. Here the mean is raised
    so far that the formula gives half of the present scale, and is then forgotten like any x: by 1 % a step.
    Before the first amax the scale itself is halved. So a burst of overflows ends as fast as ``Dynamic`` ends
    it, and the scale is back within about two hundred steps where the gradients are as before.

    A step whose amax is 0 (no gradient reached a parameter, or all were flushed to zero) says nothing about
    the size of gradients and changes nothing.

    It sees only the gradients that amax is of. Where it is others that overflow (those of activations,
    inside a backward in fp16), it climbs back into the overflow again and again: use ``Dynamic``, or a lower
    ``largest_log2``. While few steps have been seen, sigma is too small: expect one or two overflows.

    Attributes:
        scale: the factor now. It starts at 2**16, as torch does, and not at OpenSeq2Seq's 1: a first step
            that overflows is skipped and harms nothing; one whose gradients are flushed to zero is taken, and
            without an amax the scale could never rise.
        mean_decay: share of the past in mu; between 0 and 1 (OpenSeq2Seq's ``beta1``).
        variance_decay: share of the past in sigma; between 0 and 1 (``beta2``).
        deviations: how many sigma above mu a gradient may still be; at least 0. 3.09 leaves 0.1 % of a normal
            distribution above.
        largest_log2: log2 of the largest number of the format: 16 for fp16, whose largest is 65504.
        min_scale: from 2**-126. OpenSeq2Seq's is 1, which large gradients overflow.
        max_scale: up to 2**127; OpenSeq2Seq's 2**24.
        steps: steps that had an amax above 0.
        mean_sum: sum of (1 - mean_decay) * x, each decayed by mean_decay a step.
        slow_mean_sum: the same with variance_decay.
        square_sum: the same with variance_decay, of x * x.

    Source: NVIDIA OpenSeq2Seq, ``LogMaxScaler`` in ``open_seq2seq/optimizers/automatic_loss_scaler.py``.

    Raises:
        ScaleError: at construction, for a field outside its range.
    """

    scale: float = 2.0**16
    mean_decay: float = 0.99
    variance_decay: float = 0.999
    deviations: float = 3.09
    largest_log2: float = 16.0
    min_scale: float = SMALLEST_SCALE
    max_scale: float = 2.0**24
    steps: int = 0
    mean_sum: float = 0.0
    slow_mean_sum: float = 0.0
    square_sum: float = 0.0

    def __post_init__(self) -> None:
        check_limits(self.scale, self.min_scale, self.max_scale)
        for name in ("mean_decay", "variance_decay"):
            decay = getattr(self, name)
            if not (is_number(decay) and 0.0 < decay < 1.0):
                raise ScaleError(f"{name} must be between 0 and 1, got {decay!r}")
        if not (is_number(self.deviations) and 0.0 <= self.deviations < math.inf):
            raise ScaleError(f"deviations must be at least 0 and finite, got {self.deviations!r}")
        if not is_whole(self.steps) or self.steps < 0:
            raise ScaleError(f"steps must be a whole number of at least 0, got {self.steps!r}")
        for name in ("largest_log2", "mean_sum", "slow_mean_sum", "square_sum"):
            value = getattr(self, name)
            if not (is_number(value) and math.isfinite(value)):
                raise ScaleError(f"{name} must be a finite number, got {value!r}")
        sums = (self.mean_sum, self.slow_mean_sum, self.square_sum)
        if self.square_sum < 0 or (self.steps == 0 and any(sums)):
            raise ScaleError(
                f"mean_sum, slow_mean_sum and square_sum must be 0 before the first step, and square_sum "
                f"never below 0, got {sums} after {self.steps} steps"
            )

    @property
    def mean_log2(self) -> float:
        """mu: where the logarithm of amax is now; NaN before the first step."""
        return self.mean_sum / self._mean_weight if self.steps else math.nan

    @property
    def deviation_log2(self) -> float:
        """sigma: how far the logarithm of amax strays; NaN before the first step, 0 after one."""
        if not self.steps:
            return math.nan
        weight = _weight(self.variance_decay, self.steps)
        slow_mean = self.slow_mean_sum / weight
        # The difference of two large numbers may come out just below 0.
        return math.sqrt(max(self.square_sum / weight - slow_mean * slow_mean, 0.0))

    def after_step(self, *, overflow: bool, amax: float | None = None) -> Self:
        """The loss scale for the next step.

        Args:
            overflow: whether any gradient of this step was NaN or infinite.
            amax: the largest absolute value among this step's unscaled gradients, before clipping; at least 0
                and finite. Not read where ``overflow``.

        Raises:
            ScaleError: without an overflow, where amax is None, negative, NaN or infinite.
        """
        if overflow:
            return self._after_overflow()
        if amax is None:
            raise ScaleError(
                "LogMax needs amax, the largest absolute value of the unscaled gradients, after every step "
                "without an overflow: after_step(overflow=False, amax=...)"
            )
        if not (is_number(amax) and 0.0 <= amax < math.inf):
            raise ScaleError(f"expected an amax of at least 0 and finite without an overflow, got {amax!r}")
        return self._after_gradients(math.log2(amax)) if amax else self

    def _after_gradients(self, x: float) -> Self:
        fast, slow = self.mean_decay, self.variance_decay
        seen = replace(
            self,
            steps=self.steps + 1,
            mean_sum=fast * self.mean_sum + (1.0 - fast) * x,
            slow_mean_sum=slow * self.slow_mean_sum + (1.0 - slow) * x,
            square_sum=slow * self.square_sum + (1.0 - slow) * x * x,
        )
        predicted_log2 = seen.largest_log2 - (seen.mean_log2 + seen.deviations * seen.deviation_log2)
        return replace(seen, scale=seen._within_limits(predicted_log2))

    def _after_overflow(self) -> Self:
        halved_log2 = math.log2(self.scale) - 1.0
        lowered = replace(self, scale=self._within_limits(halved_log2))
        if not self.steps:
            return lowered
        mean_for_half = self.largest_log2 - self.deviations * self.deviation_log2 - halved_log2
        # A scale held up by min_scale may stand above what the formula gives: the mean never falls here.
        mean = max(mean_for_half, self.mean_log2)
        return replace(lowered, mean_sum=mean * self._mean_weight)

    @property
    def _mean_weight(self) -> float:
        return _weight(self.mean_decay, self.steps)

    def _within_limits(self, scale_log2: float) -> float:
        # Any exponent past 1000 is cut to a limit below; Python raises on 2.0**1024.
        scale = to_float32(2.0 ** min(max(scale_log2, -1000.0), 1000.0))
        return min(max(scale, to_float32(self.min_scale)), to_float32(self.max_scale))


def _weight(decay: float, steps: int) -> float:
    """1 - decay**steps: what the weights of all steps so far add up to."""
    # The plain difference has lost three digits at the first steps, and the variance is a difference itself.
    return -math.expm1(steps * math.log(decay))

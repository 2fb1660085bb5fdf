"""``Dynamic``: a loss scale that backs off at overflows and grows after good steps, by five rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from narrowcast.errors import ScaleError, near_names
from narrowcast.scaling._range import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_limits,
    is_number,
    is_whole,
    to_float32,
)

RULES = ("torch", "apex", "megatron", "deepspeed", "deepspeed_consecutive")
"""Names of the rules by which a ``Dynamic`` scale moves."""
_DEEPSPEED = ("deepspeed", "deepspeed_consecutive")
# With these an overflow is forgiven by the good step after it; with the others only by a growth.
_RESTORED_BY_A_GOOD_STEP = ("apex", "deepspeed_consecutive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """Back off at an overflow, grow after so many good steps in a row, by the rule of a named library.

    Attributes:
        scale: the factor now, from ``min_scale`` to ``max_scale``; torch starts at 2**16.
        growth_factor: multiplied in after ``growth_interval`` good steps in a row; above 1.
        backoff_factor: multiplied in when an overflow is not forgiven; between 0 and 1.
        growth_interval: good steps in a row before the scale grows; at least 1.
        good_steps: good steps since the last growth or overflow (torch's ``_growth_tracker``).
        rule: how overflows are forgiven and good steps counted, see below.
        hysteresis: overflows until the scale backs off; at least 1, which forgives none.
        hysteresis_left: how many of them are left, from 0 to ``hysteresis``; None at construction: all.
            ``replace`` keeps it, so give it anew (or None) together with another ``hysteresis``.
        min_scale: a backoff stops here; from 2**-126, the smallest normal float32.
        max_scale: a growth stops here; up to 2**127.

    Every overflow sets ``good_steps`` back to 0. Beyond that the rules differ:

    - ``"torch"``: every overflow backs off; ``hysteresis`` must be 1.
    - ``"apex"``: an overflow takes 1 from ``hysteresis_left``, and backs off where none is left; a good step
      restores it.
    - ``"megatron"``: the same, but only a growth restores it.
    - ``"deepspeed"``: an overflow backs off where 1 is left, which it keeps, else takes 1; a growth restores
      it. The first growth after the start or an overflow takes one good step more than the interval, so
      ``good_steps`` goes up to the interval and is 1 after a growth.
    - ``"deepspeed_consecutive"``: DeepSpeed's ``consecutive_hysteresis``: a good step restores it.

    A product is that of the float32 scale with the factor in double precision, rounded to float32, as in
    torch and apex. Megatron rounds its factors to float32 first and DeepSpeed divides, in double precision:
    the same for powers of two, which are all that they ship. A growth whose product is infinite in float32 is
    not taken, as in torch.

    Deviations: torch has no limits, so its scale goes on to 0, where it trains on NaN, and up to the largest
    float32. DeepSpeed stops the run at an overflow at its minimum; Megatron and DeepSpeed grow without end.

    Source: ``torch._amp_update_scale_``; apex ``csrc/update_scale_hysteresis.cu``; Megatron-LM 0.16
    ``DynamicGradScaler.update``; DeepSpeed 0.19 ``DynamicLossScaler.update_scale`` (early versions of it
    grew one step sooner).

    Raises:
        ScaleError: at construction, for a field outside its range.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0
    rule: str = "torch"
    hysteresis: int = 1
    hysteresis_left: int | None = None
    min_scale: float = SMALLEST_SCALE
    max_scale: float = LARGEST_SCALE

    def __post_init__(self) -> None:
        check_limits(self.scale, self.min_scale, self.max_scale)
        if not (is_number(self.growth_factor) and 1.0 < self.growth_factor < math.inf):
            raise ScaleError(f"growth_factor must be above 1 and finite, got {self.growth_factor!r}")
        if not (is_number(self.backoff_factor) and 0.0 < self.backoff_factor < 1.0):
            raise ScaleError(f"backoff_factor must be between 0 and 1, got {self.backoff_factor!r}")
        if not is_whole(self.growth_interval) or self.growth_interval < 1:
            raise ScaleError(
                f"growth_interval must be a whole number of at least 1, got {self.growth_interval!r}"
            )
        self._check_rule()
        if not is_whole(self.good_steps) or not 0 <= self.good_steps < self._steps_to_grow:
            most = "growth_interval" if self.rule in _DEEPSPEED else "growth_interval - 1"
            raise ScaleError(f"good_steps must be a whole number from 0 to {most}, got {self.good_steps!r}")

    def after_step(self, *, overflow: bool, amax: float | None = None) -> Self:
        """The loss scale for the next step; ``amax`` is not read."""
        return self._after_overflow() if overflow else self._after_good_step()

    def _check_rule(self) -> None:
        if self.rule not in RULES:
            raise ScaleError(f"unknown rule {self.rule!r}. {near_names(str(self.rule), RULES)}")
        if not is_whole(self.hysteresis) or self.hysteresis < 1:
            raise ScaleError(f"hysteresis must be a whole number of at least 1, got {self.hysteresis!r}")
        if self.rule == "torch" and self.hysteresis != 1:
            raise ScaleError(
                f"rule 'torch' backs off at every overflow: hysteresis must be 1, got {self.hysteresis!r}. "
                f"Rules with hysteresis: {', '.join(RULES[1:])}."
            )
        if self.hysteresis_left is None:
            object.__setattr__(self, "hysteresis_left", self.hysteresis)
        elif not is_whole(self.hysteresis_left) or not 0 <= self.hysteresis_left <= self.hysteresis:
            raise ScaleError(
                f"hysteresis_left must be a whole number from 0 to hysteresis, here {self.hysteresis}, "
                f"got {self.hysteresis_left!r}"
            )

    @property
    def _steps_to_grow(self) -> int:
        return self.growth_interval + 1 if self.rule in _DEEPSPEED else self.growth_interval

    def _after_overflow(self) -> Self:
        assert self.hysteresis_left is not None
        if self.rule in ("apex", "megatron"):
            left = max(self.hysteresis_left - 1, 0)
            backs_off = left == 0
        else:
            left = max(self.hysteresis_left - 1, 1)
            backs_off = self.hysteresis_left <= 1
        scale = self._backed_off() if backs_off else self.scale
        return replace(self, scale=scale, good_steps=0, hysteresis_left=left)

    def _after_good_step(self) -> Self:
        good_steps = self.good_steps + 1
        if good_steps < self._steps_to_grow:
            restored = self.rule in _RESTORED_BY_A_GOOD_STEP
            left = self.hysteresis if restored else self.hysteresis_left
            return replace(self, good_steps=good_steps, hysteresis_left=left)
        good_steps = 1 if self.rule in _DEEPSPEED else 0
        return replace(self, scale=self._grown(), good_steps=good_steps, hysteresis_left=self.hysteresis)

    def _backed_off(self) -> float:
        return max(to_float32(to_float32(self.scale) * self.backoff_factor), to_float32(self.min_scale))

    def _grown(self) -> float:
        grown = to_float32(to_float32(self.scale) * self.growth_factor)
        return self.scale if math.isinf(grown) else min(grown, to_float32(self.max_scale))

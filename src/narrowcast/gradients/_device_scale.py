"""A loss scale that lives on a device, so that moving it waits for nothing.

``narrowcast.scaling`` says what a scale does, as values; here the same transitions are tensors. The value is
the reference: tests drive both through the same steps.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from narrowcast.errors import ScaleError
from narrowcast.gradients import _torch_internals
from narrowcast.scaling import Dynamic, LogMax, LossScale, Off


class DeviceScale:
    """One loss scale, as 0-dim tensors on the device of the first loss.

    Attributes:
        factor: what a loss is multiplied by, float32; None until there is a device.
        good_steps: good steps since the last growth or overflow, int32; None until there is a device.
    """

    def __init__(self, value: LossScale) -> None:
        self._value = value
        self.factor: torch.Tensor | None = None
        self.good_steps: torch.Tensor | None = None
        self._hysteresis_left: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        self._untouched = True
        self._moves = 0
        self._known: tuple[float, int] = (value.scale, 0)

    def place(self, device: torch.device) -> torch.Tensor:
        """The factor, put on ``device`` if it was on none."""
        if self.factor is None:
            self.factor = torch.full((), self._value.scale, dtype=torch.float32, device=device)
            self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
            if isinstance(self._value, Dynamic):
                self.good_steps.fill_(self._value.good_steps)
                assert self._value.hysteresis_left is not None
                self._hysteresis_left = torch.full_like(self.good_steps, self._value.hysteresis_left)
            elif isinstance(self._value, LogMax):
                self._sums = _sums_of(self._value, device)
        return self.factor

    def shared_factor(self) -> torch.Tensor | None:
        """The factor itself, for somebody who may write to it."""
        self._untouched = False
        return self.factor

    @property
    def on_host(self) -> bool:
        """Whether it is read without waiting for a device."""
        return self.factor is None or self.factor.device.type == "cpu"

    @property
    def settings(self) -> LossScale:
        """What the scale is made of; its ``scale`` and counts are those of when it was last set or read."""
        return self._value

    def read(self) -> LossScale:
        """The loss scale now; waits for the device."""
        value = self._value
        if self.factor is None or isinstance(value, Off):
            return value
        if self._untouched:  # a device holds it in fp32; this much the host knows without asking
            self._value = replace(value, scale=torch.tensor(value.scale, dtype=torch.float32).item())  # type: ignore[type-var]
            return self._value
        scale = float(self.factor)
        if isinstance(value, Dynamic):
            assert self.good_steps is not None
            assert self._hysteresis_left is not None
            value = replace(
                value,
                scale=scale,
                good_steps=int(self.good_steps),
                hysteresis_left=int(self._hysteresis_left),
            )
        elif isinstance(value, LogMax):
            assert self._sums is not None
            value = replace(value, scale=scale, **_fields_of(self._sums))
        self._value, self._untouched = value, True
        self._known = (value.scale, self._moves)
        return value

    def learn(self, scale: float, moves: int) -> None:
        """The factor was ``scale`` after so many ``moves``."""
        self._known = (scale, moves)

    @property
    def moves(self) -> int:
        """How often it has moved."""
        return self._moves

    def may_be_below(self, limit: float) -> bool:
        """Whether the factor may be below ``limit``, as far as the host knows without waiting."""
        assert self.factor is not None
        if self.factor.device.type == "cpu":
            return float(self.factor) < limit
        value, (known, moves) = self._value, self._known
        if isinstance(value, Dynamic):
            return max(known * value.backoff_factor ** (self._moves - moves), value.min_scale) < limit
        return (value.min_scale if isinstance(value, LogMax) else value.scale) < limit

    def set(self, value: LossScale) -> None:
        """Go on from ``value``, on the device where this one is."""
        device = None if self.factor is None else self.factor.device
        self._value, self.factor, self._untouched = value, None, True
        self._known = (value.scale, self._moves)
        if device is not None:
            self.place(device)

    @property
    def needs_amax(self) -> bool:
        """Whether ``move`` wants the largest magnitude of the unscaled gradients."""
        return isinstance(self._value, LogMax)

    def move(self, found_inf: torch.Tensor, amax: torch.Tensor | None = None) -> None:
        """The transition after one step; ``found_inf`` above 0 says that a gradient was not finite.

        Args:
            found_inf: 0-dim, float32, on the factor's device.
            amax: 0-dim, the largest magnitude of the unscaled gradients; for ``LogMax`` only.
        """
        assert self.factor is not None
        assert self.good_steps is not None
        value = self._value
        self._untouched = False
        self._moves += 1
        if isinstance(value, Dynamic) and value.rule == "torch":
            _torch_internals.move_as_torch(
                self.factor,
                self.good_steps,
                found_inf,
                value.growth_factor,
                value.backoff_factor,
                value.growth_interval,
            )
            self.factor.clamp_(value.min_scale, value.max_scale)
        elif isinstance(value, Dynamic):
            self._move_with_hysteresis(value, found_inf > 0)
        elif isinstance(value, LogMax):
            self._move_by_statistics(value, found_inf > 0, amax)

    def _move_with_hysteresis(self, value: Dynamic, overflow: torch.Tensor) -> None:
        assert self.factor is not None
        assert self.good_steps is not None
        assert self._hysteresis_left is not None
        deepspeed = value.rule.startswith("deepspeed")
        left = self._hysteresis_left
        backs_off = overflow & (left <= 1)
        good = self.good_steps + 1
        grows = ~overflow & (good >= value.growth_interval + deepspeed)
        wide = self.factor.double() if self.factor.device.type != "mps" else self.factor
        grown = (wide * value.growth_factor).float()
        moved = torch.where(grows & torch.isfinite(grown), grown, self.factor)
        moved = torch.where(backs_off, (wide * value.backoff_factor).float(), moved)
        self.factor.copy_(moved.clamp_(value.min_scale, value.max_scale))
        good = torch.where(grows, int(deepspeed), good)
        self.good_steps.copy_(torch.where(overflow, 0, good))
        restored = ~overflow if value.rule in ("apex", "deepspeed_consecutive") else grows
        left = torch.where(overflow, (left - 1).clamp_(min=int(deepspeed)), left)
        self._hysteresis_left.copy_(torch.where(restored, value.hysteresis, left))

    def _move_by_statistics(self, value: LogMax, overflow: torch.Tensor, amax: torch.Tensor | None) -> None:
        assert self.factor is not None
        assert self._sums is not None
        if amax is None:
            raise ScaleError("LogMax needs amax, the largest magnitude of the unscaled gradients")
        steps, mean_sum, slow_mean_sum, square_sum = self._sums.unbind()
        fast, slow = value.mean_decay, value.variance_decay
        seen = ~overflow & (amax > 0)
        x = torch.where(seen, amax, 1.0).to(steps.dtype).log2()
        after = torch.stack(
            (
                steps + 1,
                fast * mean_sum + (1 - fast) * x,
                slow * slow_mean_sum + (1 - slow) * x,
                slow * square_sum + (1 - slow) * x * x,
            )
        )
        sums = torch.where(seen, after, self._sums)
        mean, deviation = _mean_and_deviation(value, sums)
        predicted = value.largest_log2 - (mean + value.deviations * deviation)
        halved = self.factor.to(steps.dtype).log2() - 1
        log2 = torch.where(overflow, halved, predicted)
        moved = log2.clamp(-1000, 1000).exp2().float().clamp(value.min_scale, value.max_scale)
        # The mean is raised so far that the formula gives half of the present scale, and never lowered.
        raised = torch.maximum(value.largest_log2 - value.deviations * deviation - halved, mean)
        raised_sum = raised * _weight(fast, sums[0])
        known = sums[0] > 0
        self.factor.copy_(torch.where(seen | overflow, moved, self.factor))
        self._sums.copy_(sums)
        self._sums[1] = torch.where(overflow & known, raised_sum, sums[1])


def _mean_and_deviation(value: LogMax, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    steps, mean_sum, slow_mean_sum, square_sum = sums.unbind()
    some = steps.clamp(min=1)
    weight = _weight(value.variance_decay, some)
    slow_mean = slow_mean_sum / weight
    deviation = (square_sum / weight - slow_mean * slow_mean).clamp(min=0).sqrt()
    return mean_sum / _weight(value.mean_decay, some), deviation


def _weight(decay: float, steps: torch.Tensor) -> torch.Tensor:
    return -torch.expm1(steps * math.log(decay))


def _sums_of(value: LogMax, device: torch.device) -> torch.Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    sums = (float(value.steps), value.mean_sum, value.slow_mean_sum, value.square_sum)
    return torch.tensor(sums, dtype=dtype, device=device)


def _fields_of(sums: torch.Tensor) -> dict[str, Any]:
    steps, mean_sum, slow_mean_sum, square_sum = sums.tolist()
    return {
        "steps": int(steps),
        "mean_sum": mean_sum,
        "slow_mean_sum": slow_mean_sum,
        "square_sum": square_sum,
    }

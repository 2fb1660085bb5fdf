"""A loss scale that lives on a device, so that moving it waits for nothing.

``narrowcast.scaling`` says what a scale does, as values; here the same transitions are tensors. The value is
the reference: tests drive both through the same steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowcast.gradients import _torch_internals
from narrowcast.scaling import Dynamic, LossScale, Off


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
        return value.scale < limit

    def set(self, value: LossScale) -> None:
        """Go on from ``value``, on the device where this one is."""
        device = None if self.factor is None else self.factor.device
        self._value, self.factor, self._untouched = value, None, True
        self._known = (value.scale, self._moves)
        if device is not None:
            self.place(device)

    def move(self, found_inf: torch.Tensor) -> None:
        """The transition after one step; ``found_inf`` above 0 says that a gradient was not finite.

        Args:
            found_inf: 0-dim, float32, on the factor's device.
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

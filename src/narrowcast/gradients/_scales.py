"""The loss scale of a scaler: on a device, and as settings that are checked and changed.

``narrowcast.scaling`` has loss scales as values, which define how a scale moves. Here scales move by the same
rules on a device, without a host sync. The tests drive both through the same steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from narrowcast.errors import OrderError, ScaleError, UnsupportedError
from narrowcast.gradients import _torch_internals
from narrowcast.gradients._devices import on_device
from narrowcast.gradients._optimizer_gradients import parameters_of
from narrowcast.machine import check_device
from narrowcast.scaling import Dynamic, LossScale, Off, Static, check_loss_scale


class DeviceScale:
    """The loss scale of a scaler, as 0-dim tensors on the device of the first loss.

    Attributes:
        settings: the value that was last set or read. Its rule and limits hold; its scale and counts may be
            out of date, since to read them needs a host sync.
        factor: the factor of the loss, float32; None until ``place``.
        good_steps: good steps since the last growth or overflow, int32; None until ``place``.
        moves: how often the factor was updated or replaced.
    """

    def __init__(self, value: LossScale) -> None:
        self.settings = value
        self.factor: torch.Tensor | None = None
        self.good_steps: torch.Tensor | None = None
        # Only ``place`` sets it, for a dynamic scale.
        self._hysteresis_left: torch.Tensor
        self.moves = 0
        # The factor that the host last knew, and ``moves`` then. It may have backed off at each move since.
        self._last_known: tuple[float, int] = (value.scale, 0)
        # On a CPU: the number that was last read from the factor, and autograd's version of the factor then,
        # which goes up at each write.
        self._number, self._read_version = value.scale, -1

    def place(self, device: torch.device) -> torch.Tensor:
        """Return the factor; the first call puts it on ``device``."""
        if self.factor is None:
            self._read_version = -1  # the new tensor may have the version of an earlier one
            self.factor = torch.full((), self.settings.scale, dtype=torch.float32, device=device)
            self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
            if isinstance(self.settings, Dynamic):
                self.good_steps.fill_(self.settings.good_steps)
                assert self.settings.hysteresis_left is not None
                self._hysteresis_left = torch.full_like(self.good_steps, self.settings.hysteresis_left)
        return self.factor

    def factor_for(self, method: str) -> torch.Tensor:
        """Return the factor; OrderError, naming ``method``, if it is on no device yet."""
        if self.factor is None:
            raise OrderError(
                f"Attempted {method} but no loss was scaled yet: the scale is on no device. Call "
                "scaler.scale(loss).backward() earlier in the iteration"
            )
        return self.factor

    def factor_on(self, device: torch.device) -> torch.Tensor:
        """Return the factor on ``device``; unlike ``place``, this leaves the scale where it is."""
        if self.factor is None:
            return torch.full((), self.settings.scale, dtype=torch.float32, device=device)
        return on_device(self.factor, device)

    def number(self) -> float:
        """Return the factor as a number; waits for the device."""
        assert self.factor is not None
        # On a CPU the tensor is read only once after each write.
        version = self.factor._version
        if not self.on_host or version != self._read_version:
            self._number, self._read_version = float(self.factor), version
        return self._number

    def copied(self) -> float | torch.Tensor:
        """Return the factor: a number if the host knows it, else a copy on its device."""
        if self.factor is None or not self.scales:
            return self.settings.scale
        if self.on_host:
            return self.number()
        return self.factor.clone()

    @property
    def scales(self) -> bool:
        """Whether losses are multiplied by a factor; only ``Off`` has none."""
        return not isinstance(self.settings, Off)

    def times(self, outputs: Any) -> Any:
        """Multiply ``outputs`` by the factor; the first call places it on the device of the first tensor."""
        # Without a loss scale, a loss that need not be widened stays as it is.
        is_wide = isinstance(outputs, torch.Tensor) and outputs.dtype in (torch.float32, torch.float64)
        if is_wide and not self.scales:
            self.place(outputs.device)
            return outputs
        return multiplied(outputs, lambda device: on_device(self.place(device), device))

    @property
    def on_host(self) -> bool:
        """Whether the factor can be read without a host sync."""
        return self.factor is None or self.factor.device.type == "cpu"

    def read(self) -> LossScale:
        """Return the present loss scale, with its counts; waits for the device."""
        # Read it each time: a script may hold the tensors and write to them, and a CUDA graph moves them
        # without the host.
        value = self.settings
        if self.factor is None or isinstance(value, Off):
            return value
        scale = float(self.factor)
        if isinstance(value, Dynamic):
            assert self.good_steps is not None
            good_steps, left = int(self.good_steps), int(self._hysteresis_left)
            value = replace(value, scale=scale, good_steps=good_steps, hysteresis_left=left)
        elif isinstance(value, Static):
            value = replace(value, scale=scale)
        self.settings = value
        self._last_known = (scale, self.moves)
        return value

    def learn(self, scale: float, moves: int) -> None:
        """Remember that the factor was ``scale`` after ``moves`` moves, unless a later factor is known."""
        _, last_moves = self._last_known
        if moves >= last_moves:
            self._last_known = (scale, moves)

    def may_be_below(self, limit: float) -> bool:
        """Return whether the factor may be below ``limit``, without a host sync."""
        assert self.factor is not None
        if self.on_host:
            return self.number() < limit
        value = self.settings
        if not isinstance(value, Dynamic):
            return value.scale < limit
        # The lowest that it can be: it backed off at every move since the host last knew it.
        last_scale, last_moves = self._last_known
        lowest = last_scale * value.backoff_factor ** (self.moves - last_moves)
        return max(lowest, value.min_scale) < limit

    def set(self, value: LossScale) -> None:
        """Replace the loss scale, and place the new one on the device of the old."""
        factor_before = self.factor
        self.settings = value
        self.factor = None
        self.moves += 1  # so that ``learn`` ignores factors from before
        self._last_known = (value.scale, self.moves)
        if factor_before is not None:
            self.place(factor_before.device)

    def change(self, **settings: Any) -> None:
        """Change some settings; waits for the device."""
        self.set(changed(self.read(), **settings))

    def move(self, found_inf: torch.Tensor) -> None:
        """Update the scale after a step.

        Args:
            found_inf: 0-dim float32 on the factor's device; above 0: a gradient was not finite.
        """
        assert self.factor is not None
        assert self.good_steps is not None
        value = self.settings
        self.moves += 1
        if isinstance(value, Dynamic) and value.rule == "torch":
            rule = value.growth_factor, value.backoff_factor, value.growth_interval
            _torch_internals.move_as_torch(self.factor, self.good_steps, found_inf, *rule)
            # On a CPU, where comparing is cheap, clamp only if that is needed, which is rare.
            if not self.on_host or not value.min_scale <= self.number() <= value.max_scale:
                self.factor.clamp_(value.min_scale, value.max_scale)
        elif isinstance(value, Dynamic):
            self._move_with_hysteresis(value, found_inf > 0)

    def _move_with_hysteresis(self, value: Dynamic, overflow: torch.Tensor) -> None:
        """Do what ``Dynamic.after_step`` does under the other rules, on the device."""
        assert self.factor is not None
        assert self.good_steps is not None
        left_before = self._hysteresis_left
        backs_off = overflow & (left_before <= 1)
        good = self.good_steps + 1
        grows = ~overflow & (good >= value.growth_interval)

        # The product in fp64, as Python computes it; MPS has none.
        wide = self.factor.double() if self.factor.device.type != "mps" else self.factor
        grown = (wide * value.growth_factor).float()
        moved = torch.where(grows & torch.isfinite(grown), grown, self.factor)
        moved = torch.where(backs_off, (wide * value.backoff_factor).float(), moved)
        self.factor.copy_(moved.clamp_(value.min_scale, value.max_scale))
        self.good_steps.copy_(torch.where(overflow | grows, 0, good))

        # apex counts overflows in a row. Megatron counts all overflows since the last growth.
        restored = ~overflow if value.rule == "apex" else grows
        left_after = torch.where(overflow, (left_before - 1).clamp_(min=0), left_before)
        self._hysteresis_left.copy_(torch.where(restored, value.hysteresis, left_after))


def multiplied(outputs: Any, factor_on: Callable[[torch.device], torch.Tensor]) -> Any:
    """Multiply a tensor, or each tensor of a nesting, by the factor on its device; fp16 and bf16 in fp32."""
    if isinstance(outputs, torch.Tensor):
        wide = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
        return wide * factor_on(outputs.device)
    times = functools.partial(multiplied, factor_on=factor_on)
    if isinstance(outputs, Mapping):
        return {key: times(item) for key, item in outputs.items()}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*map(times, outputs))
    if isinstance(outputs, list | tuple):
        return type(outputs)(map(times, outputs))
    if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
        return map(times, outputs)
    raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}")


# ---- settings


def loss_scale_of(
    given: LossScale | None,
    *,
    hysteresis: int,
    min_scale: float | None,
    max_scale: float | None,
    **settings: Any,
) -> LossScale:
    """Return the loss scale that the arguments of ``GradScaler`` describe, or raise ScaleError."""
    if min_scale is not None:
        settings["min_scale"] = min_scale
    if max_scale is not None:
        settings["max_scale"] = max_scale
    if hysteresis != 1:
        settings |= {"hysteresis": hysteresis, "rule": "apex"}
    if given is None:
        return Dynamic(**settings)

    # With a loss scale, refuse every other setting that is not at its default.
    check_loss_scale(given)
    default = Dynamic()
    given_beside = []
    for name, value in settings.items():
        if name != "rule" and value != getattr(default, name):
            given_beside.append("init_scale" if name == "scale" else name)
    if given_beside:
        raise ScaleError(
            f"loss_scale has settings of its own, got {', '.join(given_beside)} beside it: write "
            f"loss_scale={type(given).__name__}(...) with them inside"
        )
    return given


def changed(value: LossScale, **settings: Any) -> LossScale:
    """Return a dynamic loss scale with other settings, or a fixed one with another scale; else ScaleError."""
    if isinstance(value, Static) and set(settings) == {"scale"}:
        return replace(value, **settings)
    if not isinstance(value, Dynamic):
        raise ScaleError(f"{type(value).__name__} has no {', '.join(settings)} to set: Dynamic has")
    interval = settings.get("growth_interval", value.growth_interval)
    if isinstance(interval, int) and interval >= 1:
        # Dynamic takes only counts below the interval. If there were more good steps so far, the next good
        # step is to grow the scale.
        settings["good_steps"] = min(settings.get("good_steps", value.good_steps), interval - 1)
    return replace(value, **settings)


def device_type_of(device: Any, *, enabled: bool) -> str | None:
    """Return the type of ``device``; DeviceError if the scaler is enabled and this machine lacks it."""
    if device is None:
        return None
    device_type = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    if enabled:
        check_device(device_type)
    return device_type


def check_optimizer(optimizer: Any) -> None:
    """Raise ScaleError for anything but an optimizer, such as parameters."""
    if not hasattr(optimizer, "param_groups"):
        raise ScaleError(
            f"expected the optimizer, whose gradients are meant, got {type(optimizer).__name__}: give the "
            "optimizer, not model.parameters()"
        )


def check_clipping(optimizer: Any, name: str, limit: float, order: float = 2.0) -> None:
    """Check the arguments of ``clip_grad_norm_`` and ``clip_grad_value_``.

    Args:
        name: "max_norm" or "value", the argument that ``limit`` is.
        order: the order of the norm.
    """
    check_optimizer(optimizer)
    if (order != 2.0 or name == "value") and any(p.is_complex() for p in parameters_of(optimizer)):
        raise UnsupportedError("complex gradients are clipped by their norm of order 2 alone, as max_norm=1")
    if not order > 0:
        raise ScaleError(f"norm_type must be above 0, got {order!r}")
    if isinstance(limit, torch.Tensor):
        # Reading it needs a host sync. ``max_norm`` is not read here, because clipping to a NaN or a negative
        # number skips the step. Clamping to ``value`` does not skip it, and reads ``value`` anyway.
        if name == "max_norm":
            return
        limit = float(limit)
    if not (isinstance(limit, int | float) and limit >= 0):
        raise ScaleError(f"{name} must be a number of at least 0, got {limit!r}")


def one_number(value: Any) -> float:
    """Return a number, or a tensor of one element that needs no gradient, as a float; else ScaleError."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ScaleError(
        f"new_scale should be a number, or a tensor of one element with requires_grad=False, got {value!r}"
    )

"""What a ``GradScaler`` is made with, checked as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from narrowcast.errors import ScaleError
from narrowcast.machine import check_device
from narrowcast.scaling import Dynamic, LossScale, Off, Static

_TORCH = Dynamic()


def loss_scale_of(
    *,
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None,
    max_scale: float | None,
    hysteresis: int,
    loss_scale: LossScale | None,
) -> LossScale:
    """The loss scale that these arguments of ``GradScaler`` describe.

    Raises:
        ScaleError: a setting outside its range, or one beside a ``loss_scale``, which has its own.
    """
    given = {
        "init_scale": (init_scale, _TORCH.scale),
        "growth_factor": (growth_factor, _TORCH.growth_factor),
        "backoff_factor": (backoff_factor, _TORCH.backoff_factor),
        "growth_interval": (growth_interval, _TORCH.growth_interval),
        "min_scale": (min_scale, None),
        "max_scale": (max_scale, None),
        "hysteresis": (hysteresis, 1),
    }
    if loss_scale is not None:
        if not isinstance(loss_scale, Off | Static | Dynamic):
            raise ScaleError(
                "expected a loss scale of narrowcast.scaling, such as Dynamic(...) or Static(scale=8.0), got "
                f"{loss_scale!r}"
            )
        beside = [name for name, (value, default) in given.items() if value != default]
        if beside:
            raise ScaleError(
                f"loss_scale has settings of its own, got {', '.join(beside)} beside it: write "
                f"loss_scale={type(loss_scale).__name__}(...) with them inside"
            )
        return loss_scale
    made: dict[str, Any] = {"min_scale": min_scale, "max_scale": max_scale}
    return Dynamic(
        scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        rule="torch" if hysteresis == 1 else "apex",
        hysteresis=hysteresis,
        **{name: value for name, value in made.items() if value is not None},
    )


def device_type_of(device: Any, *, enabled: bool) -> str | None:
    """The type of ``device``, which must be there where the scaler is enabled; None for None.

    Raises:
        DeviceError: torch does not know it, or this machine lacks it.
    """
    if device is None:
        return None
    device_type = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    if enabled:
        check_device(device_type)
    return device_type


def check_clipping(optimizer: Any, name: str, limit: float) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise ScaleError(
            f"expected the optimizer, whose gradients are clipped, got {type(optimizer).__name__}: "
            "give the optimizer, not model.parameters()"
        )
    if isinstance(limit, torch.Tensor):
        return  # looking would wait for the device; a NaN there makes every gradient NaN, and that is checked
    if not (isinstance(limit, int | float) and limit >= 0):
        raise ScaleError(f"{name} must be a number of at least 0, got {limit!r}")


def one_number(value: Any) -> float:
    """A number, or a tensor of one element that needs no gradient, as a float.

    Raises:
        ScaleError: for anything else.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ScaleError(
        f"new_scale should be a number, or a tensor of one element with requires_grad=False, got {value!r}"
    )


def changed(value: LossScale, **settings: Any) -> LossScale:
    """A dynamic loss scale with other settings.

    Raises:
        ScaleError: it is not dynamic, or a setting is outside its range.
    """
    if isinstance(value, Static) and set(settings) == {"scale"}:
        return replace(value, **settings)
    if not isinstance(value, Dynamic):
        raise ScaleError(f"{type(value).__name__} has no {', '.join(settings)} to set: Dynamic has")
    interval = settings.get("growth_interval", value.growth_interval)
    if isinstance(interval, int) and interval >= 1:
        # So many good steps were enough, had it been this interval: the next good step grows.
        settings["good_steps"] = min(value.good_steps, interval - 1)
    return replace(value, **settings)

"""The settings of a ``GradScaler``: how they are checked, changed, saved and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from narrowcast.errors import ScaleError, near_names
from narrowcast.machine import check_device
from narrowcast.scaling import Dynamic, LossScale, Off, Static, from_torch

_KINDS: dict[str, type[Any]] = {"Off": Off, "Static": Static, "Dynamic": Dynamic}


def loss_scale_of(
    given: LossScale | None,
    *,
    hysteresis: int,
    min_scale: float | None,
    max_scale: float | None,
    **settings: Any,
) -> LossScale:
    """Return the loss scale that the arguments of ``GradScaler`` describe.

    Raises:
        ScaleError: a setting outside its range, or one beside a loss scale, which has settings of its own.
    """
    limits = {"min_scale": min_scale, "max_scale": max_scale}
    settings |= {name: limit for name, limit in limits.items() if limit is not None}
    if hysteresis != 1:
        settings |= {"hysteresis": hysteresis, "rule": "apex"}
    if given is None:
        return Dynamic(**settings)
    if not isinstance(given, Off | Static | Dynamic):
        raise ScaleError(
            "expected a loss scale of narrowcast.scaling, such as Dynamic(...) or Static(scale=8.0), got "
            f"{given!r}"
        )
    default = Dynamic()
    beside = [name for name, value in settings.items() if value != getattr(default, name) and name != "rule"]
    if beside:
        names = ", ".join("init_scale" if name == "scale" else name for name in beside)
        raise ScaleError(
            f"loss_scale has settings of its own, got {names} beside it: write "
            f"loss_scale={type(given).__name__}(...) with them inside"
        )
    return given


def changed(value: LossScale, **settings: Any) -> LossScale:
    """Return a dynamic loss scale with other settings, or a fixed one with another scale.

    Raises:
        ScaleError: it has no such setting, or the setting is outside its range.
    """
    if isinstance(value, Static) and set(settings) == {"scale"}:
        return replace(value, **settings)
    if not isinstance(value, Dynamic):
        raise ScaleError(f"{type(value).__name__} has no {', '.join(settings)} to set: Dynamic has")
    interval = settings.get("growth_interval", value.growth_interval)
    if isinstance(interval, int) and interval >= 1:
        # With at least this many good steps so far, the next one grows the scale.
        settings["good_steps"] = min(value.good_steps, interval - 1)
    return replace(value, **settings)


def device_type_of(device: Any, *, enabled: bool) -> str | None:
    """Return the type of ``device``; DeviceError if the scaler is enabled and this machine lacks it."""
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
        return  # reading it needs a host sync; a NaN there makes every gradient NaN, which skips the step
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


# ---- saved states: torch's entries beside ours, so that each loads the other's


def state_of(scales: LossScale | Mapping[str, LossScale]) -> dict[str, Any]:
    """Return the state to save: numbers and strings, which ``torch.load(weights_only=True)`` reads.

    torch's five entries are there if its scaler would go on alike except for hysteresis and limits; it
    refuses a state without them.
    """
    if isinstance(scales, Mapping):
        return {"scales": {name: _fields(scale) for name, scale in scales.items()}}
    state: dict[str, Any] = {"loss_scale": _fields(scales)}
    if isinstance(scales, Dynamic):
        state |= {
            "scale": scales.scale,
            "growth_factor": scales.growth_factor,
            "backoff_factor": scales.backoff_factor,
            "growth_interval": scales.growth_interval,
            "_growth_tracker": min(scales.good_steps, scales.growth_interval - 1),
        }
    return state


def _fields(scale: LossScale) -> dict[str, Any]:
    return {"kind": type(scale).__name__, **asdict(scale)}  # type: ignore[call-overload]


def scales_in(
    state: Mapping[str, Any], present: LossScale, *, in_force: bool
) -> LossScale | dict[str, LossScale] | None:
    """Return the loss scales of a saved state; one of torch gets the limits and hysteresis of ``present``.

    Returns None, with a warning, for the empty state of a disabled ``torch.amp.GradScaler``, and if one of
    the saved scale and the present one that is ``in_force`` is off: a state must not turn scaling on or off.
    """
    if not state:
        _warn(
            "the saved state is empty: it is that of a torch.amp.GradScaler that was disabled. This scaler "
            "keeps its own scale"
        )
        return None
    if "scales" in state:
        return {name: _scale_of(fields) for name, fields in state["scales"].items()}
    if "loss_scale" in state:
        saved = _scale_of(state["loss_scale"])
        if not in_force or isinstance(saved, Off) == isinstance(present, Off):
            return saved
        with_, without = ("a", "no") if isinstance(present, Off) else ("no", "a")
        _warn(
            f"the saved state is of a run with {with_} loss scale, and this scaler has {without} loss scale "
            "(another format?); it keeps its own"
        )
        return None
    if "loss_scaler0" in state:
        raise ScaleError("this state is one of apex: narrowcast.scaling.from_state reads it")
    if not isinstance(present, Dynamic):
        raise ScaleError(
            f"a state of torch.amp.GradScaler is of a dynamic scale, and this scaler has {present!r}"
        )
    torchs = asdict(from_torch(state))
    settings = ("scale", "growth_factor", "backoff_factor", "growth_interval", "good_steps")
    return replace(present, hysteresis_left=None, **{name: torchs[name] for name in settings})


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)  # at the caller of load_state_dict


def _scale_of(fields: Mapping[str, Any]) -> LossScale:
    kind = fields.get("kind")
    if kind not in _KINDS:
        known = near_names(str(kind), _KINDS)
        raise ScaleError(f"unknown kind of loss scale {kind!r} in a saved state. {known}")
    values = {name: value for name, value in fields.items() if name != "kind"}
    try:
        made: LossScale = _KINDS[kind](**values)
    except TypeError as unknown:
        raise ScaleError(f"a saved {kind} that this version does not read: {unknown}") from None
    return made

"""States of a scaler as they are saved: torch's entries beside ours, so that each loads from the other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from narrowcast.errors import ScaleError, near_names
from narrowcast.scaling import Dynamic, LossScale, Off, Static

_KINDS: dict[str, type[Any]] = {"Off": Off, "Static": Static, "Dynamic": Dynamic}
_TORCHS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def state_of(scales: LossScale | Mapping[str, LossScale]) -> dict[str, Any]:
    """What to save: plain numbers and strings, so that ``torch.load(weights_only=True)`` takes it.

    torch's five entries are there only where its scaler would go on alike but for hysteresis and limits; it
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
    """The loss scales of a saved state; of torch's, with the limits and hysteresis of the ``present`` one.

    None, with a warning, for the empty state of a disabled ``torch.amp.GradScaler``, and where either the
    saved scale or the present one that is ``in_force`` is off: a state must not turn scaling off.
    """
    if not state:
        warnings.warn(
            "the saved state is empty: it is that of a torch.amp.GradScaler that was disabled. This scaler "
            "goes on from its own scale",
            UserWarning,
            stacklevel=3,
        )
        return None
    if "scales" in state:
        return {name: _scale_of(fields) for name, fields in state["scales"].items()}
    if "loss_scale" in state:
        saved = _scale_of(state["loss_scale"])
        if not in_force or isinstance(saved, Off) == isinstance(present, Off):
            return saved
        with_, without = ("a", "no") if isinstance(present, Off) else ("no", "a")
        warnings.warn(
            f"the saved state is of a run with {with_} loss scale, and this scaler has {without} loss scale "
            "(another format?); it goes on as it is",
            UserWarning,
            stacklevel=3,
        )
        return None
    missing = [name for name in _TORCHS if name not in state]
    if missing:
        raise ScaleError(
            f"expected the state of a GradScaler, with {', '.join(_TORCHS)}; {', '.join(missing)} missing. "
            "narrowcast.scaling.from_state reads those of apex"
        )
    if not isinstance(present, Dynamic):
        raise ScaleError(
            f"a state of torch.amp.GradScaler is of a dynamic scale, and this scaler has {present!r}"
        )
    interval = int(state["growth_interval"])
    return replace(
        present,
        scale=float(state["scale"]),
        growth_factor=float(state["growth_factor"]),
        backoff_factor=float(state["backoff_factor"]),
        growth_interval=interval,
        good_steps=min(int(state["_growth_tracker"]), interval - 1),
        hysteresis_left=None,
    )


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

"""Loss scales from the states that torch, apex, Megatron and DeepSpeed save."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from narrowcast.errors import ScaleError, near_names
from narrowcast.scaling._dynamic import Dynamic
from narrowcast.scaling._fixed import LossScale, Off, Static
from narrowcast.scaling._range import SMALLEST_SCALE, is_number, to_float32
from narrowcast.scaling._saved import Saved

SOURCES = ("torch", "apex", "megatron", "deepspeed")
TORCH = "torch.amp.GradScaler"
APEX = "apex.amp"
MEGATRON = "Megatron's DynamicGradScaler"
DEEPSPEED = "DeepSpeed"
_APEX_KEY = re.compile(r"loss_scaler\d+")


def recognise(state: object) -> str:
    """Which library saved ``state``: "torch", "apex", "megatron" or "deepspeed", told by its keys.

    An empty state is a disabled ``GradScaler``'s (Megatron's constant scaler saves nothing either).

    Raises:
        ScaleError: for anything else.
    """
    keys = {str(key) for key in state} if isinstance(state, Mapping) else set()
    if isinstance(state, Mapping) and (not keys or keys & {"_growth_tracker", "growth_factor"}):
        return "torch"
    if keys & {"growth_tracker", "hysteresis_tracker"}:
        return "megatron"
    if any(_APEX_KEY.fullmatch(key) for key in keys):
        return "apex"
    if keys & {"cur_scale", "loss_scaler"} or hasattr(state, "cur_scale"):
        return "deepspeed"
    found = f"one with {', '.join(sorted(keys))}" if keys else type(state).__name__
    raise ScaleError(
        f"expected a loss scaler's state saved by {', '.join(SOURCES[:-1])} or {SOURCES[-1]}, got {found}"
    )


def from_state(state: object, source: str | None = None) -> list[LossScale]:
    """The loss scales that a saved state holds: one, or for apex one for each loss, in its order.

    Args:
        state: what ``state_dict()`` gave, or for DeepSpeed the scaler itself.
        source: "torch", "apex", "megatron" or "deepspeed"; None: told by the keys (``recognise``).

    Settings that a library does not save have its defaults; the function of that library takes others.

    Raises:
        ScaleError: for an unknown source, a state that is not recognised, and a key that is missing or
            unreadable.
    """
    source = recognise(state) if source is None else source
    if source == "torch":
        return [from_torch(state)]
    if source == "apex":
        return from_apex(state)
    if source == "megatron":
        return [from_megatron(state)]
    if source == "deepspeed":
        return [from_deepspeed(state)]
    raise ScaleError(f"unknown source {source!r}. {near_names(str(source), SOURCES)}")


def from_torch(state: object) -> Off | Dynamic:
    """From ``torch.amp.GradScaler.state_dict()``; empty, which a disabled scaler saves, is ``Off()``.

    Raises:
        ScaleError: for a key that is missing or unreadable, and a scale outside 2**-126 to 2**127.
    """
    saved = Saved(TORCH, _mapping(TORCH, state))
    if not saved.fields:
        return Off()
    return _dynamic(
        saved,
        scale=saved.number("scale"),
        growth_factor=saved.number("growth_factor"),
        backoff_factor=saved.number("backoff_factor"),
        growth_interval=saved.count("growth_interval"),
        good_steps=saved.count("_growth_tracker"),
    )


def from_apex(
    state: object,
    *,
    dynamic: bool = True,
    min_scale: float = SMALLEST_SCALE,
    max_scale: float = 2.0**24,
) -> list[LossScale]:
    """From ``apex.amp.state_dict()``: one value for each ``loss_scaler0``, ``loss_scaler1``, ..., in order.

    Other keys are not read. apex doubles after 2000 good steps and halves at an overflow, always.

    Args:
        state: what apex saved.
        dynamic: whether the scales move. apex does not save it; False gives ``Static``.
        min_scale: what ``amp.initialize`` was given as ``min_loss_scale``, which apex does not save;
            2**-126 stands for its default of None.
        max_scale: what it was given as ``max_loss_scale``.

    Raises:
        ScaleError: for a key that is missing or unreadable, and for 2000 or more good steps, which only a
            fixed scale counts.
    """
    scalers = {
        str(key): scaler for key, scaler in _mapping(APEX, state).items() if _APEX_KEY.fullmatch(str(key))
    }
    if not scalers:
        Saved(APEX, state).get("loss_scaler0")
    found: list[LossScale] = []
    for key, scaler in scalers.items():
        saved = Saved(f"{APEX} ({key})", _mapping(f"{APEX} ({key})", scaler))
        scale, good_steps = saved.number("loss_scale"), saved.count("unskipped")
        if not dynamic:
            found.append(Static(scale=scale))
            continue
        if good_steps >= 2000:
            raise ScaleError(
                f'expected "unskipped" in the state of {saved.source} to be below 2000, got {good_steps}; a '
                f"fixed scale counts so far: pass dynamic=False"
            )
        limits = {"min_scale": min_scale, "max_scale": max_scale}
        found.append(_dynamic(saved, scale=scale, good_steps=good_steps, rule="apex", **limits))
    return found


def from_megatron(
    state: object,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
) -> Dynamic:
    """From Megatron's ``DynamicGradScaler.state_dict()``, which saves the scale and two counts.

    The settings are those that Megatron ran with (``--loss-scale-window``, ``--hysteresis``,
    ``--min-loss-scale``); it does not save them. Factors and ``min_scale`` are rounded to float32, as there.

    Raises:
        ScaleError: for a key that is missing or unreadable, and a count that these settings cannot reach.
    """
    saved = Saved(MEGATRON, _mapping(MEGATRON, state))
    return _dynamic(
        saved,
        scale=saved.number("scale"),
        growth_factor=_rounded(growth_factor),
        backoff_factor=_rounded(backoff_factor),
        growth_interval=growth_interval,
        good_steps=saved.count("growth_tracker"),
        rule="megatron",
        hysteresis=hysteresis,
        # Megatron goes on below 0, where every overflow backs off just as at 0.
        hysteresis_left=max(saved.count("hysteresis_tracker"), 0),
        min_scale=_rounded(min_scale),
    )


def from_deepspeed(state: object, *, min_scale: float = 1.0) -> Dynamic | Static:
    """From what DeepSpeed saves: an ``FP16_Optimizer``'s state, a ZeRO optimizer's, or a scaler.

    A ZeRO optimizer's state holds the scaler itself under ``loss_scaler``. A scaler may be the object or a
    mapping of its attributes; a ``DynamicLossScaler`` has ``delayed_shift``.

    Args:
        state: the mapping, or the scaler.
        min_scale: the ``min_loss_scale`` of the configuration, which ``FP16_Optimizer`` does not save; not
            read where the state has a ``min_scale`` of its own.

    Where the scale factor is no power of two, DeepSpeed's double precision and float32 here differ in their
    last bits.

    Raises:
        ScaleError: for a key that is missing or unreadable.
    """
    saved = Saved(DEEPSPEED, state)
    if saved.has("loss_scaler"):
        saved = Saved(DEEPSPEED, saved.get("loss_scaler"))
    if saved.has("delayed_shift"):
        return _from_deepspeed_scaler(Saved("DeepSpeed's DynamicLossScaler", saved.fields))
    if saved.has("dynamic") and not saved.flag("dynamic"):
        return Static(scale=saved.number("cur_scale"))
    saved = Saved("DeepSpeed's FP16_Optimizer", saved.fields)
    if not saved.flag("dynamic_loss_scale"):
        return Static(scale=saved.number("cur_scale"))
    return _dynamic(saved, rule="deepspeed", min_scale=min_scale, **_deepspeed_fields(saved))


def _from_deepspeed_scaler(saved: Saved) -> Dynamic:
    consecutive = saved.flag("consecutive_hysteresis")
    return _dynamic(
        saved,
        rule="deepspeed_consecutive" if consecutive else "deepspeed",
        hysteresis=saved.count("delayed_shift"),
        hysteresis_left=saved.count("cur_hysteresis"),
        min_scale=saved.number("min_scale"),
        **_deepspeed_fields(saved),
    )


def _deepspeed_fields(saved: Saved) -> dict[str, Any]:
    factor, window = saved.number("scale_factor"), saved.count("scale_window")
    good_steps = saved.count("cur_iter") - saved.count("last_overflow_iter") - 1
    if window > 0 and good_steps > window:
        # DeepSpeed counts on past a growth, in whole windows; here the count is 1 after each.
        good_steps = (good_steps - 1) % window + 1
    return {
        "scale": saved.number("cur_scale"),
        "growth_factor": factor,
        "backoff_factor": 1.0 / factor if factor else 0.0,
        "growth_interval": window,
        "good_steps": good_steps,
    }


def _rounded(setting: float) -> float:
    return to_float32(setting) if is_number(setting) else setting


def _dynamic(saved: Saved, **fields: Any) -> Dynamic:
    try:
        return Dynamic(**fields)
    except ScaleError as error:
        raise ScaleError(f"the state of {saved.source} does not make a loss scale: {error}") from None


def _mapping(source: str, state: object) -> Mapping[object, object]:
    if not isinstance(state, Mapping):
        raise ScaleError(f"expected the state of {source} to be a mapping, got {type(state).__name__}")
    return state

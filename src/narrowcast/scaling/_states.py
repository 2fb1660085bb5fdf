"""Loss scales and the states that scalers save: ours, those of torch, and those of apex."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

import msgspec

from narrowcast.errors import ScaleError, did_you_mean
from narrowcast.scaling._loss_scales import SMALLEST_SCALE, Dynamic, LossScale, Off, Static

SOURCES = ("torch", "apex")
_APEX_KEY = re.compile(r"loss_scaler\d+")
_APEX_INTERVAL = 2000  # apex's growth interval, fixed in apex/amp/scaler.py

# The words by which ``state_of`` saves the class of a loss scale.
_KINDS: dict[str, type[Any]] = {"Off": Off, "Static": Static, "Dynamic": Dynamic}


class _TorchState(msgspec.Struct):
    """The entries of ``torch.amp.GradScaler.state_dict()``."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    good_steps: int = msgspec.field(name="_growth_tracker")


class _ApexState(msgspec.Struct):
    """The entries that ``apex.amp.state_dict()`` has for each loss."""

    loss_scale: float
    unskipped: int


_State = TypeVar("_State", _TorchState, _ApexState)


def _recognised(state: object) -> str:
    """Return "torch" or "apex": the library that saved ``state``, judging by its keys."""
    got = type(state).__name__
    if isinstance(state, Mapping):
        keys = {str(key) for key in state}
        # torch's disabled scaler saves an empty state.
        if not keys or keys & {"_growth_tracker", "growth_factor"}:
            return "torch"
        if any(_APEX_KEY.fullmatch(key) for key in keys):
            return "apex"
        got = f"one with {', '.join(sorted(keys))}"
    raise ScaleError(f"expected a loss scaler's state saved by {' or '.join(SOURCES)}, got {got}")


def from_state(state: object, source: str | None = None) -> list[LossScale]:
    """Return the loss scales in a saved state: one for torch, one for each loss for apex.

    >>> import torch
    >>> from narrowcast.scaling import from_state
    >>> from_state(torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict())[0].scale
    1024.0

    Args:
        state: what ``state_dict()`` returned.
        source: "torch" or "apex", the library that saved the state; None: found from the keys.

    apex does not save all settings. Here those have apex's defaults; ``from_apex`` takes others.

    Raises:
        ScaleError: for an unknown source, a state that is not recognised, and what ``from_torch`` and
            ``from_apex`` refuse.
    """
    source = _recognised(state) if source is None else source
    if source == "torch":
        return [from_torch(state)]
    if source == "apex":
        return from_apex(state)
    raise ScaleError(f"unknown source {source!r}. {did_you_mean(str(source), SOURCES)}")


def from_torch(state: object) -> Off | Dynamic:
    """Return the loss scale in ``torch.amp.GradScaler.state_dict()``.

    The empty state of a disabled scaler is ``Off()``.

    >>> import torch
    >>> from narrowcast.scaling import from_torch
    >>> from_torch(torch.amp.GradScaler("cpu", growth_interval=100).state_dict()).growth_interval
    100

    Raises:
        ScaleError: for a key that is missing or has a value of another type, and for a scale outside 2**-126
            to 2**127.
    """
    if isinstance(state, Mapping) and not state:
        return Off()
    source = "torch.amp.GradScaler"
    fields = msgspec.structs.asdict(_read(source, state, _TorchState))
    # If the script lowered the interval, there may be more good steps than Dynamic takes. (With an interval
    # below 1, which is an error, 0 good steps have Dynamic name the interval.)
    most_good_steps = max(fields["growth_interval"] - 1, 0)
    fields["good_steps"] = min(fields["good_steps"], most_good_steps)
    return _dynamic(source, **fields)


def from_apex(
    state: object,
    *,
    dynamic: bool = True,
    min_scale: float = SMALLEST_SCALE,
    max_scale: float = 2.0**24,
) -> list[LossScale]:
    """Return the loss scales in ``apex.amp.state_dict()``, one for each loss.

    >>> from narrowcast.scaling import from_apex
    >>> from_apex({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 17}}, dynamic=False)
    [Static(scale=128.0)]

    Args:
        state: what apex saved; only ``loss_scaler0``, ``loss_scaler1`` and so on are read.
        dynamic: whether the scales change, which apex does not save; False returns ``Static`` scales.
        min_scale: ``min_loss_scale`` of ``amp.initialize``, which apex does not save; for apex's default of
            None leave it at 2**-126.
        max_scale: ``max_loss_scale`` of ``amp.initialize``.

    Raises:
        ScaleError: for a key that is missing or has a value of another type, for a scale outside the limits,
            and for 2000 or more good steps, which apex counts only for a fixed scale.
    """
    if not isinstance(state, Mapping):
        raise ScaleError(f"expected the state of apex.amp to be a mapping, got {type(state).__name__}")
    loss_scales: list[LossScale] = []
    for key, scaler in state.items():
        if not _APEX_KEY.fullmatch(str(key)):
            continue
        source = f"apex.amp ({key})"
        saved = _read(source, scaler, _ApexState)
        if not dynamic:
            loss_scales.append(Static(scale=saved.loss_scale))
            continue
        if saved.unskipped >= _APEX_INTERVAL:
            raise ScaleError(
                f'expected "unskipped" in the state of {source} to be below {_APEX_INTERVAL}, got '
                f"{saved.unskipped}. Only a fixed scale counts so far: pass dynamic=False"
            )
        loss_scale = _dynamic(
            source,
            scale=saved.loss_scale,
            good_steps=saved.unskipped,
            rule="apex",
            min_scale=min_scale,
            max_scale=max_scale,
        )
        loss_scales.append(loss_scale)
    if not loss_scales:
        raise ScaleError('expected "loss_scaler0" in the state of apex.amp')
    return loss_scales


def _read(source: str, state: object, kind: type[_State]) -> _State:
    """Convert a saved state to ``kind``; ScaleError, naming ``source``, for a missing or mistyped entry."""
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise ScaleError(f"the state of {source} cannot be read: {error}") from None


def _dynamic(source: str, **fields: float | str) -> Dynamic:
    """Make a ``Dynamic``; an error names ``source``."""
    try:
        return Dynamic(**fields)  # type: ignore[arg-type]
    except ScaleError as error:
        raise ScaleError(f"the state of {source} does not make a loss scale: {error}") from None


# ---- our states, which also hold torch's entries: torch's scaler loads ours, and ours loads torch's


def state_of(scale: LossScale) -> dict[str, Any]:
    """Return the state to save: numbers and strings, which ``torch.load(weights_only=True)`` reads.

    The state of a ``Dynamic`` scale also has the five entries of ``torch.amp.GradScaler``. torch's scaler
    reads only these, so it loses our hysteresis and limits; it refuses a state without them.
    """
    fields: dict[str, Any] = asdict(scale)  # type: ignore[call-overload]
    state: dict[str, Any] = {"loss_scale": {"kind": type(scale).__name__, **fields}}
    if isinstance(scale, Dynamic):
        state["scale"] = scale.scale
        state["growth_factor"] = scale.growth_factor
        state["backoff_factor"] = scale.backoff_factor
        state["growth_interval"] = scale.growth_interval
        state["_growth_tracker"] = scale.good_steps
    return state


def scale_in(state: Mapping[str, Any], present: LossScale, *, in_force: bool) -> LossScale | None:
    """Return the loss scale of a saved state; a state of torch gets the limits and hysteresis of ``present``.

    Args:
        state: what ``state_dict()`` of our scaler or of torch's returned.
        present: the loss scale of the scaler that loads the state.
        in_force: whether that scaler is enabled.

    Returns:
        None, with a warning, if the scaler is to keep its own scale. That is so for the empty state of a
        disabled ``torch.amp.GradScaler``; and for a state of ours if the scaler is enabled and just one of
        the two scales is ``Off``, since loading must not turn scaling on or off.

    Raises:
        ScaleError: a state of apex; a state of torch, if ``present`` is not dynamic; an entry that is missing
            or outside its range.
    """
    if not isinstance(state, Mapping):
        raise ScaleError(f"expected what state_dict() of a scaler returned, got {type(state).__name__}")
    if not state:
        _warn(
            "the saved state is empty: it is that of a torch.amp.GradScaler that was disabled. This scaler "
            "keeps its own scale"
        )
        return None

    # A state of ours. (In the state of an apex LossScaler "loss_scale" is a number.)
    if isinstance(state.get("loss_scale"), Mapping):
        saved = _scale_of(state["loss_scale"])
        if in_force and isinstance(saved, Off) != isinstance(present, Off):
            theirs = "no" if isinstance(saved, Off) else "a"
            ours = "no" if isinstance(present, Off) else "a"
            _warn(
                f"the saved state is of a run with {theirs} loss scale, and this scaler has {ours} loss "
                "scale (another format?); it keeps its own"
            )
            return None
        return saved

    # A state of another library.
    if "loss_scaler0" in state:
        raise ScaleError("this state is one of apex: narrowcast.scaling.from_state reads it")
    if not isinstance(present, Dynamic):
        raise ScaleError(
            f"a state of torch.amp.GradScaler is of a dynamic scale, and this scaler has {present!r}"
        )
    saved = from_torch(state)
    assert isinstance(saved, Dynamic)  # only an empty state is Off
    return replace(
        present,
        scale=saved.scale,
        growth_factor=saved.growth_factor,
        backoff_factor=saved.backoff_factor,
        growth_interval=saved.growth_interval,
        good_steps=saved.good_steps,
        hysteresis_left=None,
    )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)  # at the caller of load_state_dict


def _scale_of(fields: Mapping[str, Any]) -> LossScale:
    """Return the loss scale that ``state_of`` saved as ``fields``."""
    kind = fields.get("kind")
    if kind not in _KINDS:
        raise ScaleError(
            f"unknown kind of loss scale {kind!r} in a saved state. {did_you_mean(str(kind), _KINDS)}"
        )
    values = {name: value for name, value in fields.items() if name != "kind"}
    try:
        loss_scale: LossScale = _KINDS[kind](**values)
    except TypeError as unknown_field:
        raise ScaleError(f"a saved {kind} that this version does not read: {unknown_field}") from None
    return loss_scale

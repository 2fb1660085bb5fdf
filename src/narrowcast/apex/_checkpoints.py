"""``amp.state_dict``, ``amp.load_state_dict`` and ``amp.master_params``."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from narrowcast.apex._loss_scaler import LossScaler
from narrowcast.apex._optimizers import optimizer_of, prepared
from narrowcast.apex._state import amp_state, say
from narrowcast.errors import AmpError
from narrowcast.scaling import Dynamic, from_apex

_KEY = re.compile(r"loss_scaler\d+")


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters that ``optimizer`` updates: under O2 float32 masters in place of half weights.

    Their gradients are unscaled after each ``scale_loss`` block, and scaled within it, which is said once an
    optimizer: clip after the block.
    """
    found = optimizer_of(optimizer)
    mine = prepared(found)
    if mine is not None:
        mine.refresh()
        mine.say_that_gradients_are_scaled()
    for group in found.param_groups:
        yield from group["params"]


def state_dict(destination: Any = None) -> Any:
    """The scale of each loss of the latest ``amp.initialize``, as apex saves it.

    Masters are not in it: under O2 ``model.state_dict()`` holds them.

    Args:
        destination: a mapping to put the entries into; None makes an ``OrderedDict``.

    Returns:
        ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``; empty where amp is disabled.

    Raises:
        AmpError: ``amp.initialize`` was not called.
    """
    _require_initialized("state_dict")
    state = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(amp_state.loss_scalers):
        state[f"loss_scaler{number}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return state


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Give the losses of the latest ``amp.initialize`` the scales of a state, apex's or ours, by position.

    With another number of losses those that both have are loaded, with a warning. A scale outside the
    limits that ``amp.initialize`` was given is taken at the nearest limit, which is said too. A static scale
    takes the state's value, as in apex.

    Raises:
        AmpError: ``amp.initialize`` was not called; what came is no state of ``amp``. Nothing was changed.
        ScaleError: an entry that holds no loss scale. Nothing was changed.
    """
    _require_initialized("load_state_dict")
    _check(state_dict)
    scalers = amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        both = min(len(state_dict), len(scalers))
        warnings.warn(
            f"the state holds the scales of {_losses(len(state_dict))}, and amp.initialize made scales for "
            f"{_losses(len(scalers))}: {both} are loaded. Give amp.initialize the num_losses of the run that "
            "was saved",
            stacklevel=2,
        )
    if not state_dict:
        return
    found = from_apex(state_dict, dynamic=False)
    counts = [_count(key, entry) for key, entry in state_dict.items()]
    for number, (scaler, saved, count) in enumerate(zip(scalers, found, counts, strict=False)):
        _load(number, scaler, saved.scale, count)


def _load(number: int, scaler: LossScaler, scale: float, count: int) -> None:
    value = scaler.value
    if isinstance(value, Dynamic):
        kept = min(max(scale, value.min_scale), value.max_scale)
        if kept != scale:
            say(
                f"amp: loss scaler {number} is saved at {scale:g}, which is outside of min_loss_scale and "
                f"max_loss_scale: it goes on at {kept:g}"
            )
        # A static scale counts on without end; one more good block and a dynamic one grows.
        scale, count = kept, min(count, value.growth_interval - 1)
    scaler._loss_scale, scaler._unskipped = scale, count


def _require_initialized(name: str) -> None:
    if amp_state.opt_properties is None:
        raise AmpError(f"amp.{name} came before amp.initialize, which makes the loss scales: call it first")


def _check(state: object) -> None:
    expected = (
        'expected what amp.state_dict() returns, {"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}'
    )
    if not isinstance(state, Mapping):
        raise AmpError(f"{expected}, got {type(state).__name__}")
    unknown = [
        str(key)
        for key, entry in state.items()
        if not _KEY.fullmatch(str(key)) or not isinstance(entry, Mapping)
    ]
    if not unknown and (state or not amp_state.loss_scalers):
        return
    came = f"the keys {', '.join(unknown)}" if state else "an empty one"
    raise AmpError(
        f"{expected}, got {came}. The scale of a state that another library saved: scale = "
        "narrowcast.scaling.from_state(state)[0].scale, then "
        'amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 0}})'
    )


def _count(key: str, entry: Mapping[str, Any]) -> int:
    count = int(entry["unskipped"])
    if count < 0:
        raise AmpError(f'expected "unskipped" of {key} to be at least 0, got {count}')
    return count


def _losses(count: int) -> str:
    return "1 loss" if count == 1 else f"{count} losses"

"""Checkpoints that another training loop wrote with ``torch.save``, as the tree of one of ours.

Read are dicts of the states of model, optimizer, scheduler and loss scaler (torch's or apex's) under the keys
that torch's and apex's examples use. Everything else in the dict becomes the position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import CheckpointError, ScaleError
from narrowcast.gradients import GradScaler
from narrowcast.scaling import from_state
from narrowcast.training.checkpoint._file import FORMAT, damaged, load_without_code

_MODEL = ("state_dict", "model", "model_state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict")
_SCHEDULER = ("scheduler", "scheduler_state_dict", "lr_scheduler")
_SCALER = ("scaler", "scaler_state_dict", "amp")


def read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the tree of a foreign checkpoint, and notes on what was converted or missing.

    Raises:
        CheckpointError: the file is damaged, would run code, or holds no model's state under a known key.
    """
    found = load_without_code(path)
    if isinstance(found, Mapping) and found.get("format") == FORMAT:
        raise damaged(path, "its last line is missing")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: expected a dict with the states of a run, got {type(found).__name__}")
    notes = [f"{path} was written by torch.save, not by save_checkpoint: it was converted"]
    bare = bool(found) and all(isinstance(value, torch.Tensor) for value in found.values())
    rest = {"state_dict": found} if bare else dict(found)
    model = _one_of(path, rest, _MODEL)
    if not isinstance(model, Mapping):
        raise CheckpointError(
            f"{path}: expected the model's state under {', '.join(_MODEL[:-1])} or {_MODEL[-1]}, got the "
            f"keys {', '.join(map(str, found)) or 'none'}: load it by hand, with torch.load"
        )
    if model and all(str(name).startswith("module.") for name in model):
        model = {str(name).removeprefix("module."): value for name, value in model.items()}
        notes.append('its model was wrapped in DDP: "module." was removed from the names')
    scaler = _scaler_state(path, _one_of(path, rest, _SCALER), notes)
    notes.append("the random states stay as they are: those of another loop are not read")
    tree = {
        "model": dict(model),
        "objects": {
            **_objects("optimizers", _one_of(path, rest, _OPTIMIZER)),
            **_objects("schedulers", _one_of(path, rest, _SCHEDULER)),
            **_objects("scalers", scaler),
        },
        "stepper": None,
        "random": None,
        "policy": None,
        "position": rest,
        "versions": {},
    }
    return tree, notes


def _one_of(path: Path, rest: dict[Any, Any], keys: Sequence[str]) -> Any:
    """Take the value under the one of ``keys`` that is present out of ``rest``; None if there is none."""
    found = [key for key in keys if key in rest]
    if len(found) > 1:
        raise CheckpointError(f"{path} holds both {' and '.join(found)}: save it again with one of them")
    return rest.pop(found[0]) if found else None


def _objects(kind: str, state: Any) -> dict[tuple[str, str, str], Any]:
    states = state if isinstance(state, Sequence) else [] if state is None else [state]
    saved = [{"kind": None, "parameters": None, "state": one} for one in states]
    return {("", kind, str(index)): one for index, one in enumerate(saved)}


def _scaler_state(path: Path, state: Any, notes: list[str]) -> Any:
    """The state for ``GradScaler.load_state_dict``; None if there is none."""
    if not isinstance(state, Mapping) or not any(str(key).startswith("loss_scaler") for key in state):
        return state or None  # torch's; a disabled scaler saves {}
    try:
        scales = from_state(state, "apex")
    except ScaleError as error:
        raise CheckpointError(f"{path}: the state of its loss scaler cannot be read: {error}") from error
    if len(scales) > 1:
        raise CheckpointError(
            f"{path} holds {len(scales)} loss scales of apex: read them with nc.scaling.from_state, and load "
            "the rest without the scaler"
        )
    notes.append(f"its loss scale comes from the state of apex: {scales[0]}")
    return GradScaler(loss_scale=scales[0]).state_dict()

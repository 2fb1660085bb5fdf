"""Checkpoints that ``torch.save`` wrote for training loops of old, as the tree of one of ours.

Known are dicts with the states of model, optimizer, scheduler and loss scaler (torch's or
apex's) under the usual keys, and torch's random states, one for all ranks or one for each.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import CheckpointError, ScaleError
from narrowcast.gradients import GradScaler
from narrowcast.scaling import from_state, recognise
from narrowcast.training._checkpoint_file import damaged
from narrowcast.training._checkpoint_groups import Group

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_MODEL = ("state_dict", "model_state", "model_state_dict", "model")
_OPTIMIZER = ("optimizer", "optimizer_state", "optimizer_state_dict")
_SCHEDULER = ("scheduler", "scheduler_state", "scheduler_state_dict", "lr_scheduler")
_SCALER = ("amp", "amp_state", "scaler", "scaler_state", "scaler_state_dict", "grad_scaler")
_RANDOM = ("random_rng_states_all", "random_rng_state_all", "random_rng_state", "rng_state")
_CUDA = ("cuda_rng_states_all", "cuda_rng_state_all", "cuda_rng_state")


def is_one(path: Path) -> bool:
    """Whether ``torch.save`` may have written the file."""
    with path.open("rb") as file:
        start = file.read(4)
    return start == _ZIP or start[:1] == _PICKLE


def read(path: Path, rank: int, count: int) -> tuple[dict[str, Any], list[str]]:
    """The tree of a foreign checkpoint for this one of ``count`` ranks, and what was converted or missing.

    Raises:
        CheckpointError: it is damaged, would run code, or cannot be told apart.
    """
    found = _load(path)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: expected a dict with the states of a run, got {type(found).__name__}")
    notes = [f"{path} was written by torch.save, not by save_checkpoint: it was converted"]
    if found and all(isinstance(value, torch.Tensor) for value in found.values()):
        notes.append("it holds a model's state dict, and nothing else of the run")
        found = {"state_dict": found}
    rest = dict(found)
    model = _one_of(path, rest, _MODEL)
    if not isinstance(model, Mapping):
        raise CheckpointError(
            f"{path}: expected the model's state under {', '.join(_MODEL[:-1])} or {_MODEL[-1]}, got the "
            f"keys {', '.join(map(str, found)) or 'none'}: load it by hand, with torch.load"
        )
    if model and all(str(name).startswith("module.") for name in model):
        model = {str(name).removeprefix("module."): value for name, value in model.items()}
        notes.append('its model was wrapped in DDP: "module." was taken from the names')
    group = Group().state({})
    for one, keys in (("optimizers", _OPTIMIZER), ("schedulers", _SCHEDULER)):
        state = _one_of(path, rest, keys)
        states = state if isinstance(state, Sequence) else [] if state is None else [state]
        group[one] = {
            str(index): {"kind": None, "parameters": None, "state": each} for index, each in enumerate(states)
        }
    scaler = _scaler_state(path, _one_of(path, rest, _SCALER), notes)
    if scaler is not None:
        group["scalers"] = {"0": {"kind": None, "state": scaler}}
    tree = {
        "model": dict(model),
        "stepper": None,
        "loose": group,
        "random": _random(path, rest, rank, count, notes),
        "policy": None,
        "position": rest,
        "ranks": 1,
        "versions": {},
    }
    return tree, notes


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            zipped = file.read(4) == _ZIP
        if zipped:
            with zipfile.ZipFile(path) as records:
                bad = records.testzip()
            if bad is not None:
                raise damaged(path, f"the CRC-32 of {bad} is wrong")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.findall(r"GLOBAL (\S+) was not an allowed", str(error))
        what = f"run {wanted[0]}" if wanted else "run code, or is no pickle"
        raise CheckpointError(
            f"{path} would {what} when it is read, and was not read: where you trust who wrote it, convert "
            "it with torch.load(path, weights_only=False) and torch.save of plain values and tensors; "
            "harmless classes can be allowed with torch.serialization.safe_globals around load_checkpoint"
        ) from error
    except (RuntimeError, EOFError, zipfile.BadZipFile, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise damaged(path, str(error).partition("\n")[0]) from error


def _one_of(path: Path, rest: dict[Any, Any], keys: Sequence[str]) -> Any:
    """The value under the one of ``keys`` that is there, taken out; None where there is none."""
    found = [key for key in keys if key in rest]
    if len(found) > 1:
        raise CheckpointError(
            f"{path} holds {' and '.join(found)}, and which of them is meant cannot be told: save it again "
            "with one of them"
        )
    return rest.pop(found[0]) if found else None


def _scaler_state(path: Path, state: Any, notes: list[str]) -> dict[str, Any] | None:
    if state is None:
        return None
    try:
        source = recognise(state)
        if source == "torch":
            if not state:
                notes.append("its loss scaler was disabled, and saved nothing: the scaler stays as it is")
            return dict(state) or None
        scales = from_state(state, source)
    except ScaleError as error:
        raise CheckpointError(f"{path}: the state of its loss scaler cannot be read: {error}") from error
    if len(scales) > 1:
        raise CheckpointError(
            f"{path} holds {len(scales)} loss scales of {source}, and which loss each is for cannot be told: "
            "read them with nc.scaling.from_state, and load the rest without the scaler"
        )
    notes.append(f"its loss scale is from the state that {source} saves: {scales[0]}")
    return GradScaler(loss_scale=scales[0]).state_dict()


def _random(
    path: Path, rest: dict[Any, Any], rank: int, count: int, notes: list[str]
) -> dict[str, Any] | None:
    """torch's random states, as far as they are there."""
    host = _of_rank(path, _one_of(path, rest, _RANDOM), "random state", rank, count, notes)
    cuda = _of_rank(path, _one_of(path, rest, _CUDA), "CUDA random state", rank, count, notes)
    if host is None and cuda is None:
        notes.append("it holds no random states: they are as they were")
        return None
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    devices = {} if cuda is None else {f"cuda:{device}": cuda}
    return {"torch": host, "devices": devices, "python": None, "numpy": None}


def _of_rank(
    path: Path, states: Any, what: str, rank: int, count: int, notes: list[str]
) -> torch.Tensor | None:
    """The state that is this rank's."""
    if states is None:
        return None
    if isinstance(states, torch.Tensor) and states.dim() == 1:
        states = [states]
    if not all(isinstance(one, torch.Tensor) and one.dtype == torch.uint8 for one in states):
        raise CheckpointError(f"{path}: expected each {what} in it to be a tensor of bytes (uint8)")
    if len(states) != count:
        notes.append(
            f"it holds one {what} for all ranks"
            if len(states) == 1
            else f"it holds the {what} of {len(states)} ranks, and here "
            f"{'is 1' if count == 1 else f'are {count}'}: each rank takes its own where there is one"
        )
    if rank < len(states):
        state: torch.Tensor = states[rank].cpu()
        return state
    return states[0].cpu() if len(states) == 1 else None

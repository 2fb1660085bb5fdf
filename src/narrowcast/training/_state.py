"""The live objects of a run and its random states: saved, compared with what is live, and loaded."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from narrowcast.errors import CheckpointError, NarrowcastError, SettingError, few
from narrowcast.gradients import parameters_of
from narrowcast.weights import HeldWeights, held_by

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
_BESIDE = "beside the Stepper"
Key = tuple[str, str, str]
"""Group, kind and name of an object."""
_WORDS = {
    "optimizers": ("optimizer", "Give it as optimizer=..."),
    "held": ("held weights", "Hold the optimizer's weights with nc.weights.hold, as when it was saved"),
    "schedulers": ("scheduler", "Give it as scheduler=..."),
    "scalers": ("scaler", "Give it as scaler=..."),
}


@dataclass
class Fit:
    """Compares a saved state with the objects it is loaded into; collects the notes."""

    source: Any
    notes: list[str] = field(default_factory=list)

    def refuse(self, problem: str, fix: str) -> NoReturn:
        raise CheckpointError(f"{self.source} does not fit: {problem}. {fix}. Nothing was loaded")


class Objects:
    """Optimizers, held weights, schedulers and scalers, by group, kind and name.

    A Stepper has a group for each named optimizer, ``""`` for one without a name. A checkpoint has one more
    for what was given beside the Stepper; without a Stepper there is only ``""``.
    """

    def __init__(self, model: torch.nn.Module, groups: Mapping[str | None, Any]) -> None:
        self.live: dict[Key, Any] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
        self._names = {number: canonical(model, name) for number, name in names.items()}
        for name, group in groups.items():
            self.add(name or "", group.optimizers, group.schedulers, group.scaler)

    def add(self, group: str, optimizer: Any, scheduler: Any, scaler: Any) -> None:
        """Add what was given, without what is there already, and the held weights of optimizers."""
        known = {id(one) for one in self.live.values()}
        for kind, several in (("optimizers", optimizer), ("schedulers", scheduler), ("scalers", scaler)):
            for name, one in _by_name(kind, several).items():
                if id(one) in known:
                    continue
                self.live[group, kind, name] = one
                handle = held_by(one) if kind == "optimizers" else None
                if handle is not None:
                    self.live[group, "held", name] = handle

    def of_kind(self, kind: str) -> dict[Key, Any]:
        return {key: one for key, one in self.live.items() if key[1] == kind}

    def state(self) -> dict[Key, dict[str, Any]]:
        states: dict[Key, dict[str, Any]]
        states = {key: {"kind": kind_of(one), "state": one.state_dict()} for key, one in self.live.items()}
        for key, one in self.of_kind("optimizers").items():
            states[key]["parameters"] = self._described(one)
        return states

    def _described(self, optimizer: Any) -> list[str]:
        """Describe each parameter; masters have the names of their low-precision parameters."""
        held = held_by(optimizer)
        low_of = {id(working): low for low, working in held.parameters} if held is not None else {}
        other = "a tensor that is not the model's"
        return [
            f"{self._names.get(id(low_of.get(id(p), p)), other)}, {form_of(p)}"
            for p in parameters_of(optimizer)
        ]

    def check(self, fit: Fit, saved: Mapping[Key, Any]) -> None:
        """Compare saved states with the live objects; nothing is written."""
        for key in saved:
            if key not in self.live:
                noun, fix = _WORDS[key[1]]
                problem = f"it holds the {noun} {_shown(key)} ({saved[key]['kind']}), which was not given"
                if self.live:
                    fit.refuse(problem, fix)
                fit.notes.append(f"{problem}: not loaded")
        for key, one in self.live.items():
            if key in saved:
                self._check_object(fit, key, one, saved[key])
            elif getattr(one, "scales_losses", True):
                there = ", ".join(_shown(other) for other in saved if other[1] == key[1]) or "none"
                fit.refuse(
                    f"it holds no {_WORDS[key[1]][0]} {_shown(key)} (it has {there})",
                    "Save it too, or load without it",
                )

    def _check_object(self, fit: Fit, key: Key, one: Any, saved: Mapping[str, Any]) -> None:
        which = f"{_WORDS[key[1]][0]} {_shown(key)}"
        if key[1] == "held":
            try:
                one.check_state_dict(saved["state"])
            except SettingError as error:
                fit.refuse(str(error), "Hold the weights as they were held")
        if saved["kind"] != kind_of(one):
            fit.refuse(f"the {which} is of {kind_of(one)}, and was of {saved['kind']}", "Make the same kind")
        if key[1] != "optimizers":
            return
        same = "Make it from the same parameters in the same order and groups"
        sizes, came = (
            [len(group["params"]) for group in groups]
            for groups in (one.param_groups, saved["state"]["param_groups"])
        )
        if sizes != came:
            fit.refuse(f"the {which} has groups of {sizes} parameters, and had {came}", same)
        for index, (here, there) in enumerate(zip(self._described(one), saved["parameters"], strict=True)):
            if here != there:
                fit.refuse(f"parameter {index} of the {which} is {here}, and was {there}", same)

    def load(self, saved: Mapping[Key, Any]) -> None:
        """Load states that were checked."""
        for kind in ("scalers", "schedulers", "optimizers", "held"):
            for key, one in self.of_kind(kind).items():
                if key in saved and kind == "optimizers":
                    _load_optimizer(one, saved[key]["state"])
                elif key in saved:
                    one.load_state_dict(saved[key]["state"])


def _by_name(kind: str, given: Any) -> dict[str, Any]:
    """One object, several in order, or several by name, as a dict."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        found = {str(name): one for name, one in given.items()}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = {str(index): one for index, one in enumerate(given)}
    else:
        found = {"0": given}
    for one in found.values():
        if kind == "optimizers" and not hasattr(one, "param_groups"):
            hint = ": write stepper=" if hasattr(one, "autocast") else ""
            raise CheckpointError(f"expected a torch.optim.Optimizer, got {type(one).__name__}{hint}")
        if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
            raise CheckpointError(
                f"expected {kind} with state_dict() and load_state_dict(), got {type(one).__name__}"
            )
    return found


def _shown(key: Key) -> str:
    """The name of an object, after that of its group."""
    return repr(f"{key[0]} {key[2]}".strip())


def kind_of(one: Any) -> str:
    """Name the kind of an object; torch's scaler and ours share a class name."""
    name = type(one).__name__
    if isinstance(one, HeldWeights):
        return one.updates
    return f"torch.amp.{name}" if name == "GradScaler" and type(one).__module__.startswith("torch") else name


def form_of(value: Any) -> str:
    """Return dtype and shape of a tensor, and the type of anything else, in words."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load a state as it was saved; torch casts states to the dtypes of the parameters.

    Settings that are tensors, such as a learning rate on a GPU, go to the device where they were.
    """
    devices = [
        {key: value.device for key, value in group.items() if isinstance(value, torch.Tensor)}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, places in zip(optimizer.param_groups, devices, strict=True):
        for key, device in places.items():
            if isinstance(group[key], torch.Tensor):
                group[key] = group[key].to(device)
    positions = [index for group in state["param_groups"] for index in group["params"]]
    for parameter, position in zip(parameters_of(optimizer), positions, strict=True):
        for key, value in state["state"].get(position, {}).items():
            now = optimizer.state.get(parameter, {}).get(key)
            both = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            if both and key != "step" and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)


# ---- a run: the model, its objects and the random states


class Run:
    """The live objects of one call of ``save_checkpoint`` or ``load_checkpoint``."""

    def __init__(self, model: Any, optimizer: Any, stepper: Any, scheduler: Any, scaler: Any) -> None:
        if not isinstance(model, torch.nn.Module):
            raise CheckpointError(
                f"expected the model, a torch.nn.Module, got {type(model).__name__}; several models are one "
                'as torch.nn.ModuleDict({"g": generator, "d": discriminator})'
            )
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise CheckpointError(
                "FullyShardedDataParallel keeps flat pieces that fit no other number of ranks: shard the "
                "model with torch.distributed.fsdp.fully_shard"
            )
        if stepper is not None and not hasattr(stepper, "_groups"):
            raise CheckpointError(f"expected stepper to be a nc.Stepper, got {type(stepper).__name__}")
        self.model = model
        self.stepper = stepper
        self.objects = Objects(model, {} if stepper is None else stepper._groups)
        self.objects.add("" if stepper is None else _BESIDE, optimizer, scheduler, scaler)

    def state(self) -> dict[str, Any]:
        """Return everything but position and policy, with live tensors.

        Raises:
            OrderError: in the middle of a Stepper's accumulation, whose gradients would be lost.
        """
        stepper = None
        if self.stepper is not None:
            self.stepper._refuse_unfinished()
            stepper = {"steps": self.stepper.steps, "formats": self.stepper._format_names()}
        return {
            "model": self.model_state(),
            "stepper": stepper,
            "objects": self.objects.state(),
            "random": random_states(),
        }

    def model_state(self) -> dict[str, Any]:
        """The model's state by names without wrappers."""
        state, names = self.model.state_dict(), self._names()
        return {names[name]: value for name, value in state.items()}

    def _names(self) -> dict[str, str]:
        """Return each name without wrappers, or as it is if two tensors would have the same name."""
        names = {name: canonical(self.model, name) for name in self.model.state_dict()}
        return names if len(set(names.values())) == len(names) else {name: name for name in names}

    def layouts(self) -> dict[tuple[Any, ...], Any]:
        """By place in the tree: a tensor whose kind, and perhaps shape, the one there has."""
        found: dict[Any, Any] = {("model", name): value for name, value in self.model_state().items()}
        for key, one in self.objects.of_kind("optimizers").items():
            for index, parameter in enumerate(parameters_of(one)):
                found["objects", key, "state", "state", index] = parameter
        for key, one in self.objects.of_kind("held").items():
            for index, (low, _) in enumerate(one.parameters):
                found["objects", key, "state", "kept", index] = low
        return found

    def check(self, fit: Fit, tree: dict[str, Any]) -> None:
        """Compare all of ``tree`` with the live objects; nothing is written."""
        self._check_model(fit, tree["model"])
        if self.objects.live:
            self._check_kind(fit, tree["stepper"])
        elif tree["objects"]:
            tree["random"] = None  # the model alone is wanted, not a run that continues
        self.objects.check(fit, tree["objects"])

    def _check_kind(self, fit: Fit, saved: Mapping[str, Any] | None) -> None:
        """Refuse the checkpoint of a Stepper without one, and the other way round; and another format."""
        if (saved is None) != (self.stepper is None):
            was, given = ("a loop without a Stepper", "one") if saved is None else ("a Stepper", "none")
            fit.refuse(
                f"it was saved from {was}, and {given} was given", "Give what was saved, or the model alone"
            )
        if saved is None or self.stepper is None:
            return
        for device, now in self.stepper._format_names().items():
            before = saved["formats"].get(device, now)
            if before != now and not self.stepper._goes_on_in(before, now):
                fit.refuse(
                    f"the Stepper computes in {now} on {device}, and computed in {before}",
                    f"Make it with a policy that computes in {before}",
                )

    def _check_model(self, fit: Fit, theirs: Mapping[str, Any]) -> None:
        mine = self.model_state()
        same = "Make the model that was saved"
        missing, unknown = [n for n in mine if n not in theirs], [n for n in theirs if n not in mine]
        if missing:
            fit.refuse(f"the checkpoint lacks {few(missing, 5)}", same)
        if unknown:
            fit.refuse(f"the model has no {few(unknown, 5)}", same)
        for name, here in mine.items():
            if isinstance(here, torch.Tensor) and form_of(here) != form_of(theirs[name]):
                fit.refuse(f"{name} is {form_of(here)} here, and was {form_of(theirs[name])}", same)

    def load(self, fit: Fit, tree: Mapping[str, Any]) -> None:
        """Load a tree that was checked.

        Raises:
            CheckpointError: a ``load_state_dict`` raised; what was loaded before it stays.
        """
        try:
            self.objects.load(tree["objects"])
            if self.stepper is not None:
                self.stepper._restart(**tree["stepper"])
            state = {name: tree["model"][saved] for name, saved in self._names().items()}
            self.model.load_state_dict(state, strict=False)
            if tree["random"] is not None:
                fit.notes.extend(set_random_states(tree["random"]))
        except NarrowcastError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{fit.source} could not be loaded, and was in part: {type(error).__name__}: {error}"
            ) from error


def canonical(model: torch.nn.Module, name: str) -> str:
    """A name in a state dict without what DDP, ``torch.compile`` and checkpoint wrappers add to it."""
    kept: list[str] = []
    module: Any = model
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    for part in name.split("."):
        wraps = part in _WRAPPERS and isinstance(module, torch.nn.Module)
        if not wraps or (part == "module" and not isinstance(module, parallel)):
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)


# ---- random states


def random_states() -> dict[str, Any]:
    """Return the states of torch (CPU and devices in use), of ``random``, and of NumPy if it is imported.

    A device that this process has not used yet has no state, and is not initialized for it.
    """
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "devices": {name: _module(name).get_rng_state(*_index(name)) for name in _devices(in_use=True)},
        "python": random.getstate(),
        "numpy": None if numpy is None else _plain(numpy.random.get_state(legacy=False)),
    }


def set_random_states(states: dict[str, Any]) -> list[str]:
    """Set ``states``; return notes on those that could not be set."""
    notes = []
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    for name, state in states["devices"].items():
        if name in _devices(in_use=False):
            _module(name).set_rng_state(state, *_index(name))
        else:
            notes.append(f"the random state of {name} was not set: this process has no such device")
    for name in _devices(in_use=True):
        if name not in states["devices"]:
            notes.append(f"the checkpoint holds no random state of {name}: it is unchanged")
    if states["numpy"] is None:
        if "numpy" in sys.modules:
            notes.append("the checkpoint holds no random state of NumPy: it is unchanged")
    elif importlib.util.find_spec("numpy") is None:
        notes.append("the random state of NumPy was not set: it is not installed here")
    else:
        import numpy

        numpy.random.set_state(states["numpy"])
    return notes


def _devices(*, in_use: bool) -> list[str]:
    """The accelerators of this machine, or those that this process has initialized (all of torch.mps)."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or (in_use and not getattr(_module(kind.type), "is_initialized", lambda: True)()):
        return []
    return [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]


def _module(name: str) -> Any:
    return torch.get_device_module(name.partition(":")[0])


def _index(name: str) -> tuple[int, ...]:
    kind, _, index = name.partition(":")
    return () if kind == "mps" else (int(index),)  # torch.mps has one device, and takes no index


def _plain(value: Any) -> Any:
    """NumPy's arrays as lists, which NumPy accepts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value

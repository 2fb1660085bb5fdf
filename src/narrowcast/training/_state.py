"""The live objects of a run: their states are saved, compared with those of a checkpoint, and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from narrowcast.errors import CheckpointError, NarrowcastError, SettingError, few
from narrowcast.gradients import parameters_of
from narrowcast.replay import random_states, set_random_states
from narrowcast.weights import HeldWeights, held_by

_BESIDE = "beside the Stepper"
Key = tuple[str, str, str]
"""Group, kind and name of an object."""
_NOUNS = {
    "optimizers": "optimizer",
    "held": "held weights",
    "schedulers": "scheduler",
    "scalers": "scaler",
}
_HOW_TO_GIVE = {
    "optimizers": "Give it as optimizer=...",
    "held": "Hold the optimizer's weights with nc.weights.hold, as when it was saved",
    "schedulers": "Give it as scheduler=...",
    "scalers": "Give it as scaler=...",
}


@dataclass
class Fit:
    """Refuses a state that does not fit, and collects notes on what was left out.

    Attributes:
        source: where the state is from, as messages name it.
        notes: one sentence each, for the user.
    """

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
        self._parameter_names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameter_names[id(parameter)] = name_without_wrappers(model, name)
        for group_name, group in groups.items():
            self.add(group_name or "", group.optimizers, group.schedulers, group.scaler)

    def add(self, group: str, optimizer: Any, scheduler: Any, scaler: Any) -> None:
        """Add the given objects that are not there yet, and the held weights of new optimizers."""
        present = {id(obj) for obj in self.live.values()}
        for kind, argument in (("optimizers", optimizer), ("schedulers", scheduler), ("scalers", scaler)):
            for name, obj in _by_name(kind, argument).items():
                if id(obj) in present:
                    continue
                self.live[group, kind, name] = obj
                if kind == "optimizers":
                    held = held_by(obj)
                    if held is not None:
                        self.live[group, "held", name] = held

    def of_kind(self, kind: str) -> dict[Key, Any]:
        return {key: obj for key, obj in self.live.items() if key[1] == kind}

    def state(self) -> dict[Key, dict[str, Any]]:
        states: dict[Key, dict[str, Any]] = {}
        for key, obj in self.live.items():
            states[key] = {"kind": _kind_of(obj), "state": obj.state_dict()}
        for key, optimizer in self.of_kind("optimizers").items():
            states[key]["parameters"] = self._described_parameters(optimizer)
        return states

    def _described_parameters(self, optimizer: Any) -> list[str]:
        """Describe each parameter; masters have the names of their low-precision parameters."""
        low_by_working = {}
        held = held_by(optimizer)
        if held is not None:
            low_by_working = {id(working): low for low, working in held.parameters}

        descriptions = []
        for parameter in parameters_of(optimizer):
            in_model = low_by_working.get(id(parameter), parameter)
            name = self._parameter_names.get(id(in_model), "a tensor that is not the model's")
            descriptions.append(f"{name}, {_form_of(parameter)}")
        return descriptions

    # ---- comparison

    def check(self, fit: Fit, saved: Mapping[Key, Any]) -> None:
        """Compare saved states with the live objects; nothing is written."""
        for key, entry in saved.items():
            if key not in self.live:
                problem = (
                    f"it holds the {_NOUNS[key[1]]} {_shown(key)} ({entry['kind']}), which was not given"
                )
                if self.live:
                    fit.refuse(problem, _HOW_TO_GIVE[key[1]])
                # The model was given alone, as for an evaluation.
                fit.notes.append(f"{problem}: not loaded")

        for key, obj in self.live.items():
            if key in saved:
                self._check_object(fit, key, obj, saved[key])
            elif getattr(obj, "scales_losses", True):
                # Only narrowcast's scaler has this attribute. One that never scales, as of a Stepper in bf16,
                # has nothing to load.
                same_kind = [_shown(other) for other in saved if other[1] == key[1]]
                fit.refuse(
                    f"it holds no {_NOUNS[key[1]]} {_shown(key)} (it has {', '.join(same_kind) or 'none'})",
                    "Save it too, or load without it",
                )

    def _check_object(self, fit: Fit, key: Key, obj: Any, entry: Mapping[str, Any]) -> None:
        what = f"{_NOUNS[key[1]]} {_shown(key)}"
        if key[1] == "held":
            try:
                obj.check_state_dict(entry["state"])
            except SettingError as error:
                fit.refuse(str(error), "Hold the weights as they were held")
        if entry["kind"] != _kind_of(obj):
            fit.refuse(f"the {what} is of {_kind_of(obj)}, and was of {entry['kind']}", "Make the same kind")
        if key[1] == "optimizers":
            self._check_parameters(fit, what, obj, entry)

    def _check_parameters(self, fit: Fit, what: str, optimizer: Any, entry: Mapping[str, Any]) -> None:
        fix = "Make it from the same parameters in the same order and groups"
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        saved_sizes = [len(group["params"]) for group in entry["state"]["param_groups"]]
        if sizes != saved_sizes:
            fit.refuse(f"the {what} has groups of {sizes} parameters, and had {saved_sizes}", fix)

        descriptions = zip(self._described_parameters(optimizer), entry["parameters"], strict=True)
        for index, (now, before) in enumerate(descriptions):
            if now != before:
                fit.refuse(f"parameter {index} of the {what} is {now}, and was {before}", fix)

    # ---- loading

    def load(self, saved: Mapping[Key, Any]) -> None:
        """Load states that were checked."""
        # Schedulers come before optimizers: many are classes of the user, whose load_state_dict may raise,
        # and until then little has changed.
        for kind in ("scalers", "schedulers", "optimizers", "held"):
            for key, obj in self.of_kind(kind).items():
                if key not in saved:
                    continue
                state = saved[key]["state"]
                if kind == "optimizers":
                    _load_optimizer(obj, state)
                else:
                    obj.load_state_dict(state)


def _by_name(kind: str, argument: Any) -> dict[str, Any]:
    """Return one object, several in order, or several by name, as a dict."""
    if argument is None:
        return {}
    if isinstance(argument, Mapping):
        objects = {str(name): obj for name, obj in argument.items()}
    elif isinstance(argument, Sequence) and not isinstance(argument, str):
        objects = {str(index): obj for index, obj in enumerate(argument)}
    else:
        objects = {"0": argument}

    for obj in objects.values():
        if kind == "optimizers" and not hasattr(obj, "param_groups"):
            hint = ""
            if hasattr(obj, "autocast"):
                hint = ": write stepper="
            raise CheckpointError(f"expected a torch.optim.Optimizer, got {type(obj).__name__}{hint}")
        if not hasattr(obj, "state_dict") or not hasattr(obj, "load_state_dict"):
            raise CheckpointError(
                f"expected {kind} with state_dict() and load_state_dict(), got {type(obj).__name__}"
            )
    return objects


def _shown(key: Key) -> str:
    """Return the name of an object, after that of its group."""
    group, _, name = key
    return repr(f"{group} {name}".strip())


def _kind_of(obj: Any) -> str:
    """Name the kind of an object; torch's scaler and ours share a class name."""
    if isinstance(obj, HeldWeights):
        return obj.updates
    name = type(obj).__name__
    if name == "GradScaler" and type(obj).__module__.startswith("torch"):
        return "torch.amp.GradScaler"
    return name


def _form_of(value: Any) -> str:
    """Return dtype and shape of a tensor, and the type of anything else, in words."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load a state of an optimizer as it was saved, and correct two things that torch changes."""
    # First: a setting may be a tensor, such as a learning rate on a GPU. It stays on the device it has now.
    devices_by_group = []
    for group in optimizer.param_groups:
        devices_by_group.append(
            {name: value.device for name, value in group.items() if isinstance(value, torch.Tensor)}
        )

    optimizer.load_state_dict(state)

    for group, devices in zip(optimizer.param_groups, devices_by_group, strict=True):
        for name, device in devices.items():
            if isinstance(group[name], torch.Tensor):
                group[name] = group[name].to(device)

    # Second: torch casts states, but for "step", to the dtypes of the parameters. They keep the dtypes they
    # were saved in.
    positions = []
    for group in state["param_groups"]:
        positions += group["params"]
    for parameter, position in zip(parameters_of(optimizer), positions, strict=True):
        loaded = optimizer.state.get(parameter, {})
        for name, saved in state["state"].get(position, {}).items():
            now = loaded.get(name)
            both_tensors = isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor)
            if both_tensors and name != "step" and now.dtype != saved.dtype:
                loaded[name] = saved.to(now.device)


# ---- a run: the model, its objects and the random states


class Run:
    """The live objects of one call of ``save_checkpoint`` or ``load_checkpoint``."""

    def __init__(self, model: Any, optimizer: Any, stepper: Any, scheduler: Any, scaler: Any) -> None:
        if not isinstance(model, torch.nn.Module):
            raise CheckpointError(
                f"expected the model, a torch.nn.Module, got {type(model).__name__}; several models are one "
                'as torch.nn.ModuleDict({"g": generator, "d": discriminator})'
            )
        for module in model.modules():
            # By name, since the import of the class takes a second.
            if type(module).__name__ == "FullyShardedDataParallel":
                raise CheckpointError(
                    "FullyShardedDataParallel keeps flat pieces that fit no other number of ranks: shard the "
                    "model with torch.distributed.fsdp.fully_shard"
                )
        if stepper is not None and not hasattr(stepper, "_groups"):
            raise CheckpointError(f"expected stepper to be a nc.Stepper, got {type(stepper).__name__}")

        self.model = model
        self.stepper = stepper
        if stepper is None:
            self.objects = Objects(model, {})
            self.objects.add("", optimizer, scheduler, scaler)
        else:
            self.objects = Objects(model, stepper._groups)
            self.objects.add(_BESIDE, optimizer, scheduler, scaler)

    def state(self) -> dict[str, Any]:
        """Return everything but position and policy, with live tensors.

        Raises:
            OrderError: in the middle of a Stepper's accumulation, whose gradients would be lost.
        """
        stepper_state = None
        if self.stepper is not None:
            self.stepper._refuse_unfinished()
            stepper_state = {"steps": self.stepper.steps, "formats": self.stepper._format_names()}
        return {
            "model": self._model_state(),
            "stepper": stepper_state,
            "objects": self.objects.state(),
            "random": random_states(),
        }

    def _model_state(self) -> dict[str, Any]:
        state = self.model.state_dict()
        return {name_without_wrappers(self.model, name): value for name, value in state.items()}

    def layouts(self) -> dict[tuple[Any, ...], Any]:
        """Return live tensors by their place in the tree of a checkpoint, as models of how to shard it.

        A saved tensor is sharded as the live tensor at its place. A state of an optimizer is sharded as its
        parameter, which is at the place one level up, if it has the same shape.
        """
        # The first "state" is that of our entry, the second is torch's. What is kept for low weights is
        # sharded as they are.
        layouts: dict[Any, Any] = {}
        for name, value in self._model_state().items():
            layouts["model", name] = value
        for key, optimizer in self.objects.of_kind("optimizers").items():
            for index, parameter in enumerate(parameters_of(optimizer)):
                layouts["objects", key, "state", "state", index] = parameter
        for key, held in self.objects.of_kind("held").items():
            for index, (low, _) in enumerate(held.parameters):
                layouts["objects", key, "state", "kept", index] = low
        return layouts

    # ---- comparison

    def check(self, fit: Fit, tree: Mapping[str, Any]) -> None:
        """Compare all of ``tree`` with the live objects; nothing is written."""
        self._check_model(fit, tree["model"])
        if self.objects.live:
            self._check_stepper(fit, tree["stepper"])
        self.objects.check(fit, tree["objects"])

    def _check_model(self, fit: Fit, saved: Mapping[str, Any]) -> None:
        fix = "Make the model that was saved"
        state = self._model_state()
        missing = [name for name in state if name not in saved]
        if missing:
            fit.refuse(f"the checkpoint lacks {few(missing, 5)}", fix)
        unknown = [name for name in saved if name not in state]
        if unknown:
            fit.refuse(f"the model has no {few(unknown, 5)}", fix)
        for name, value in state.items():
            now, before = _form_of(value), _form_of(saved[name])
            if isinstance(value, torch.Tensor) and now != before:
                fit.refuse(f"{name} is {now} here, and was {before}", fix)

    def _check_stepper(self, fit: Fit, saved: Mapping[str, Any] | None) -> None:
        """Refuse the checkpoint of a Stepper without one, and the other way round; and another format."""
        fix = "Give what was saved, or the model alone"
        if saved is None and self.stepper is not None:
            fit.refuse("it was saved from a loop without a Stepper, and one was given", fix)
        if saved is not None and self.stepper is None:
            fit.refuse("it was saved from a Stepper, and none was given", fix)
        if saved is None:
            return

        for device, now in self.stepper._format_names().items():
            before = saved["formats"].get(device, now)
            if before != now and not self.stepper._may_keep_format(before, now):
                fit.refuse(
                    f"the Stepper computes in {now} on {device}, and computed in {before}",
                    f"Make it with a policy that computes in {before}",
                )

    # ---- loading

    def continues(self, tree: Mapping[str, Any]) -> bool:
        """Return whether the run goes on that saved a tree.

        It does not if the model alone is loaded of a run that saved more, as for an evaluation.
        """
        return bool(self.objects.live) or not tree["objects"]

    def load(self, fit: Fit, tree: Mapping[str, Any]) -> None:
        """Load a tree that was checked.

        Raises:
            CheckpointError: a ``load_state_dict`` raised; what was loaded before it stays.
        """
        try:
            self.objects.load(tree["objects"])
            if self.stepper is not None:
                self.stepper._restart(**tree["stepper"])
            # Wrappers may be others than when it was saved.
            model_state = {}
            for name in self.model.state_dict():
                model_state[name] = tree["model"][name_without_wrappers(self.model, name)]
            # All names were compared. Not strict, since a hook may keep out of state_dict() what loading
            # expects.
            self.model.load_state_dict(model_state, strict=False)

            if tree["random"] is not None and self.continues(tree):
                fit.notes.extend(set_random_states(tree["random"]))
        except NarrowcastError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{fit.source} could not be loaded, and was in part: {type(error).__name__}: {error}"
            ) from error


def name_without_wrappers(model: torch.nn.Module, name: str) -> str:
    """Return a name in a state dict without the parts that DDP, ``torch.compile`` and checkpoints add."""
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    parts: list[str] = []
    module: Any = model
    for part in name.split("."):
        is_wrapper = False
        if part == "module":
            # Other classes with this attribute, such as AveragedModel, are models of their own.
            is_wrapper = isinstance(module, parallel)
        elif part in ("_orig_mod", "_checkpoint_wrapped_module"):
            is_wrapper = isinstance(module, torch.nn.Module) and list(module._modules) == [part]
        if not is_wrapper:
            parts.append(part)
        module = getattr(module, part, None)
    return ".".join(parts)

"""Optimizers, held weights, schedulers and scalers of a checkpoint: states that are checked, then loaded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from narrowcast.errors import CheckpointError, SettingError
from narrowcast.scaling import Off
from narrowcast.weights import HeldWeights, check_state, held_by

KINDS = ("optimizers", "held", "schedulers", "scalers")
_OF_ITS_SHAPE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf"}
"""State of torch's optimizers that has the shape of its parameter."""


@dataclass
class Fit:
    """What was found while a checkpoint was compared with what it is loaded into."""

    path: Any
    strict: bool
    foreign: bool = False
    notes: list[str] = field(default_factory=list)

    def refuse(self, problem: str, fix: str) -> NoReturn:
        raise CheckpointError(f"{self.path} does not fit: {problem}. {fix}. Nothing was loaded")

    def unless_strict(self, problem: str, fix: str, consequence: str) -> None:
        """An error where strict, else a note."""
        if self.strict:
            self.refuse(problem, f"{fix}; or load what fits with strict=False")
        self.notes.append(f"{problem}: {consequence}")


@dataclass
class Write:
    """One thing to load, and how to have it as it was."""

    do: Callable[[], Any]
    undo: Callable[[], Any]


@dataclass
class Group:
    """Optimizers and what goes with them, each by name."""

    optimizers: dict[str, Any] = field(default_factory=dict)
    held: dict[str, HeldWeights] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    scalers: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, kind) for kind in KINDS)

    def state(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Everything to save, live tensors; ``names`` are those of the model's parameters, by ``id``."""
        return {
            "optimizers": {
                name: {"kind": kind_of(one), "parameters": described(one, names), "state": one.state_dict()}
                for name, one in self.optimizers.items()
            },
            "held": {name: one.state_dict() for name, one in self.held.items()},
            "schedulers": {
                name: {"kind": kind_of(one), "state": one.state_dict()}
                for name, one in self.schedulers.items()
            },
            "scalers": {
                name: {"kind": kind_of(one), "state": one.state_dict()} for name, one in self.scalers.items()
            },
        }

    def layouts(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """Where in the state tensors of a parameter's shape stand, and such a parameter."""
        for name, one in self.optimizers.items():
            for index, parameter in enumerate(parameters_of(one)):
                yield ("optimizers", name, "state", "state", str(index)), parameter
        for name, held in self.held.items():
            for index, (low, _) in enumerate(held.parameters):
                yield ("held", name, "kept", str(index)), low

    def check(self, fit: Fit, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Refuse what does not fit; nothing is written."""
        for kind in KINDS:
            self._check_names(fit, kind, getattr(self, kind), saved[kind])
        for name, one in self.optimizers.items():
            if name in saved["optimizers"]:
                _check_optimizer(fit, name, one, saved["optimizers"][name], names)
        for name, held in self.held.items():
            if name in saved["held"]:
                try:
                    check_state(held, saved["held"][name])
                except SettingError as error:
                    fit.refuse(str(error), "Hold the weights as they were held")
        for name, one in self.schedulers.items():
            if name in saved["schedulers"]:
                _check_kind(fit, "scheduler", name, one, saved["schedulers"][name])
        for name, one in self.scalers.items():
            if name in saved["scalers"]:
                _check_scaler(fit, name, one, saved["scalers"][name])

    def _check_names(self, fit: Fit, kind: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        one = _NOUNS[kind]
        for name, live in mine.items():
            if name not in theirs and not isinstance(getattr(live, "initial_loss_scale", None), Off):
                fit.unless_strict(
                    f"the checkpoint holds no {one} {name!r} (it has {', '.join(theirs) or 'none'})",
                    "Save it too, or load without it",
                    "it stays as it is",
                )
        for name in theirs:
            if name not in mine:
                kept = f"{_WITH_ARTICLE.get(kind, one)} {name!r} ({_kind_in(theirs[name])})"
                problem = f"the checkpoint holds {kept} that was not given"
                if self.optimizers:
                    fit.unless_strict(problem, _GIVE[kind], "it was not loaded")
                else:
                    fit.notes.append(f"{problem}: it was not loaded")

    def writes(self, saved: Mapping[str, Any]) -> Iterator[Write]:
        """What is to be done, the easily undone first."""
        for kind in ("scalers", "schedulers", "optimizers"):
            for name, one in getattr(self, kind).items():
                if name in saved[kind]:
                    yield _write_of(kind, one, saved[kind][name])
        for name, held in self.held.items():
            if name in saved["held"]:
                # Checked before, so that it goes well; a copy to go back to would be as large as the weights.
                yield Write(functools.partial(held.load_state_dict, saved["held"][name]), lambda: None)


_NOUNS = {"optimizers": "optimizer", "held": "held weights", "schedulers": "scheduler", "scalers": "scaler"}
_WITH_ARTICLE = {"optimizers": "an optimizer", "schedulers": "a scheduler", "scalers": "a scaler"}
_GIVE = {
    "optimizers": "Give it as optimizer=...",
    "held": "Hold the optimizer's weights with nc.weights.hold, as they were when it was saved",
    "schedulers": "Give it as scheduler=...",
    "scalers": "Give it as scaler=...",
}


def by_name(what: str, given: Any) -> dict[str, Any]:
    """One thing, several in order, or several by name, as a dict."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        found = {str(name): one for name, one in given.items()}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = {str(index): one for index, one in enumerate(given)}
    else:
        found = {"0": given}
    for one in found.values():
        if not all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
            raise CheckpointError(
                f"expected {what} to be something with state_dict() and load_state_dict(), several in a "
                f"list, or a dict of them, got {type(one).__name__}"
            )
    return found


def loose_group(optimizer: Any, scheduler: Any, scaler: Any, held: Any, owned: set[int]) -> Group:
    """What was given beside a Stepper, without what is the Stepper's own (``owned``, by ``id``)."""

    def mine(what: str, given: Any) -> dict[str, Any]:
        return {name: one for name, one in by_name(what, given).items() if id(one) not in owned}

    group = Group(mine("optimizer", optimizer), {}, mine("scheduler", scheduler), mine("scaler", scaler))
    handles = list(mine("held", held).values())
    for name, one in group.optimizers.items():
        if not hasattr(one, "param_groups"):
            hint = ": write stepper=" if type(one).__name__ == "Stepper" else ""
            raise CheckpointError(f"expected a torch.optim.Optimizer, got {type(one).__name__}{hint}")
        handle = held_by(one)
        if handle is not None:
            group.held[name] = handle
    for handle in handles:
        if not isinstance(handle, HeldWeights):
            raise CheckpointError(
                f"expected held to be what nc.weights.hold returns, got {type(handle).__name__}"
            )
        if handle not in group.held.values():
            group.held[f"held {len(group.held)}"] = handle
    return group


def kind_of(one: Any) -> str:
    """What to call it: torch's scaler and ours share a class name."""
    name = type(one).__name__
    return f"torch.amp.{name}" if name == "GradScaler" and type(one).__module__.startswith("torch") else name


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def described(optimizer: Any, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Name, shape and dtype of each parameter, held ones by their low parameter's name."""
    held = held_by(optimizer)
    low_of = {id(working): low for low, working in held.parameters} if held is not None else {}
    return [
        {
            "name": names.get(id(low_of.get(id(p), p))),
            "shape": list(p.shape),
            "dtype": str(p.dtype).removeprefix("torch."),
        }
        for p in parameters_of(optimizer)
    ]


def _kind_in(saved: Any) -> str:
    return str(
        (saved.get("kind") or saved.get("updates")) if isinstance(saved, Mapping) else type(saved).__name__
    )


def _check_kind(fit: Fit, what: str, name: str, one: Any, saved: Mapping[str, Any]) -> None:
    if saved["kind"] is not None and saved["kind"] != kind_of(one):
        fit.unless_strict(
            f"{what} {name!r} is of {kind_of(one)}, and that in the checkpoint of {saved['kind']}",
            f"Make the {what} that was saved",
            "its state was loaded all the same",
        )


def _check_scaler(fit: Fit, name: str, one: Any, saved: Mapping[str, Any]) -> None:
    if saved["kind"] is None or saved["kind"] == kind_of(one):
        return
    if kind_of(one).startswith("torch.") and "scale" not in saved["state"]:
        fit.refuse(
            f"scaler {name!r} is torch's, and the checkpoint holds a loss scale that it cannot follow",
            "Use nc.GradScaler",
        )
    fit.notes.append(f"scaler {name!r} is a {kind_of(one)}, and the state was that of a {saved['kind']}")


def _check_optimizer(
    fit: Fit, name: str, one: Any, saved: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    _check_kind(fit, "optimizer", name, one, saved)
    state = saved["state"]
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        fit.refuse(
            f"expected the state of optimizer {name!r}, got {type(state).__name__}", "Save its state_dict()"
        )
    mine, theirs = one.param_groups, state["param_groups"]
    sizes, came = [len(g["params"]) for g in mine], [len(g["params"]) for g in theirs]
    same = "Make it from the same parameters in the same order and groups"
    if sizes != came:
        fit.refuse(f"optimizer {name!r} has groups of {sizes} parameters, and the checkpoint of {came}", same)
    for here, there in zip(mine, theirs, strict=True):
        missing = sorted(set(here) - set(there) - {"params", "param_names"})
        if missing:
            fit.refuse(
                f"the state of optimizer {name!r} is of another kind than {kind_of(one)}: it has no "
                f"{', '.join(missing)}",
                "Make the optimizer that was saved",
            )
    parameters = parameters_of(one)
    for index, (here, there) in enumerate(
        zip(described(one, names), saved["parameters"] or [], strict=False)
    ):
        if here["shape"] != there["shape"]:
            fit.refuse(
                f"parameter {index} of optimizer {name!r} is {_words(here)}, and was {_words(there)}", same
            )
        if here["name"] != there["name"] and None not in (here["name"], there["name"]):
            fit.unless_strict(
                f"parameter {index} of optimizer {name!r} is {_words(here)}, and was {_words(there)}",
                same,
                "its state was loaded by its number",
            )
    positions = [index for group in theirs for index in group["params"]]
    for parameter, position in zip(parameters, positions, strict=True):
        for key, value in state["state"].get(position, {}).items():
            if key in _OF_ITS_SHAPE and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                fit.refuse(
                    f"{key} of parameter {position} of {name!r} has shape {tuple(value.shape)}, and "
                    f"the parameter {tuple(parameter.shape)}",
                    same,
                )


def _words(parameter: Mapping[str, Any]) -> str:
    name = parameter["name"] or "a tensor that is not the model's"
    return f"{name}, {parameter['dtype']} of shape {tuple(parameter['shape'])}"


def _write_of(kind: str, one: Any, saved: Mapping[str, Any]) -> Write:
    state = saved["state"]
    if kind != "optimizers":
        before = copy.deepcopy(one.state_dict())
        return Write(
            lambda: one.load_state_dict(state), lambda: one.load_state_dict(before) if before else None
        )
    # Tensors in it are not written to: loading replaces them.
    old = one.state_dict()

    devices = devices_of_settings(one)

    def load() -> None:
        one.load_state_dict(state)
        exact(one, saved, devices)

    return Write(load, lambda: one.load_state_dict(old))


def devices_of_settings(optimizer: Any) -> list[dict[str, torch.device]]:
    """Where the settings of each group are that are tensors, as a learning rate may be."""
    return [
        {key: value.device for key, value in group.items() if isinstance(value, torch.Tensor)}
        for group in optimizer.param_groups
    ]


def exact(optimizer: Any, saved: Mapping[str, Any], devices: list[dict[str, torch.device]]) -> None:
    """Give the loaded state its saved dtypes back, which torch changes to those of the parameters.

    Settings that are tensors go to ``devices``, where they were before.
    """
    for group, places in zip(optimizer.param_groups, devices, strict=True):
        for key, device in places.items():
            if isinstance(group[key], torch.Tensor):
                group[key] = group[key].to(device)
    state = saved["state"]
    positions = [index for group in state["param_groups"] for index in group["params"]]
    dtypes = [one["dtype"] for one in saved["parameters"] or []]
    for parameter, position, dtype in zip(parameters_of(optimizer), positions, dtypes, strict=False):
        if str(parameter.dtype).removeprefix("torch.") != dtype:
            continue
        for key, value in state["state"].get(position, {}).items():
            now = optimizer.state.get(parameter, {}).get(key)
            both = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            if both and key != "step" and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)


def few(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

"""What a checkpoint is of: a model, a Stepper or what a loop has instead, and the random states."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from narrowcast.errors import CheckpointError, NarrowcastError
from narrowcast.policy import format_name
from narrowcast.training._checkpoint_groups import (
    Fit,
    Group,
    Write,
    devices_of_settings,
    exact,
    few,
    loose_group,
)
from narrowcast.training._random import check_random_states, random_states, set_random_states
from narrowcast.training._stepper import Stepper
from narrowcast.weights import held_by

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}


class Parts:
    """The live objects of one call of ``save_checkpoint`` or ``load_checkpoint``."""

    def __init__(
        self, model: Any, optimizer: Any, stepper: Any, scheduler: Any, scaler: Any, held: Any
    ) -> None:
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
        if stepper is not None and not isinstance(stepper, Stepper):
            raise CheckpointError(f"expected stepper to be a nc.Stepper, got {type(stepper).__name__}")
        self.model = model
        self.stepper: Stepper | None = stepper
        self.lanes: dict[str, Group] = {}
        for name, lane in stepper._lanes.items() if stepper is not None else ():
            optimizers = {str(index): one for index, one in enumerate(lane.optimizers)}
            self.lanes[name or ""] = Group(
                optimizers,
                {index: held for index, one in optimizers.items() if (held := held_by(one)) is not None},
                {str(index): one for index, one in enumerate(lane.schedulers)},
                {"0": lane.scaler},
            )
        owned = {
            id(one)
            for group in self.lanes.values()
            for kind in (group.optimizers, group.held, group.schedulers, group.scalers)
            for one in kind.values()
        }
        self.loose = loose_group(optimizer, scheduler, scaler, held, owned)
        names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
        self.names = {number: canonical(model, name) for number, name in names.items()}

    def tree(self) -> dict[str, Any]:
        """Everything but position and policy, live tensors.

        Raises:
            OrderError: in the middle of a Stepper's window, whose gradients would be lost.
        """
        stepper = None
        if self.stepper is not None:
            self.stepper.state_dict()  # refuses the middle of a window, and settles what is on the way
            stepper = {
                "steps": self.stepper.steps,
                "formats": {device: format_name(dtype) for device, dtype in self.stepper.formats.items()},
                "lanes": {name: group.state(self.names) for name, group in self.lanes.items()},
            }
        return {
            "model": {name: value for name, (_, value) in self.model_state().items()},
            "stepper": stepper,
            "loose": self.loose.state(self.names),
            "random": random_states(),
        }

    def model_state(self) -> dict[str, tuple[str, Any]]:
        """By the name without wrappers: the model's own name for it, and the value."""
        state = self.model.state_dict()
        found = {canonical(self.model, name): (name, value) for name, value in state.items()}
        return found if len(found) == len(state) else {name: (name, value) for name, value in state.items()}

    def layouts(self) -> dict[tuple[str, ...], torch.Tensor]:
        """By place in the tree: what a tensor there is of the kind of, and perhaps the shape."""
        found: dict[tuple[str, ...], torch.Tensor] = {
            ("model", name): value
            for name, (_, value) in self.model_state().items()
            if isinstance(value, torch.Tensor)
        }
        found |= {("loose", *place): like for place, like in self.loose.layouts()}
        for lane, group in self.lanes.items():
            found |= {("stepper", "lanes", lane, *place): like for place, like in group.layouts()}
        # A loop's own state may be loaded into a Stepper, and the other way round.
        if set(self.lanes) == {""}:
            found |= {("loose", *place): like for place, like in self.lanes[""].layouts()}
        elif not self.lanes:
            found |= {("stepper", "lanes", "", *place): like for place, like in self.loose.layouts()}
        return found

    def check(self, fit: Fit, tree: dict[str, Any]) -> list[Write]:
        """What is to be done to load ``tree``, after everything in it was found to fit."""
        self._meet(fit, tree)
        self._check_model(fit, tree)
        stepper = tree["stepper"]
        if fit.foreign or not fit.strict:
            for group, saved in self._pairs(tree):
                self._make_masters(fit, group, saved, tree["model"])
        if stepper is not None and self.stepper is not None:
            self._check_lanes(fit, stepper)
        self.loose.check(fit, tree["loose"], self.names)
        if self.stepper is None and not self.loose and any(tree["loose"].values()):
            tree["random"] = None  # the model alone is wanted, not a run that goes on
        if tree["random"] is not None:
            try:
                check_random_states(tree["random"])
            except (RuntimeError, TypeError, ValueError, KeyError) as error:
                fit.refuse(
                    f"a random state in it cannot be set: {error}", "Use the torch that it was saved with"
                )
        return list(self._writes(fit, tree))

    def _meet(self, fit: Fit, tree: dict[str, Any]) -> None:
        """Bring a loop's own states and those of a Stepper together where one was saved and one is here."""
        empty = Group().state({})
        stepper, loose = tree["stepper"], tree["loose"]
        if self.stepper is not None and stepper is None:
            if set(self.lanes) != {""} or not loose["optimizers"]:
                fit.unless_strict(
                    "the checkpoint holds no state of a Stepper",
                    "Save it with stepper=..., or load without it",
                    "the Stepper stays as it is",
                )
                return
            tree["stepper"] = {"steps": 0, "formats": None, "lanes": {"": loose}}
            tree["loose"] = empty
            fit.notes.append(
                "the checkpoint is of a loop without a Stepper: its optimizers were loaded into the Stepper, "
                "which counts its steps from 0"
            )
        elif self.stepper is None and stepper is not None:
            if set(stepper["lanes"]) != {""} or any(loose.values()):
                fit.refuse("it is of a Stepper with several optimizers by name", "Give stepper=...")
            tree["stepper"], tree["loose"] = None, stepper["lanes"][""]
            if self.loose:
                fit.notes.append(
                    "the checkpoint is of a Stepper: its states were loaded into what was given instead"
                )

    def _pairs(self, tree: Mapping[str, Any]) -> list[tuple[Group, dict[str, Any]]]:
        """Each group with what was saved of it."""
        lanes = tree["stepper"]["lanes"] if self.stepper is not None and tree["stepper"] is not None else {}
        found = [(group, lanes[name]) for name, group in self.lanes.items() if name in lanes]
        return [*found, (self.loose, tree["loose"])]

    def _check_lanes(self, fit: Fit, saved: Mapping[str, Any]) -> None:
        if set(saved["lanes"]) != set(self.lanes):
            came, here = (", ".join(map(repr, sorted(one))) for one in (saved["lanes"], self.lanes))
            fit.refuse(
                f"it is of a Stepper with optimizers {came}, and here they are {here}", "Name them alike"
            )
        for device, format_ in (self.stepper.formats if self.stepper is not None else {}).items():
            was = (saved["formats"] or {}).get(device)
            if was is not None and was != format_name(format_):
                fit.unless_strict(
                    f"the Stepper computes in {format_name(format_)} on {device}, and the saved one in {was}",
                    "Make it with the policy that was saved",
                    "the run goes on in the new format",
                )
        for name, group in self.lanes.items():
            group.check(fit, saved["lanes"][name], self.names)

    def _make_masters(self, fit: Fit, group: Group, saved: dict[str, Any], model: Mapping[str, Any]) -> None:
        """Masters from fp32 weights, where the checkpoint has none and the weights here have some."""
        for name, held in group.held.items():
            lows = [low for low, _ in held.parameters]
            kept = [model.get(self.names.get(id(low), "")) for low in lows]
            wide = all(
                isinstance(value, torch.Tensor) and (value.dtype, value.shape) == (torch.float32, low.shape)
                for low, value in zip(lows, kept, strict=True)
            )
            if wide and name not in saved["held"] and held.updates == "masters":
                saved["held"][name] = {**held.state_dict(), "kept": kept}
                fit.notes.append("the fp32 masters were made from the fp32 weights in the checkpoint")

    def _check_model(self, fit: Fit, tree: dict[str, Any]) -> None:
        mine = {name: value for name, (_, value) in self.model_state().items()}
        theirs = tree["model"]
        same = "Make the model that was saved"
        missing, unknown = [n for n in mine if n not in theirs], [n for n in theirs if n not in mine]
        if missing:
            fit.unless_strict(f"the checkpoint lacks {few(missing)}", same, "left as they are")
        if unknown:
            fit.unless_strict(f"the model has no {few(unknown)}", same, "not loaded")
        for name, here in mine.items():
            there = theirs.get(name)
            if not isinstance(here, torch.Tensor) or name not in theirs:
                continue
            if not isinstance(there, torch.Tensor):
                fit.refuse(f"{name} is a tensor here, and was a {type(there).__name__}", same)
            if here.shape != there.shape:
                fit.refuse(f"{name} has shape {tuple(here.shape)}, and had {tuple(there.shape)}", same)
            if here.dtype != there.dtype:
                both = here.is_floating_point() and there.is_floating_point()
                problem = (
                    f"{name} is {format_name(here.dtype)} here, and was saved in {format_name(there.dtype)}"
                )
                if not both:
                    fit.refuse(problem, same)
                if fit.foreign:
                    fit.notes.append(f"{problem}: converted, rounded to nearest")
                else:
                    fit.unless_strict(problem, same, "converted, rounded to nearest")

    def _writes(self, fit: Fit, tree: dict[str, Any]) -> Iterator[Write]:
        """In this order: what can be taken back, then what was checked and goes well."""
        if self.stepper is not None and tree["stepper"] is not None:
            yield from self._stepper_writes(self.stepper, tree["stepper"])
        yield from self.loose.writes(tree["loose"])
        yield Write(lambda: self._load_model(tree["model"]), lambda: None)
        if tree["random"] is not None:
            yield Write(lambda: fit.notes.extend(set_random_states(tree["random"])), lambda: None)

    def _stepper_writes(self, stepper: Stepper, saved: Mapping[str, Any]) -> Iterator[Write]:
        steps = stepper.steps
        lanes = {
            name: _lane_state(group, saved["lanes"][name], group.state(self.names))
            for name, group in self.lanes.items()
        }
        for name, group in self.lanes.items():
            # Schedulers and scalers may refuse a state, so they go first.
            yield from Group({}, {}, group.schedulers, group.scalers).writes(saved["lanes"][name])
            for one in group.optimizers.values():
                yield Write(lambda: None, functools.partial(one.load_state_dict, one.state_dict()))

        devices = {
            (name, index): devices_of_settings(one)
            for name, group in self.lanes.items()
            for index, one in group.optimizers.items()
        }

        def load() -> None:
            stepper.load_state_dict({"steps": saved["steps"], "lanes": lanes})
            for name, group in self.lanes.items():
                for index, theirs in saved["lanes"][name]["optimizers"].items():
                    exact(group.optimizers[index], theirs, devices[name, index])

        yield Write(load, lambda: setattr(stepper, "steps", steps))

    def _load_model(self, saved: Mapping[str, Any]) -> None:
        state = {own: saved[name] for name, (own, _) in self.model_state().items() if name in saved}
        self.model.load_state_dict(state, strict=False)


def carry_out(writes: list[Write], path: Any) -> None:
    """Load all of it; where one raises, what came before it is taken back."""
    undo: list[Callable[[], Any]] = []
    try:
        for one in writes:
            undo.append(one.undo)
            one.do()
    except Exception as error:
        for back in reversed(undo):
            with contextlib.suppress(Exception):
                back()
        if isinstance(error, NarrowcastError):
            raise
        raise CheckpointError(f"{path} could not be loaded: {type(error).__name__}: {error}") from error


def canonical(model: torch.nn.Module, name: str) -> str:
    """A name in a state dict without what DDP, ``torch.compile`` and checkpoint wrappers add to it."""
    kept: list[str] = []
    module: Any = model
    for part in name.split("."):
        wraps = part in _WRAPPERS and isinstance(module, torch.nn.Module) and _is_wrapper(module, part)
        if not wraps:
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)


def _is_wrapper(module: torch.nn.Module, part: str) -> bool:
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return part != "module" or isinstance(module, parallel)


def _lane_state(group: Group, saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A lane's state as ``Stepper.state_dict`` gives it; what was not saved is as it is ``now``."""

    def each(kind: str) -> list[Any]:
        return [saved[kind].get(name, now[kind][name]) for name in getattr(group, kind)]

    return {
        "optimizers": [one["state"] for one in each("optimizers")],
        "masters": each("held"),
        "schedulers": [one["state"] for one in each("schedulers")],
        "scaler": each("scalers")[0]["state"],
    }

"""A policy that travels with the graph: into recomputation, backward functions and other threads.

What is in force in a thread is lost where autograd runs a forward again. Activation checkpointing brings back
PyTorch's own autocast state, but neither rules nor a region in float32 on a CPU. So while a region that needs
it is open, a function that is checkpointed is bound to the state of that moment.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch

from narrowcast.casting import _regions, _torch_internals
from narrowcast.casting._places import place_on, places_here
from narrowcast.policy import Scope


@runtime_checkable
class Owner(Protocol):
    """Who opened a region and may say that it cannot be opened again."""

    def check_recomputation(self) -> None: ...


class State:
    """The autocast state of a thread, rules included, of the device types on which something is on."""

    __slots__ = ("_cache", "_devices", "_owners")

    def __init__(self) -> None:
        self._owners = [one for one in _regions.owners() if isinstance(one, Owner)]
        devices = {*places_here(), *_regions.devices_on()}
        self._cache = torch.is_autocast_cache_enabled()
        self._devices: list[tuple[str, bool, torch.dtype, Scope | None]] = [
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), place_on(d))
            for d in sorted(devices)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """That state in the calling thread, whatever is in force there; as it was afterwards.

        Raises:
            OrderError: a model was computed in it by hooks that are gone.
        """
        for one in self._owners:
            one.check_recomputation()
        absent = [d for d in places_here() if d not in {one[0] for one in self._devices}]
        owner = object()
        entered = 0
        try:
            for device in absent:
                dtype = torch.get_autocast_dtype(device)
                _regions.enter(owner, device, dtype, False, self._cache, audible=False, place=None)
                entered += 1
            for device, enabled, dtype, place in self._devices:
                _regions.enter(owner, device, dtype, enabled, self._cache, audible=False, place=place)
                entered += 1
            yield
        finally:
            for _ in range(entered):
                _regions.leave(owner)


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in the state of this moment, in whatever thread and whenever it is called."""
    state = State()

    @functools.wraps(function)
    def in_that_state(*args: Any, **kwargs: Any) -> Any:
        with state.restored():
            return function(*args, **kwargs)

    return in_that_state


class _Process:
    def __init__(self) -> None:
        self.composable: bool | None = None
        # Names of modules of torch that stand for something of ours while regions that travel are open: the
        # module's dict, the name, what is there, and ours.
        self.replacements: list[tuple[dict[str, Any], str, Any, Any]] = []

    def find(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """Made once, since regions open often; anew where another module that checkpoints was imported."""
        composable = _torch_internals.COMPOSABLE_CHECKPOINT in sys.modules
        if composable is not self.composable:
            self.composable = composable
            self.replacements = [
                (module.__dict__, name, module.__dict__[name], make(module.__dict__[name]))
                for module in _torch_internals.checkpoint_modules()
                for name, make in _REPLACEMENTS.items()
                if hasattr(module, name)
            ]
        return self.replacements


_process = _Process()


def install() -> None:
    """Bind what is checkpointed from now on; called as the first region that needs it opens."""
    for names, name, original, ours in _process.find():
        if names[name] is original:  # else somebody else has replaced it since
            names[name] = ours


def remove() -> None:
    """Called as the last such region closes."""
    for names, name, original, ours in _process.replacements:
        if names[name] is ours:
            names[name] = original


class _BindingFunction:
    """Stands for ``CheckpointFunction``, of which ``checkpoint`` calls ``apply`` alone."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._original.apply(_bound_where_needed(function), *args, **kwargs)


def _binding_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(_bound_where_needed(function), *args, **kwargs)

    return generator


def _quiet_kwargs(original: Callable[..., Any]) -> Callable[..., Any]:
    """What ``checkpoint`` brings back itself; not a region in float32, of which it would warn on a CPU."""

    @functools.wraps(original)
    def kwargs_of_regions(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        for one in found:
            if one is not None and one.get("dtype") == torch.float32:
                one.update(enabled=False, dtype=torch.bfloat16)
        return found

    return kwargs_of_regions


_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "CheckpointFunction": _BindingFunction,
    "_checkpoint_without_reentrant_generator": _binding_generator,
    "_get_autocast_kwargs": _quiet_kwargs,
}


def _bound_where_needed(function: Callable[..., Any]) -> Callable[..., Any]:
    if torch.compiler.is_compiling() or not _regions.needs_to_travel():
        return function
    return bound(function)

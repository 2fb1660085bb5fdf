"""O1 in force: models that cast in their calls, and a thread that casts outside of them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from narrowcast.apex._torch_internals import version_of
from narrowcast.apex.amp._functions import (
    Casts,
    are_disabled_here,
    begin,
    registered_functions,
    registered_operators,
)
from narrowcast.apex.amp._rules import plan
from narrowcast.casting import Applied, LastingRegion, drop_casts
from narrowcast.errors import OrderError
from narrowcast.policy import format_name

_active: list[Handle] = []


def start_casts(models: list[torch.nn.Module], half: torch.dtype) -> Handle:
    """Cast by the lists in calls of the models, and in this thread outside of them."""
    devices = _device_types(models)
    functions = registered_functions()
    policy, whole = plan(format_name(half), devices, registered_operators(), apart=[*functions.items()])
    handle = Handle(Casts(policy, half, {**whole, **functions}), devices)
    handle.start(models)
    return handle


class Handle:
    """The casts of one ``initialize`` with O1; ``remove()`` ends them."""

    def __init__(self, casts: Casts, devices: Iterable[str]) -> None:
        self._casts = casts
        self._dtypes = dict.fromkeys(devices, casts.half)
        self._thread = threading.current_thread()
        self._region: LastingRegion | None = None
        self._applied: weakref.WeakKeyDictionary[torch.nn.Module, Applied] = weakref.WeakKeyDictionary()
        self._undo = ExitStack()
        self._versions: weakref.WeakKeyDictionary[torch.nn.Module, _Versions] = weakref.WeakKeyDictionary()
        self._gradients_were_off = False

    def start(self, models: list[torch.nn.Module]) -> None:
        """Put everything in force, or nothing if that raises."""
        with ExitStack() as undo, ExitStack() as done:
            undo.callback(begin(self._casts))
            before = _latest_here()
            if before is not None:
                before._close_region()
                done.callback(before._open_region)
            self._open_region()
            done.callback(self._close_region)
            for model in dict.fromkeys(models):
                _release(model)
                self._applied[model] = Applied(model, self._casts.policy, admits=self._admits)
                done.callback(self._applied[model].remove)
            done.pop_all()
            self._undo = undo.pop_all()
        _active.append(self)

    def remove(self) -> None:
        """End the casts; those of an earlier ``initialize`` are in force again. Without effect when repeated.

        Raises:
            OrderError: another thread began it, or a region of autocast was opened since and is still open.
        """
        if self not in _active:
            return
        had_region = self._region is not None
        self._close_region()
        _active.remove(self)
        before = _latest_here()
        if had_region and before is not None:
            before._open_region()
        for applied in list(self._applied.values()):
            applied.remove()
        self._applied.clear()
        self._undo.close()
        del self._casts  # frees the kernels of its policy

    def is_active(self) -> bool:
        """Return whether it casts."""
        return self in _active

    def _deactivate(self) -> None:
        self.remove()

    def _clear_cache(self) -> None:
        drop_casts()

    def _open_region(self) -> None:
        self._region = LastingRegion(self._casts.policy, self._dtypes, cache_enabled=True)

    def _close_region(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None

    def _admits(self, model: torch.nn.Module) -> bool:
        """Return whether ``model``, which is about to be called, casts; drop casts that may be outdated."""
        if are_disabled_here():
            return False
        if model not in self._versions:
            self._versions[model] = _Versions(model)
        # Scripts swap weights through .data around an evaluation, which no version shows.
        gradients_are_off = not torch.is_grad_enabled()
        if self._versions[model].changed() or gradients_are_off or self._gradients_were_off:
            drop_casts()
        self._gradients_were_off = gradients_are_off
        return True


class _Versions:
    """How often the weights of one model had been written at its last call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = [one for one in model.parameters() if not one.is_inference()]
        self._sum = -1

    def changed(self) -> bool:
        before, self._sum = self._sum, sum(version_of(one) for one in self._weights)
        return before != self._sum


def _device_types(models: list[torch.nn.Module]) -> tuple[str, ...]:
    """Return the device types of the models' weights; without weights, the default one."""
    found = dict.fromkeys(
        tensor.device.type for model in models for tensor in (*model.parameters(), *model.buffers())
    )
    found.pop("meta", None)
    return tuple(found) or (torch.get_default_device().type,)


def _latest_here() -> Handle | None:
    """Return the latest handle in force that this thread began."""
    here = threading.current_thread()
    return next((one for one in reversed(_active) if one._thread is here), None)


def _release(model: torch.nn.Module) -> None:
    """Remove what an earlier ``initialize`` applied to ``model``."""
    for handle in _active:
        applied = handle._applied.pop(model, None)
        if applied is not None:
            applied.remove()


def _leave_in_child() -> None:
    """Close the region in a forked process, as one that loads data, whose main thread is a copy of ours."""
    latest = _latest_here()
    if latest is not None:
        try:
            latest._close_region()
        except OrderError:
            return  # forked inside another region, which ends first


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)

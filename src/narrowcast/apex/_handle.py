"""O1 in force: models that cast in their calls, and a thread that casts outside of them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import torch

from narrowcast.apex._casts import (
    REFUSED,
    Casts,
    WholeCast,
    are_off_here,
    begin,
    disable_casts,
)
from narrowcast.apex._functions import cast_by_name, registered_functions, registered_operators
from narrowcast.apex._operators import MODULES
from narrowcast.apex._patches import Target, patch
from narrowcast.apex._rules import BANNED, Plan, plan
from narrowcast.apex._torch_internals import version_of
from narrowcast.casting import Applied, LastingRegion, drop_casts
from narrowcast.errors import OrderError
from narrowcast.policy import format_name

_active: list[Handle] = []
_H = TypeVar("_H", bound="Handle")


def start_casts(
    models: list[torch.nn.Module],
    half: torch.dtype,
    *,
    allow_banned: bool = False,
    caching: bool = True,
    kind: Callable[[Casts, Iterable[str], bool], _H],
) -> _H:
    """Have the models cast by the lists in their calls, and this thread outside of them.

    Args:
        kind: the class of what is returned, or what makes one.

    Raises:
        PolicyError: a name on the lists that stands for nothing, or a model that has a policy already.
        OrderError: a region of autocast is open in this thread.
    """
    devices = _device_types(models)
    functions = registered_functions()
    made = plan(
        format_name(half),
        devices,
        registered_operators(),
        allow_banned=allow_banned,
        apart=[*functions.items()],
    )
    handle = kind(Casts(made.policy, half, {**_whole(made), **functions}), devices, caching)
    handle.start(models)
    return handle


class Handle:
    """apex's handle: what one ``initialize`` with O1, or ``init``, put in force; ``remove()`` ends it."""

    def __init__(self, casts: Casts, devices: Iterable[str], caching: bool = True) -> None:
        self._casts = casts
        self._caching = caching
        self._dtypes = dict.fromkeys(devices, casts.half)
        self._thread = threading.current_thread()
        self._region: LastingRegion | None = None
        self._applied: weakref.WeakKeyDictionary[torch.nn.Module, Applied] = weakref.WeakKeyDictionary()
        self._undo = ExitStack()
        self._weights = _Weights()

    def start(self, models: list[torch.nn.Module]) -> None:
        """Put it in force, or nothing at all."""
        with ExitStack() as undo, ExitStack() as done:
            undo.callback(begin(self._casts))
            undo.callback(patch(self._casts.whole, cast_by_name))
            before = _latest_here()
            if before is not None:
                before._close_region()
                done.callback(before._open_region)
            self._open_region()
            done.callback(self._close_region)
            for model in dict.fromkeys(models):
                _let_go(model)
                self._applied[model] = Applied(model, self._casts.policy, admits=self._admits)
                done.callback(self._applied[model].remove)
            done.pop_all()
            self._undo = undo.pop_all()
        _active.append(self)

    def remove(self) -> None:
        """End it; without effect the second time. The casts of an earlier ``initialize`` are on again.

        Raises:
            OrderError: another thread began it, or a region of autocast was opened since and is still open.
        """
        if self not in _active:
            return
        if self._region is not None:
            self._close_region()
            _active.remove(self)
            before = _latest_here()
            if before is not None:
                before._open_region()
        else:
            _active.remove(self)
        for applied in list(self._applied.values()):
            applied.remove()
        self._applied.clear()
        self._undo.close()
        del self._casts  # the kernels of its policy go with it

    def is_active(self) -> bool:
        """Whether it casts."""
        return self in _active

    def disable_casts(self) -> AbstractContextManager[None]:
        """As ``amp.disable_casts``."""
        return disable_casts()

    def _deactivate(self) -> None:
        self.remove()

    def _disable_casts(self) -> AbstractContextManager[None]:
        return disable_casts()

    def _clear_cache(self) -> None:
        drop_casts()

    def _open_region(self) -> None:
        self._region = LastingRegion(self._casts.policy, self._dtypes, cache_enabled=self._caching)

    def _close_region(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None

    def _admits(self, model: torch.nn.Module) -> bool:
        """Whether ``model``, which is about to be called, casts by itself."""
        if are_off_here():
            return False
        self._weights.before_call(model)
        return True


class _Weights:
    """Sees to it that a call computes with no old cast: casts are kept from one backward pass to the next."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[torch.nn.Module, _Seen] = weakref.WeakKeyDictionary()
        self._gradients_were_off = False

    def before_call(self, model: torch.nn.Module) -> None:
        seen = self._seen.get(model)
        if seen is None:
            seen = self._seen[model] = _Seen(model)
        # Weights are swapped through .data around an evaluation, which leaves no trace.
        off = not torch.is_grad_enabled()
        if seen.written() or off or self._gradients_were_off:
            drop_casts()
        self._gradients_were_off = off


class _Seen:
    """The weights of one model, and how often they had been written at its last call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = [one for one in model.parameters() if not one.is_inference()]
        self._versions = -1

    def written(self) -> bool:
        versions = sum(version_of(one) for one in self._weights)
        if versions == self._versions:
            return False
        self._versions = versions
        return True


def _whole(made: Plan) -> dict[Target, WholeCast]:
    """What stands in front of functions of the lists in Python."""
    found: dict[Target, WholeCast] = {}
    for (module, name), kind in made.whole.items():
        found[MODULES[module], name] = WholeCast(kind, alone=True)
    for (module, name), advice in made.banned.items():
        found[MODULES[module], name] = WholeCast(BANNED, advice=advice)
    for module, name in made.in_place:
        found[MODULES[module], name] = WholeCast(REFUSED, advice=_in_place(name))
    return found


def _in_place(name: str) -> str:
    return (
        f"{name} was called with a half tensor, and computes in float32, which cannot be written into one: "
        f"call {name.removesuffix('_')}, which returns a new tensor in float32, or .float() before"
    )


def _device_types(models: list[torch.nn.Module]) -> tuple[str, ...]:
    """Those of the models' weights; without any, the one on which tensors are made by default."""
    found = dict.fromkeys(
        tensor.device.type for model in models for tensor in (*model.parameters(), *model.buffers())
    )
    found.pop("meta", None)
    return tuple(found) or (torch.get_default_device().type,)


def _latest_here() -> Handle | None:
    """The latest in force that this thread began."""
    here = threading.current_thread()
    return next((one for one in reversed(_active) if one._thread is here), None)


def _let_go(model: torch.nn.Module) -> None:
    """Take away what an earlier ``initialize`` put on ``model``, which another takes over."""
    for handle in _active:
        applied = handle._applied.pop(model, None)
        if applied is not None:
            applied.remove()


def _leave_in_child() -> None:
    """A forked process, as one that loads data, is not the thread that asked for casts."""
    latest = _latest_here()
    if latest is not None:
        try:
            latest._close_region()
        except OrderError:
            return  # forked inside of another region, whose end comes first


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)

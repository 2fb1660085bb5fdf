"""Carry out O1: casts in calls of models, in the thread of ``initialize``, and in decorated functions.

A policy (``_rules``) casts the operators of PyTorch. The user's functions, and the few of PyTorch that are
cast as a whole, are decorated or replaced here.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from narrowcast.apex.amp._levels import LOW_DTYPES
from narrowcast.apex.amp._process_state import process_state
from narrowcast.apex.amp._rules import (
    BANNED,
    FLOAT,
    HALF,
    MODULES,
    WIDEST,
    Key,
    Target,
    WholeCast,
    operators_of,
    plan,
)
from narrowcast.casting import (
    Applied,
    LastingRegion,
    ScopedRegion,
    active_scopes,
    cast_where,
    drop_casts,
    tensors_inside,
)
from narrowcast.errors import AmpError, OrderError
from narrowcast.policy import Policy, format_name
from narrowcast.weights import version_of

_F = TypeVar("_F", bound=Callable[..., Any])


# ---- no casts


class _CallingThread(threading.local):
    def __init__(self) -> None:
        self.disable_depth = 0


_calling_thread = _CallingThread()


@contextmanager
def disable_casts() -> Iterator[None]:
    """Turn casts off inside, in this thread, also in models of O1; casts come back after an exception."""
    _calling_thread.disable_depth += 1
    try:
        with _no_region():
            yield
    finally:
        _calling_thread.disable_depth -= 1


@contextmanager
def _no_region() -> Iterator[None]:
    """Turn casts off inside. A model of O1 that is called inside opens its own region, and casts."""
    with ExitStack() as regions:
        for device in active_scopes():
            regions.enter_context(ScopedRegion(device, torch.get_autocast_dtype(device), False))
        yield


# ---- functions of the user


def half_function(fn: _F) -> _F:
    """Decorator: under O1, call ``fn`` with its floating tensors in half, in any nesting.

    Tensors in float32, float16 and bfloat16 on the models' device types are cast; what overflows becomes
    infinite. Calls inside ``fn`` are cast as usual. Without O1 in force in the calling thread, and inside
    ``disable_casts``, nothing is cast.
    """
    return _casting(fn, WholeCast(HALF))


def float_function(fn: _F) -> _F:
    """Decorator: as ``half_function``, in float32."""
    return _casting(fn, WholeCast(FLOAT))


def promote_function(fn: _F) -> _F:
    """Decorator: as ``half_function``, in the widest type among the floating tensors given."""
    return _casting(fn, WholeCast(WIDEST))


def register_half_function(module: Any, name: str) -> None:
    """Run ``module.name`` in half under O1, as if it was decorated with ``half_function``.

    This takes precedence over the lists, for each ``amp.initialize`` from now on. A function of ``torch``,
    ``torch.nn.functional`` or ``torch.Tensor`` is cast wherever its operator is called, another one where it
    is called by that name. ``module`` may be a class. Raises ``ValueError`` if there is no such function, and
    ``AmpError`` if O1 is in force already.
    """
    _register(module, name, HALF)


def register_float_function(module: Any, name: str) -> None:
    """As ``register_half_function``, in float32."""
    _register(module, name, FLOAT)


def register_promote_function(module: Any, name: str) -> None:
    """As ``register_half_function``, in the widest type among the floating tensors given."""
    _register(module, name, WIDEST)


# The casts of registered functions. They are kept for every later initialize.
registered: dict[Target, str] = {}


def _register(module: Any, name: str, cast: str) -> None:
    if not callable(getattr(module, name, None)):
        raise ValueError(
            f"expected the name of a function of {getattr(module, '__name__', module)!r}, got {name!r}"
        )
    if process_state.handle is not None and process_state.handle.is_active():
        raise AmpError(
            f"{name!r} was registered after amp.initialize, which has made its casts: register it before, or "
            "decorate it with amp.half_function, amp.float_function or amp.promote_function"
        )
    registered[module, name] = cast


def _registered_casts() -> tuple[dict[Key, str], dict[Target, WholeCast]]:
    """Return the registered functions that call an operator of PyTorch, and all others."""
    names_of_modules = {id(module): name for name, module in MODULES.items()}
    operators: dict[Key, str] = {}
    functions: dict[Target, WholeCast] = {}
    for (module, name), cast in registered.items():
        if id(module) in names_of_modules and operators_of(name):
            operators[names_of_modules[id(module)], name] = cast
        else:
            functions[module, name] = WholeCast(cast)
    return operators, functions


# ---- functions that cast their arguments

_replaced: set[Target] = set()


def _replace(targets: Iterable[Target]) -> None:
    """Replace each target by a casting function, for good: without casts in force it calls the original."""
    for target in targets:
        if target not in _replaced:
            owner, name = target
            setattr(owner, name, _casting(getattr(owner, name), target))
            _replaced.add(target)


def _casting(function: _F, how: WholeCast | Target) -> _F:
    """Wrap ``function`` to cast its arguments by ``how``; a ``Target`` is looked up in the casts in force."""

    @functools.wraps(function)
    def casting(*args: Any, **kwargs: Any) -> Any:
        in_force = _casts_here()
        if in_force is None:
            return function(*args, **kwargs)
        casts, devices = in_force
        whole = how if isinstance(how, WholeCast) else casts.functions.get(how)
        if whole is None:
            return function(*args, **kwargs)
        if whole.cast == BANNED:
            _refuse_half((args, kwargs), devices, whole.advice)
            return function(*args, **kwargs)

        dtype = _dtype_for(whole.cast, (args, kwargs), casts, devices)

        def wants(tensor: torch.Tensor) -> bool:
            return _is_castable(tensor, devices) and tensor.dtype is not dtype

        args, kwargs = cast_where(args, dtype, wants), cast_where(kwargs, dtype, wants)
        if not whole.alone:
            return function(*args, **kwargs)
        with _no_region():
            return function(*args, **kwargs)

    return casting  # type: ignore[return-value]


def _refuse_half(arguments: Any, devices: tuple[str, ...], advice: str) -> None:
    for tensor in tensors_inside(arguments):
        if tensor.dtype in LOW_DTYPES and tensor.device.type in devices:
            raise AmpError(advice)


def _dtype_for(cast: str, arguments: Any, casts: Casts, devices: tuple[str, ...]) -> torch.dtype:
    if cast == HALF:
        return casts.half
    if cast == FLOAT:
        return torch.float32
    dtypes = [tensor.dtype for tensor in tensors_inside(arguments) if _is_castable(tensor, devices)]
    if not dtypes:
        return torch.float32
    return functools.reduce(torch.promote_types, dtypes)


def _is_castable(tensor: torch.Tensor, devices: tuple[str, ...]) -> bool:
    return tensor.dtype in (*LOW_DTYPES, torch.float32) and tensor.device.type in devices


# ---- models and threads


@dataclass(frozen=True, slots=True, eq=False)
class Casts:
    """What one ``initialize`` with O1 casts: operators by the policy, Python functions as a whole."""

    policy: Policy
    half: torch.dtype
    functions: Mapping[Target, WholeCast]


def planned_casts(half: torch.dtype, models: list[torch.nn.Module]) -> Casts:
    """Return the casts of the current lists and registrations; nothing is in force yet."""
    operators, functions = _registered_casts()
    policy, whole = plan(format_name(half), _device_types(models), operators)
    return Casts(policy, half, {**whole, **functions})


# Handles in force, oldest first, by the id of their policy's rules. The scope that is active in a thread has
# these rules, so that any thread finds its handle.
handles: dict[int, Handle] = {}


def _casts_here() -> tuple[Casts, tuple[str, ...]] | None:
    """Return the casts of the calling thread and their device types; None if O1 casts nothing here."""
    if not handles:
        return None
    devices_by_rules: dict[int, list[str]] = {}
    for device, scope in active_scopes().items():
        devices_by_rules.setdefault(id(scope.resolved.rules), []).append(device)
    for rules, devices in devices_by_rules.items():
        if rules in handles:
            return handles[rules].casts, tuple(devices)
    return None


class Handle:
    """The casts that one ``initialize`` with O1 put in force; scripts find it in ``_amp_state.handle``."""

    def __init__(self, casts: Casts, models: list[torch.nn.Module]) -> None:
        self.casts = casts
        self._thread = threading.current_thread()
        self._region: LastingRegion | None = None
        self._applied: weakref.WeakKeyDictionary[torch.nn.Module, Applied] = weakref.WeakKeyDictionary()
        self._versions: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._gradients_were_off = False

        # Calls outside of models follow the latest initialize of this thread.
        latest = _latest_here()
        if latest is not None:
            latest._close_region()

        # A model that has a policy of nc.apply refuses a second one: then end the casts that were begun here.
        try:
            self._region = LastingRegion(casts.policy, dict.fromkeys(_device_types(models), casts.half))
            self._apply_to(models)
        except BaseException:
            self._deactivate()
            raise
        _replace(casts.functions)
        handles[id(casts.policy.rules)] = self

    def _apply_to(self, models: list[torch.nn.Module]) -> None:
        for model in dict.fromkeys(models):
            # A model of an earlier initialize follows the latest.
            for handle in handles.values():
                handle._release(model)
            self._applied[model] = Applied(model, self.casts.policy, admits=self._admits)

    def is_active(self) -> bool:
        """Return whether it casts."""
        return id(self.casts.policy.rules) in handles

    def _deactivate(self) -> None:
        """End the casts, as apex's method of this name does; models keep their weights.

        Raises:
            OrderError: another thread made this handle, or a region of autocast that was opened later is
                still open.
        """
        self._close_region()
        for model in list(self._applied):
            self._release(model)
        handles.pop(id(self.casts.policy.rules), None)

    def _clear_cache(self) -> None:
        """Drop kept casts of weights. apex has a method of this name, which scripts may call."""
        drop_casts()

    def _close_region(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None

    def _release(self, model: torch.nn.Module) -> None:
        applied = self._applied.pop(model, None)
        if applied is not None:
            applied.remove()

    def _admits(self, model: torch.nn.Module) -> bool:
        """Return whether ``model``, which is about to be called, casts; drop casts that may be outdated."""
        if _calling_thread.disable_depth > 0:
            return False
        weights = (weight for weight in model.parameters() if not torch.nn.parameter.is_lazy(weight))
        version = sum(version_of(weight) for weight in weights if not weight.is_inference())
        was_written = self._versions.get(model) != version
        self._versions[model] = version

        # Scripts replace weights by others through .data for an evaluation, and no version counts that.
        gradients_are_off = not torch.is_grad_enabled()
        if was_written or gradients_are_off or self._gradients_were_off:
            drop_casts()
        self._gradients_were_off = gradients_are_off
        return True


def _device_types(models: list[torch.nn.Module]) -> tuple[str, ...]:
    """Return the device types of the models' weights and buffers without "meta", or else the default one."""
    device_types: dict[str, None] = {}
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            device_types[tensor.device.type] = None
    device_types.pop("meta", None)
    return tuple(device_types) or (torch.get_default_device().type,)


def _latest_here() -> Handle | None:
    """Return the latest handle in force that this thread made."""
    for handle in reversed(handles.values()):
        if handle._thread is threading.current_thread():
            return handle
    return None


def _leave_in_child() -> None:
    """Close the region that a forked process inherits, so that workers of a data loader cast nothing."""
    latest = _latest_here()
    if latest is not None:
        try:
            latest._close_region()
        except OrderError:
            return  # another region was open at the fork, and must be closed first: the child keeps both


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)

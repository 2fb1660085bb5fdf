"""Carry out O1: casts in calls of models, in the thread of ``initialize``, and in decorated functions.

Rules for operators (``_rules``) cast most functions of PyTorch. The user's functions, and the few of PyTorch
that are cast as a whole, are decorated or replaced here.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from narrowcast.apex.amp._amp_state import _amp_state
from narrowcast.apex.amp._levels import LOW_DTYPES
from narrowcast.apex.amp._rules import (
    BANNED,
    FLOAT,
    HALF,
    MODULES,
    WIDEST,
    Key,
    Target,
    WholeCast,
    is_known,
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


@dataclass(frozen=True, slots=True, eq=False)
class Casts:
    """What one ``initialize`` with O1 casts."""

    policy: Policy
    half: torch.dtype
    whole: Mapping[Target, WholeCast] = field(default_factory=dict)


# By the id of the rules of the policy, which the regions of the policy share, in any thread.
_in_force: dict[int, Casts] = {}


def _casts_here() -> tuple[Casts, tuple[str, ...]] | None:
    """Return the casts of the calling thread and their device types; None if O1 casts nothing here."""
    if not _in_force:
        return None
    devices = []
    found = None
    for device, scope in active_scopes().items():
        its = _in_force.get(id(scope.resolved.rules))
        if its is not None and (found is None or its is found):
            found = its
            devices.append(device)
    return None if found is None else (found, tuple(devices))


# ---- no casts


class _Thread(threading.local):
    def __init__(self) -> None:
        self.disabled = 0


_thread = _Thread()


@contextmanager
def disable_casts() -> Iterator[None]:
    """Turn casts off inside, in this thread, also in models of O1; casts come back after an exception."""
    _thread.disabled += 1
    try:
        with _no_region():
            yield
    finally:
        _thread.disabled -= 1


@contextmanager
def _no_region() -> Iterator[None]:
    """Turn casts off inside, except in models, which open their own regions."""
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
    return _cast(fn, WholeCast(HALF))


def float_function(fn: _F) -> _F:
    """Decorator: as ``half_function``, in float32."""
    return _cast(fn, WholeCast(FLOAT))


def promote_function(fn: _F) -> _F:
    """Decorator: as ``half_function``, in the widest type among the floating tensors given."""
    return _cast(fn, WholeCast(WIDEST))


def register_half_function(module: Any, name: str) -> None:
    """Run ``module.name`` in half under O1, as if it was decorated with ``half_function``.

    This takes precedence over the lists, for each ``amp.initialize`` from now on, until ``amp.shutdown``. A
    function of ``torch``, ``torch.nn.functional`` or ``torch.Tensor`` is cast wherever its operator is
    called, another one where it is called by that name. ``module`` may be a class. Raises ``ValueError`` if
    there is no such function, and ``AmpError`` if O1 is in force already.
    """
    _register(module, name, HALF)


def register_float_function(module: Any, name: str) -> None:
    """As ``register_half_function``, in float32."""
    _register(module, name, FLOAT)


def register_promote_function(module: Any, name: str) -> None:
    """As ``register_half_function``, in the widest type among the floating tensors given."""
    _register(module, name, WIDEST)


registered: dict[Target, str] = {}  # emptied by amp.shutdown


def _register(module: Any, name: str, kind: str) -> None:
    if not callable(getattr(module, name, None)):
        raise ValueError(
            f"expected the name of a function of {getattr(module, '__name__', module)!r}, got {name!r}"
        )
    if _amp_state.handle is not None and _amp_state.handle.is_active():
        raise AmpError(
            f"{name!r} was registered after amp.initialize, which has made its casts: register it before, or "
            "decorate it with amp.half_function, amp.float_function or amp.promote_function"
        )
    registered[module, name] = kind


def _registered_casts() -> tuple[dict[Key, str], dict[Target, WholeCast]]:
    """Return the registered functions that stand for operators of PyTorch, and all others."""
    operators: dict[Key, str] = {}
    functions: dict[Target, WholeCast] = {}
    for (module, name), kind in registered.items():
        of_torch = next((word for word, one in MODULES.items() if one is module), None)
        if of_torch is not None and is_known(name):
            operators[of_torch, name] = kind
        else:
            functions[module, name] = WholeCast(kind)
    return operators, functions


# ---- calls with casts


_MISSING = object()
# By target: what the owner had under the name, and what replaces it.
_replaced: dict[Target, tuple[Any, Callable[..., Any]]] = {}


def _replace_functions() -> None:
    """Replace the functions that some casts in force name, and restore all others."""
    wanted = {target for casts in _in_force.values() for target in casts.whole}
    for target in [one for one in _replaced if one not in wanted]:
        owner, name = target
        own, ours = _replaced.pop(target)
        if vars(owner).get(name) is not ours:
            continue  # other code replaced it since, and may still call ours, which then casts nothing
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    for target in wanted - _replaced.keys():
        owner, name = target
        own = vars(owner).get(name, _MISSING)  # a class may inherit it
        ours = _cast(getattr(owner, name), target)
        setattr(owner, name, ours)
        _replaced[target] = own, ours


def _cast(function: _F, wanted: WholeCast | Target) -> _F:
    """Wrap ``function`` to cast its arguments in this way, or as the casts in force here have it by name."""

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        found = _casts_here()
        if found is None:
            return function(*args, **kwargs)
        how = wanted if isinstance(wanted, WholeCast) else found[0].whole.get(wanted)
        return function(*args, **kwargs) if how is None else _call(how, function, args, kwargs, *found)

    return cast  # type: ignore[return-value]


def _call(
    how: WholeCast,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    casts: Casts,
    devices: tuple[str, ...],
) -> Any:
    """Call ``function`` with its arguments cast by ``how``."""
    reads_dtypes = how.kind in (BANNED, WIDEST)
    inside = tensors_inside((args, kwargs)) if reads_dtypes else []
    dtypes = [tensor.dtype for tensor in inside if _is_castable(tensor, devices)]
    if how.kind == BANNED:
        if any(dtype in LOW_DTYPES for dtype in dtypes):
            raise AmpError(how.advice)
        return function(*args, **kwargs)
    if how.kind == WIDEST:
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    else:
        dtype = casts.half if how.kind == HALF else torch.float32

    def wants(tensor: torch.Tensor) -> bool:
        return _is_castable(tensor, devices) and tensor.dtype is not dtype

    args, kwargs = cast_where(args, dtype, wants), cast_where(kwargs, dtype, wants)
    if not how.alone:
        return function(*args, **kwargs)
    with _no_region():
        return function(*args, **kwargs)


def _is_castable(tensor: torch.Tensor, devices: tuple[str, ...]) -> bool:
    return tensor.dtype in (*LOW_DTYPES, torch.float32) and tensor.device.type in devices


# ---- models and threads

_active: list[Handle] = []


def start_casts(models: list[torch.nn.Module], half: torch.dtype) -> Handle:
    """Cast by the lists in calls of the models, and in this thread outside of them."""
    devices = _device_types(models)
    operators, functions = _registered_casts()
    policy, whole = plan(format_name(half), devices, operators)
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
        self._versions: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._gradients_were_off = False

    def start(self, models: list[torch.nn.Module]) -> None:
        """Put everything in force, or nothing if that raises."""
        with ExitStack() as undo, ExitStack() as done:
            key = id(self._casts.policy.rules)
            _in_force[key] = self._casts
            undo.callback(_replace_functions)
            undo.callback(_in_force.pop, key)
            _replace_functions()
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

    def _clear_cache(self) -> None:
        drop_casts()

    def _open_region(self) -> None:
        self._region = LastingRegion(self._casts.policy, self._dtypes)

    def _close_region(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None

    def _admits(self, model: torch.nn.Module) -> bool:
        """Return whether ``model``, which is about to be called, casts; drop casts that may be outdated."""
        if _thread.disabled:
            return False
        weights = (one for one in model.parameters() if not torch.nn.parameter.is_lazy(one))
        version = sum(version_of(one) for one in weights if not one.is_inference())
        was_written = self._versions.get(model) != version
        self._versions[model] = version
        # Scripts swap weights through .data around an evaluation, which no version shows.
        gradients_are_off = not torch.is_grad_enabled()
        if was_written or gradients_are_off or self._gradients_were_off:
            drop_casts()
        self._gradients_were_off = gradients_are_off
        return True


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

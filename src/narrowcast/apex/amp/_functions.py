"""Casts around whole Python functions: ``disable_casts``, decorators, and functions registered by name.

Functions of PyTorch are cast by rules about their operators where there are such (``_rules``). What is here
is for functions of the user, and for the few of PyTorch that must be cast as a whole.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from narrowcast.apex.amp._amp_state import _amp_state
from narrowcast.apex.amp._levels import LOW_DTYPES
from narrowcast.apex.amp._rules import BANNED, FLOAT, HALF, MODULES, WIDEST, Key, Target, WholeCast, is_known
from narrowcast.casting import ScopedRegion, active_scopes, cast_where
from narrowcast.errors import AmpError
from narrowcast.policy import Policy

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class Casts:
    """What one ``initialize`` with O1 casts."""

    policy: Policy
    half: torch.dtype
    whole: Mapping[Target, WholeCast] = field(default_factory=dict)


# By the id of the policy's rules, which the regions of the policy share.
_in_force: dict[int, list[Casts]] = {}


def begin(casts: Casts) -> Callable[[], None]:
    """Let threads that are in a region of this policy find ``casts``; return a function that ends it."""
    key = id(casts.policy.rules)
    _in_force.setdefault(key, []).append(casts)
    _replace_functions()

    def end() -> None:
        _in_force[key].remove(casts)
        if not _in_force[key]:
            del _in_force[key]
        _replace_functions()

    return end


def casts_here() -> tuple[Casts, tuple[str, ...]] | None:
    """Return the casts of the calling thread and their device types; None if O1 casts nothing here."""
    if not _in_force:
        return None
    devices = []
    found = None
    for device, scope in active_scopes().items():
        its = _in_force.get(id(scope.resolved.rules))
        if its is not None and (found is None or its[0] is found):
            found = its[0]
            devices.append(device)
    return None if found is None else (found, tuple(devices))


# ---- no casts


class _Thread(threading.local):
    def __init__(self) -> None:
        self.disabled = 0


_thread = _Thread()


def are_disabled_here() -> bool:
    """Return whether this thread is inside ``disable_casts``."""
    return _thread.disabled > 0


@contextmanager
def disable_casts() -> Iterator[None]:
    """Cast nothing inside, in this thread, also in models of O1; an exception ends it as a return does."""
    _thread.disabled += 1
    try:
        with _no_region():
            yield
    finally:
        _thread.disabled -= 1


@contextmanager
def _no_region() -> Iterator[None]:
    """Cast nothing inside, except in models, which cast by themselves."""
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
    return _decorated(fn, HALF)


def float_function(fn: _F) -> _F:
    """Decorator: as ``half_function``, in float32."""
    return _decorated(fn, FLOAT)


def promote_function(fn: _F) -> _F:
    """Decorator: as ``half_function``, in the widest type among the floating tensors given."""
    return _decorated(fn, WIDEST)


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


_registered: dict[Target, str] = {}


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
    _registered[module, name] = kind


def forget_registered() -> None:
    """Undo every registration."""
    _registered.clear()


def registered_operators() -> dict[Key, str]:
    """Return the registered functions that stand for operators of PyTorch, with their kinds."""
    names = {id(module): name for name, module in MODULES.items()}
    return {
        (names[id(module)], name): kind
        for (module, name), kind in _registered.items()
        if _is_operator(module, name)
    }


def registered_functions() -> dict[Target, WholeCast]:
    """Return the other registered functions."""
    return {target: WholeCast(kind) for target, kind in _registered.items() if not _is_operator(*target)}


def _is_operator(module: Any, name: str) -> bool:
    return any(module is one for one in MODULES.values()) and is_known(name)


# ---- calls with casts


_MISSING = object()
# By target: what the owner had under the name, and what replaces it.
_replaced: dict[Target, tuple[Any, Callable[..., Any]]] = {}


def _replace_functions() -> None:
    """Replace the functions that some casts in force name, and restore all others."""
    wanted = {target for many in _in_force.values() for casts in many for target in casts.whole}
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
        ours = _cast_by_name(target, getattr(owner, name))
        setattr(owner, name, ours)
        _replaced[target] = own, ours


def _cast_by_name(target: Target, below: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that casts as the casts of the calling thread say, and calls ``below``."""

    @functools.wraps(below)
    def cast(*args: Any, **kwargs: Any) -> Any:
        found = casts_here()
        how = None if found is None else found[0].whole.get(target)
        if found is None or how is None:
            return below(*args, **kwargs)
        return _call(how, below, args, kwargs, *found)

    return cast


def _decorated(fn: _F, kind: str) -> _F:
    how = WholeCast(kind)

    @functools.wraps(fn)
    def cast(*args: Any, **kwargs: Any) -> Any:
        found = casts_here()
        return fn(*args, **kwargs) if found is None else _call(how, fn, args, kwargs, *found)

    return cast  # type: ignore[return-value]


def _call(
    how: WholeCast,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    casts: Casts,
    devices: tuple[str, ...],
) -> Any:
    """Call ``function`` with its arguments cast as ``how`` says."""
    reads_dtypes = how.kind in (BANNED, WIDEST)
    dtypes = _castable_dtypes((args, kwargs), devices) if reads_dtypes else []
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


def _castable_dtypes(values: Any, devices: tuple[str, ...]) -> list[torch.dtype]:
    """Return the types of the castable tensors in ``values``."""
    found: list[torch.dtype] = []

    def note(tensor: torch.Tensor) -> bool:
        if _is_castable(tensor, devices):
            found.append(tensor.dtype)
        return False

    cast_where(values, torch.float32, note)
    return found


def _is_castable(tensor: torch.Tensor, devices: tuple[str, ...]) -> bool:
    return tensor.dtype in (*LOW_DTYPES, torch.float32) and tensor.device.type in devices

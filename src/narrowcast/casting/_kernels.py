"""Kernels of ours in PyTorch's dispatcher, on the autocast key of a device, one an operator.

A rule for an operator replaces the kernel that autocast has for it: it stands above autograd, so that casts
are differentiated, and serves calls from Python and from C++ alike. It is there as long as some policy needs
it; with the last such policy it goes, outside of regions, and the dispatch table is then as before.
Where no rule is in force in the calling thread a kernel does what PyTorch does:

- an operator on PyTorch's table calls the kernel that was there, fetched before ours took its place;
- any other goes on to what comes after autocast, as if there were no kernel: a composite is taken apart, and
  what it is made of is cast.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.compiler import is_exporting

from narrowcast.casting import _operators
from narrowcast.casting._functorch import Front
from narrowcast.casting._operators import below_autocast, native_kernel
from narrowcast.casting._regions import once_none_is_open
from narrowcast.casting._scopes import scope_on
from narrowcast.casting._torch_internals import make_library, skipped_by_dynamo
from narrowcast.errors import UnsupportedError
from narrowcast.policy import (
    Policy,
    ResolvedPolicy,
    Scope,
    autocast_key,
    format_name,
    native_table,
    operator,
    resolve,
    resolved,
)


class _Library:
    """The kernels of one autocast key."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.key = autocast_key(device_type)
        self.libraries: dict[str, Any] = {}
        self.users: Counter[str] = Counter()
        self.installed: dict[str, Callable[..., Any]] = {}
        self.native: dict[str, Callable[..., Any]] = {}  # of those on PyTorch's table

    def add(self, op: str) -> None:
        qualified = op if "::" in op else f"aten::{op}"
        namespace, _, word = qualified.partition("::")
        native = native_kernel(op, self.device_type)
        if native is not None:
            self.native[op] = native
        kernel = _kernel(op, self.device_type, native or below_autocast(operator(op), self.device_type))
        library = self.libraries[op] = make_library(namespace)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            library.impl(word, kernel, self.key, with_keyset=True)
        self.installed[op] = kernel

    def drop(self, op: str) -> None:
        self.libraries.pop(op)._destroy()
        del self.installed[op]
        self.native.pop(op, None)


def own_kernel(op: str, device_type: str) -> Callable[..., Any] | None:
    """Our kernel of ``op``, to be called with a keyset first; None where there is none.

    Where a ``TorchDispatchMode`` is on, PyTorch calls the kernel in Python that was last registered under
    this name and key, even when it was taken away since: one that stands on ours calls it directly, and goes
    on doing so when its time is over.
    """
    library = _libraries.get(device_type)
    return None if library is None else library.installed.get(op)


class Overlay(Protocol):
    """Kernels on top of ours, which step aside while ours come and go, so that ours never call them."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


overlays: list[Overlay] = []
_lock = threading.RLock()  # a policy may end by garbage collection while kernels are being added
_libraries: dict[str, _Library] = {}
_served: weakref.WeakSet[ResolvedPolicy] = weakref.WeakSet()


def serve(resolved: ResolvedPolicy) -> None:
    """See that every operator about which this policy decides has a kernel, as long as the policy lives."""
    if resolved in _served:
        return
    with _lock:
        if resolved in _served:
            return
        ops = resolved.kernels()
        library = _libraries.setdefault(resolved.device_type, _Library(resolved.device_type))
        hold(library.device_type, ops)
        weakref.finalize(resolved, release, library.device_type, ops).atexit = False
        _served.add(resolved)


def root_scope(policy: Policy, device_type: str, dtype: torch.dtype) -> Scope:
    """Where calls are made from in a region of ``policy``, outside of modules that rules name."""
    found = resolved(policy, device_type, format_name(dtype))
    serve(found)
    return found.root


# A region is made from a policy at each step, and what it needs to know is the same each time.
_regions_of: dict[int, tuple[weakref.ref[Policy], dict[str, tuple[torch.dtype, Scope | None]]]] = {}


def region_of(policy: Policy, device_type: str) -> tuple[torch.dtype, Scope | None]:
    """The dtype of a region of ``policy`` and the place of its rules; None: it has none.

    Raises:
        PolicyError: the policy needs weights in a low format, which a region alone does not keep.
    """
    key = id(policy)
    entry = _regions_of.get(key)
    if entry is None or entry[0]() is not policy:
        entry = _regions_of[key] = (weakref.ref(policy, lambda _: _regions_of.pop(key, None)), {})
    found = entry[1].get(device_type)
    if found is None:
        dtype = resolve(policy, device_type)
        scope = None if policy.is_plain else root_scope(policy, device_type, dtype)
        found = entry[1][device_type] = (dtype, scope)
    return found


def hold(device_type: str, ops: tuple[str, ...]) -> None:
    """Give each of ``ops`` a kernel until ``release`` is called with the same arguments."""
    with _lock:
        library = _libraries.setdefault(device_type, _Library(device_type))
        library.users.update(ops)  # first: a policy may end meanwhile, and must not take all with it
        new = [op for op in ops if op not in library.installed]
        if new:
            with _overlays_aside():
                for op in new:
                    library.add(op)
            _front.cover(new, native_table(device_type))


def release(device_type: str, ops: tuple[str, ...]) -> None:
    """Take away each kernel that nobody else needs, as soon as no region is open in any thread.

    Policies end when garbage is collected. In the middle of a region a weight would be cast again, for
    PyTorch's kernel, and the gradients of its two casts add up in another format.
    """
    with _lock:
        users = _libraries[device_type].users
        users.subtract(ops)
        users += Counter()  # without those that nobody needs
    once_none_is_open(_take_away_unneeded)


def _take_away_unneeded() -> None:
    with _lock:
        unneeded = {
            device_type: [op for op in library.installed if op not in library.users]
            for device_type, library in _libraries.items()
        }
        if not any(unneeded.values()):
            return
        with _overlays_aside():
            for device_type, ops in unneeded.items():
                for op in ops:
                    _libraries[device_type].drop(op)
        if not any(one.users for one in _libraries.values()):
            _front.uncover()
        else:
            elsewhere = {op for one in _libraries.values() for op in one.installed}
            _front.uncover([op for ops in unneeded.values() for op in ops if op not in elsewhere])


def _native_of(op: str, device_type: str) -> Callable[..., Any] | None:
    """What PyTorch's own table does with ``op``, to be called with a keyset first; None: nothing."""
    library = _libraries[device_type]
    if op in library.installed:
        return library.native.get(op)
    return native_kernel(op, device_type)


_front = Front(_native_of)


@contextmanager
def _overlays_aside() -> Iterator[None]:
    for overlay in reversed(overlays):
        overlay.end()
    try:
        yield
    finally:
        for overlay in overlays:
            overlay.begin()


def _kernel(op: str, device_type: str, native: Callable[..., Any]) -> Callable[..., Any]:
    """Our kernel of ``op``; ``native`` is what PyTorch would do, called with a keyset first."""

    @skipped_by_dynamo  # after a graph break it would take our code for the script's
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = scope_on(device_type)
        if scope is None:
            return native(keyset, *args, **kwargs)
        try:
            action: Any = scope.actions[op]
        except KeyError:
            action = _prepare(op, scope)
        if action is None:
            return native(keyset, *args, **kwargs)
        if is_exporting():
            _refuse_export(op, scope)
        return action(keyset, args, kwargs)

    return kernel


def _refuse_export(op: str, scope: Scope) -> None:
    decision = scope.decide(op)
    because = "" if decision is None else f" ({decision.because})"
    raise UnsupportedError(
        f"{op} was called while torch.export traced it inside a region whose policy decides about it{because}"
        ", and an exported program keeps no region around it: export it outside of the region"
    )


def _prepare(op: str, scope: Scope) -> _operators.Action | None:
    decision = scope.decide(op)
    action: _operators.Action | None = (
        None if decision is None else _operators.action_for(op, decision, scope)
    )
    scope.actions[op] = action
    return action

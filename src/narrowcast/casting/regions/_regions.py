"""Enter and leave the autocast state of torch, and restore it when a forward pass is recomputed.

torch keeps weight casts in one cache for the whole process, whose key is the weight alone. Two rules keep a
cast of one dtype out of a region of another. Within a thread, the cache is dropped whenever the dtype
changes. Between threads, a region uses the cache only while no other thread has a region that uses it for
another dtype; otherwise it runs with the cache off and casts its weights at each use. A region in float32
neither reads nor writes the cache, since only casts of fp32 weights are kept there. Regions that
``torch.autocast`` opened in other threads are not detected.

Activation checkpointing restores PyTorch's own autocast state, but neither rules nor a region in float32 on
a CPU. So while such a region is open, functions that are checkpointed are bound to the current state.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from narrowcast.casting import _torch_internals
from narrowcast.casting._torch_internals import (
    CHECKPOINT,
    CHECKPOINT_GENERATOR,
    Replacements,
    skipped_by_dynamo,
    torch_autocast,
)
from narrowcast.casting.regions import _scopes, _weight_casts
from narrowcast.casting.regions._scopes import (
    OpenRegion,
    mark_of,
    promotion_here,
    scope_on,
    scopes_here,
    set_scope,
    thread,
)
from narrowcast.errors import OrderError
from narrowcast.policy import TABLES, Scope

_State = tuple[str, torch.dtype, bool, Scope | None]
"""A region to open: its device type, its dtype, whether autocast is on in it, and its scope."""


class _Process:
    """State shared by the regions of all threads; read and written with the lock held.

    Attributes:
        caching: the open regions of all threads that keep casts.
        dtype_of_casts: the dtype of the casts in torch's cache; None: unknown, perhaps that of a
            ``torch.autocast``.
        had_a_region: whether a region was ever opened.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.caching: set[OpenRegion] = set()
        self.dtype_of_casts: torch.dtype | None = None
        self.had_a_region = False

    def open(self, region: OpenRegion, *, cache: bool) -> None:
        with self.lock:
            if not self.had_a_region:
                self.prepare_compiler()
            # The state outside may be that of a torch.autocast inside an outer region of ours. It filled the
            # cache unseen, while ``dtype_of_casts`` still names the outer region's dtype: where the two
            # differ, drop what is there.
            if region.enabled_before and region.cache_before:
                self.drop_casts_unless_of(region.dtype_before)
            # A region that may not keep casts makes them at each use of a weight.
            if cache and self.may_cache(region):
                region.caching = True
                self.caching.add(region)
                self.drop_casts_unless_of(region.dtype)
            if region.watches:
                _weight_casts.begin_watching(region)
            if region.propagates:
                _CHECKPOINTING.begin(region)

    def prepare_compiler(self) -> None:
        """Make torch.compile compute gradients as eager code does; graphs compiled earlier are dropped."""
        # At the first region, since a script that opens none must find torch as it is.
        if _torch_internals.trace_backward_outside_of_regions():
            _torch_internals.reset_compiled_code()
        self.had_a_region = True

    def close(self, region: OpenRegion, *, drop: bool) -> None:
        with self.lock:
            self.caching.discard(region)
            if region.watches:
                _weight_casts.end_watching(region)
            if region.propagates:
                _CHECKPOINTING.end(region)
            if drop:
                torch.clear_autocast_cache()
                self.dtype_of_casts = None
            elif region.enabled_before and region.cache_before:
                self.drop_casts_unless_of(region.dtype_before)

    def may_cache(self, region: OpenRegion) -> bool:
        """Return whether no other thread keeps casts of another dtype."""
        for caching in self.caching:
            if caching.dtype != region.dtype and caching.regions_of_thread is not region.regions_of_thread:
                return False
        return True

    def drop_casts_unless_of(self, dtype: torch.dtype) -> None:
        """Drop the casts in torch's cache if they are of another dtype than ``dtype``, and note ``dtype``."""
        if dtype in (self.dtype_of_casts, torch.float32):
            return
        # An unknown dtype (None) counts as another: torch.autocast may have filled the cache.
        torch.clear_autocast_cache()
        self.dtype_of_casts = dtype

    def after_fork(self) -> None:
        """In a forked child, keep only this thread's regions, since no other thread exists there.

        The lock is new, because another thread may have held it.
        """
        self.lock = threading.Lock()
        self.caching = {region for region in self.caching if region.regions_of_thread is thread.regions}


_process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.after_fork)


@skipped_by_dynamo
def enter(
    owner: object,
    device: str,
    dtype: torch.dtype,
    enabled: bool,
    cache_enabled: bool,
    scope: Scope | None,
    promotion: Callable[[str, str], None] | None = None,
    watches: bool = False,
) -> None:
    """Open a region in this thread, which ``leave(owner)`` closes. ``OpenRegion`` describes the arguments."""
    if scope is not None:
        mark_of(scope)  # first, since it may raise
    region = OpenRegion(owner, device, dtype, enabled, scope, promotion, watches)
    thread.regions.append(region)
    torch.autocast_increment_nesting()
    wants_cache = enabled and cache_enabled and dtype != torch.float32
    _process.open(region, cache=wants_cache)

    # Each of these calls takes a twentieth of the time that a region costs: skip those without effect.
    if scope is not region.scope_before:
        set_scope(scope, device)
    if enabled is not region.enabled_before:
        torch.set_autocast_enabled(device, enabled)
    if dtype is not region.dtype_before:
        torch.set_autocast_dtype(device, dtype)
    # Where nothing is cast, leave the setting as the caller asked for: regions made inside take it as their
    # default.
    caches = region.caching if wants_cache else cache_enabled
    if caches is not region.cache_before:
        torch.set_autocast_cache_enabled(caches)
    # Promotion is set here and in ``_close``: a function of ``_scopes`` would cost a call at each region.
    if promotion is not None:
        torch.set_autocast_dtype(*_scopes.PROMOTING)


@contextmanager
def traced_region(
    device: str,
    dtype: torch.dtype,
    enabled: bool,
    scope_state: tuple[tuple[str, torch.dtype], ...] = (),
    *,
    cache_enabled: bool = False,
) -> Iterator[None]:
    """Open a region in code that Dynamo traces; ``scope_state`` is its scope, from ``autocast_state_of``.

    Dynamo traces ``torch.autocast``, inside checkpoints and custom functions too, but neither locks nor
    stacks of a thread. ``torch.autocast`` would disable a region in float32 on a CPU, so one of another dtype
    is opened, and the dtype is then set to float32. The cache of weight casts is off by default, so that it
    returns no cast of another region.
    """
    opened_dtype = torch.float16 if dtype == torch.float32 and enabled else dtype
    with torch_autocast(device, opened_dtype, enabled, cache_enabled):
        if dtype != opened_dtype:
            _torch_internals.let_dynamo_trace_autocast()
            _torch_internals.set_autocast_dtype(device, dtype)
        if not scope_state:
            yield
            return
        # ``scope_state`` has one entry for the scope, and in a promoting region a second. Dynamo traces no
        # loop over contexts, so two are entered always; a single entry is entered twice, which changes
        # nothing. ``enabled=False``: torch.autocast takes these dtypes only when off. (``set_scope`` has
        # autocast on there, for Dynamo's guards; those look at the state before a graph, not inside it.)
        with torch_autocast(*scope_state[0], enabled=False), torch_autocast(*scope_state[-1], enabled=False):
            yield


@skipped_by_dynamo
def leave(owner: object) -> None:
    """Close the region that ``owner`` opened last in this thread.

    Raises:
        OrderError: it is not the innermost one, or ``owner`` opened none here. The regions inside it are
            closed too, so the state is what it was before owner's region.
    """
    regions = thread.regions
    if regions and regions[-1].owner is owner:
        leave_to(len(regions) - 1)
        return

    depths = [depth for depth, region in enumerate(regions) if region.owner is owner]
    if not depths:
        raise OrderError(
            "expected a region that this thread entered, got one that it did not enter or has left already; "
            "leave a region in the thread that entered it, as a with statement does"
        )
    depth = depths[-1]
    region = regions[depth]
    count_inside = len(regions) - depth - 1
    leave_to(depth)
    raise OrderError(
        f"expected the innermost region to be left first, got the {region.device} region in {region.dtype} "
        f"with {count_inside} still open inside it, which ended too; a generator or a coroutine that stops "
        "inside a region does this: open the region around each of its steps"
    )


def leave_to(depth: int) -> None:
    """Close the innermost regions of this thread until ``depth`` are left."""
    regions = thread.regions
    while len(regions) > depth:
        _close(regions.pop())


def _close(region: OpenRegion) -> None:
    """Set the autocast state back to that before ``region``."""
    device = region.device
    torch.set_autocast_enabled(device, region.enabled_before)
    torch.set_autocast_dtype(device, region.dtype_before)
    torch.set_autocast_cache_enabled(region.cache_before)
    # Restore the scope in two cases. The region changed it: an interrupted ``set_scope`` may have left a
    # half-set state that ``scope_on`` does not show. Or another scope is in force now, which an interrupted
    # call of a module left.
    if region.scope is not region.scope_before or scope_on(device) is not region.scope_before:
        set_scope(region.scope_before, device)
    if region.promotion is not None:
        torch.set_autocast_dtype(_scopes.PROMOTING[0], region.promoting_before)

    # Weight casts end with the outermost region of the thread.
    is_outermost = torch.autocast_decrement_nesting() == 0
    if is_outermost:
        _weight_casts.drop_casts_here()
    _process.close(region, drop=is_outermost)


@contextmanager
def open_regions(
    states: Iterable[_State], cache_enabled: bool, promotion: Callable[[str, str], None] | None = None
) -> Iterator[None]:
    """Open the regions of ``states`` in order; close those that were opened, also after an error."""
    depth = len(thread.regions)
    try:
        for device, dtype, enabled, scope in states:
            enter(None, device, dtype, enabled, cache_enabled, scope, promotion)
        yield
    finally:
        leave_to(depth)


# ---- recomputation


def state_here(
    promotion: Callable[[str, str], None] | None = None,
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes contexts in which the current autocast state holds, in any thread.

    Args:
        promotion: given only where a compiled graph entered the region: ``thread.regions`` does not list
            such a region, so its device types are found by the autocast state. None: ``thread.regions`` lists
            every region.
    """
    cache_enabled = torch.is_autocast_cache_enabled()
    devices = set(scopes_here())
    devices.update(region.device for region in thread.regions)
    if promotion is None:
        promotion = promotion_here()
    else:
        # Any device on which autocast is on may be the graph's.
        devices.update(device for device in TABLES if torch.is_autocast_enabled(device))

    states: list[_State] = []
    for device in sorted(devices):
        dtype = torch.get_autocast_dtype(device)
        states.append((device, dtype, torch.is_autocast_enabled(device), scope_on(device)))

    def again() -> AbstractContextManager[None]:
        # Switch rules off on devices that have rules now and had none then. Checkpointing itself restores
        # whether autocast is on there, and its dtype.
        without_rules: list[_State] = []
        for device in scopes_here():
            if device not in devices:
                is_enabled = torch.is_autocast_enabled(device)
                without_rules.append((device, torch.get_autocast_dtype(device), is_enabled, None))
        return open_regions([*without_rules, *states], cache_enabled, promotion)

    return again


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` bound to the current autocast state, for later calls in any thread.

    A call raises OrderError if a policy that was in force here has been removed since.
    """
    checks = [getattr(region.owner, "check_recomputation", None) for region in thread.regions]
    state = state_here()

    @functools.wraps(function)
    def in_that_state(*args: Any, **kwargs: Any) -> Any:
        for check in checks:
            if check is not None:
                check()
        with state():
            return function(*args, **kwargs)

    return in_that_state


def _bound_where_needed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``bound(function)`` inside regions that checkpointing does not restore, else ``function``."""
    is_needed = any(region.propagates for region in thread.regions)
    if not is_needed or torch.compiler.is_compiling():
        return function
    return bound(function)


class _BindingFunction:
    """Replaces ``CheckpointFunction``, of which ``checkpoint`` calls only ``apply``, to bind the function."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._original.apply(_bound_where_needed(function), *args, **kwargs)


def _binding_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the generator of checkpoints without reentry, to bind the function."""

    @functools.wraps(original)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(_bound_where_needed(function), *args, **kwargs)

    return generator


def _quiet_kwargs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep ``checkpoint`` from restoring a region in float32 itself, since it would warn on a CPU."""

    @functools.wraps(original)
    def kwargs_of_regions(*args: Any, **kwargs: Any) -> Any:
        kwargs_by_device = original(*args, **kwargs)
        for autocast_kwargs in kwargs_by_device:
            if autocast_kwargs is not None and autocast_kwargs.get("dtype") == torch.float32:
                autocast_kwargs.update(enabled=False, dtype=torch.bfloat16)
        return kwargs_by_device

    return kwargs_of_regions


_CHECKPOINTING = Replacements(
    (CHECKPOINT, "CheckpointFunction", _BindingFunction),
    (CHECKPOINT, CHECKPOINT_GENERATOR, _binding_generator),
    (CHECKPOINT, "_get_autocast_kwargs", _quiet_kwargs),
)
"""Replaces these parts of torch's checkpointing, while a region is open that it does not restore."""

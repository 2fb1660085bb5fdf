"""The state of a thread: its open regions, and the scope that its calls are made in.

A scope is the set of rules in force at a place. Kernels, modules and compiled graphs must all know the scope
of the calling thread, and ``torch.compile`` must compile anew for another scope. So the scope is kept where
torch keeps the state of autocast, which Dynamo traces and guards, and which a graph can enter and leave:

- torch has an autocast dtype for every device type, also for IPUs, on which no tensor ever is. While rules
  are in force for the CPU, autocast is on for IPUs, and its dtype there, the *mark*, stands for the scope.
- The device type whose dtype is the mark is the *carrier*: "ipu" for the CPU, "hpu" for every other device
  type. There are two, since the parts of a model may be on a CPU and on a GPU, each with a scope.
- Any dtype but fp16 and bf16, for which programs open regions, may be a mark. ``_meanings`` says which scope
  each one stands for. When none is left, those of scopes that no open region has are given to others.
- The keys of graphs that torch caches on disk contain the marks, which another process gives to other scopes.
  So what they stand for is added to these keys.

In the same way the autocast dtype of XLA devices says that operators promote.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting._locks import process_lock
from narrowcast.casting._torch_internals import reset_compiled_code, set_in_every_thread
from narrowcast.errors import UnsupportedError
from narrowcast.policy import ResolvedPolicy, Rule, Scope, dtype_of

_NO_SCOPE = torch.float16
"""The autocast dtype that a carrier gets when no rules are in force."""
PROMOTING = ("xla", torch.float64)
"""The autocast state in which operators of a thread promote where formats meet."""
_lock = process_lock()


def _dtypes_for_marks() -> tuple[torch.dtype, ...]:
    """Return the dtypes that may stand for a scope: no program opens a region on a carrier in one of them."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return tuple(sorted(dtypes - {torch.float16, torch.bfloat16}, key=str))


_MARKS = _dtypes_for_marks()
_SPARE_MARKS = 16
"""How many unused dtypes a new policy should find, for the scopes inside its modules."""
_carrier_of: dict[str, str] = {}
"""Device type -> its carrier, for those that had a scope."""
_Identity = tuple[str, str]
"""The device type of a scope, and what identifies the scope there."""
_Meaning = tuple[_Identity, "weakref.WeakSet[Scope]"]
"""What a mark stands for, and the scopes with it: those of equal policies share one."""
_meanings: dict[str, dict[torch.dtype, _Meaning]] = {}
"""Carrier -> mark -> what it stands for."""


def carrier_for(device_type: str) -> str:
    """Return the device type whose autocast dtype stands for the scopes of ``device_type``."""
    return "ipu" if device_type == "cpu" else "hpu"


class OpenRegion:
    """One entered region, and the state that leaving it restores.

    Attributes:
        owner: the object that opened it and will leave it.
        watches: whether it watches writes of weights: loading them and a backward pass inside it then drop
            their casts, and the backward pass warns.
        propagates: whether checkpoints must restore it, since PyTorch does not.
        scope: the rules inside; referenced here, since the autocast state holds no reference.
        promotion: called with the name of each operator that runs otherwise than in the low format, and with
            how and why. None: promotion stays as it is outside.
        caching: whether weight casts are kept.
        regions_of_thread: the list that holds it, by which regions of one thread are told from those of
            another.
    """

    __slots__ = (
        "cache_before", "caching", "device", "dtype", "dtype_before", "enabled_before", "owner",
        "promoting_before", "promotion", "propagates", "regions_of_thread", "scope", "scope_before",
        "watches",
    )  # fmt: skip

    def __init__(
        self,
        owner: object,
        device: str,
        dtype: torch.dtype,
        enabled: bool,
        scope: Scope | None,
        promotion: Callable[[str, str], None] | None,
        watches: bool,
    ) -> None:
        self.owner = owner
        self.regions_of_thread = thread.regions
        self.device = device
        self.dtype = dtype
        self.watches = watches and enabled
        self.promotion = promotion
        # A checkpoint restores a region by torch.autocast, which turns itself off in float32 on a CPU.
        self.propagates = scope is not None or promotion is not None or (enabled and dtype == torch.float32)
        self.scope = scope
        self.caching = False
        self.enabled_before = torch.is_autocast_enabled(device)
        self.dtype_before = torch.get_autocast_dtype(device)
        self.cache_before = torch.is_autocast_cache_enabled()
        self.scope_before = scope_on(device)
        self.promoting_before = torch.get_autocast_dtype(PROMOTING[0])


class _Regions(list[OpenRegion]):
    """The open regions of a thread; a class, so that other threads can refer to them weakly."""


_of_threads: weakref.WeakValueDictionary[int, _Regions] = weakref.WeakValueDictionary()
"""The regions of each living thread by the ``id`` of their list: a list has no hash, as a WeakSet needs."""


class _Thread(threading.local):
    """State of a thread.

    Attributes:
        regions: its open regions, outermost first.
        scopes: device type -> the scope that was set last, in force while the autocast state has its mark.
        casting_rule: the rule for the module whose inputs or outputs this thread is casting, or None.
        results: the ``DirectResults`` of the model that this thread calls under ``run``, or None.
        traced_results: the ``DirectResults`` of the fake tensors that Dynamo traces in this thread, or None.
        traced_from: the id of the compilation in which Dynamo began to trace that model.
    """

    casting_rule: Rule | None = None
    results: Any = None
    traced_results: Any = None
    traced_from: Any = None

    def __init__(self) -> None:
        self.regions = _Regions()
        self.scopes: dict[str, Scope] = {}
        with _lock:
            _of_threads[id(self.regions)] = self.regions


thread = _Thread()


def rule_that_casts() -> Rule | None:
    """Return the rule for the module whose inputs or outputs this thread is casting, or None."""
    return thread.casting_rule


def scope_on(device_type: str) -> Scope | None:
    """Return the scope of this thread's calls on ``device_type``; None: no rule is in force."""
    # Called at each call of an operator with a rule, so the most common cases come first.
    carrier = _carrier_of.get(device_type)
    if carrier is None:
        return None  # no policy with rules was ever used there
    mark = torch.get_autocast_dtype(carrier)
    if mark is _NO_SCOPE:
        return None
    latest_scope = thread.scopes.get(device_type)
    if latest_scope is not None and latest_scope.mark is mark:
        return latest_scope
    # A compiled graph entered the region, and so set the autocast state alone.
    meaning = _meanings[carrier].get(mark)
    if meaning is None or meaning[0][0] != device_type:
        return None
    return next(iter(meaning[1]), None)


def is_promoting() -> bool:
    """Return whether operators of this thread promote where formats meet."""
    return torch.get_autocast_dtype(PROMOTING[0]) is PROMOTING[1]


def promotion_here() -> Callable[[str, str], None] | None:
    """Return the promotion of this thread's innermost region that has one."""
    # Regions of modules inside it have none of their own.
    for region in reversed(thread.regions):
        if region.promotion is not None:
            return region.promotion
    return None


def devices_with_scopes() -> tuple[str, ...]:
    """Return the device types that ever had a scope."""
    return tuple(_carrier_of)


def scopes_here() -> dict[str, Scope]:
    """Return the scopes of this thread's calls by device type."""
    scopes = {}
    for device in devices_with_scopes():
        scope = scope_on(device)
        if scope is not None:
            scopes[device] = scope
    return scopes


def set_scope(scope: Scope | None, device_type: str) -> None:
    """Set the scope of this thread's calls; None: no rule is in force."""
    if scope is None:
        carrier, mark = carrier_for(device_type), _NO_SCOPE
        thread.scopes.pop(device_type, None)
    else:
        mark = mark_of(scope)
        carrier = _carrier_of[device_type]
        thread.scopes[device_type] = scope
    # Autocast is on there because Dynamo compares dtypes only of devices on which it is. The dtype comes
    # last, since ``scope_on`` goes by it: after an interrupt in between, it returns the scope of before.
    torch.set_autocast_enabled(carrier, scope is not None)
    torch.set_autocast_dtype(carrier, mark)


def change_scope(scope: Scope, device_type: str) -> None:
    """As ``set_scope``, but only from one scope to another: faster, for each call of a module with a rule."""
    mark = scope.mark or mark_of(scope)
    thread.scopes[device_type] = scope
    torch.set_autocast_dtype(_carrier_of[device_type], mark)


def autocast_state_of(scope: Scope | None, device_type: str) -> tuple[str, torch.dtype]:
    """Return the device type whose autocast dtype stands for ``scope``, and that dtype."""
    mark = _NO_SCOPE if scope is None else mark_of(scope)
    return carrier_for(device_type), mark


def mark_of(scope: Scope) -> torch.dtype:
    """Return the dtype that stands for ``scope``, chosen at the first call.

    Raises:
        UnsupportedError: there are more scopes than dtypes.
    """
    if scope.mark is not None:
        return scope.mark
    device_type = scope.resolved.device_type
    carrier = carrier_for(device_type)
    # As text, so that the keys of graphs on disk can contain it.
    identity = (device_type, repr(scope.identity))
    with _lock:
        meanings = _meanings.setdefault(carrier, {})
        mark = _mark_with(identity, meanings) or _unused_mark(meanings)
        if mark not in meanings:
            meanings[mark] = (identity, weakref.WeakSet())
            _tag_graphs_on_disk()
        meanings[mark][1].add(scope)
        _carrier_of[device_type] = carrier
        scope.mark = mark
    return mark


def _mark_with(identity: _Identity, meanings: dict[torch.dtype, _Meaning]) -> torch.dtype | None:
    for mark, (known, _) in meanings.items():
        if known == identity:
            return mark
    return None


def _unused_mark(meanings: dict[torch.dtype, _Meaning]) -> torch.dtype:
    """Return a dtype that stands for no scope."""
    if len(meanings) == len(_MARKS):
        _free_marks(meanings)
    for mark in _MARKS:
        if mark not in meanings:
            return mark
    raise UnsupportedError(
        f"expected at most {len(_MARKS)} different sets of rules at once, in open regions and while a "
        "compiled function is running in any thread, since torch.compile can tell no more of them apart: let "
        "rules share a pattern, or open a region with another policy when no compiled function is running"
    )


def make_room_for_marks() -> None:
    """If few dtypes are left, free those of the scopes that no open region has.

    Called when a policy is new, when usually no compiled code is running. Later might be too late: while any
    thread runs compiled code, no dtypes can be freed.
    """
    with _lock:
        for meanings in _meanings.values():
            if len(_MARKS) - len(meanings) < _SPARE_MARKS:
                _free_marks(meanings)


def _free_marks(meanings: dict[torch.dtype, _Meaning]) -> None:
    """Free the dtypes of the scopes that no open region has; each gets another one when it is needed."""
    policies_in_use: set[ResolvedPolicy] = set()
    for regions in _of_threads.values():
        for region in tuple(regions):  # a copy, since its thread may open and close regions meanwhile
            if region.scope is not None:
                policies_in_use.add(region.scope.resolved)

    freed = []
    for mark, (_, scopes) in meanings.items():
        if policies_in_use.isdisjoint(scope.resolved for scope in scopes):
            freed.append(mark)

    # Drop compiled graphs first: those of the old scopes would be used for new scopes with the same dtypes.
    if freed and reset_compiled_code():
        for mark in freed:
            for scope in meanings.pop(mark)[1]:
                scope.mark = None


def _tag_graphs_on_disk() -> None:
    """Add what the dtypes stand for to the key of every compiled graph that is kept on disk."""
    known: list[tuple[str, str, _Identity]] = []
    for carrier, meanings in _meanings.items():
        for mark, (identity, _) in meanings.items():
            known.append((carrier, str(mark), identity))
    our_tag = hashlib.sha256(repr(sorted(known)).encode()).hexdigest()[:16]

    settings = torch.compiler.config
    tag_of_others = (settings.cache_key_tag or "").partition("|narrowcast:")[0]
    set_in_every_thread(settings, "cache_key_tag", f"{tag_of_others}|narrowcast:{our_tag}")


def lower_dtype(scope: Scope) -> torch.dtype:
    """Return the dtype that ``"lower"`` stands for in ``scope``.

    Inside a module with a rule it is the policy's format. Elsewhere it is the autocast dtype, since a
    ``torch.autocast`` inside our region may have another.
    """
    if scope.rule is not None:
        return dtype_of(scope.resolved.lower)
    return torch.get_autocast_dtype(scope.resolved.device_type)


def region_dtype(device_type: str) -> torch.dtype:
    """Return the dtype in which operators that PyTorch's table casts to the low format compute here."""
    scope = scope_on(device_type)
    return torch.get_autocast_dtype(device_type) if scope is None else lower_dtype(scope)

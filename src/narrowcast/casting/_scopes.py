"""The state of a thread: its open regions, and the scope that its calls are made in.

The scope is kept in torch's own autocast state, which ``torch.compile`` guards and traces. No tensor is ever
on an IPU, so while rules are in force for the CPU, the autocast dtype of IPUs stands for the scope, and
autocast is on for them: another scope is another state, for which Dynamo makes another graph. If there are
more scopes than dtypes, a second such device type is used as well. The keys of graph caches on disk contain
that state, and the list of what each dtype stands for in this process. In the same way the autocast dtype of
XLA devices says that operators promote.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable

import torch

from narrowcast.casting._torch_internals import trace_backward_outside_of_regions
from narrowcast.errors import UnsupportedError
from narrowcast.policy import Rule, Scope, dtype_of

# The device types whose dtypes stand for the scopes of another one: for the first scopes, and for the others.
# Those of "cpu" differ from the others', since a model may be on a CPU and on one other device.
_STATE_DEVICES = {"cpu": ("ipu", "maia"), "mtia": ("hpu", "xpu")}
_OTHER_STATE_DEVICES = ("hpu", "mtia")
_NEUTRAL = torch.float16
PROMOTING = ("xla", torch.float64)
"""The autocast state in which operators of a thread promote where formats meet."""
# Without those in which a program may have opened a region for such a device.
_FORMATS = tuple(
    sorted(
        {one for one in vars(torch).values() if isinstance(one, torch.dtype)} - {_NEUTRAL, torch.bfloat16},
        key=str,
    )
)
_lock = threading.Lock()
_Mark = tuple[torch.dtype, torch.dtype | None]
_NO_SCOPE: _Mark = (_NEUTRAL, None)
# By device type and identity of a scope, its mark; by device type and mark, the scopes (of equal policies).
_marks: dict[tuple[str, str], _Mark] = {}
_by_mark: dict[tuple[str, torch.dtype, torch.dtype | None], list[weakref.ref[Scope]]] = {}


class _Process:
    device_types: tuple[str, ...] = ()  # those that had a scope
    beyond = False  # whether the second device type of a pair is used


class OpenRegion:
    """One entered region, and the state that leaving it restores.

    Attributes:
        owner: the object that opened it and will leave it.
        warns: whether a backward pass inside it warns.
        propagates: whether checkpoints must restore it, since PyTorch does not.
        caller: the ``id`` of the frame with which the region ends if its owner does not leave it, or None.
        scope: the rules inside; referenced here, since the autocast state holds no reference.
        promotion: operators promote inside; called with each that runs otherwise, and how.
        caching: whether weight casts are kept.
        moved: whether the scope inside differs from that outside.
    """

    __slots__ = (
        "cache_before", "caching", "caller", "device", "dtype", "dtype_before", "enabled_before", "moved",
        "owner", "promoting_before", "promotion", "propagates", "scope", "scope_before", "thread", "warns",
    )  # fmt: skip

    def __init__(
        self, owner: object, device: str, dtype: torch.dtype, warns: bool, scope: Scope | None, enabled: bool
    ) -> None:
        self.owner = owner
        self.thread = thread.regions
        self.device = device
        self.dtype = dtype
        self.warns = warns and enabled
        self.promotion: Callable[[str, str], None] | None = getattr(owner, "_promotion", None)
        self.propagates = bool(scope or self.promotion) or (enabled and dtype == torch.float32)
        self.caller: int | None = None
        self.scope = scope
        self.caching = False
        self.moved = False
        self.enabled_before = torch.is_autocast_enabled(device)
        self.dtype_before = torch.get_autocast_dtype(device)
        self.cache_before = torch.is_autocast_cache_enabled()
        self.scope_before = scope_on(device)
        self.promoting_before = torch.get_autocast_dtype(PROMOTING[0])


class _Thread(threading.local):
    """State of a thread.

    Attributes:
        regions: its open regions, outermost first.
        casting_rule: the rule for a module whose inputs or outputs it is casting.
    """

    casting_rule: Rule | None = None

    def __init__(self) -> None:
        self.regions: list[OpenRegion] = []


_process = _Process()
thread = _Thread()


def rule_that_casts() -> Rule | None:
    """Return the rule for the module whose inputs or outputs this thread is casting, or None."""
    return thread.casting_rule


def scope_on(device_type: str) -> Scope | None:
    """Return the scope of this thread's calls on ``device_type``; None: no rule is in force."""
    if device_type not in _process.device_types:  # asked at each call and region, so the fast way first
        return None
    carrier, beyond = _STATE_DEVICES.get(device_type, _OTHER_STATE_DEVICES)
    first, second = torch.get_autocast_dtype(carrier), None
    if first is _NEUTRAL:
        return None
    if _process.beyond:
        second = torch.get_autocast_dtype(beyond)
        second = second if second in _FORMATS else None
    for reference in _by_mark.get((device_type, first, second), ()):
        scope = reference()
        if scope is not None:
            return scope
    return None


def is_promoting() -> bool:
    """Return whether operators of this thread promote where formats meet."""
    return torch.get_autocast_dtype(PROMOTING[0]) is PROMOTING[1]


def promotion_here() -> Callable[[str, str], None] | None:
    """Return the promotion of this thread's innermost region that has one."""
    return next((one.promotion for one in reversed(thread.regions) if one.promotion is not None), None)


def scopes_here() -> dict[str, Scope]:
    """Return the scopes of this thread's calls by device type."""
    found = {device: scope_on(device) for device in _process.device_types}
    return {device: scope for device, scope in found.items() if scope is not None}


def set_scope(scope: Scope | None, device_type: str) -> None:
    """Set the scope of this thread's calls; None: no rule is in force."""
    first, second = _STATE_DEVICES.get(device_type, _OTHER_STATE_DEVICES)
    mark = _NO_SCOPE if scope is None else scope.mark or _choose_mark(scope)
    torch.set_autocast_dtype(first, mark[0])
    torch.set_autocast_enabled(first, mark[0] is not _NEUTRAL)
    if _process.beyond:
        torch.set_autocast_dtype(second, mark[1] or _NEUTRAL)
        torch.set_autocast_enabled(second, mark[1] is not None)


def autocast_state_of(scope: Scope | None, device_type: str) -> list[tuple[str, torch.dtype]]:
    """Return the device types whose autocast dtypes stand for ``scope``, with these dtypes."""
    mark = _NO_SCOPE if scope is None else scope.mark or _choose_mark(scope)
    carriers = _STATE_DEVICES.get(device_type, _OTHER_STATE_DEVICES)
    if not _process.beyond:
        return [(carriers[0], mark[0])]
    return [(carriers[0], mark[0]), (carriers[1], mark[1] or _NEUTRAL)]


def _choose_mark(scope: Scope) -> _Mark:
    """Choose the dtypes that stand for ``scope``; UnsupportedError if the process has used up all of them."""
    device_type = scope.resolved.device_type
    with _lock:
        identity = (device_type, repr(scope.identity))
        if identity not in _marks:
            carriers = _STATE_DEVICES.get(device_type, _OTHER_STATE_DEVICES)
            before = sum(_STATE_DEVICES.get(device, _OTHER_STATE_DEVICES) == carriers for device, _ in _marks)
            lap, at = divmod(before, len(_FORMATS))
            if lap > len(_FORMATS):
                raise UnsupportedError(
                    f"expected fewer than {before} scopes of policies with rules in one process, since "
                    "torch.compile can tell no more of them apart: make each policy once"
                )
            if device_type not in _process.device_types:
                _process.device_types += (device_type,)
            _process.beyond |= lap > 0
            trace_backward_outside_of_regions()
            _marks[identity] = (_FORMATS[at], _FORMATS[lap - 1] if lap else None)
            # Add what the marks stand for to the key of every compiled graph that is kept on disk.
            settings = torch.compiler.config
            ours = hashlib.sha256(repr(sorted(_marks.items())).encode()).hexdigest()[:16]
            kept = (settings.cache_key_tag or "").partition("|narrowcast:")[0]
            settings.cache_key_tag = f"{kept}|narrowcast:{ours}"
        scope.mark = _marks[identity]
        same = _by_mark.setdefault((device_type, *scope.mark), [])
        same[:] = [one for one in same if one() is not None] + [weakref.ref(scope)]
        return scope.mark


def lower_dtype(scope: Scope) -> torch.dtype:
    """Return the dtype of ``"lower"`` in ``scope``: inside a module with a rule the policy's format.

    Elsewhere that of the region, since one of ``torch.autocast`` inside ours may have another.
    """
    if scope.rule is not None:
        return dtype_of(scope.resolved.lower)
    return torch.get_autocast_dtype(scope.resolved.device_type)


def region_dtype(device_type: str) -> torch.dtype:
    """Return the dtype in which operators on PyTorch's list of low-precision ones compute here."""
    scope = scope_on(device_type)
    return torch.get_autocast_dtype(device_type) if scope is None else lower_dtype(scope)

"""Register the kernels of rules in PyTorch's dispatcher.

A rule for an operator replaces its kernel on the autocast key of a device. There casts are differentiated,
and calls from Python and C++ are covered alike. The kernel exists as long as a policy needs it; then the
dispatch table is as before. If no rule is in force in the calling thread, a kernel does what PyTorch does:

- an operator on PyTorch's table calls the kernel that ours replaced;
- any other is redispatched below autocast, as if there were no kernel: a composite is decomposed, and its
  parts are cast.

Rules inside the transformations of ``torch.func`` need kernels in front of its layers. ``vmap``, ``grad`` and
``jvp`` come before autocast in the dispatcher. ``vmap`` decomposes composites before autocast sees them, so a
rule for ``softmax`` would be ignored; and below each layer autocast is on again, so the product inside a
``linear`` that a rule computes in fp32 would be cast to the region's format. If rules are in force, the
kernels in front cast the inputs first, and the layers run with autocast off; composites without a rule are
decomposed there. Code outside of ``torch.func`` never reaches these kernels. Operators that a layer calls
skip them, and if ``vmap`` would thereby ignore a rule, an error is raised.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from narrowcast.casting import _direct_results, _operators, _promotion
from narrowcast.casting._direct_results import GATHER, NOTED, noting
from narrowcast.casting._distributions import DISTRIBUTIONS
from narrowcast.casting._functions import FUNCTIONS
from narrowcast.casting._operators import below_autocast, native_kernel, without_autocast_cache
from narrowcast.casting._promotion import (
    NORMS,
    SPARSE_PRODUCTS,
    promoted,
    promoted_on,
    promoted_under_vmap,
    promoting,
    promoting_sparse,
    promoting_under_vmap,
)
from narrowcast.casting._scopes import make_room_for_marks, scope_on, scopes_here
from narrowcast.casting._torch_internals import (
    decomposition_of,
    has_kernel,
    is_exporting,
    names_of_composites,
    register_kernel,
    skipped_by_dynamo,
)
from narrowcast.errors import UnsupportedError
from narrowcast.policy import (
    FP32_SET_DTYPE,
    TABLES,
    UNLISTED,
    Policy,
    ResolvedPolicy,
    Scope,
    autocast_key,
    format_name,
    kept_for,
    native_table,
    operator,
    qualified,
    resolve,
    resolved,
)

_Kernel = Callable[..., Any]


class _AutocastKernels:
    """The kernels on the autocast key of one device type."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.key = autocast_key(device_type)
        self.libraries: dict[str, Any] = {}
        self.users: Counter[str] = Counter()
        self.of_rules: Counter[str] = Counter()  # those of them that are rules
        self.installed: dict[str, _Kernel] = {}
        self.native: dict[str, _Kernel] = {}  # of those on PyTorch's table

    def add(self, op: str) -> None:
        native = native_kernel(op, self.device_type)
        if native is not None:
            self.native[op] = native
        go_on = native or below_autocast(operator(op), self.device_type)
        if op in promoted():
            go_on = promoting(op, go_on, self.device_type)
        if op in NOTED or op == GATHER:
            go_on = noting(op, go_on)
        kernel = _kernel(op, self.device_type, go_on)
        self.libraries[op] = register_kernel(op, self.key, kernel)
        self.installed[op] = kernel

    def drop(self, op: str) -> None:
        self.libraries[op]._destroy()  # first: if an exception ends it, the next one tries again
        del self.libraries[op], self.installed[op]
        self.native.pop(op, None)


class _PromotingKernels(_AutocastKernels):
    """The kernels with which operators promote on another key than autocast's, which no rule concerns."""

    def __init__(self, key: str, promote: Callable[[str, _Kernel], _Kernel]) -> None:
        super().__init__("cpu")
        self.key = key
        self.promote = promote

    def add(self, op: str) -> None:
        native = without_autocast_cache(torch.library.get_kernel(qualified(op), self.key).call_boxed)
        kernel = self.promote(op, native)
        self.libraries[op] = register_kernel(op, self.key, kernel)
        self.installed[op] = kernel


def own_kernel(op: str, device_type: str) -> _Kernel | None:
    """Return our kernel of ``op``, to be called with a keyset first, or None.

    Under a ``TorchDispatchMode`` PyTorch calls the kernel that Python registered last for this name and key,
    even a removed one. So an overlay may run after its end, and must call our kernel directly.
    """
    library = _libraries.get(device_type)
    return None if library is None else library.installed.get(op)


class Overlay(Protocol):
    """Kernels on top of ours, removed while ours change, so that ours never call them."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


overlays: list[Overlay] = []
_lock = threading.Lock()
_FRONT = "FuncTorchDynamicLayerFrontMode"
_BATCHED = "FuncTorchBatched"
_DECOMPOSED = "FuncTorchBatchedDecomposition"
_SPARSE_CSR = "SparseCsrCPU"
_libraries: dict[str, _AutocastKernels] = {
    _BATCHED: _PromotingKernels(_BATCHED, promoting_under_vmap),
    _SPARSE_CSR: _PromotingKernels(_SPARSE_CSR, promoting_sparse),
}
"""By device type, those for ``vmap``, and those for products of sparse CSR matrices."""
_served: weakref.WeakSet[ResolvedPolicy] = weakref.WeakSet()
# What is no longer needed: device type, operators, whether of rules. Only who holds the lock takes from it.
_released: deque[tuple[str, tuple[str, ...], bool]] = deque()


def serve(resolved: ResolvedPolicy) -> None:
    """Register a kernel for each operator that this policy decides, as long as the policy lives."""
    if resolved in _served:
        return
    make_room_for_marks()
    ops = resolved.kernels()
    acquire(resolved.device_type, ops)
    weakref.finalize(resolved, release, resolved.device_type, ops).atexit = False
    _served.add(resolved)


class Promotion:
    """As long as this lives, operators promote where they would raise, in regions that are opened with it.

    Args:
        policy: of these regions.
        dtype: their dtype on ``device_type``.
        say: called once for each operator that runs in fp32 for want of a low kernel.
    """

    def __init__(
        self, policy: Policy, device_type: str, dtype: torch.dtype, say: Callable[[str], None]
    ) -> None:
        words = {format_name(dtype), *(word for one in policy.rules for word in (one.compute, one.output))}
        ops = promoted_on(device_type, frozenset(words & {"bf16", "fp16"})) if device_type in TABLES else ()
        self._say, self._said = say, set[str]()
        acquired = [(device_type, ops), (_BATCHED, promoted_under_vmap())]
        if device_type == "cpu":
            acquired.append((_SPARSE_CSR, SPARSE_PRODUCTS))
        for where, kernels in acquired:
            acquire(where, kernels, of_rules=False)
            weakref.finalize(self, release, where, kernels, of_rules=False).atexit = False
        user = object()
        for names in (NORMS, FUNCTIONS, DISTRIBUTIONS):
            names.begin(user)
            weakref.finalize(self, names.end, user).atexit = False
        _promotion.living.add(self)

    def __call__(self, op: str, what: str) -> None:
        if op not in self._said:
            self._said.add(op)
            self._say(f"{op} {what}")


class NotesOfResults:
    """As long as this lives, operators on a device note their results for ``DirectResults``."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._gathers = False
        self._acquire(NOTED)
        _direct_results.living.add(self)

    def begin_gather(self) -> None:
        """Have ``gather`` note its results too; it has no kernel in models without the other operators."""
        if not self._gathers:
            self._gathers = True
            self._acquire((GATHER,))

    def _acquire(self, ops: tuple[str, ...]) -> None:
        acquire(self._device_type, ops, of_rules=False)
        weakref.finalize(self, release, self._device_type, ops, of_rules=False).atexit = False


def root_scope(policy: Policy, device_type: str, dtype: torch.dtype) -> Scope:
    """Return the scope in a region of ``policy``, outside of modules that rules select."""
    if device_type not in TABLES:
        raise UnsupportedError(
            f"expected a device whose autocast table is known ({', '.join(TABLES)}), got {device_type!r}, "
            'where rules and other tables cannot be followed: use a preset without them, as "bf16"'
        )
    found = resolved(policy, device_type, format_name(dtype))
    serve(found)
    return found.root


def region_of(policy: Policy, device_type: str) -> tuple[torch.dtype, Scope | None]:
    """Return the dtype of a region of ``policy``, and its scope or None if it has no rules."""
    kept = kept_for(policy).regions
    found: tuple[torch.dtype, Scope | None] | None = kept.get(device_type)
    if found is None:  # a region is opened at each step, with the same dtype and scope each time
        dtype = resolve(policy, device_type)
        scope = None if policy.is_plain else root_scope(policy, device_type, dtype)
        found = kept[device_type] = (dtype, scope)
    return found


def acquire(device_type: str, ops: tuple[str, ...], *, of_rules: bool = True) -> None:
    """Give each of ``ops`` a kernel until ``release`` is called with the same arguments."""
    try:
        with _lock:
            library = _libraries.setdefault(device_type, _AutocastKernels(device_type))
            library.users.update(ops)
            first_rules = of_rules and any(op not in library.of_rules for op in ops)
            if of_rules:
                library.of_rules.update(ops)
            new = [op for op in ops if op not in library.installed]
            if new:
                with _overlays_removed():
                    for op in new:
                        library.add(op)
            if first_rules:
                _update_functorch()
    except BaseException:
        release(device_type, ops, of_rules=of_rules)
        raise
    _remove_released()


def release(device_type: str, ops: tuple[str, ...], *, of_rules: bool = True) -> None:
    """Remove each kernel that no other policy needs.

    Policies end when garbage is collected, perhaps while this or another thread changes kernels: who holds
    the lock then removes what was released meanwhile.
    """
    _released.append((device_type, ops, of_rules))
    _remove_released()


def _remove_released() -> None:
    while _released and _lock.acquire(blocking=False):
        try:
            while _released:
                _remove(*_released.popleft())
        finally:
            _lock.release()


def _remove(device_type: str, ops: tuple[str, ...], of_rules: bool) -> None:
    library = _libraries[device_type]
    unneeded = _counted_down(library.users, ops)
    if unneeded:
        with _overlays_removed():
            for op in unneeded:
                if op in library.installed:
                    library.drop(op)
    if of_rules and _counted_down(library.of_rules, ops):
        _update_functorch()


def _counted_down(users: Counter[str], ops: tuple[str, ...]) -> list[str]:
    """Count one user less of each of ``ops``; return those that have none left."""
    unneeded = []
    for op in ops:
        users[op] -= 1
        if users[op] < 1:
            del users[op]
            unneeded.append(op)
    return unneeded


@contextmanager
def overlaid(overlay: Overlay) -> Iterator[None]:
    """Put ``overlay`` on top of our kernels; under the lock, since another thread may be changing those."""
    with _lock:
        overlay.begin()
        overlays.append(overlay)
    _remove_released()
    try:
        yield
    finally:
        with _lock:
            overlays.remove(overlay)
            overlay.end()
        _remove_released()


@contextmanager
def _overlays_removed() -> Iterator[None]:
    """Take overlays away, and put them back at the end."""
    removed = list(overlays)
    overlays.clear()
    for overlay in reversed(removed):
        overlay.end()
    try:
        yield
    finally:
        for overlay in removed:
            overlay.begin()
        overlays.extend(removed)


def _kernel(op: str, device_type: str, native: _Kernel) -> _Kernel:
    """Return our kernel of ``op``; ``native`` does what PyTorch would, called with a keyset first."""

    def prepare(scope: Scope) -> _operators.Action | None:
        decision = scope.decide(op)
        if decision is None:
            return None
        action = _operators.action_for(op, decision, scope)
        if decision.compute in (UNLISTED, FP32_SET_DTYPE) and op in promoted():
            go_on = promoting(op, lambda keyset, *args, **kwargs: action(keyset, args, kwargs), device_type)
            return lambda keyset, args, kwargs: go_on(keyset, *args, **kwargs)
        return action

    @skipped_by_dynamo  # after a graph break it would compile our code as the script's
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = scope_on(device_type)
        if scope is None:
            return native(keyset, *args, **kwargs)
        try:
            action: Any = scope.actions[op]
        except KeyError:
            action = scope.actions[op] = prepare(scope)
        if action is None:
            return native(keyset, *args, **kwargs)
        if is_exporting():
            decision = scope.decide(op)
            assert decision is not None
            raise UnsupportedError(
                f"{op} was called while torch.export traced it inside a region whose policy decides about it "
                f"({decision.because}), and an exported program keeps no region around it: export it outside "
                "of the region"
            )
        return action(keyset, args, kwargs)

    return kernel


# ---- in front of torch.func


def _update_functorch() -> None:
    """Register in front of ``torch.func`` what the kernels on autocast keys need; remove everything else.

    In front: operators with a rule, on PyTorch's table, and every composite. Inside: those that ``vmap``
    decomposes in spite of a rule.
    """
    ruled = list(dict.fromkeys(op for one in _libraries.values() for op in one.of_rules))
    wanted: dict[tuple[str, str], Callable[..., _Kernel]] = {}
    if ruled:
        listed = (native_table(one.device_type) for one in _libraries.values() if one.of_rules)
        for op in (*itertools.chain.from_iterable(listed), *_composites(), *ruled):
            wanted[op, _FRONT] = _kernel_in_front
    for op in ruled:
        if has_kernel(qualified(op), _DECOMPOSED):
            wanted[op, _BATCHED] = _kernel_inside
    for gone in [one for one in _functorch if one not in wanted]:
        _functorch.pop(gone)._destroy()
    for (op, key), make in wanted.items():
        if (op, key) not in _functorch:
            name = qualified(op)
            below = without_autocast_cache(torch.library.get_kernel(name, key).call_boxed)
            has_own = has_kernel(name, key) or has_kernel(name, _BATCHED)
            _functorch[op, key] = register_kernel(op, key, make(op, below, has_own))


_functorch: dict[tuple[str, str], Any] = {}  # operator and key -> the library of its kernel
_composites = functools.cache(names_of_composites)


def _kernel_in_front(op: str, below: _Kernel, has_own: bool) -> _Kernel:
    """Return a kernel that casts above all layers if rules are in force.

    ``has_own``: the layers have a kernel of their own for ``op``, and do not decompose it.
    """
    word = f"in front of {op}"
    missing = object()

    @skipped_by_dynamo
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        action: Any = None
        scope = _scope_of(args, kwargs)
        if scope is not None:
            action = scope.actions.get(word, missing)
            if action is missing:
                action = scope.actions[word] = _prepare_in_front(op, scope, has_own)
        return below(keyset, *args, **kwargs) if action is None else action(keyset, args, kwargs)

    return kernel


def _prepare_in_front(op: str, scope: Scope, has_own: bool) -> _operators.Action | None:
    decision = scope.decide(op)
    if decision is not None and decision.compute != UNLISTED:
        return _operators.action_for(op, decision, scope)
    library = _libraries[scope.resolved.device_type]
    native = library.native.get(op) if op in library.installed else native_kernel(op, library.device_type)
    if decision is None and native is not None:
        return lambda keyset, args, kwargs: native(keyset, *args, **kwargs)
    if has_own or not has_kernel(qualified(op), "CompositeImplicitAutograd"):
        return None
    decompose = decomposition_of(operator(op))
    if op not in promoted():
        return lambda _keyset, args, kwargs: decompose(*args, **kwargs)

    def in_parts(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return decompose(*args, **kwargs)

    promote = promoting(op, in_parts, library.device_type)
    return lambda keyset, args, kwargs: promote(keyset, *args, **kwargs)


def _kernel_inside(op: str, below: _Kernel, _has_own: bool) -> _Kernel:
    """Return a kernel that raises where ``vmap`` would ignore the rule in force."""

    @skipped_by_dynamo
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _scope_of(args, kwargs)
        decision = None if scope is None else scope.decide(op)
        if decision is not None and decision.compute != UNLISTED:
            raise UnsupportedError(
                f"{op} was called inside another operator under torch.vmap, which passes over what is "
                f"decided about it ({decision.because}); call it by itself, or give the other operator a rule"
            )
        return below(keyset, *args, **kwargs)

    return kernel


def _scope_of(args: Any, kwargs: Any) -> Scope | None:
    """Return the scope in force where autocast is on and a call has tensors; None: there is none."""
    for device, scope in scopes_here().items():
        if torch.is_autocast_enabled(device):
            tensors = _operators.tensors_in((*args, *kwargs.values()))
            if any(one.device.type == device for one in tensors):
                return scope
    return None

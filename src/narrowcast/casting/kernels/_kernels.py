"""Register the kernels of rules in PyTorch's dispatcher.

A rule for an operator replaces its kernel on the autocast key of a device. Autograd records casts that are
made there, and calls from Python and C++ are covered alike. The kernel exists as long as a policy needs it;
then the dispatch table is as before. If no rule is in force in the calling thread, a kernel does what PyTorch
does:

- an operator on PyTorch's table does what the kernel did that ours replaced;
- any other is redispatched below autocast, as if there were no kernel: a composite is decomposed, and its
  parts are cast.

``vmap``, ``grad`` and ``jvp`` of ``torch.func`` come before autocast in the dispatcher. Two things would go
wrong there. ``vmap`` decomposes composites first, so a rule for ``softmax`` would be ignored. Below each
layer autocast is on again, so the product inside a ``linear`` that a rule computes in fp32 would be cast to
the region's format. So while rules are in force, kernels in front of the layers cast the inputs, and the
layers run with autocast off. Code outside of ``torch.func`` never reaches these kernels. Operators that a
layer itself calls do not reach them either: where ``vmap`` would ignore a rule for that reason, we raise.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from narrowcast.casting._locks import process_lock
from narrowcast.casting._torch_internals import (
    has_kernel,
    is_exporting,
    register_kernel,
    skipped_by_dynamo,
)
from narrowcast.casting.kernels import _direct_results, _operators, _promotion
from narrowcast.casting.kernels._direct_results import GATHER, NOTED, noting
from narrowcast.casting.kernels._distributions import DISTRIBUTIONS
from narrowcast.casting.kernels._functions import FUNCTIONS
from narrowcast.casting.kernels._operators import below_autocast, native_kernel, without_autocast_cache
from narrowcast.casting.kernels._promotion import (
    NORMS,
    SPARSE_PRODUCTS,
    promoted,
    promoted_on,
    promoted_under_vmap,
    promoting,
    promoting_sparse,
    promoting_under_vmap,
)
from narrowcast.casting.regions._scopes import make_room_for_marks, scope_on, scopes_here
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
"""Called with the keyset of the call, and with the arguments of the operator."""
# Dispatch keys: https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/DispatchKey.h
_FRONT = "FuncTorchDynamicLayerFrontMode"
"""Ahead of every layer of ``torch.func``."""
_BATCHED = "FuncTorchBatched"
"""Inside a layer of ``vmap``."""
_DECOMPOSED = "FuncTorchBatchedDecomposition"
"""Where a layer of ``vmap`` takes a composite apart."""
_SPARSE_CSR = "SparseCsrCPU"


# ---- the kernels on one key


class _AutocastKernels:
    """The kernels on the autocast key of one device type.

    Attributes:
        installed: operator -> our kernel, to be called with a keyset first.
        native: operator -> what does the work of PyTorch's kernel, for those on its table.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.key = autocast_key(device_type)
        self.installed: dict[str, _Kernel] = {}
        self.native: dict[str, _Kernel] = {}
        self._libraries: dict[str, Any] = {}

    def add(self, op: str) -> None:
        # Before ours is registered, since a lookup would then return ours.
        native = native_kernel(op, self.device_type)
        if native is not None:
            self.native[op] = native
        go_on = native or below_autocast(operator(op), self.device_type)
        if op in promoted():
            go_on = promoting(op, go_on, self.device_type)
        if op in NOTED or op == GATHER:
            go_on = noting(op, go_on)
        self._install(op, _kernel(op, self.device_type, go_on))

    def drop(self, op: str) -> None:
        # PyTorch puts back the kernel that ours stood in front of.
        self._libraries.pop(op)._destroy()
        del self.installed[op]
        self.native.pop(op, None)

    def _install(self, op: str, kernel: _Kernel) -> None:
        self._libraries[op] = register_kernel(op, self.key, kernel)
        self.installed[op] = kernel


class _PromotingKernels(_AutocastKernels):
    """Kernels on a key other than autocast's. They only make operators promote; rules do not use them."""

    def __init__(self, key: str, promote: Callable[[str, _Kernel], _Kernel]) -> None:
        # Any device type: only ``add`` of the base class uses it, and this class replaces that.
        super().__init__("cpu")
        self.key = key
        self._promote = promote

    def add(self, op: str) -> None:
        native = without_autocast_cache(torch.library.get_kernel(qualified(op), self.key).call_boxed)
        self._install(op, self._promote(op, native))


def own_kernel(op: str, device_type: str) -> _Kernel | None:
    """Return our kernel of ``op``, to be called with a keyset first, or None.

    A kernel of an overlay may still be called after the overlay's ``end``, and then calls what this returns:
    under a ``TorchDispatchMode`` PyTorch calls what Python registered last for this name and key, even after
    it was removed.
    """
    kernels = _kernels_on.get(device_type)
    return None if kernels is None else kernels.installed.get(op)


_kernels_on: dict[str, _AutocastKernels] = {
    _BATCHED: _PromotingKernels(_BATCHED, promoting_under_vmap),
    _SPARSE_CSR: _PromotingKernels(_SPARSE_CSR, promoting_sparse),
}
"""Device type -> the kernels on its autocast key; ``_BATCHED`` and ``_SPARSE_CSR`` -> those on these keys."""


# ---- which kernels there are


class _Need(NamedTuple):
    """Operators that need a kernel.

    Attributes:
        where: the device type, or another key of ``_kernels_on``.
        ops: the operators.
        by_rules: whether a policy decides about them; these get kernels in front of ``torch.func`` too.
    """

    where: str
    ops: Iterable[str]
    by_rules: bool = False


_lock = process_lock()
_needs_of: weakref.WeakKeyDictionary[object, list[_Need]] = weakref.WeakKeyDictionary()
"""What needs kernels, as long as it lives: resolved policies, promotions, notes of results."""


class _Ended:
    """Holds whether a user of kernels was freed since ``_update`` last looked."""

    unnoticed = False


def need(user: object, *needs: _Need) -> None:
    """Install kernels for as long as ``user`` lives."""
    weakref.finalize(user, _a_user_ended).atexit = False
    with _lock:
        _needs_of[user] = [*_needs_of.get(user, ()), *needs]
        try:
            _update()
        except BaseException:
            del _needs_of[user]
            raise
    _remove_unneeded()


def _a_user_ended() -> None:
    _Ended.unnoticed = True
    _remove_unneeded()


def _remove_unneeded() -> None:
    """Remove the kernels that nothing needs any more.

    Garbage is collected anywhere, perhaps while this or another thread changes kernels. So this does not wait
    for the lock: the thread that holds it looks again after its release.
    """
    while _Ended.unnoticed and _lock.acquire(blocking=False):
        try:
            _Ended.unnoticed = False
            _update()
        finally:
            _lock.release()


def _update() -> None:
    """Install the kernels that are needed and missing, and remove those that are not needed."""
    # Computed from the users that live now. With a count for each kernel, a user whose end was missed would
    # leave its kernels behind.
    needed: defaultdict[str, set[str]] = defaultdict(set)
    ruled: defaultdict[str, set[str]] = defaultdict(set)
    for where, ops, by_rules in itertools.chain.from_iterable(list(_needs_of.values())):
        needed[where].update(ops)
        if by_rules:
            ruled[where].update(ops)
    for where in needed:
        _kernels_on.setdefault(where, _AutocastKernels(where))

    for where, kernels in _kernels_on.items():
        missing = needed[where] - kernels.installed.keys()
        unneeded = kernels.installed.keys() - needed[where]
        if missing or unneeded:
            with _overlays_removed():
                for op in sorted(unneeded):
                    kernels.drop(op)
                for op in sorted(missing):
                    kernels.add(op)
    _update_functorch(ruled)


class Overlay(Protocol):
    """Kernels on top of ours.

    They are removed while ours change, because a new kernel of ours would take them for PyTorch's.
    """

    def begin(self) -> None: ...
    def end(self) -> None: ...


overlays: list[Overlay] = []


@contextmanager
def overlaid(overlay: Overlay) -> Iterator[None]:
    """Put ``overlay`` on top of our kernels; under the lock, since another thread may be changing those."""
    with _lock:
        overlay.begin()
        overlays.append(overlay)
    _remove_unneeded()
    try:
        yield
    finally:
        with _lock:
            overlays.remove(overlay)
            overlay.end()
        _remove_unneeded()


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


# ---- what needs kernels


def root_scope(policy: Policy, device_type: str, dtype: torch.dtype) -> Scope:
    """Return the scope in a region of ``policy``, outside of modules that rules select."""
    if device_type not in TABLES:
        raise UnsupportedError(
            f"expected a device whose autocast table is known ({', '.join(TABLES)}), got {device_type!r}, "
            'where rules and other tables cannot be followed: use a preset without them, as "bf16"'
        )
    on_device = resolved(policy, device_type, format_name(dtype))
    serve(on_device)
    return on_device.root


def serve(resolved_policy: ResolvedPolicy) -> None:
    """Install a kernel for each operator about which this policy decides, as long as the policy lives."""
    if resolved_policy not in _needs_of:
        make_room_for_marks()  # the scopes of a new policy will need marks
        ops = resolved_policy.kernels()
        need(resolved_policy, _Need(resolved_policy.device_type, ops, by_rules=True))


def dtype_and_scope(policy: Policy, device_type: str) -> tuple[torch.dtype, Scope | None]:
    """Return the dtype of a region of ``policy``, and its scope or None if it has no rules."""
    # A region is opened at each step, with the same dtype and scope each time.
    kept = kept_for(policy).regions
    region: tuple[torch.dtype, Scope | None] | None = kept.get(device_type)
    if region is None:
        dtype = resolve(policy, device_type)
        scope = None if policy.is_plain else root_scope(policy, device_type, dtype)
        region = kept[device_type] = (dtype, scope)
    return region


class Promotion:
    """While this lives, operators that raise where formats differ promote, in regions opened with it.

    Args:
        policy: of these regions.
        device_type: the device type on which they cast.
        dtype: their dtype there.
        say: called once for each operator that runs otherwise, with how and why: in fp32, since PyTorch has
            no bf16 or fp16 kernel for it, or with fp16's largest number in place of a larger one.
    """

    def __init__(
        self, policy: Policy, device_type: str, dtype: torch.dtype, say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._said = set[str]()

        needs = [_Need(_BATCHED, promoted_under_vmap())]
        if device_type in TABLES:
            words: set[str | None] = {format_name(dtype)}
            for rule in policy.rules:
                words |= {rule.compute, rule.output}
            low_formats = frozenset({"bf16", "fp16"} & words)
            needs.append(_Need(device_type, promoted_on(device_type, low_formats)))
        if device_type == "cpu":
            needs.append(_Need(_SPARSE_CSR, SPARSE_PRODUCTS))
        need(self, *needs)

        user = object()  # not self, which the set of users would keep alive
        for replacements in (NORMS, FUNCTIONS, DISTRIBUTIONS):
            replacements.begin(user)
            weakref.finalize(self, replacements.end, user).atexit = False
        _promotion.living.add(self)

    def __call__(self, op: str, what: str) -> None:
        """Call ``say`` if this is the first message about ``op``; ``what``: how it runs, and why."""
        if op not in self._said:
            self._said.add(op)
            self._say(f"{op} {what}")


class NotesOfResults:
    """As long as this lives, operators on a device note their results for ``DirectResults``."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._gathers = False
        need(self, _Need(device_type, NOTED))
        _direct_results.living.add(self)

    def begin_gather(self) -> None:
        """Have ``gather`` note its results too; only now, since most models do not need its kernel."""
        if not self._gathers:
            self._gathers = True
            need(self, _Need(self._device_type, (GATHER,)))


# ---- the kernel of an operator


def _kernel(op: str, device_type: str, native: _Kernel) -> _Kernel:
    """Return our kernel of ``op``; ``native`` does what PyTorch would, called with a keyset first."""

    def prepare(scope: Scope) -> _operators.Action | None:
        decision = scope.decide(op)
        if decision is None:
            return None
        action = _operators.action_for(op, decision, scope)
        # These decisions cast nothing, so inputs of different formats may reach the operator.
        if decision.compute in (UNLISTED, FP32_SET_DTYPE) and op in promoted():
            go_on = promoting(op, lambda keyset, *args, **kwargs: action(keyset, args, kwargs), device_type)
            return lambda keyset, args, kwargs: go_on(keyset, *args, **kwargs)
        return action

    @skipped_by_dynamo  # else Dynamo would compile this function after a graph break
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = scope_on(device_type)
        if scope is None:
            return native(keyset, *args, **kwargs)
        # Prepared at the first call in each scope.
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


def _update_functorch(ruled: Mapping[str, Iterable[str]]) -> None:
    """Register in front of ``torch.func`` what the kernels on autocast keys need; remove everything else.

    In front of all layers: operators with a rule, and those on PyTorch's table. Inside a layer: operators
    with a rule that ``vmap`` decomposes; their kernels raise.

    Args:
        ruled: device type -> the operators there that a policy decides about.
    """
    wanted: dict[tuple[str, str], Callable[[str, _Kernel], _Kernel]] = {}
    for device_type, ops in ruled.items():
        for op in (*native_table(device_type), *ops):
            wanted[op, _FRONT] = _kernel_in_front
        for op in ops:
            if has_kernel(qualified(op), _DECOMPOSED):
                wanted[op, _BATCHED] = _kernel_inside

    for place in _functorch.keys() - wanted.keys():
        _functorch.pop(place)._destroy()
    for (op, key), make in wanted.items():
        if (op, key) not in _functorch:
            below = without_autocast_cache(torch.library.get_kernel(qualified(op), key).call_boxed)
            _functorch[op, key] = register_kernel(op, key, make(op, below))


_functorch: dict[tuple[str, str], Any] = {}
"""Operator and key -> the library of its kernel for ``torch.func``."""


def _kernel_in_front(op: str, below: _Kernel) -> _Kernel:
    """Return a kernel that casts above all layers if rules are in force."""
    key = f"in front of {op}"
    missing = object()

    @skipped_by_dynamo
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        action: Any = None
        scope = _scope_of(args, kwargs)
        if scope is not None:
            action = scope.actions.get(key, missing)
            if action is missing:
                action = _prepare_in_front(op, scope)
                # It may be an overlay's kernel, which cannot be called after the overlay's end.
                if not overlays:
                    scope.actions[key] = action
        return below(keyset, *args, **kwargs) if action is None else action(keyset, args, kwargs)

    return kernel


def _prepare_in_front(op: str, scope: Scope) -> _operators.Action | None:
    decision = scope.decide(op)
    # An unlisted operator is not cast itself; its parts are, inside the layers.
    if decision is not None:
        return None if decision.compute == UNLISTED else _operators.action_for(op, decision, scope)
    # PyTorch's own kernel casts here, in front: inside the layers it would be too late. Where ours is
    # installed, a lookup would return ours.
    kernels = _kernels_on[scope.resolved.device_type]
    native = kernels.native.get(op)
    if op not in kernels.installed:
        native = native_kernel(op, kernels.device_type)
    if native is None:
        return None
    return lambda keyset, args, kwargs: native(keyset, *args, **kwargs)


def _kernel_inside(op: str, below: _Kernel) -> _Kernel:
    """Return a kernel that raises where ``vmap`` would ignore the rule in force."""

    @skipped_by_dynamo
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _scope_of(args, kwargs)
        decision = None if scope is None else scope.decide(op)
        if decision is not None and decision.compute != UNLISTED:
            raise UnsupportedError(
                f"torch.vmap would ignore what is decided about {op} ({decision.because}), since {op} was "
                "called inside another operator: call it by itself, or give the other operator a rule"
            )
        return below(keyset, *args, **kwargs)

    return kernel


def _scope_of(args: Any, kwargs: Any) -> Scope | None:
    """Return the scope of the first device type with autocast on and a tensor in the call, or None."""
    for device, scope in scopes_here().items():
        if torch.is_autocast_enabled(device):
            tensors = _operators.tensors_in((*args, *kwargs.values()))
            if any(tensor.device.type == device for tensor in tensors):
                return scope
    return None

"""Rules inside the transformations of ``torch.func``: kernels in front of its layers.

``vmap``, ``grad`` and ``jvp`` stand above autocast in PyTorch's dispatcher. ``vmap`` takes composites apart
before autocast sees them, so that a rule for ``softmax`` would be passed over; and below each layer autocast
is on again, so that the product inside a ``linear`` that a rule computes in fp32 would be cast to the
region's format. So while there are kernels of ours, some stand where a call enters the layers. If rules are
in force in the calling thread they cast there, above all layers, and what follows runs with autocast off;
composites without a rule are taken apart there. Outside of ``torch.func`` nothing reaches them.

What a layer itself calls meets none of them. Where ``vmap`` would pass over a rule for it, that is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from narrowcast.casting import _operators
from narrowcast.casting._operators import without_autocast_cache
from narrowcast.casting._scopes import scopes_here
from narrowcast.casting._torch_internals import (
    decomposition_of,
    has_kernel,
    make_library,
    names_of_composites,
    skipped_by_dynamo,
)
from narrowcast.errors import UnsupportedError
from narrowcast.policy import UNLISTED, Scope, operator

_FRONT = "FuncTorchDynamicLayerFrontMode"
_BATCHED = "FuncTorchBatched"
_TAKEN_APART = "FuncTorchBatchedDecomposition"
_Kernel = Callable[..., Any]


class Front:
    """The kernels in front of the layers, for rules on every type of device.

    Args:
        native_of: what autocast itself does with an operator on a type of device, to be called with a keyset
            first; None: nothing.
    """

    def __init__(self, native_of: Callable[[str, str], _Kernel | None]) -> None:
        self._native_of = native_of
        self._covered: dict[tuple[str, str], Any] = {}  # operator and key -> the library of its kernel
        self._of_rules: dict[str, list[tuple[str, str]]] = {}  # what is there for a ruled operator alone

    def cover(self, ruled: Iterable[str], listed: Iterable[str]) -> None:
        """See to operators with kernels of ours, those on PyTorch's table, and every composite."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for op in (*listed, *(() if self._covered else names_of_composites())):
                if not self._add(op, _FRONT, self._kernel_in_front) and op in self._of_rules:
                    self._of_rules[op] = [one for one in self._of_rules[op] if one != (op, _FRONT)]
            for op in ruled:
                alone = self._of_rules.setdefault(op, [])
                if self._add(op, _FRONT, self._kernel_in_front):
                    alone.append((op, _FRONT))
                if has_kernel(_qualified(op), _TAKEN_APART) and self._add(op, _BATCHED, self._kernel_inside):
                    alone.append((op, _BATCHED))

    def uncover(self, ruled: Iterable[str] | None = None) -> None:
        """Take away the kernels that only these operators needed; by default every one."""
        if ruled is None:
            gone = list(self._covered)
            self._of_rules.clear()
        else:
            gone = [one for op in ruled for one in self._of_rules.pop(op, ())]
        for one in gone:
            self._covered.pop(one)._destroy()

    def _add(self, op: str, key: str, make: Callable[[str, _Kernel, bool], _Kernel]) -> bool:
        if (op, key) in self._covered:
            return False
        qualified = _qualified(op)
        namespace, _, word = qualified.partition("::")
        library = self._covered[op, key] = make_library(namespace)
        below = without_autocast_cache(torch.library.get_kernel(qualified, key).call_boxed)
        of_its_own = has_kernel(qualified, key) or has_kernel(qualified, _BATCHED)
        kernel = make(op, below, of_its_own)
        library.impl(word, kernel, key, with_keyset=True)
        return True

    def _kernel_in_front(self, op: str, below: _Kernel, of_its_own: bool) -> _Kernel:
        """Casts above all layers, where rules are in force.

        ``of_its_own``: whether the layers have something of their own for ``op``, and do not take it apart.
        """
        word = f"in front of {op}"

        @skipped_by_dynamo
        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            for device, scope in scopes_here().items():
                if torch.is_autocast_enabled(device) and _is_on(device, args, kwargs):
                    action: Any = scope.actions.get(word, self)
                    if action is self:
                        action = scope.actions[word] = self._prepare(op, scope, of_its_own)
                    return below(keyset, *args, **kwargs) if action is None else action(keyset, args, kwargs)
            return below(keyset, *args, **kwargs)

        return kernel

    def _prepare(self, op: str, scope: Scope, of_its_own: bool) -> _operators.Action | None:
        decision = scope.decide(op)
        if decision is not None and decision.compute != UNLISTED:
            return _operators.action_for(op, decision, scope)
        native = self._native_of(op, scope.resolved.device_type) if decision is None else None
        if native is not None:
            return lambda keyset, args, kwargs: native(keyset, *args, **kwargs)
        if of_its_own or not has_kernel(_qualified(op), "CompositeImplicitAutograd"):
            return None
        apart = decomposition_of(operator(op))
        return lambda _keyset, args, kwargs: apart(*args, **kwargs)

    def _kernel_inside(self, op: str, below: _Kernel, _of_its_own: bool) -> _Kernel:
        """Refuses where ``vmap`` would pass over the rule that is in force."""

        @skipped_by_dynamo
        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            for device, scope in scopes_here().items():
                if torch.is_autocast_enabled(device) and _is_on(device, args, kwargs):
                    decision = scope.decide(op)
                    if decision is not None and decision.compute != UNLISTED:
                        raise UnsupportedError(
                            f"{op} was called inside another operator under torch.vmap, which passes over "
                            f"what is decided about it ({decision.because}); call it by itself, or give the "
                            "other operator a rule"
                        )
            return below(keyset, *args, **kwargs)

        return kernel


def _qualified(op: str) -> str:
    return op if "::" in op else f"aten::{op}"


def _is_on(device: str, args: Any, kwargs: Any) -> bool:
    """Whether some tensor is on a device of that type."""
    return any(one.device.type == device for one in _operators.tensors_in((*args, *kwargs.values())))

"""Report each call of an operator together with the decision of autocast about it.

While a watcher is active, all operators that do not write to their arguments have a kernel on the autocast
key that calls the kernel below it and reports the call. Composites are reported, and so are their parts if
they are decomposed. Calls inside an operator that was cast as a whole are not reported: autocast is off
there. Calls that other kernels make are reported only if they are cast, for example the matmul that a sparse
matmul calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.casting._torch_internals import has_kernel, register_kernel, skipped_by_dynamo
from narrowcast.casting.kernels import _kernels, _operators
from narrowcast.casting.kernels._operators import below_autocast, native_kernel
from narrowcast.casting.kernels._promotion import why_no_lstm
from narrowcast.casting.regions._scopes import region_dtype, scope_on
from narrowcast.errors import OrderError
from narrowcast.policy import UNLISTED, Rule, autocast_key, every_operator, native_table, operator, qualified

# Python's Tensor relies on these to make a plain tensor of a Parameter.
_LEFT_ALONE = frozenset({"detach", "alias", "lift", "lift_fresh", "_make_dual", "_fw_primal"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call of an operator in a region.

    Attributes:
        op: as ``"linear"`` or ``"softmax.int"``.
        inputs, outputs: tensors among the arguments before casts, and among the results, lists flattened.
        dtype: the dtype that eligible inputs were cast to; None: no cast.
        rule: the rule that decided; None: PyTorch's table, or nothing.
        because: the reason of the decision, as text.
        listed: whether a rule or a table decides about it.
        composite: whether it was decomposed; its parts are then reported as calls of their own.
        enclosing: the operators that it was called in, outermost first.
    """

    op: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    dtype: torch.dtype | None
    rule: Rule | None
    because: str
    listed: bool
    composite: bool
    enclosing: tuple[str, ...]


class _Thread(threading.local):
    def __init__(self) -> None:
        # The operators that the thread is in, each with whether it was decomposed.
        self.under_way: list[tuple[str, bool]] = []


_thread = _Thread()


def ops_under_way() -> tuple[str, ...]:
    """Return the watched operators that the calling thread is in, outermost first."""
    return tuple(op for op, _ in _thread.under_way)


@contextmanager
def watch_ops(listener: Callable[[OpCall], None], *, device_type: str = "cpu") -> Iterator[None]:
    """Call ``listener`` after each operator in regions on ``device_type``, in every thread.

    A watched operator takes some 10 microseconds longer. What ``listener`` itself computes is watched too,
    unless it does so with autocast off. A second watcher is refused.
    """
    if _kernels.overlays:
        raise OrderError(
            "expected no other trace of operators, got one that is still open: leave its with statement first"
        )
    for low in (torch.bfloat16, torch.float16):
        why_no_lstm(low)  # tries an LSTM at the first call, which would be reported as the caller's
    with _kernels.overlaid(_Watch(device_type, listener)):
        yield


class _Watch:
    """The kernels of one watcher."""

    def __init__(self, device_type: str, listener: Callable[[OpCall], None]) -> None:
        self._device_type = device_type
        self._listener = listener
        self._libraries: dict[str, Any] = {}

    def begin(self) -> None:
        key = autocast_key(self._device_type)
        for op in every_operator():
            if op in _LEFT_ALONE:
                continue
            namespace = qualified(op).partition("::")[0]
            # What the operator does without being watched: under a rule, on PyTorch's table, or neither.
            below = (
                _kernels.own_kernel(op, self._device_type)
                or native_kernel(op, self._device_type)
                or below_autocast(operator(op), self._device_type)
            )
            watched = self._watched(op, below)
            self._libraries[namespace] = register_kernel(op, key, watched, self._libraries.get(namespace))

    def end(self) -> None:
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()

    def _watched(self, op: str, below: Callable[..., Any]) -> Callable[..., Any]:
        """Return the kernel of ``op``; PyTorch may call it after ``end``, see ``own_kernel``."""
        device_type, listener = self._device_type, self._listener
        kind = native_table(device_type).get(op)
        is_composite = has_kernel(qualified(op), "CompositeImplicitAutograd")

        @skipped_by_dynamo
        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._libraries:  # called after ``end``
                return below(keyset, *args, **kwargs)
            enclosing = ops_under_way()
            compute, rule, because = _decided(op, device_type, kind)
            is_decomposed = is_composite and compute in (None, UNLISTED)
            # Inside an operator that is not decomposed, only calls that are cast are reported.
            is_inside_a_kernel = bool(enclosing) and not _thread.under_way[-1][1]
            _thread.under_way.append((op, is_decomposed))
            try:
                result = below(keyset, *args, **kwargs)
            finally:
                _thread.under_way.pop()
            if is_inside_a_kernel and compute is None:
                return result

            inputs = _operators.tensors_in((*args, *kwargs.values()))
            dtype = None
            if compute is not None:
                dtype = _operators.compute_dtype(compute, region_dtype(device_type), inputs, device_type)
            listener(
                OpCall(
                    op=op,
                    inputs=tuple(inputs),
                    outputs=tuple(_operators.tensors_in(result)),
                    dtype=dtype,
                    rule=rule,
                    because=because,
                    listed=compute is not None,
                    composite=is_decomposed,
                    enclosing=enclosing,
                )
            )
            return result

        return kernel


def _decided(op: str, device_type: str, kind: str | None) -> tuple[str | None, Rule | None, str]:
    """Return the word that decides about ``op`` in this thread (None: nothing does), the rule, and why.

    ``kind`` is how PyTorch's table for ``device_type`` casts ``op``; None: it is not on the table.
    """
    scope = scope_on(device_type)
    decision = None if scope is None else scope.decide(op)
    if decision is not None:
        return decision.compute, decision.rule, decision.because
    if kind is None:
        return None, None, "unlisted: in the formats that come"
    return kind, None, f"PyTorch's table for {device_type}"

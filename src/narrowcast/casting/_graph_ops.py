"""One call in a graph, run on tensors without data: which operators it comes to, and which of them are cast.

Dynamo's graphs hold calls as a person writes them (``F.linear``, ``x @ y``, ``einsum``). Where PyTorch's
autocast decides is below that: at the dispatcher's operators, composites before what they are made of. So a
call is run with a mode above autograd and autocast that sees those operators one by one, and does with each
what the eager engine would; once more, recorded by ``make_fx``, where that changed something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting._actions import Action, action_for
from narrowcast.casting._torch_internals import (
    ModeAboveAutograd,
    asks_whether_key_is_off,
    has_kernel,
    record_above_autograd,
    run_in_mode,
    without_key,
)
from narrowcast.policy import UNLISTED, Decision, Scope, base_of

CAST: Any = torch.ops.aten._to_copy.default
"""What a cast of ours is in a graph; those of the model itself stay ``to``."""
_aten: Any = torch.ops.aten
_ASKING = frozenset({_aten.size.default, _aten.stride.default, _aten.storage_offset.default})
_DECOMPOSE = "decompose"
_PLAIN = (int, float, str, bool, torch.dtype, torch.device, torch.memory_format, torch.layout)


class Caster:
    """What is done with each operator; the graph's walk says where in the model it is called from.

    Attributes:
        place: rules in force for the calls that come now.
    """

    def __init__(self, place: Scope) -> None:
        self.place = place
        self._device = place.resolved.device_type
        self.is_off = asks_whether_key_is_off(self._device)
        self._off = without_key(self._device)
        self._found: dict[tuple[Any, int, bool], Action | str | None] = {}
        self._places: list[Scope] = []  # kept alive, since they are told apart by identity

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, dict[Any, bool]]:
        """The result of ``call``, with casts, and the operators that it came to.

        Of each operator that was seen: whether it was cast, or is made of something that was.
        """
        mode = _Watching(self)
        result = run_in_mode(mode, call, args, kwargs)
        return result, mode.seen

    def record(self, call: Callable[..., Any], inputs: list[Any], seen: dict[Any, bool]) -> Any:
        """The graph of ``call(*inputs)`` with its casts; ``seen`` is what ``run`` gave for it."""
        recording = _Recording(self, seen)
        table = {op: recording.of(op) for op in (*seen, _aten.to.dtype)}
        return record_above_autograd(call, table, inputs)

    def plainly(self, op: Any, args: Any, kwargs: Any) -> Any:
        with self._off():
            return op(*args, **kwargs)

    def action(self, op: Any, args: Any) -> Action | str | None:
        """What becomes of a call of ``op``: an action, taking it apart, or nothing."""
        as_onednn = _is_onednn_lstm(op, args)
        key = (op, id(self.place), as_onednn)
        if key not in self._found:
            self._places.append(self.place)
            self._found[key] = self._action(op, as_onednn)
        return self._found[key]

    def _action(self, op: Any, as_onednn: bool) -> Action | str | None:
        name = op.name().removeprefix("aten::")
        composite = has_kernel(op.name(), "CompositeImplicitAutograd")
        otherwise = _DECOMPOSE if composite else None
        if op._schema.is_mutable or op in _ASKING or op.namespace == "prim":
            return None if op in _ASKING else otherwise
        decision = self._decision(name)
        if decision is None and as_onednn:
            decision = self._decision("mkldnn_rnn_layer")
        if decision is None and name.endswith(".vec"):
            # Such an overload only works out the output's size before it calls the operator itself; under a
            # tracer it is something else altogether.
            decision = self._decision(base_of(name))
        if decision is None or decision.compute == UNLISTED:
            return otherwise
        return action_for(name, decision, self.place)

    def _decision(self, name: str) -> Decision | None:
        resolved = self.place.resolved
        kind = resolved.native.get(name)
        found = self.place.decide(name)
        if found is None and kind is not None:
            return Decision(compute=kind, because=resolved.why_native(name))
        return found


class _Watching(ModeAboveAutograd):  # type: ignore[misc]
    """Runs each operator as ``Caster`` says. Of the class that PyTorch lets stand above autograd."""

    def __init__(self, caster: Caster) -> None:
        super().__init__(None, "real", pre_dispatch=True)
        self.caster = caster
        self.seen: dict[Any, bool] = {}
        self._acting: tuple[Any, Any, Any] | None = None  # the call that is being cast
        self._changed = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        caster = self.caster
        if self._acting is not None:
            # The call itself, or a cast before or after it.
            self._changed |= not _is_same(self._acting, (op, args, kwargs))
            return caster.plainly(op, args, kwargs)
        if caster.is_off():
            return caster.plainly(op, args, kwargs)
        self.seen.setdefault(op, False)
        action = caster.action(op, args)
        if action is None:
            return caster.plainly(op, args, kwargs)
        before, self._changed = self._changed, False
        try:
            with self:
                if action is _DECOMPOSE:
                    result = op.decompose(*args, **kwargs)
                else:
                    self._acting = (op, args, kwargs)
                    try:
                        result = action(None, args, kwargs)  # type: ignore[operator]
                    finally:
                        self._acting = None
            if self._changed:
                self.seen[op] = True
        finally:
            self._changed |= before
        return result

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


def _is_onednn_lstm(op: Any, args: Any) -> bool:
    """Whether eager code would hand this LSTM to oneDNN, in one operator that PyTorch's table lists.

    Under a tracer it is made of others, which would give other formats.
    """
    if op is not torch.ops.aten.lstm.input or not args[0].is_cpu:
        return False
    hidden, cell = args[1]
    onednn: Any = torch.backends.mkldnn
    return bool(
        onednn.is_available() and onednn.enabled and hidden.shape[-1] == cell.shape[-1]
    )  # it knows no projections


def _is_same(first: Any, second: Any) -> bool:
    """Whether two calls, or two of their arguments, are the very same; said of fewer than are."""
    if first is second:
        return True
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_same(first[key], second[key]) for key in first)
    return type(first) is type(second) and isinstance(first, _PLAIN) and bool(first == second)


class _Recording:
    """The same, while ``make_fx`` records: as what it calls for each operator before it records it."""

    def __init__(self, caster: Caster, seen: dict[Any, bool]) -> None:
        self._caster = caster
        self._seen = seen
        self._acting: Any = None  # the operator that is being cast, which is recorded whole

    def of(self, op: Any) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            caster = self._caster
            if op is _aten.to.dtype and self._acting not in (None, op):
                return caster.plainly(CAST, args[:1], {"dtype": args[1]})
            if caster.is_off():
                return NotImplemented  # record it
            action = caster.action(op, args)
            if action is None or (action is _DECOMPOSE and not self._seen.get(op)):
                return caster.plainly(op, args, kwargs)
            if action is _DECOMPOSE:
                return op.decompose(*args, **kwargs)
            self._acting = op
            try:
                return action(None, args, kwargs)  # type: ignore[operator]
            finally:
                self._acting = None

        return instead

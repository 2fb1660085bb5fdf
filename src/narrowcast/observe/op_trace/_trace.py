"""What ran in which format: every operator that autocast decides about, and the operations that ran in it.

Two views of the same calls are joined. ``casting.watch_ops`` reports each operator with the decision about
it, after those that it called. ``OperationWatch`` reports each operation that really ran, with its time, its
bytes and its casts. An operation belongs to the innermost operator in which it ran.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

from narrowcast.casting import rule_that_casts, watch_ops
from narrowcast.observe.op_trace._operations import (
    BACKWARD,
    ModulePaths,
    Operation,
    OperationWatch,
    Place,
    formats_of,
)
from narrowcast.observe.op_trace._rules import ReachedRules
from narrowcast.policy import Policy, format_name

_AS_BACKWARD = "backward: in the formats of the forward"
_NO_REGION = "outside of every region"
_NO_INPUT = "it has no input to cast"
_BORDER = "a rule for the module casts what goes in, or what comes out"
_WIDE = ("fp32", "float64", "complex64", "complex128")


@dataclass(slots=True, eq=False)
class Site:
    """Calls of one operator at one place, with the same formats and the same decision."""

    place: Place
    op: str
    within: tuple[str, ...]
    inputs: tuple[str, ...]
    computes: str | None
    outputs: tuple[str, ...]
    because: str
    rule: str | None
    listed: bool
    calls: int = 0
    operations: list[Operation] = field(default_factory=list)

    def add(self, operations: Sequence[Operation], *, calls: int = 1) -> None:
        self.calls += calls
        self.operations += operations
        for operation in operations:
            operation.site = self

    def call(self) -> dict[str, str]:
        """Return the event fields of a call here."""
        return {
            "root": self.place.root,
            "path": self.place.path,
            "phase": self.place.phase,
            "op": self.op,
        }

    def event(self) -> dict[str, Any]:
        casts = [operation for operation in self.operations if operation.cast is not None]
        return {
            "event": "site",
            **self.call(),
            "within": list(self.within),
            "kind": self._kind(),
            "inputs": list(self.inputs),
            "computes": self.computes,
            "outputs": list(self.outputs),
            "because": self.because,
            "rule": self.rule,
            "listed": self.listed,
            "calls": self.calls,
            "casts": len(casts),
            "cast_bytes": sum(operation.moved_bytes for operation in casts),
            "duration_s": _took_s(self.operations),
        }

    def _kind(self) -> str:
        ran = [operation for operation in self.operations if not operation.is_view]
        if not ran:
            return "view"
        if any(operation.multiplies is not None for operation in ran):
            return "product"
        if all(operation.cast is not None for operation in ran):
            return "cast"
        return "other" if self.inputs or self.outputs else "no floats"


@dataclass(slots=True, eq=False)
class Collected:
    """Sites by their first nine fields, and pairs of casts to a format and back."""

    sites: dict[tuple[Any, ...], Site] = field(default_factory=dict)
    round_trips: list[tuple[Operation, Operation]] = field(default_factory=list)

    def site(self, *key: Any) -> Site:
        """Return the site with these fields, a new one if there is none."""
        if key not in self.sites:
            self.sites[key] = Site(*key)
        return self.sites[key]


def together(parts: Sequence[Collected], *, also: Collected | None = None) -> Collected:
    """Join what was collected in several steps; of ``also`` only sites in modules that no part has."""
    found = Collected(round_trips=[trip for part in parts for trip in part.round_trips])
    sites = [item for part in parts for item in part.sites.items()]
    if also is not None:
        known = {key for key, _ in sites}
        sites += [(key, site) for key, site in also.sites.items() if key not in known and site.place.root]
    for key, site in sites:
        found.site(*key).add(site.operations, calls=site.calls)
    return found


@dataclass(slots=True, eq=False)
class _Call:
    """An operator that returned.

    Attributes:
        key: the fields of its ``Site``.
        depth: in how many watched operators it was called.
        decided: whether it, or an operator inside it, was decided about.
        operations: that belong to it.
        calls: 0 if only its parts are counted, else 1.
    """

    key: tuple[Any, ...]
    depth: int
    decided: bool
    operations: list[Operation]
    calls: int = 1


class _Thread(threading.local):
    def __init__(self, all_pending: list[list[_Call | Operation]]) -> None:
        self.pending: list[_Call | Operation] = []  # what no operator that returned has claimed yet
        all_pending.append(self.pending)


class OpTrace:
    """Watches every operator between entering and leaving it::

        with OpTrace(policy) as trace:
            trace.paths.add_model(model)
            with nc.autocast("cuda", policy=policy):
                model(batch)
        events = trace_events(trace.take(), trace.unreached(), {...})

    Watching costs some tens of microseconds an operation. They are not counted as its time, but disturb the
    caches; on a GPU the time of small operations includes their launch.

    Args:
        policy: whose rules are looked for.
        device_type: on which regions are watched.

    Attributes:
        paths: add each model before it is called; set ``in_optimizer`` while an optimizer steps.
        rules: which were reached.
    """

    def __init__(self, policy: Policy, device_type: str = "cpu") -> None:
        self.paths = ModulePaths(self._saw_fp8)
        self.rules = ReachedRules(policy)
        self._device_type = device_type
        self._watch = OperationWatch(self.paths.here, self._saw_operation)
        self._all_pending: list[list[_Call | Operation]] = []  # of every thread
        self._thread = _Thread(self._all_pending)
        self._lock = threading.Lock()
        self._collected = Collected()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.paths)
        self._stack.enter_context(watch_ops(self._saw_call, device_type=self._device_type))
        self._stack.enter_context(self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def take(self) -> Collected:
        """Return what was seen since entering, or since the last call of this method."""
        with self._lock:
            self._count_pending()
            found, self._collected = self._collected, Collected()
            found.round_trips, self._watch.round_trips = self._watch.round_trips, []
        return found

    def unreached(self) -> list[dict[str, Any]]:
        """Return the rules that no call reached; see ``ReachedRules.unreached``."""
        return self.rules.unreached(self.paths.called_modules())

    # ---- callbacks

    def _saw_operation(self, operation: Operation) -> None:
        self._thread.pending.append(operation)

    def _saw_call(self, call: Any) -> None:
        """Count an operator as a whole if nothing inside it was decided, else what is inside by itself."""
        depth, border, pending = len(call.enclosing), rule_that_casts(), self._thread.pending
        at = len(pending)
        while at and pending[at - 1].depth > depth:
            at -= 1
        inside, pending[at:] = pending[at:], []
        rule = border or call.rule
        key = (
            self.paths.here(),
            call.op,
            tuple(call.enclosing),
            formats_of(call.inputs),
            None if call.dtype is None else format_name(call.dtype),
            formats_of(call.outputs),
            call.because if border is None else _BORDER,
            None if rule is None else str(rule),
            bool(call.listed),
        )
        made = _Call(key, depth, call.listed and not call.composite, [])
        made.operations = own = [one for one in inside if isinstance(one, Operation)]
        parts = [one for one in inside if isinstance(one, _Call)]
        with self._lock:
            self.rules.saw(call.op, rule, [operation.op for operation in own])
            if not made.decided and any(part.decided for part in parts):
                for part in parts:
                    self._count_call(part)
                made.decided = True
                made.calls = int(any(not operation.is_view for operation in own))
            else:
                made.operations = own + [operation for part in parts for operation in part.operations]
            if depth == 0:
                self._count_call(made)
            else:
                pending.append(made)

    def _saw_fp8(self, place: Place, module: Any, args: Any, output: Any) -> None:
        """Count what ran in a linear layer in fp8 as one matmul, by the rule for the layer."""
        pending = self._thread.pending
        at = len(pending)
        while at and isinstance(one := pending[at - 1], Operation) and one.place == place:
            at -= 1
        mine = [one for one in pending[at:] if isinstance(one, Operation)]
        del pending[at:]
        given = [one for one in (*args, *module.parameters()) if isinstance(one, torch.Tensor)]
        made = [output] if isinstance(output, torch.Tensor) else []
        with self._lock:
            rule = str(self.rules.of_fp8(place.path, module))
            formats = formats_of(given), module.fp8_recipe, formats_of(made)
            self._collected.site(place, "linear", (), *formats, rule, rule, True).add(mine)

    def _count_call(self, call: _Call) -> None:
        if call.calls:
            self._collected.site(*call.key).add(call.operations)

    def _count_pending(self) -> None:
        """Count what ran in no watched operator: backward, optimizers, code outside of regions."""
        for pending in list(self._all_pending):
            for one in pending:
                if isinstance(one, Operation):
                    rule = None if one.rule is None else str(one.rule)
                    key = (one.place, one.op, (), one.inputs, None, one.outputs, _why(one), rule, False)
                    self._collected.site(*key).add([one])
            pending.clear()


def _why(operation: Operation) -> str:
    """Say why an operation outside of every watched operator computed in its formats."""
    if operation.place.phase == BACKWARD:
        return _AS_BACKWARD
    if operation.rule is not None:
        return _BORDER
    return _NO_REGION if operation.inputs else _NO_INPUT


# ---- events of a capture


def trace_events(
    seen: Collected, unreached: list[dict[str, Any]], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the events of a trace, ``watched`` with its totals last.

    Args:
        seen: what was collected.
        unreached: rules that no call reached.
        facts: more fields of ``watched``.
    """
    sites = list(seen.sites.values())
    ran = [operation for site in sites for operation in site.operations if not operation.is_view]
    casts = [operation for operation in ran if operation.cast is not None]
    products = [operation for operation in ran if operation.multiplies is not None]
    totals = {
        "event": "watched",
        "ops": len(ran),
        "casts": len(casts),
        "moved_bytes": sum(operation.moved_bytes for operation in ran),
        "cast_bytes": sum(operation.moved_bytes for operation in casts),
        "duration_s": _took_s(ran),
        "cast_s": _took_s(casts),
        "product_s": _took_s(products),
        "narrow_product_s": _took_s(product for product in products if product.multiplies not in _WIDE),
    }
    return [
        *(site.event() for site in sites),
        *_round_trip_events(seen.round_trips),
        *({"event": "unreached", **found} for found in unreached),
        {**totals, **facts},
    ]


def _took_s(operations: Iterable[Operation]) -> float:
    return sum((operation.took_s() for operation in operations), 0.0)


def _round_trip_events(pairs: list[tuple[Operation, Operation]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for first, second in pairs:
        assert first.cast is not None
        narrow, wide = first.cast[1], first.cast[0]
        event = found.setdefault(
            (first.site, second.site, first.cast),
            {
                "event": "round trip",
                "formats": [wide, narrow, wide],
                "first": first.site.call(),
                "second": second.site.call(),
                "count": 0,
                "moved_bytes": 0,
            },
        )
        event["count"] += 1
        event["moved_bytes"] += first.moved_bytes + second.moved_bytes
    return list(found.values())

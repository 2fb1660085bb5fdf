"""What ran in which format: every operator that autocast decides about, and the operations that ran in it.

Two views of the same calls are joined. ``casting.watch_ops`` reports each operator with the decision about
it, after those that it called. ``OperationWatch`` reports each operation that really ran, with its time, its
bytes and its casts. An operation belongs to the innermost operator around it that was decided about, or to
the outermost one if there is none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple, Self

import torch

from narrowcast.capture import json_ready
from narrowcast.casting import rule_that_casts, watch_ops
from narrowcast.errors import nearest_name
from narrowcast.observe.op_trace._operations import (
    BACKWARD,
    FORWARD,
    ModulePaths,
    Operation,
    OperationWatch,
    formats_of,
)
from narrowcast.policy import (
    FP8_RECIPES,
    Policy,
    Rule,
    base_of,
    class_names,
    format_name,
    names_module,
    without_prefix,
)

_BORDER = "a rule for the module casts what goes in, or what comes out"
_WIDE = ("fp32", "float64", "complex64", "complex128")
# How many names of modules a rule's name is compared with, to suggest a similar one.
_MOST_MODULES = 500
# Which of these a matmul becomes depends on its bias and its number of dimensions.
_MATMULS = ("mm", "addmm", "matmul", "bmm", "baddbmm", "mv", "addmv")


class Site(NamedTuple):
    """What the calls of one operator at one place share; fields of the event ``site``."""

    root: str
    path: str
    phase: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    because: str
    within: tuple[str, ...] = ()
    computes: str | None = None
    rule: str | None = None
    listed: bool = False


Collected = dict[Site, list[list[Operation]]]
"""What ran at each site: the operations of each call."""


def together(parts: Iterable[Collected], *, also: Collected | None = None) -> Collected:
    """Join what several steps collected; add those sites of ``also`` that are in a module and in no part."""
    joined: Collected = {}
    for part in parts:
        for site, calls in part.items():
            joined.setdefault(site, []).extend(calls)
    if also is not None:
        for site, calls in also.items():
            if site.root and site not in joined:
                joined[site] = calls
    return joined


class _Unclaimed(threading.local):
    """Operations of a thread that no operator has claimed yet.

    Attributes:
        has_decided_part: whether something inside the outermost operator under way was decided about.
    """

    # threading.local calls it again in each thread that uses the object.
    def __init__(self, of_all_threads: list[list[Operation]]) -> None:
        self.operations: list[Operation] = []
        self.has_decided_part = False
        of_all_threads.append(self.operations)


class OpTrace:
    """Watches every operator between entering and leaving it::

        with OpTrace(policy) as trace:
            trace.paths.add_model(model)
            with nc.autocast("cuda", policy=policy):
                model(batch)
        events = trace_events(trace.take(), trace.rules.unreached(), {...})

    Watching costs some tens of microseconds an operation. They are not counted as its time, but disturb the
    caches; on a GPU the time of small operations includes their launch. Add each model to ``paths`` before
    it is called, and set ``paths.in_optimizer`` while an optimizer steps.
    """

    def __init__(self, policy: Policy, device_type: str = "cpu") -> None:
        self.paths = ModulePaths()
        self.rules = ReachedRules(policy, self.paths)
        self._device_type = device_type
        self._watch = OperationWatch(self.paths, self._saw_operation)
        self._unclaimed_of_all: list[list[Operation]] = []
        self._unclaimed = _Unclaimed(self._unclaimed_of_all)
        self._lock = threading.Lock()
        self._collected: Collected = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.paths)
        self._stack.enter_context(watch_ops(self._saw_call, device_type=self._device_type))
        self._stack.enter_context(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take(self) -> Collected:
        """Return what was seen since entering, or since the last call of this method."""
        with self._lock:
            # These ran in no watched operator: backward, optimizers, operators that write in place, and code
            # outside of regions.
            for operations in list(self._unclaimed_of_all):
                for operation in operations:
                    self._count_alone(operation)
                operations.clear()
            found, self._collected = self._collected, {}
        return found

    # ---- callbacks

    def _saw_operation(self, operation: Operation) -> None:
        if operation.place.fp8_rule is not None and operation.depth == 0:
            # No watched operator will claim it. It is counted now and not in take(), so that its row stands
            # among those of its module's neighbours.
            with self._lock:
                self._count_alone(operation)
        else:
            self._unclaimed.operations.append(operation)

    def _saw_call(self, call: Any) -> None:
        """Record an operator that was decided about, or an outermost one, with the operations it claims."""
        depth = len(call.enclosing)
        module_rule = rule_that_casts()
        rule = module_rule or call.rule
        is_decided = call.listed and not call.composite
        is_outermost = depth == 0
        inside: list[Operation] = []
        if is_decided or is_outermost:
            inside = self._claimed(depth)

        unclaimed = self._unclaimed
        has_row = is_decided
        if is_outermost and not is_decided:
            # Parts that were decided about have rows of their own. The whole then has a row only if
            # operations ran in it that no part claimed.
            has_row = not unclaimed.has_decided_part or bool(_computed(inside))
        if is_outermost:
            unclaimed.has_decided_part = False
        elif is_decided:
            unclaimed.has_decided_part = True

        with self._lock:
            self.rules.saw(call.op, rule, [operation.op for operation in inside])
            if not has_row:
                return
            place = self.paths.here()
            site = Site(
                root=place.root,
                path=place.path,
                phase=place.phase,
                op=call.op,
                inputs=formats_of(call.inputs),
                outputs=formats_of(call.outputs),
                because=call.because if module_rule is None else _BORDER,
                within=tuple(call.enclosing),
                computes=_name_or_none(call.dtype),
                rule=_text_or_none(rule),
                listed=call.listed,
            )
            self._collected.setdefault(site, []).append(inside)

    def _claimed(self, depth: int) -> list[Operation]:
        """Take the operations that ran in the operator at ``depth`` which ends now."""
        operations = self._unclaimed.operations
        first = len(operations)
        while first and operations[first - 1].depth > depth:
            first -= 1
        inside = operations[first:]
        del operations[first:]
        return inside

    def _count_alone(self, operation: Operation) -> None:
        """Count an operation that ran outside of every watched operator, and say why it has its format."""
        place, rule = operation.place, operation.rule
        computes: str | None = None
        if place.fp8_rule is not None:
            rule, because = place.fp8_rule, str(place.fp8_rule)
            if operation.multiplies is not None:
                computes = rule.compute
            self.rules.saw(operation.op, rule, ())
        elif place.phase == BACKWARD:
            because = "backward: in the formats of the forward"
        elif rule is not None:
            because = _BORDER
        elif place.phase == FORWARD and base_of(operation.op).endswith("_"):
            because = "it writes to its argument, which autocast never casts"
        elif operation.inputs:
            because = "outside of every region"
        else:
            because = "it has no input to cast"
        site = Site(
            root=place.root,
            path=place.path,
            phase=place.phase,
            op=operation.op,
            inputs=operation.inputs,
            outputs=operation.outputs,
            because=because,
            computes=computes,
            rule=_text_or_none(rule),
        )
        self._collected.setdefault(site, []).append([operation])


def _name_or_none(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else format_name(dtype)


def _text_or_none(rule: Rule | None) -> str | None:
    return None if rule is None else str(rule)


# ---- rules


def near_module(rule: Rule, named: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    """Return ``" (did you mean "encoder.*"?)"`` for a rule that names none of these modules, or ``""``."""
    # Paths start at the module that the script calls. If that is a part of a larger module, the rule may have
    # been written with the path in the larger one.
    modules = list(named)
    shorter = without_prefix(rule, modules)
    if shorter is not None:
        return f' (did you mean "{shorter}"? paths start at the module that is called)'
    if rule.module is not None:
        asked = rule.module
        known = [path for path, _ in modules]
    else:
        asked = _without_package(str(rule.module_type))
        known = [_without_package(classes[0]) for _, classes in modules]
    nearest = nearest_name(asked, list(dict.fromkeys(known))[:_MOST_MODULES])
    if nearest is None:
        return ""
    return f' (did you mean "{nearest}"?)'


def _without_package(class_name: str) -> str:
    return class_name.rpartition(".")[2]


class ReachedRules:
    """Records which rules of a policy decided about a call, and explains why the others did not."""

    def __init__(self, policy: Policy, paths: ModulePaths) -> None:
        self._rules, self._paths = policy.rules, paths
        self.clear()

    def clear(self) -> None:
        self._reached: set[Rule] = set()
        self._called: set[str] = set()
        self._around: dict[str, str] = {}  # operation -> the first operator in which it ran

    def saw(self, op: str, rule: Rule | None, below: Iterable[str]) -> None:
        """Note a call of ``op``, which ``rule`` decided about, and in which the operations ``below`` ran."""
        # A rule may name one overload of an operator, or all of them.
        names = {op, base_of(op)}
        self._called |= names
        if rule is not None:
            self._reached.add(rule)
        for inner in below:
            for name in {inner, base_of(inner)} - names:
                self._around.setdefault(name, op)

    def unreached(self) -> list[dict[str, Any]]:
        """Return ``rule`` and ``reason`` of each rule that was not reached."""
        named = [(path, class_names(type(module))) for path, module in self._paths.called_modules()]
        found = []
        for rule in self._rules:
            if rule in self._reached:
                continue
            if rule.is_for_modules:
                if not any(names_module(rule, *module) for module in named):
                    hint = near_module(rule, named)
                    reason = f"it names none of the modules that were called{hint}"
                    found.append({"rule": str(rule), "reason": reason})
                    continue
                # A rule for a whole module casts its inputs, so it is reached whatever the module calls.
                if rule.op is None and rule.compute not in FP8_RECIPES:
                    continue
            found.append({"rule": str(rule), "reason": self._why(rule)})
        return found

    def _why(self, rule: Rule) -> str:
        if rule.compute in FP8_RECIPES:
            return "no linear layer that was called multiplies in fp8 by it"
        op = str(rule.op)
        if op in self._called:
            return f"each call of {op} was decided by a more specific rule, or is outside of its modules"
        names = [op]
        if op in _MATMULS:
            names.extend(_MATMULS)
        for name in names:
            if name in self._around:
                outer = self._around[name]
                whole = f"{outer}, which is decided about as a whole"
                return f"{op} runs only inside {whole}: a rule for {base_of(outer)} reaches it"
        return f"{op} was not called"


# ---- events of a capture


def trace_events(
    seen: Collected, unreached: list[dict[str, Any]], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the events of a trace, the last one ``watched``: totals and ``facts``."""
    events: list[dict[str, Any]] = []
    ran: list[Operation] = []
    for site, calls in seen.items():
        operations = list(chain(*calls))
        events.append(_site_event(site, len(calls), operations))
        ran += _computed(operations)
    events += [{"event": "unreached", **rule} for rule in unreached]

    casts = [operation for operation in ran if operation.is_cast]
    products = [operation for operation in ran if operation.multiplies is not None]
    narrow_products = [operation for operation in products if operation.multiplies not in _WIDE]
    events.append(
        {
            "event": "watched",
            "ops": len(ran),
            "casts": len(casts),
            "moved_bytes": _moved_bytes(ran),
            "cast_bytes": _moved_bytes(casts),
            "duration_s": _took_s(ran),
            "cast_s": _took_s(casts),
            "product_s": _took_s(products),
            "narrow_product_s": _took_s(narrow_products),
            **facts,
        }
    )
    return [json_ready(event) for event in events]


def _computed(operations: Iterable[Operation]) -> list[Operation]:
    return [operation for operation in operations if not operation.is_view]


def _took_s(operations: Iterable[Operation]) -> float:
    return sum(map(Operation.took_s, operations), 0.0)


def _moved_bytes(operations: Iterable[Operation]) -> int:
    return sum(operation.moved_bytes for operation in operations)


def _site_event(site: Site, calls: int, operations: list[Operation]) -> dict[str, Any]:
    casts = [operation for operation in operations if operation.is_cast]
    return {
        "event": "site",
        **site._asdict(),
        "kind": _kind_of(site, operations),
        "calls": calls,
        "casts": len(casts),
        "cast_bytes": _moved_bytes(casts),
        "duration_s": _took_s(operations),
    }


def _kind_of(site: Site, operations: list[Operation]) -> str:
    ran = _computed(operations)
    if not ran:
        return "view"
    if any(operation.multiplies is not None for operation in ran):
        return "product"
    if all(operation.is_cast for operation in ran):
        return "cast"
    if site.inputs or site.outputs:
        return "other"
    return "no floats"

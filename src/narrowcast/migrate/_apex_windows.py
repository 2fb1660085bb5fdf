"""From a scaled backward pass to the step of each optimizer: what looks at its gradients there."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from narrowcast.migrate._apex_always import steps_after
from narrowcast.migrate._apex_calls import Calls
from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._apex_gradients import Lookers
from narrowcast.migrate._apex_plan import Plan
from narrowcast.migrate._apex_steps import Block, Blocks, exclusive, in_plain_branch
from narrowcast.migrate._source import Source
from narrowcast.migrate._walk import walk

_BETWEEN = (
    "gradients may be looked at here between two backward passes of one step, where a scaler cannot unscale: "
    "it does so once, after the last"
)
_ELSEWHERE = (
    "gradients may be looked at here after a backward pass that apex was told not to unscale, and the step "
    "is elsewhere: a scaler unscales once a step"
)
_APART = (
    "gradients may be looked at here between a function that goes backward and one that steps: put it into "
    "one of them"
)
_MIDDLE = "gradients of an earlier iteration are looked at here, which may be scaled still: step first"
_BEFORE = "gradients are changed here before a backward pass, which adds scaled ones to them: do so after it"
_DECORATED = "gradients may be looked at by this decorator, before or after what it is for: write it out"
_OUT_OF_SIGHT = "gradients are looked at here when Python comes to it, which need not be where it stands"
_TURNS = (
    "optimizers step here one after the other in functions of their own, and each would update the scale: "
    "where scaler.update() belongs, once, is not clear"
)
_NEVER_CLEARED = (
    "gradients are not cleared in each iteration here, and each steps: a scaler's step leaves them unscaled, "
    "and the next backward pass adds scaled ones to them"
)
_CLEARED = re.compile(r"zero_grad|\.grad\s*=\s*None|\.zero_\(")
_Event = tuple[int, ast.stmt, bool, ast.Call | None]
_LOOPS = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A statement that calls a function of this file which goes backward, steps or does both."""

    start: int
    statement: ast.stmt
    call: ast.Call
    name: str
    scales: bool
    steps: bool


class Windows:
    """The statements of one file that look at scaled gradients, and whose."""

    def __init__(self, plan: Plan, flow: Flow, calls: Calls, blocks: Blocks, steps: list[ast.Call]) -> None:
        self._plan, self._source, self._flow, self._blocks = plan, plan.source, flow, blocks
        self._lookers = Lookers(plan.source, flow, calls, blocks, steps)
        self._direct: dict[int, list[ast.Call]] = defaultdict(list)
        self._steps: dict[int, list[tuple[ast.Call, str]]] = defaultdict(list)
        for step in steps:
            assert isinstance(step.func, ast.Attribute)
            owner = self._source.code(step.func.value)
            self._steps[id(self._source.function(step))].append((step, owner))
            self._direct[id(self._source.function(step))].append(step)
        # By the id of a function, None's for the module, as in ``blocks``.
        self._turns: dict[int, list[_Turn]] = defaultdict(list)
        for name in self._lookers.scales | self._lookers.steps:
            scales, does_step = name in self._lookers.scales, name in self._lookers.steps
            for call in calls.by_name[name]:
                statement = self._source.statement(call)
                turn = _Turn(self._source.start(statement), statement, call, name, scales, does_step)
                self._turns[id(self._source.function(call))].append(turn)
        for turns in self._turns.values():
            turns.sort(key=lambda one: one.start)

    def turns(self) -> Iterator[int]:
        """Where functions are called that go backward or step."""
        return (turn.start for turns in self._turns.values() for turn in turns)

    def looks(self) -> Iterator[tuple[ast.stmt, str]]:
        """Each statement that looks, with the name of each optimizer whose gradients are scaled there."""
        inside: dict[int, list[ast.stmt]] = defaultdict(list)
        for node in self._source.nodes:
            if isinstance(node, ast.stmt):
                inside[id(self._source.function(node))].append(node)
        for node in self._lookers.decorated():
            self._plan.refuse(node, _DECORATED)
        for one in self._lookers.out_of_sight():
            self._plan.refuse(one, _OUT_OF_SIGHT)
        for function in self._blocks.by_function.keys() | self._steps.keys() | self._turns.keys():
            self._check_turns(function)
            self._check_cleared(function, inside[function])
            for statement in inside[function]:
                how = self._lookers.looks(statement)
                if how is None or in_plain_branch(self._source, statement, self._blocks):
                    continue
                if how == "sure" and self._lookers.changes(statement):
                    self._check_before(function, statement, inside[function])
                for name in self._owners(function, statement, how):
                    if not self._is_between(function, statement, name, how):
                        yield statement, name

    def _events(self, function: int) -> list[_Event]:
        """What goes backward or steps in a function: where, the statement, whether it scales, the step."""
        source = self._source
        found: list[_Event] = []
        found += [(b.start, b.statement, True, None) for b in self._blocks.by_function[function]]
        for step, _ in self._steps[function]:
            found.append((source.start(step), source.statement(step), False, step))
        for turn in self._turns[function]:
            found.append((turn.start, turn.statement, turn.scales, turn.call if turn.steps else None))
        return sorted(found, key=lambda one: one[0])

    def _check_turns(self, function: int) -> None:
        """Refuse two steps, one of them in a function that is called, without a backward pass between."""
        source = self._source
        scaling = [at for _, at, scales, _ in self._events(function) if scales]
        called = {id(turn.call) for turn in self._turns[function]}
        last: tuple[ast.stmt, ast.Call] | None = None
        for _, at, scales, step in self._events(function):
            if scales:
                last = None
            if step is None:
                continue
            if (
                last is not None
                and {id(step), id(last[1])} & called
                and not self._apart(last[0], at)
                and source.code(step) != source.code(last[1])
            ):
                self._plan.refuse(at, _TURNS)
            loop = self._loop(at, at)
            if id(step) in called and loop is not None and scaling:
                begin, end = source.span(loop)
                if not any(begin <= source.start(one) < end for one in scaling):
                    self._plan.refuse(at, _TURNS)
            last = at, step

    def _check_cleared(self, function: int, inside: list[ast.stmt]) -> None:
        """Refuse a loop that steps in each iteration and does not clear gradients in each."""
        source = self._source
        texts = [(source.start(one), one) for one in inside if not hasattr(one, "body")]
        cleared = [(start, one) for start, one in texts if _CLEARED.search(source.code(one))]
        self._check_stepped(function, sorted(start for start, _ in cleared))
        for block in self._blocks.by_function[function]:
            loop = self._loop(block.statement, block.statement)
            if loop is None:
                continue
            begin, end = source.span(loop)
            clears = [one for start, one in cleared if begin < start < end]
            if clears:
                path = self._suites(block.statement)
                always = any(id(source.suite(_out_of_loops(source, one))) in path for one in clears)
                wrong = not always and self._steps_in(function, loop, block)
            else:
                wrong = not _CLEARED.search(source.text) and self._steps_in(
                    function, loop, block, now_and_then=True
                )
            if wrong:
                self._plan.refuse(block.statement, _NEVER_CLEARED)

    def _check_stepped(self, function: int, cleared: list[int]) -> None:
        """Refuse a backward pass after a step in the same function, where nothing is cleared between."""
        blocks = {block.start: block for block in self._blocks.by_function[function]}
        last: dict[str, ast.Call] = {}
        for start, at, scales, step in self._events(function):
            if step is not None and not scales and isinstance(step.func, ast.Attribute):
                last[self._source.code(step.func.value)] = step
            for optimizer in blocks[start].optimizers if start in blocks else ():
                before = last.pop(self._source.code(optimizer), None)
                if before is None or self._apart(before, at):
                    continue
                if bisect_left(cleared, self._source.start(before)) == bisect_left(cleared, start):
                    self._plan.refuse(at, _NEVER_CLEARED)

    @cached_property
    def _open(self) -> set[str]:
        """Names of functions that go backward and only step under a condition of its own."""
        return {
            block.function.name
            for block in self._blocks
            if block.function is not None
            and any(
                not steps_after(self._source, block.statement, owner, self._direct)
                for _, owner in self._steps[id(block.function)]
            )
        }

    def _steps_in(self, function: int, loop: ast.stmt, block: Block, *, now_and_then: bool = False) -> bool:
        """Whether an optimizer steps after each backward pass of a block in a loop, or now and then."""
        end = self._source.span(loop)[1]
        return any(
            block.start < self._source.start(step) < end
            and (
                now_and_then or steps_after(self._source, block.statement, owner, self._direct, failing=False)
            )
            for step, owner in self._steps[function]
            if owner in {self._source.code(one) for one in block.optimizers}
        )

    def _suites(self, statement: ast.stmt) -> set[int]:
        """The suites around a statement, by their ``id``."""
        outer = (one for one in self._source.around(statement) if isinstance(one, ast.stmt))
        return {id(self._source.suite(one)) for one in (statement, *outer)}

    def _check_before(self, function: int, at: ast.stmt, inside: list[ast.stmt]) -> None:
        """Refuse what changes gradients before the first backward pass of a function, and is not cleared."""
        start = self._source.start(at)
        starts = [block.start for block in self._blocks.by_function[function]]
        starts += [turn.start for turn in self._turns[function] if turn.scales]
        if not starts or start > min(starts):
            return
        between = (one for one in inside if start < self._source.start(one) < min(starts))
        if not any(_CLEARED.search(self._source.code(one)) for one in between):
            self._plan.refuse(at, _BEFORE)

    def _owners(self, function: int, at: ast.stmt, how: str) -> list[str]:
        """The optimizers that step after ``at`` on gradients of a backward pass before it."""
        start, source = self._source.start(at), self._source
        turns = [one for one in self._turns[function] if one.statement is not at]
        own = self._blocks.by_function[function]
        since: list[tuple[int, list[str], Block | None]] = []
        since += [(b.start, [source.code(one) for one in b.optimizers], b) for b in own if b.start < start]
        since += [(-1, self._carried(function, b, at, how), None) for b in own if b.start > start]
        if not own:
            names = list(dict.fromkeys(name for _, name in self._steps[function]))
            scaling = [one for one in turns if one.scales]
            if not names and any(one.start < start and not one.steps for one in scaling):
                return self._apart_owners(function, at)
            if how == "sure" and any(one.steps and one.name in self._open for one in scaling):
                self._plan.refuse(at, _MIDDLE)
            since = [(one.start, names, None) for one in scaling if one.start < start]
            if not scaling or any(self._loop(one.statement, at) for one in scaling if one.start > start):
                since.append((-1, names, None))
        found = []
        for begin, owners, block in since:
            if any(
                begin < one.start < start and one.steps and not self._apart(one.statement, at)
                for one in turns
            ):
                continue
            for name in owners:
                stepped = [step for step, owner in self._steps[function] if owner == name]
                if any(begin < source.start(one) < start and not self._apart(one, at) for one in stepped):
                    continue
                if any(source.start(one) >= start for one in stepped):
                    found.append(name)
                elif not stepped and block is not None:
                    found.append(name)
                    if _delays(block):
                        self._plan.refuse(at, _ELSEWHERE)
        return list(dict.fromkeys(found))

    def _carried(self, function: int, block: Block, at: ast.stmt, how: str) -> list[str]:
        """Before a backward pass in a loop: whose gradients an earlier iteration left scaled."""
        loop, source, start = self._loop(block.statement, at), self._source, self._source.start(at)
        if loop is None:
            return []
        begin, end = source.span(loop)
        path = self._suites(block.statement)
        if any(
            turn.steps and block.start < turn.start < end and id(source.suite(turn.statement)) in path
            for turn in self._turns[function]
        ):
            return []
        found = []
        for name in (source.code(one) for one in block.optimizers):
            steps = [source.start(step) for step, owner in self._steps[function] if owner == name]
            later = any(block.start < one < end for one in steps)
            if later and steps_after(source, block.statement, name, self._direct):
                continue
            if any(start <= one < block.start for one in steps):
                found.append(name)
            elif how == "sure" and not any(begin < one < start for one in steps):
                self._plan.refuse(at, _MIDDLE)
        return found

    def _apart_owners(self, function: int, at: ast.stmt) -> list[str]:
        """The optimizer that a function called after ``at`` steps, where one went backward before it."""
        start, source = self._source.start(at), self._source
        turns = [one for one in self._turns[function] if not self._apart(one.statement, at)]
        since = max((one.start for one in turns if one.scales and one.start < start), default=start)
        if any(since < one.start < start and one.steps for one in turns):
            return []
        given = {
            source.code(argument)
            for one in turns
            if one.steps and one.start > start
            for argument in one.call.args
            if self._flow.is_optimizer(argument)
        }
        texts = {owner for steps in self._steps.values() for _, owner in steps}
        known = {
            text
            for text in texts
            if text.startswith("self.") and self._flow.held(at, text) in self._flow.optimizers
        }
        names = given or (known if len(texts) == 1 else set())
        if len(names) != 1:
            self._plan.refuse(at, _APART)
            return []
        return list(names)

    def _loop(self, one: ast.AST, other: ast.AST) -> ast.stmt | None:
        """The innermost loop of a function that holds both."""
        around = {id(outer) for outer in self._source.around(one)}
        for outer in self._source.around(other):
            if isinstance(outer, Function | ast.ClassDef):
                return None
            if isinstance(outer, _LOOPS) and id(outer) in around:
                return outer
        return None

    def _apart(self, one: ast.AST, other: ast.stmt) -> bool:
        return exclusive(self._source, self._source.statement(one), other)

    def _is_between(self, function: int, at: ast.stmt, name: str, how: str) -> bool:
        """Whether another backward pass comes before the step; refused where the look may matter."""
        source, start = self._source, self._source.start(at)
        after = [
            source.start(step)
            for step, owner in self._steps[function]
            if owner == name and source.start(step) > start and not self._apart(step, at)
        ]
        end = min(after, default=len(source.text))
        later = [
            block
            for block in self._blocks.by_function[function]
            if start < block.start < end
            and name in {source.code(one) for one in block.optimizers}
            and not self._apart(block.statement, at)
        ]
        if not later:
            return False
        if how == "sure" or not self._feeds(at, later):
            self._plan.refuse(at, _BETWEEN)
        return True

    def _feeds(self, at: ast.stmt, later: list[Block]) -> bool:
        """Whether a statement computes what a later loss is made of."""
        needed = {text for block in later for text in _names(block.loss)}
        around = self._source.function(at) or self._source.tree
        assigns = [node for node in walk(around) if isinstance(node, ast.Assign)]
        before = -1
        while len(needed) != before:
            before = len(needed)
            for node in assigns:
                if needed & {text for target in node.targets for text in _names(target)}:
                    needed |= _names(node.value)
        targets = at.targets if isinstance(at, ast.Assign) else []
        return bool(needed & {text for target in targets for text in _names(target)})


def _out_of_loops(source: Source, statement: ast.stmt) -> ast.stmt:
    """The statement itself, or the loop over parameters or optimizers in which it stands."""
    while isinstance(outer := source.parents[statement], ast.For | ast.With) and len(outer.body) < 3:
        statement = outer
    return statement


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in walk(node) if isinstance(one, ast.Name)}


def _delays(block: Block) -> bool:
    return len(block.call.args) > 4 or any(
        one.arg == "delay_unscale" and getattr(one.value, "value", None) is not False
        for one in block.call.keywords
    )

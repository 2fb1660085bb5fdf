"""Scaled backward passes, clipping and optimizer steps, from apex's spelling to that of a scaler."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._apex_plan import Plan
from narrowcast.migrate._apex_setup import Scaler, Setup
from narrowcast.migrate._arguments import argument, is_plain
from narrowcast.migrate._source import Reference, Source
from narrowcast.migrate._text import insert_after, insert_before, one_line, unwrap
from narrowcast.migrate._walk import walk

_PLACE_OF_ENABLED = 2
_SCALE_ORDER = ("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")


_NO_STEP = (
    "the step() of {name} is not in this file, or is not told apart from others: it would have to become the "
    "scaler's step"
)
_HANDED_ON = "the step of an optimizer is handed on here: where it is called is not known"
_LOOP = (
    "optimizers step here in a loop, and scaler.update() belongs behind it: write their steps one after the "
    "other first"
)


@dataclass(slots=True, eq=False)
class Block:
    """One ``with amp.scale_loss(...)``."""

    statement: ast.With
    call: ast.Call
    loss: ast.expr
    optimizers: list[ast.expr]
    name: str | None
    start: int
    function: Function | None


class Blocks(list[Block]):
    """The blocks of a file, in their order, with ways to find one.

    Attributes:
        setups: what calls of ``amp.initialize`` there are.
    """

    def __init__(self, setups: Iterable[Setup] = ()) -> None:
        super().__init__()
        self.setups = list(setups)
        self._switches: set[tuple[str, bool]] | None = None

    @cached_property
    def by_id(self) -> dict[int, Block]:
        """Each block by the ``id`` of its statement."""
        return {id(block.statement): block for block in self}

    def around(self, source: Source, node: ast.AST) -> Block | None:
        """The block in which ``node`` stands."""
        return next((self.by_id[id(one)] for one in source.around(node) if id(one) in self.by_id), None)

    def number_before(self, offset: int) -> int:
        """How many blocks begin before a character, or at it."""
        return bisect_right(self._starts, offset)

    @cached_property
    def _starts(self) -> list[int]:
        return [block.start for block in self]

    def switches(self, source: Source) -> set[tuple[str, bool]]:
        """The conditions of ``initialize``, and whether they hold where mixed precision is on."""
        if self._switches is None:
            self._switches = set()
            for setup in self.setups:
                inner: ast.AST = setup.call
                for outer in source.around(setup.call):
                    if isinstance(outer, ast.If) and inner is not outer.test:
                        in_body = any(inner is one for one in outer.body)
                        self._switches.add(condition(source, outer.test, in_body))
                    inner = outer
                enabled = argument(setup.call, _PLACE_OF_ENABLED, "enabled")
                if enabled is not None:
                    self._switches.add(condition(source, enabled, True))
        return self._switches

    @cached_property
    def by_function(self) -> dict[int, list[Block]]:
        """The blocks of each function, by its ``id``; of the module by that of None."""
        found: dict[int, list[Block]] = defaultdict(list)
        for block in self:
            found[id(block.function)].append(block)
        return found


def read_blocks(plan: Plan, flow: Flow, setups: Iterable[Setup]) -> Blocks:
    """Every ``scale_loss`` of the file; what is no plain block is refused in ``plan``."""
    blocks = Blocks(setups)
    for reference in plan.references("amp.scale_loss"):
        plan.handled(reference)
        block = _read_block(plan, reference)
        if block is not None:
            blocks.append(block)
            flow.optimizers.update(flow.held(one) for one in block.optimizers)
    return blocks


def _read_block(plan: Plan, reference: Reference) -> Block | None:
    call = plan.call_of(reference)
    item = plan.source.parents[call] if call is not None else None
    statement = plan.source.parents[item] if item is not None else None
    if call is None or not isinstance(item, ast.withitem) or not isinstance(statement, ast.With):
        plan.refuse(reference.node, "amp.scale_loss outside a with statement")
        return None
    if len(statement.items) > 1 or not plan.source.stands_alone(statement):
        plan.refuse(reference.node, "a with statement of amp.scale_loss and more: split it first")
        return None
    given = {name: argument(call, place, name) for place, name in enumerate(_SCALE_ORDER)}
    loss, optimizers, name = given["loss"], given["optimizers"], item.optional_vars
    if not is_plain(call) or loss is None or optimizers is None or not isinstance(name, ast.Name):
        plan.refuse(call, "expected amp.scale_loss(loss, optimizer) as a name, written out")
        return None
    late = given["delay_overflow_check"]
    if late is not None and not (isinstance(late, ast.Constant) and late.value is False):
        plan.refuse(late, "delay_overflow_check unscales without a check, which a scaler never does")
    if given["loss_id"] is not None:
        plan.note(given["loss_id"], "loss_id goes: one scaler serves all losses")
    listed = list(optimizers.elts) if isinstance(optimizers, ast.List | ast.Tuple) else [optimizers]
    begin, function = plan.source.start(statement), plan.source.function(statement)
    return Block(statement, call, loss, listed, name.id, begin, function)


def write_block(plan: Plan, block: Block, scaler: Scaler) -> None:
    """Scale the loss where the block stood, and put what was in the block in its place."""
    source, statement = plan.source, block.statement
    scaled = f"{scaler.at(source, statement)}.scale({source.code(block.loss)})"
    around = source.function(statement) or source.tree
    uses = [
        node
        for node in walk(around)
        if isinstance(node, ast.Name) and node.id == block.name and isinstance(node.ctx, ast.Load)
        and _of_block(source, node, block)
    ]  # fmt: skip
    begin, end = statement.lineno, statement.end_lineno or statement.lineno
    inside = [node for node in uses if begin <= node.lineno <= end]
    once = len(inside) == len(uses) == 1 and not _in_loop(source, inside[0], statement)
    if once:
        plan.changes.replace(source.span(inside[0]), scaled)
    else:
        insert_before(source, plan.changes, statement, f"{block.name} = {scaled}")
    if one_line(source, statement):
        plan.changes.replace((source.start(statement), source.start(statement.body[0])), "")
    else:
        unwrap(source, plan.changes, statement, statement.body)


def _of_block(source: Source, node: ast.Name, block: Block) -> bool:
    """Whether a name is that of this block: no later block of the same name lies before it."""
    inner = next(
        (
            outer
            for outer in source.around(node)
            if isinstance(outer, ast.With)
            and any(
                isinstance(i.optional_vars, ast.Name) and i.optional_vars.id == node.id for i in outer.items
            )
        ),
        None,
    )
    return inner is block.statement if inner is not None else node.lineno > (block.statement.end_lineno or 0)


def _in_loop(source: Source, node: ast.AST, block: ast.With) -> bool:
    for outer in source.around(node):
        if outer is block:
            return False
        if isinstance(outer, ast.For | ast.While | ast.Lambda | Function | ast.comprehension):
            return True
    return False


def in_plain_branch(source: Source, node: ast.AST, blocks: Blocks) -> bool:
    """Whether ``node`` is in the branch of an ``if`` that is taken where mixed precision is off."""
    switches = blocks.switches(source)
    inner: ast.AST = node
    for outer in source.around(node) if switches else ():
        if isinstance(outer, ast.If) and inner is not outer.test:
            in_body = any(inner is one for one in outer.body)
            test, holds = condition(source, outer.test, in_body)
            if (test, not holds) in switches:
                return True
        inner = outer
    return False


def condition(source: Source, test: ast.expr, holds: bool) -> tuple[str, bool]:
    """A test without the ``not`` before it, and whether it holds."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    return source.code(test), holds


def is_backward(node: ast.AST) -> bool:
    """Whether a node is a call of a ``backward``."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    )


def find_steps(plan: Plan, flow: Flow, blocks: Blocks) -> list[ast.Call]:
    """The ``step()`` calls of optimizers whose losses apex scales."""
    source = plan.source
    with_blocks = {id(source.function(block.statement)) for block in blocks}
    # A backward() of this file that scales is none of a plain loss.
    helps = any(block.function is not None and block.function.name == "backward" for block in blocks)
    plain = {
        id(source.function(node))
        for node in source.nodes
        if is_backward(node) and not helps and id(source.function(node)) not in with_blocks
    }  # fmt: skip
    found = []
    for node in source.nodes:
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
            or node.func.attr != "step"
        ):
            continue
        owner = node.func.value
        if node.func.attr != "step" or not flow.is_optimizer(owner) or in_plain_branch(source, node, blocks):
            continue
        if id(source.function(node)) in plain:
            continue
        statement = source.statement(node)
        if blocks.around(source, node) is not None:
            plan.refuse(node, "step inside the block of scale_loss, on gradients that are still scaled")
        if node.args or node.keywords:
            plan.refuse(node, "step with a closure, which torch's scaler does not take")
        elif not isinstance(statement, ast.Expr) or statement.value is not node:
            plan.refuse(node, "what step returns is used")
        found.append(node)
    _check_all_step(plan, flow, blocks, found)
    return found


def _check_all_step(plan: Plan, flow: Flow, blocks: Blocks, steps: list[ast.Call]) -> None:
    """Each optimizer that has scaled gradients must step by the scaler."""
    source = plan.source
    stepped = {flow.held(step.func.value) for step in steps if isinstance(step.func, ast.Attribute)}
    texts = {text for _, text in stepped}
    alone = len(texts) == 1 and all(len(setup.optimizers) == 1 for setup in blocks.setups)
    waiting = [*stepped]
    while waiting:  # what is handed to a name that steps does so too
        new = flow.handed.get(waiting.pop(), set()) - stepped
        stepped |= new
        waiting += new
    for block in blocks:
        if any(flow.is_forward(node) for node in walk(block.loss) if isinstance(node, ast.Call)):
            plan.refuse(block.loss, "the loss is computed in the call of amp.scale_loss: name it before")
        for optimizer in block.optimizers:
            held = flow.held(optimizer)
            given = flow.handed.get(held, set())
            if held in stepped or (given and given <= stepped):
                continue
            if not alone or len(flow.optimizers) <= len(block.optimizers):
                plan.refuse(block.call, _NO_STEP.format(name=source.code(optimizer)))
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "step" and flow.is_optimizer(node.value):
            if getattr(source.parents[node], "func", None) is not node:
                plan.refuse(node, _HANDED_ON)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "getattr"
            and flow.is_optimizer(node.args[0])
            and getattr(node.args[-1], "value", "step") == "step"
        ):
            plan.refuse(node, _HANDED_ON)
    _check_loops(plan, flow, steps)


def _check_loops(plan: Plan, flow: Flow, steps: list[ast.Call]) -> None:
    """Refuse a loop over several optimizers in which each steps by itself."""
    source = plan.source
    known = {id(step) for step in steps}
    for node in source.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or id(node) in known:
            continue
        owner = node.func.value
        if node.func.attr != "step" or not isinstance(owner, ast.Name):
            continue
        for outer in source.around(node):
            loops = getattr(outer, "generators", [outer])
            for loop in loops:
                if not isinstance(loop, ast.For | ast.comprehension) or owner.id not in _named(loop.target):
                    continue
                if any(flow.is_optimizer(one) for one in walk(loop.iter)):
                    plan.refuse(node, _LOOP)


def _named(target: ast.expr) -> set[str]:
    return {one.id for one in walk(target) if isinstance(one, ast.Name)}


def write_steps(plan: Plan, steps: list[ast.Call], blocks: Blocks, scaler: Scaler) -> None:
    """Step by the scaler, and update it once after the last step before the next backward pass."""
    source = plan.source
    by_function: dict[int, list[ast.Call]] = defaultdict(list)
    for step in steps:
        by_function[id(source.function(step))].append(step)
    for group in by_function.values():
        runs: list[list[ast.Call]] = []
        for step in group:
            since = blocks.number_before(source.start(runs[-1][-1])) if runs else -1
            if since == blocks.number_before(source.start(step)):
                runs[-1].append(step)
            else:
                runs.append([step])
        for run in runs:
            _write_run(plan, run, scaler)


def _write_run(plan: Plan, run: list[ast.Call], scaler: Scaler) -> None:
    source = plan.source
    name = scaler.at(source, run[0])
    last: dict[int, ast.stmt] = {}
    suites: dict[int, ast.stmt] = {}
    calls: dict[int, tuple[ast.Call, str]] = {}
    for step in run:
        assert isinstance(step.func, ast.Attribute)
        statement = source.statement(step)
        for other in suites.values():
            same = source.suite(other) is source.suite(statement)
            if not same and not exclusive(source, other, statement):
                plan.refuse(
                    step,
                    "two optimizers step after one backward pass, in places that may both be reached or not: "
                    f"where {name}.update() belongs, once, is not clear",
                )
        calls[id(statement)] = step, f"{name}.step({source.code(step.func.value)})"
        last[id(source.suite(statement))] = suites[id(source.suite(statement))] = statement
    for statement in last.values():
        if source.stands_alone(statement):
            insert_after(source, plan.changes, statement, f"{name}.update()")
        else:
            step, code = calls[id(statement)]
            calls[id(statement)] = step, f"{code}; {name}.update()"
    for step, code in calls.values():
        plan.changes.replace(source.span(step), code)


def exclusive(source: Source, one: ast.stmt, other: ast.stmt) -> bool:
    """Whether two statements are in different branches of one ``if`` or ``match``."""
    inside = {}
    inner: ast.AST = one
    for outer in source.around(one):
        inside[id(outer)] = inner
        inner = outer
    inner = other
    for outer in source.around(other):
        if id(outer) in inside:
            branches = [_branch(outer, node) for node in (inside[id(outer)], inner)]
            return None not in branches and branches[0] != branches[1]
        inner = outer
    return False


def _branch(node: ast.AST, child: ast.AST) -> int | None:
    """Which branch of ``node`` a child of it is in, where only one is taken."""
    if isinstance(node, ast.Match):
        return id(child) if isinstance(child, ast.match_case) else None
    if not isinstance(node, ast.If):
        return None
    return next((id(suite) for suite in (node.body, node.orelse) if any(child is one for one in suite)), None)

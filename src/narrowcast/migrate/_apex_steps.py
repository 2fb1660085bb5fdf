"""Scaled backward passes, clipping and optimizer steps, from apex's spelling to that of a scaler."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field

from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._apex_plan import Plan, root
from narrowcast.migrate._apex_setup import Scaler
from narrowcast.migrate._arguments import argument, is_plain
from narrowcast.migrate._source import Reference, Source
from narrowcast.migrate._text import insert_after, insert_before, one_line, unwrap

_SCALE_ORDER = ("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")
# What looks at gradients, which apex has unscaled when its block ends.
_LOOKS = re.compile(r"(clip_grad_|clip_grad\b|grad_norm|\.grad\b|all_?reduce_?(grad|and)|synchronize\()")


@dataclass(slots=True, eq=False)
class Block:
    """One ``with amp.scale_loss(...)``."""

    statement: ast.With
    call: ast.Call
    loss: ast.expr
    optimizers: list[ast.expr]
    name: str | None
    optional: list[ast.If] = field(default_factory=list)


def read_blocks(plan: Plan, flow: Flow) -> list[Block]:
    """Every ``scale_loss`` of the file; what is no plain block is refused in ``plan``."""
    blocks = []
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
    if (
        len(statement.items) > 1
        or one_line(plan.source, statement)
        or not plan.source.stands_alone(statement)
    ):
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
    return Block(statement, call, loss, listed, name.id)


def write_block(plan: Plan, block: Block, scaler: Scaler) -> None:
    """Scale the loss where the block stood, and put what was in the block in its place."""
    source, statement = plan.source, block.statement
    scaled = f"{scaler.at(source, statement)}.scale({source.code(block.loss)})"
    around = source.function(statement) or source.tree
    uses = [
        node
        for node in ast.walk(around)
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


def in_plain_branch(source: Source, node: ast.AST, blocks: list[Block]) -> bool:
    """Whether ``node`` is in the branch of an ``if`` that is taken without apex."""
    inner: ast.AST = node
    for outer in source.around(node):
        if isinstance(outer, ast.If):
            here = outer.body if any(inner is one for one in outer.body) else outer.orelse
            other = outer.orelse if here is outer.body else outer.body
            if _holds(source, other, blocks) and not _holds(source, here, blocks):
                return True
            if _masters(source, other) and not _masters(source, here):
                return True
        inner = outer
    return False


def _masters(source: Source, suite: list[ast.stmt]) -> bool:
    return any("master_params(" in source.code(one) for one in suite)


def _holds(source: Source, suite: list[ast.stmt], blocks: list[Block]) -> bool:
    spans = [source.span(one) for one in suite]
    starts = [source.start(block.statement) for block in blocks]
    return any(begin <= start < end for begin, end in spans for start in starts)


def find_steps(plan: Plan, flow: Flow, blocks: list[Block]) -> list[ast.Call]:
    """The ``step()`` calls of optimizers whose losses apex scales."""
    source = plan.source
    with_blocks = {id(source.function(block.statement)) for block in blocks}
    plain = {
        id(source.function(node))
        for node in source.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
        and id(source.function(node)) not in with_blocks
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
        if any(_inside(source, node, block) for block in blocks):
            plan.refuse(node, "step inside the block of scale_loss, on gradients that are still scaled")
        if node.args or node.keywords:
            plan.refuse(node, "step with a closure, which torch's scaler does not take")
        elif not isinstance(statement, ast.Expr) or statement.value is not node:
            plan.refuse(node, "what step returns is used")
        elif not source.stands_alone(statement):
            plan.refuse(node, "step shares its line with another statement")
        found.append(node)
    _check_all_step(plan, flow, blocks, found)
    return found


def _inside(source: Source, node: ast.AST, block: Block) -> bool:
    begin, end = source.span(block.statement)
    return begin <= source.start(node) < end


def _check_all_step(plan: Plan, flow: Flow, blocks: list[Block], steps: list[ast.Call]) -> None:
    """Each optimizer that has scaled gradients must step by the scaler."""
    source = plan.source
    stepped = {flow.held(step.func.value) for step in steps if isinstance(step.func, ast.Attribute)}
    for block in blocks:
        for optimizer in block.optimizers:
            aliases = len(flow.optimizers) > len(block.optimizers) and bool(stepped)
            if flow.held(optimizer) not in stepped and not (aliases and len({r for _, r in stepped}) == 1):
                plan.refuse(
                    block.call,
                    f"the step() of {source.code(optimizer)} is not in this file, or is not told apart from "
                    "others: it would have to become the scaler's step",
                )


def write_steps(plan: Plan, steps: list[ast.Call], blocks: list[Block], scaler: Scaler) -> None:
    """Step by the scaler, and update it once after the last step before the next backward pass."""
    source = plan.source
    by_function: dict[int, list[ast.Call]] = defaultdict(list)
    for step in steps:
        by_function[id(source.function(step))].append(step)
    starts = sorted(source.start(block.statement) for block in blocks)
    for group in by_function.values():
        runs: list[list[ast.Call]] = []
        for step in group:
            last = source.start(runs[-1][-1]) if runs else -1
            if runs and not any(last < start < source.start(step) for start in starts):
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
    for step in run:
        assert isinstance(step.func, ast.Attribute)
        statement = source.statement(step)
        for other in suites.values():
            same = source.suite(other) is source.suite(statement)
            if not same and not _exclusive(source, other, statement):
                plan.refuse(
                    step,
                    "two optimizers step after one backward pass, in places that may both be reached or not: "
                    f"where {name}.update() belongs, once, is not clear",
                )
        plan.changes.replace(source.span(step), f"{name}.step({source.code(step.func.value)})")
        last[id(source.suite(statement))] = suites[id(source.suite(statement))] = statement
    for statement in last.values():
        insert_after(source, plan.changes, statement, f"{name}.update()")


def _exclusive(source: Source, one: ast.stmt, other: ast.stmt) -> bool:
    """Whether two statements are in different branches of one ``if``."""
    around_one = {id(outer): outer for outer in source.around(one)}
    for outer in source.around(other):
        if id(outer) in around_one:
            return isinstance(outer, ast.If)
    return False


def write_looks(plan: Plan, flow: Flow, blocks: list[Block], steps: list[ast.Call], scaler: Scaler) -> None:
    """Unscale before anything looks at gradients, and say whose they are without ``master_params``."""
    source = plan.source
    looked: dict[int, tuple[ast.stmt, list[str]]] = {}
    for reference in plan.references("amp.master_params"):
        plan.handled(reference)
        call = plan.call_of(reference)
        owner = argument(call, 0, "optimizer") if call is not None else None
        if call is None or owner is None or not is_plain(call):
            plan.refuse(reference.node, "amp.master_params without its optimizer written out")
            continue
        plan.changes.replace(source.span(call), _parameters_of(plan, flow, owner, call))
        statement = source.statement(call)
        if not in_plain_branch(source, statement, blocks):
            looked.setdefault(id(statement), (statement, []))[1].append(source.code(owner))
    for statement, others in _other_looks(plan, blocks, steps):
        looked.setdefault(id(statement), (statement, []))[1].extend(others)
    first: dict[tuple[int, str], ast.stmt] = {}
    for statement, owners in sorted(looked.values(), key=lambda one: source.start(one[0])):
        for name in dict.fromkeys(owners):
            run = _run_of(source, statement, blocks)
            before = first.get((run, name))
            if before is not None and not _exclusive(source, before, statement):
                if source.suite(before) is source.suite(statement):
                    continue
                plan.refuse(statement, f"gradients of {name} are looked at twice: unscale_ may come once")
                continue
            first[run, name] = statement
            _check_once(plan, statement, name, steps)
            if _clause_of_if(source, statement):
                plan.refuse(statement, "gradients are looked at in an elif: no statement can come before it")
            if any(_inside(source, statement, block) for block in blocks):
                plan.note(
                    statement, "apex looked here at gradients that were still scaled; now they are true"
                )
            code = f"{scaler.at(source, statement)}.unscale_({name})"
            insert_before(source, plan.changes, statement, code, _indent(source, statement, blocks))


def _indent(source: Source, statement: ast.stmt, blocks: list[Block]) -> str:
    """The indentation of a statement once the block around it is gone."""
    indent = source.indent(statement)
    for block in blocks:
        if _inside(source, statement, block):
            inner = source.indent(block.statement.body[0])
            return source.indent(block.statement) + indent.removeprefix(inner)
    return indent


def _clause_of_if(source: Source, statement: ast.stmt) -> bool:
    parent = source.parents[statement]
    if not isinstance(statement, ast.If) or not isinstance(parent, ast.If):
        return False
    return parent.orelse == [statement] and source.text[source.start(statement) :].startswith("elif")


def _run_of(source: Source, statement: ast.stmt, blocks: list[Block]) -> int:
    """The block that a statement comes after (or is in), so that places of one backward pass are known."""
    starts = [source.start(block.statement) for block in blocks]
    return max((start for start in starts if start <= source.start(statement)), default=-1)


def _other_looks(plan: Plan, blocks: list[Block], steps: list[ast.Call]) -> list[tuple[ast.stmt, list[str]]]:
    """Statements between a scaled backward pass and the step that look at gradients by themselves."""
    source, found = plan.source, []
    for block in blocks:
        function = source.function(block.statement)
        begin = source.start(block.statement)
        later = [
            source.start(step)
            for step in steps
            if source.function(step) is function and source.start(step) > begin
        ]
        if not later:
            continue
        owners = [source.code(one) for one in block.optimizers]
        for node in source.nodes:
            if not isinstance(node, ast.stmt) or not begin < source.start(node) < min(later):
                continue
            if source.function(node) is not function or hasattr(node, "body"):
                continue
            text = source.code(node)
            ours = "master_params" in text or in_plain_branch(source, node, blocks)
            if _LOOKS.search(text) and not ours and source.span(node)[1] <= min(later):
                found.append((node, owners))
    return found


def _check_once(plan: Plan, statement: ast.stmt, owner: str, steps: list[ast.Call]) -> None:
    """Refuse to unscale where that happens more often than the step."""
    source = plan.source
    outside = {id(outer) for outer in source.around(statement)}
    for step in steps:
        if not isinstance(step.func, ast.Attribute) or source.code(step.func.value) != owner:
            continue
        if source.function(step) is not source.function(statement) or source.start(step) < source.start(
            statement
        ):
            continue
        rarer = [
            outer
            for outer in source.around(source.statement(step))
            if id(outer) not in outside and isinstance(outer, ast.If | ast.For | ast.While)
        ]
        if rarer:
            plan.refuse(
                statement,
                f"gradients are clipped or read after each backward pass, and {owner} steps under a "
                "condition of its own: a scaler unscales once a step. Move it to the step first",
            )
        return


def _parameters_of(plan: Plan, flow: Flow, owner: ast.expr, at: ast.AST) -> str:
    """The parameters of an optimizer: by its model where that is known and at hand."""
    source = plan.source
    if (beside := _in_other_branch(source, at)) is not None:
        return beside
    made = [
        node.value
        for node in source.nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args
        and any(source.code(target) == source.code(owner) for target in node.targets)
    ]  # fmt: skip
    models = {source.code(one.args[0]) for one in made}
    if len(made) == len(models) == 1 and len(flow.optimizers) == len({name for _, name in flow.optimizers}):
        (code,) = models
        text = code.removesuffix(".parameters()")
        if (
            code.endswith(".parameters()")
            and flow.held(at, text) in flow.models
            and _at_hand(source, at, text)
        ):
            return code
    text = source.code(owner)
    return f'[p for group in {text}.param_groups for p in group["params"]]'


def _in_other_branch(source: Source, at: ast.AST) -> str | None:
    """What the same call has as its first argument in the branch that is taken without apex."""
    call = source.parents[at]
    statement = source.statement(at)
    around = source.parents[statement]
    if not isinstance(call, ast.Call) or not isinstance(around, ast.If) or at not in call.args[:1]:
        return None
    other = around.orelse if any(statement is one for one in around.body) else around.body
    same = [
        node
        for one in other
        for node in ast.walk(one)
        if isinstance(node, ast.Call) and source.code(node.func) == source.code(call.func) and node.args
    ]
    return source.code(same[0].args[0]) if len(same) == 1 else None


def _at_hand(source: Source, at: ast.AST, text: str) -> bool:
    """Whether a variable means the same where ``at`` stands: used in the function around it, or global."""
    function = source.function(at)
    if function is None or text.startswith("self."):
        return True
    names = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return root(text) in names | stored

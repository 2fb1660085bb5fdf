"""Where a script looks at gradients between its backward pass and its step: they are unscaled before that."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._apex_plan import Plan, root
from narrowcast.migrate._apex_setup import Scaler
from narrowcast.migrate._apex_steps import Blocks, exclusive, in_plain_branch
from narrowcast.migrate._arguments import argument, is_plain
from narrowcast.migrate._source import Source
from narrowcast.migrate._text import insert_before

# What looks at gradients, which apex has unscaled when its block ends.
Steps = Mapping[int, list[ast.Call]]
_LOOKS = re.compile(r"(clip_grad_|clip_grad\b|grad_norm|\.grad\b|all_?reduce_?(grad|and)|synchronize\()")


def write_looks(plan: Plan, flow: Flow, blocks: Blocks, steps: list[ast.Call], scaler: Scaler) -> None:
    """Unscale before anything looks at gradients, and say whose they are without ``master_params``."""
    source = plan.source
    by_function: dict[int, list[ast.Call]] = defaultdict(list)
    for step in steps:
        by_function[id(source.function(step))].append(step)
    starts = sorted(source.start(step) for step in steps)
    looked: dict[int, tuple[ast.stmt, list[str]]] = {}
    for reference in plan.references("amp.master_params"):
        plan.handled(reference)
        call = plan.call_of(reference)
        owner = argument(call, 0, "optimizer") if call is not None else None
        if call is None or owner is None or not is_plain(call):
            plan.refuse(reference.node, "amp.master_params without its optimizer written out")
            continue
        plan.changes.replace(source.span(call), _parameters_of(plan, flow, owner, call))
        statement = _anchor(source, source.statement(call), blocks, starts)
        if not in_plain_branch(source, statement, blocks):
            looked.setdefault(id(statement), (statement, []))[1].append(source.code(owner))
    for inner, others in _other_looks(plan, blocks, by_function):
        statement = _anchor(source, inner, blocks, starts)
        looked.setdefault(id(statement), (statement, []))[1].extend(others)
    first: dict[tuple[int, str], ast.stmt] = {}
    for statement, owners in sorted(looked.values(), key=lambda one: source.start(one[0])):
        for name in dict.fromkeys(owners):
            run = blocks.number_before(source.start(statement))
            before = first.get((run, name))
            if before is not None and not exclusive(source, before, statement):
                if source.suite(before) is source.suite(statement):
                    continue
                plan.refuse(statement, f"gradients of {name} are looked at twice: unscale_ may come once")
                continue
            first[run, name] = statement
            _check_once(plan, statement, name, by_function)
            if _clause_of_if(source, statement):
                plan.refuse(statement, "gradients are looked at in an elif: no statement can come before it")
            if blocks.around(source, statement) is not None:
                plan.note(
                    statement, "apex looked here at gradients that were still scaled; now they are true"
                )
            code = f"{scaler.at(source, statement)}.unscale_({name})"
            insert_before(source, plan.changes, statement, code, _indent(source, statement, blocks))


def _indent(source: Source, statement: ast.stmt, blocks: Blocks) -> str:
    """The indentation of a statement once the block around it is gone."""
    indent = source.indent(statement)
    block = blocks.around(source, statement)
    if block is None:
        return indent
    return source.indent(block.statement) + indent.removeprefix(source.indent(block.statement.body[0]))


def _clause_of_if(source: Source, statement: ast.stmt) -> bool:
    parent = source.parents[statement]
    if not isinstance(statement, ast.If) or not isinstance(parent, ast.If):
        return False
    return parent.orelse == [statement] and source.text[source.start(statement) :].startswith("elif")


def _anchor(source: Source, statement: ast.stmt, blocks: Blocks, steps: list[int]) -> ast.stmt:
    """The statement before which gradients are unscaled, once: the outermost loop after the backward pass.

    A loop with a step in it is that of training, also where its backward pass is in another function.
    """
    found, since = statement, blocks.number_before(source.start(statement))
    for outer in source.around(statement):
        if isinstance(outer, ast.For | ast.AsyncFor | ast.While):
            begin, end = source.span(outer)
            if blocks.number_before(begin) != since or bisect_left(steps, begin) != bisect_left(steps, end):
                break
            found = outer
        elif isinstance(outer, Function | ast.ClassDef):
            break
    return found


def _other_looks(plan: Plan, blocks: Blocks, steps: Steps) -> list[tuple[ast.stmt, list[str]]]:
    """Statements between a scaled backward pass and the step that look at gradients by themselves."""
    source, found = plan.source, []
    looks: dict[int, list[ast.stmt]] = defaultdict(list)
    for node in source.nodes:
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            text = source.code(node)
            if _LOOKS.search(text) and "master_params" not in text:
                looks[id(source.function(node))].append(node)
    for function, inside in blocks.by_function.items():
        for block in inside:
            later = [start for step in steps.get(function, ()) if (start := source.start(step)) > block.start]
            owners = [source.code(one) for one in block.optimizers]
            for node in looks[function] if later else ():
                if block.start < source.start(node) < min(later) and not in_plain_branch(
                    source, node, blocks
                ):
                    found.append((node, owners))
    return found


def _check_once(plan: Plan, statement: ast.stmt, owner: str, steps: Steps) -> None:
    """Refuse to unscale where that happens more often than the step."""
    source = plan.source
    outside = {id(outer) for outer in source.around(statement)}
    for step in steps.get(id(source.function(statement)), ()):
        if not isinstance(step.func, ast.Attribute) or source.code(step.func.value) != owner:
            continue
        if source.start(step) < source.start(statement):
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
    made = flow.made.get(source.code(owner), [])
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
    code = source.code(same[0].args[0]) if len(same) == 1 else None
    return code if code is not None and "master_params(" not in code else None


def _at_hand(source: Source, at: ast.AST, text: str) -> bool:
    """Whether a variable means the same where ``at`` stands: used in the function around it, or global."""
    function = source.function(at)
    if function is None or text.startswith("self."):
        return True
    names = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return root(text) in names | stored

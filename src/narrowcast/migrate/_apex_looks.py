"""Where a script looks at gradients between its backward pass and its step: they are unscaled before that."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

from narrowcast.migrate._apex_always import steps_after
from narrowcast.migrate._apex_calls import Calls
from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._apex_plan import Plan, root
from narrowcast.migrate._apex_setup import Scaler
from narrowcast.migrate._apex_steps import Blocks, in_plain_branch
from narrowcast.migrate._apex_windows import Windows
from narrowcast.migrate._arguments import argument, is_plain
from narrowcast.migrate._source import Source
from narrowcast.migrate._text import insert_before
from narrowcast.migrate._walk import walk

_MORE_OFTEN = (
    "gradients are clipped or read after each backward pass, and {name} steps under a condition of its own: "
    "a scaler unscales once a step. Move it to the step first"
)
_TWICE = "gradients of {name} are looked at twice: unscale_ may come once"


def write_looks(
    plan: Plan, flow: Flow, calls: Calls, blocks: Blocks, steps: list[ast.Call], scaler: Scaler
) -> None:
    """Unscale before anything looks at gradients, and say whose they are without ``master_params``."""
    source = plan.source
    by_function: dict[int, list[ast.Call]] = defaultdict(list)
    for step in steps:
        by_function[id(source.function(step))].append(step)
    windows = Windows(plan, flow, calls, blocks, steps)
    starts = sorted([*(source.start(step) for step in steps), *windows.turns()])
    looked: dict[tuple[int, int, str], list[ast.stmt]] = defaultdict(list)
    found = [*_masters(plan, flow, blocks), *windows.looks()]
    for statement, name in sorted(found, key=lambda one: source.start(one[0])):
        run = id(source.function(statement)), blocks.number_before(source.start(statement)), name
        looked[run].append(_anchor(source, statement, blocks, starts))
    for (_, _, name), statements in looked.items():
        for statement in _places(plan, blocks, statements, name):
            if not steps_after(source, statement, name, by_function):
                plan.refuse(statement, _MORE_OFTEN.format(name=name))
            if _clause_of_if(source, statement):
                plan.refuse(statement, "gradients are looked at in an elif: no statement can come before it")
            if not source.stands_alone(statement):
                plan.refuse(statement, "what looks at gradients shares its line with another statement")
            if blocks.around(source, statement) is not None:
                plan.note(
                    statement, "apex looked here at gradients that were still scaled; now they are true"
                )
            code = f"{scaler.at(source, statement)}.unscale_({name})"
            insert_before(source, plan.changes, statement, code, _indent(source, statement, blocks))


def _masters(plan: Plan, flow: Flow, blocks: Blocks) -> Iterator[tuple[ast.stmt, str]]:
    """The statements that ask for ``master_params``, and of which optimizer."""
    source = plan.source
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
            yield statement, source.code(owner)


def _places(plan: Plan, blocks: Blocks, looks: list[ast.stmt], name: str) -> list[ast.stmt]:
    """Before which statements gradients are unscaled, once on each path, for all that look at them."""
    source = plan.source
    paths = [_path(source, one) for one in looks]
    depth = 0
    while all(len(path) > depth + 1 for path in paths) and len({id(path[depth]) for path in paths}) == 1:
        depth += 1
    level: dict[int, list[ast.stmt]] = defaultdict(list)
    for path, one in zip(paths, looks, strict=True):
        level[id(source.suite(path[depth]))].append(one)
    if len(level) > 1:
        # Under one statement, in several of its suites.
        if isinstance(paths[0][depth - 1], ast.If):
            return [place for part in level.values() for place in _places(plan, blocks, part, name)]
        whole = paths[0][depth - 1]
        if _holds_block(whole, blocks):
            plan.refuse(looks[0], _TWICE.format(name=name))
        return [whole]
    before, first = paths[0][depth], looks[0]
    if all(path[depth] is before for path in paths):
        return [first]
    if _holds_block(before, blocks):
        # The first stands by its backward pass; what follows it meets gradients that are unscaled.
        around = {id(outer) for outer in source.around(first)}
        near = [block for block in blocks if id(block.statement) in {id(one) for one in walk(before)}]
        if not any(id(source.parents[block.statement]) in around for block in near):
            plan.refuse(first, _TWICE.format(name=name))
        inside = [one for path, one in zip(paths, looks, strict=True) if path[depth] is before]
        return _places(plan, blocks, inside, name)
    return [before]


def _holds_block(statement: ast.stmt, blocks: Blocks) -> bool:
    return any(id(node) in blocks.by_id for node in walk(statement))


def _path(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """The statements around one within its function, outermost first, itself last."""
    path = [statement]
    for outer in source.around(statement):
        if isinstance(outer, Function | ast.ClassDef):
            break
        if isinstance(outer, ast.stmt):
            path.append(outer)
    return path[::-1]


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
        for node in walk(one)
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
    stored = {node.id for node in walk(function) if isinstance(node, ast.Name)}
    return root(text) in names | stored

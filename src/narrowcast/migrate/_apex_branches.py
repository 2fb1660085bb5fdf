"""Scripts that hold apex and native mixed precision side by side: the native one stays."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from narrowcast.migrate._apex_plan import RULE
from narrowcast.migrate._arguments import argument_spans
from narrowcast.migrate._changes import Changes
from narrowcast.migrate._settings import Settings
from narrowcast.migrate._source import Reference, Source
from narrowcast.migrate._text import one_line, remove, unwrap

_NATIVE = re.compile(r"(torch|narrowcast)\.((cuda\.|cpu\.)?amp\.)?(autocast|GradScaler)$")
_SCALES = re.compile(r"scaler\w*\.(scale|step|update|unscale_|state_dict|load_state_dict)\(")
_APEX = re.compile("apex", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Guard:
    """The branch of an ``if`` that is taken for apex."""

    node: ast.If
    in_body: bool


def apex_branches(source: Source, settings: Settings) -> Changes:
    """Take out the branches for apex of a file that has branches for ``torch.amp`` beside them."""
    changes = Changes()
    if not any(_NATIVE.match(one.full) for one in source.references):
        return changes
    guards: dict[tuple[int, bool], _Guard] = {}
    for reference in source.references:
        if not reference.full.startswith("apex.amp"):
            continue
        guard = _guard(source, reference)
        if guard is None:
            return changes
        guards[id(guard.node), guard.in_body] = guard
    taken = [guard for guard in guards.values() if not _inside_another(source, guard, guards)]
    if not taken or any(one_line(source, guard.node) for guard in taken):
        return changes
    removed: list[ast.stmt] = []
    offered = _take_out_choices(source, changes)
    for guard in taken:
        _take_out(source, changes, guard, removed)
        message = f"the branch for apex goes, and that for torch.amp stays ({source.code(guard.node.test)})"
        if not offered and re.search("""['"]apex['"]""", source.code(guard.node.test)):
            message += f"; {_what_apex_gets(source, guard)}"
        changes.tell(source.start(guard.node), RULE, message, fixed=True)
    remove(source, changes, removed)
    return changes


def _what_apex_gets(source: Source, guard: _Guard) -> str:
    """What runs where the script is still started with 'apex'."""
    node = guard.node
    if not source.text.startswith("elif", source.start(node)) and (
        not guard.in_body or (node.orelse and not _next_is_elif(source, node))
    ):
        return "this is no longer asked: torch.amp runs for every value, 'apex' too"
    while node.orelse and _next_is_elif(source, node):
        assert isinstance(node.orelse[0], ast.If)
        node = node.orelse[0]
    if node.orelse or not guard.in_body:
        return "nothing refuses 'apex' here now, with which the else branch is taken"
    return "nothing refuses 'apex' here now, with which no branch is taken"


def _guard(source: Source, reference: Reference) -> _Guard | None:
    inner: ast.AST = reference.node
    for outer in source.around(reference.node):
        if isinstance(outer, ast.If) and inner is not outer.test:
            in_body = any(inner is one for one in outer.body)
            chained = not in_body and len(outer.orelse) == 1 and isinstance(outer.orelse[0], ast.If)
            if not chained and (_names_apex(source, outer.test, in_body) or _beside(source, outer, in_body)):
                return _Guard(outer, in_body)
        inner = outer
    return None


def _names_apex(source: Source, test: ast.expr, in_body: bool) -> bool:
    """Whether a test holds for apex alone, or, where it is the other branch, for everything but apex."""
    if not _APEX.search(source.code(test)):
        return False
    turned = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    turned = turned or (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.IsNot))
    return turned is not in_body


def _beside(source: Source, node: ast.If, in_body: bool) -> bool:
    """Whether the other branch is native and this one is not."""
    here, other = (node.body, node.orelse) if in_body else (node.orelse, node.body)
    return _is_native(source, other) and not _is_native(source, here)


def _is_native(source: Source, suite: list[ast.stmt]) -> bool:
    if not suite:
        return False
    begin, end = source.start(suite[0]), source.span(suite[-1])[1]
    if _SCALES.search(source.text[begin:end]):
        return True
    return any(_NATIVE.match(one.full) and begin <= source.start(one.node) < end for one in source.references)


def _inside_another(source: Source, guard: _Guard, guards: dict[tuple[int, bool], _Guard]) -> bool:
    inner: ast.AST = guard.node
    for outer in source.around(guard.node):
        if isinstance(outer, ast.If):
            in_body = any(inner is one for one in outer.body)
            if (id(outer), in_body) in guards:
                return True
        inner = outer
    return False


def _take_out(source: Source, changes: Changes, guard: _Guard, removed: list[ast.stmt]) -> None:
    node = guard.node
    is_elif = source.text.startswith("elif", source.start(node))
    if not guard.in_body:
        if is_elif:
            changes.replace((source.start(node), source.span(node.test)[1]), "else")
            changes.replace(_clause(source, node), "")
        else:
            unwrap(source, changes, node, node.body)
    elif not node.orelse and not is_elif:
        removed.append(node)
    elif not node.orelse:
        changes.replace(source.lines(node), "")
    elif is_elif or _next_is_elif(source, node):
        begin, end = source.lines(node)[0], _clause(source, node)[0]
        changes.replace((begin, end), "")
        if not is_elif:
            changes.replace((source.start(node.orelse[0]), source.start(node.orelse[0]) + 4), "if")
    else:
        unwrap(source, changes, node, node.orelse)


def _next_is_elif(source: Source, node: ast.If) -> bool:
    return source.text.startswith("elif", source.start(node.orelse[0])) and isinstance(node.orelse[0], ast.If)


def _clause(source: Source, node: ast.If) -> tuple[int, int]:
    """From the line of the ``else`` or ``elif`` after a suite to the end of the whole statement."""
    if _next_is_elif(source, node):
        return source.lines(node.orelse[0])[0], source.lines(node)[1]
    at = source.line_of(source.start(node.orelse[0]))[0] - 1
    while not source.text[source.starts[at - 1] : source.starts[at]].strip().startswith("else"):
        at -= 1
    return source.starts[at - 1], source.lines(node)[1]


def _take_out_choices(source: Source, changes: Changes) -> bool:
    """Let an option of the command line no longer offer apex; whether there is one."""
    found = False
    for node in source.nodes:
        if not isinstance(node, ast.Call) or not source.code(node.func).endswith("add_argument"):
            continue
        spans = {
            one.arg: one.value for one, _, _ in argument_spans(source, node) if isinstance(one, ast.keyword)
        }
        choices, default = spans.get("choices"), spans.get("default")
        if not isinstance(choices, ast.List | ast.Tuple | ast.Set):
            continue
        rest = [source.code(one) for one in choices.elts if getattr(one, "value", None) != "apex"]
        if len(rest) == len(choices.elts) or not rest:
            continue
        if getattr(default, "value", None) == "apex" and len(rest) > 1:
            changes.tell(source.start(node), RULE, "this option still offers apex, by default", fixed=False)
            continue
        left, right = source.code(choices)[0], source.code(choices)[-1]
        comma = "," if len(rest) == 1 and left == "(" else ""
        changes.replace(source.span(choices), f"{left}{', '.join(rest)}{comma}{right}")
        if default is not None and getattr(default, "value", None) == "apex":
            changes.replace(source.span(default), rest[0])
        changes.tell(source.start(node), RULE, "the option no longer offers apex", fixed=True)
        found = True
    return found

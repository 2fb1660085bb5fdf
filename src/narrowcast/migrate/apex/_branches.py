"""Scripts with a branch for apex beside one for ``torch.amp``: the branch for apex goes."""

from __future__ import annotations

import ast
import re

from narrowcast.migrate.apex._plan import RULE
from narrowcast.migrate.source._edits import Changes, Settings, is_one_line, remove, unwrap
from narrowcast.migrate.source._tree import Source

_NATIVE = re.compile(r"(torch|narrowcast)\.((cuda\.|cpu\.)?amp\.)?(autocast|GradScaler)$")
_APEX = re.compile("apex", re.IGNORECASE)
_GONE = (
    "the branch for apex goes, and that for torch.amp stays ({test}): a script that still asks for apex gets "
    "what stands for everything else"
)


def apex_branches(source: Source, settings: Settings) -> Changes:
    """Remove the branches for apex of a file that uses ``torch.amp`` beside them.

    Only where every use of ``apex.amp`` stands in the body of an ``if`` whose test names apex.
    """
    changes = Changes()
    if not any(_NATIVE.match(one.full) for one in source.references):
        return changes
    branches: dict[int, ast.If] = {}
    for reference in source.references:
        if reference.full.startswith("apex.amp"):
            branch = _branch_of(source, reference.node)
            if branch is None or is_one_line(branch):
                return changes
            branches[id(branch)] = branch
    removed: list[ast.stmt] = []
    for branch in branches.values():
        if not any(id(outer) in branches for outer in source.around(branch)):
            _remove_branch(source, changes, branch, removed)
            told = _GONE.format(test=source.code(branch.test))
            changes.tell(source.start(branch), RULE, told, fixed=True)
    remove(source, changes, removed)
    return changes


def _branch_of(source: Source, node: ast.AST) -> ast.If | None:
    """Return the innermost ``if`` whose test holds for apex and whose body holds ``node``."""
    inner = node
    for outer in source.around(node):
        if isinstance(outer, ast.If) and inner in outer.body and _APEX.search(source.code(outer.test)):
            test = outer.test
            turned = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
            turned = turned or (
                isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.IsNot)
            )
            return None if turned else outer
        inner = outer
    return None


def _remove_branch(source: Source, changes: Changes, node: ast.If, removed: list[ast.stmt]) -> None:
    begin, end = source.lines(node)
    is_elif = source.text.startswith("elif", source.start(node))
    if not node.orelse:
        if is_elif:
            changes.replace((begin, end), "")
        else:
            removed.append(node)
        return
    first = node.orelse[0]
    next_is_elif = isinstance(first, ast.If) and source.text.startswith("elif", source.start(first))
    if next_is_elif:
        changes.replace((begin, source.lines(first)[0]), "")
        if not is_elif:
            changes.replace((source.start(first), source.start(first) + len("elif")), "if")
    elif is_elif:
        line = source.line_of(source.start(first))[0] - 1
        while not source.text[source.starts[line - 1] :].lstrip().startswith("else"):
            line -= 1
        changes.replace((begin, source.starts[line - 1]), "")
    else:
        unwrap(source, changes, node, node.orelse)

"""Imports and arguments as pieces of text: moved to another module, or removed."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Collection

from narrowcast.migrate.source._edits import Changes, between_statements, remove
from narrowcast.migrate.source._tree import Source

GONE = ""
"""The new module of an import that is removed."""

_BLANKS = " \t\f\r\n\\"
_MODULE = re.compile(r"from\b(.*?)\bimport\b", re.DOTALL)


def move_imports(
    source: Source,
    changes: Changes,
    moved: Collection[str],
    home: Callable[[str], str | None],
    removed: list[ast.stmt] | None = None,
) -> None:
    """Rewrite the imports that bind the names in ``moved``.

    Args:
        home: maps an old full name to the new one, to ``GONE`` if the import goes, to None if it stays.
        removed: collects the statements that go; the caller removes them. None: they are removed here.
    """
    gone: list[ast.stmt] = []
    for statement in source.nodes:
        if isinstance(statement, ast.ImportFrom):
            _move_from(source, changes, statement, moved, home, gone)
        elif isinstance(statement, ast.Import):
            _move_plain(source, changes, statement, moved, home, gone)
    if removed is None:
        remove(source, changes, gone)
    else:
        removed += gone


def _move_from(
    source: Source,
    changes: Changes,
    statement: ast.ImportFrom,
    moved: Collection[str],
    home: Callable[[str], str | None],
    gone: list[ast.stmt],
) -> None:
    targets: dict[str, list[ast.alias]] = defaultdict(list)
    for alias in statement.names:
        new = home(f"{'.' * statement.level}{statement.module or ''}.{alias.name}")
        if new is not None and (alias.asname or alias.name) in moved:
            targets[new.rpartition(".")[0]].append(alias)
    if not targets:
        return
    leaving = [alias for aliases in targets.values() for alias in aliases]
    if len(targets) == 1 and len(leaving) == len(statement.names):
        if GONE in targets:
            gone.append(statement)
        else:
            set_module(source, changes, statement, *targets)
        return
    lines = [
        f"from {module} import {', '.join(map(ast.unparse, aliases))}"
        for module, aliases in targets.items()
        if module != GONE
    ]
    replace_names(source, changes, statement, leaving, lines)


def _move_plain(
    source: Source,
    changes: Changes,
    statement: ast.Import,
    moved: Collection[str],
    home: Callable[[str], str | None],
    gone: list[ast.stmt],
) -> None:
    lines: dict[str, None] = {}
    leaving = []
    for alias in statement.names:
        bound = alias.asname or alias.name.partition(".")[0]
        new = home(alias.name)
        if new is None or bound not in moved:
            continue
        leaving.append(alias)
        if alias.asname and new != GONE:
            lines[f"import {new} as {alias.asname}"] = None
        elif new != GONE and not any(one.full == one.name == bound for one in source.imports):
            lines[f"import {new.partition('.')[0]}"] = None
    if leaving and not lines and len(leaving) == len(statement.names):
        gone.append(statement)
    elif leaving:
        replace_names(source, changes, statement, leaving, list(lines))


def set_module(source: Source, changes: Changes, statement: ast.ImportFrom, module: str) -> None:
    """Import the same names from another module; comments and brackets stay."""
    match = _MODULE.match(source.code(statement))
    assert match is not None
    at = source.start(statement)
    changes.replace((at + match.start(1), at + match.end(1)), f" {module} ")


def replace_names(
    source: Source,
    changes: Changes,
    statement: ast.Import | ast.ImportFrom,
    leaving: list[ast.alias],
    lines: list[str],
) -> None:
    """Take names out of an import statement, and put further statements behind it."""
    between = between_statements(source, statement)
    names = statement.names
    kept = [alias for alias in names if alias not in leaving]
    if not kept:
        changes.replace(source.span(statement), between.join(lines))
        return
    for index, alias in enumerate(names):
        if alias not in leaving:
            continue
        if any(one in kept for one in names[index + 1 :]):
            changes.replace((source.start(alias), source.start(names[index + 1])), "")
        else:
            changes.replace((source.span(names[index - 1])[1], source.span(alias)[1]), "")
    changes.insert(source.span(statement)[1], "".join(between + line for line in lines))


def open_bracket(source: Source, call: ast.Call) -> int:
    """Return the character after the opening bracket of a call."""
    at = _skip(source.text, source.span(call.func)[1])
    while source.text[at] != "(":
        at = _skip(source.text, at + 1)  # brackets around what is called
    return at + 1


def argument_spans(source: Source, call: ast.Call) -> list[tuple[ast.expr | ast.keyword, int, int]]:
    """Return each argument with the span of its text, brackets around it included."""
    nodes: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    found = []
    text, at = source.text, _skip(source.text, open_bracket(source, call))
    close = source.span(call)[1] - 1
    for node in nodes:
        end = source.span(node)[1]
        after = _skip(text, end)
        while after < close and text[after] == ")":
            end = after + 1
            after = _skip(text, end)
        found.append((node, at, end))
        at = _skip(text, after + 1)
    return found


def drop_arguments(source: Source, changes: Changes, call: ast.Call, names: Collection[str]) -> None:
    """Remove keyword arguments of a call, each with its comma."""
    spans = argument_spans(source, call)
    leaving = [isinstance(node, ast.keyword) and node.arg in names for node, _, _ in spans]
    for index, (_, start, end) in enumerate(spans):
        if not leaving[index]:
            continue
        if not all(leaving[:index]):
            changes.replace((spans[index - 1][2], end), "")
        elif index + 1 < len(spans):
            changes.replace((start, spans[index + 1][1]), "")
        else:
            changes.replace((start, source.span(call)[1] - 1), "")


def _skip(text: str, at: int) -> int:
    """Return the next character that is neither blank nor in a comment."""
    while at < len(text):
        if text[at] == "#":
            while text[at] not in "\r\n":
                at += 1
        elif text[at] in _BLANKS:
            at += 1
        else:
            break
    return at

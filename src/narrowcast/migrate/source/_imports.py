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
    homes: dict[ast.Import | ast.ImportFrom, dict[ast.alias, str]] = defaultdict(dict)
    for one in source.imports:
        if one.name in moved and (new := home(one.full)) is not None:
            homes[one.statement][one.alias] = new
    gone: list[ast.stmt] = []
    for statement, news in homes.items():
        lines = _new_imports(source, statement, news)
        modules = {new.rpartition(".")[0] for new in news.values()}
        is_whole = len(news) == len(statement.names)
        if is_whole and not lines:
            gone.append(statement)
        elif is_whole and len(modules) == 1 and isinstance(statement, ast.ImportFrom):
            set_module(source, changes, statement, *modules)
        else:
            replace_names(source, changes, statement, list(news), lines)
    if removed is None:
        remove(source, changes, gone)
    else:
        removed += gone


def _new_imports(
    source: Source, statement: ast.Import | ast.ImportFrom, news: dict[ast.alias, str]
) -> list[str]:
    """Return the statements that import the names of ``statement`` from where they are now."""
    lines: dict[str, list[str]] = defaultdict(list)
    for alias, new in news.items():
        bound = alias.asname or alias.name.partition(".")[0]
        if new == GONE:
            continue
        if isinstance(statement, ast.ImportFrom):
            lines[f"from {new.rpartition('.')[0]} import "].append(ast.unparse(alias))
        elif alias.asname:
            lines[f"import {new} as {bound}"] = []
        elif not any(one.full == one.name == bound for one in source.imports):
            lines[f"import {new.partition('.')[0]}"] = []
    return [line + ", ".join(names) for line, names in lines.items()]


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

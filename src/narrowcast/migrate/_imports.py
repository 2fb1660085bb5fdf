"""Imports that follow what they import to its new home, or go where nothing uses them any more."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from narrowcast.migrate._changes import Changes
from narrowcast.migrate._fragments import from_module, only_names, without_names
from narrowcast.migrate._source import Source
from narrowcast.migrate._text import remove

Key = tuple[ast.AST, str]
GONE = ""
"""The new home of what no longer has to be imported."""


@dataclass(slots=True)
class Moves:
    """Imported names of which every use was rewritten, each as its scope and the name in it."""

    done: set[Key] = field(default_factory=set)


def move_imports(
    source: Source,
    changes: Changes,
    moves: Moves,
    home: Callable[[str], str | None],
    removed: list[ast.stmt] | None = None,
) -> None:
    """Rewrite the imports of the names in ``moves``.

    Args:
        home: the new full name for an old one, ``GONE`` where the import goes, None where it stays.
        removed: statements that other edits take out; those that go are added, and the caller removes them.
            None: they are removed here.
    """
    gone: list[ast.stmt] = []
    for statement in source.nodes:
        if isinstance(statement, ast.ImportFrom):
            _move_from(source, changes, statement, moves, home, gone)
        elif isinstance(statement, ast.Import):
            _move_plain(source, changes, statement, moves, home, gone)
    if removed is None:
        remove(source, changes, gone)
    else:
        removed += gone


def _move_from(
    source: Source,
    changes: Changes,
    statement: ast.ImportFrom,
    moves: Moves,
    home: Callable[[str], str | None],
    gone: list[ast.stmt],
) -> None:
    targets: dict[str, list[str]] = defaultdict(list)
    for alias in statement.names:
        key = (
            source.names.scope_of_import(statement, alias.asname or alias.name),
            alias.asname or alias.name,
        )
        new = home(f"{'.' * statement.level}{statement.module or ''}.{alias.name}")
        if new is not None and key in moves.done:
            targets[new.rpartition(".")[0] if new else GONE].append(alias.name)
    if not targets:
        return
    text = source.code(statement)
    moved = [name for names in targets.values() for name in names]
    if len(targets) == 1 and len(moved) == len(statement.names):
        (module,) = targets
        if module == GONE:
            gone.append(statement)
        else:
            changes.replace(source.span(statement), from_module(text, module))
        return
    lines = [rest] if (rest := without_names(text, moved)) is not None else []
    for module, names in targets.items():
        if module != GONE:
            listed = (f"{old} as {new}" if new else old for old, new in only_names(text, names))
            lines.append(f"from {module} import {', '.join(listed)}")
    changes.replace(source.span(statement), _between(source, statement).join(lines))


def _move_plain(
    source: Source,
    changes: Changes,
    statement: ast.Import,
    moves: Moves,
    home: Callable[[str], str | None],
    gone: list[ast.stmt],
) -> None:
    lines = []
    moved = []
    for alias in statement.names:
        bound = alias.asname or alias.name.partition(".")[0]
        scope = source.names.scope_of_import(statement, bound)
        new = home(alias.name)
        if new is None or (scope, bound) not in moves.done:
            continue
        moved.append(alias.name)
        if alias.asname and new != GONE:
            lines.append(f"import {new} as {alias.asname}")
        elif not alias.asname and new != GONE and not _imported_elsewhere(source, statement, scope, bound):
            lines.append(f"import {new.partition('.')[0]}")
    if not moved:
        return
    rest = without_names(source.code(statement), moved)
    lines = [*([rest] if rest is not None else []), *dict.fromkeys(lines)]
    if lines:
        changes.replace(source.span(statement), _between(source, statement).join(lines))
    else:
        gone.append(statement)


def _imported_elsewhere(source: Source, statement: ast.Import, scope: ast.AST, bound: str) -> bool:
    """Whether another import binds the first part of a dotted name in the same scope, before it is needed."""
    for other, other_scope, name, plain in bindings(source):
        if other is not statement and other_scope is scope and name == bound and plain:
            return True
    return False


def bindings(source: Source) -> Iterator[tuple[ast.stmt, ast.AST, str, bool]]:
    """Each import: its statement, the scope, the name bound, and whether it is ``import name`` alone."""
    for statement in source.nodes:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                bound = alias.asname or alias.name.partition(".")[0]
                plain = isinstance(statement, ast.Import) and alias.name == bound
                yield statement, source.names.scope_of_import(statement, bound), bound, plain


def _between(source: Source, statement: ast.stmt) -> str:
    """What stands between two statements put in the place of one."""
    if source.stands_alone(statement):
        return source.newline + source.indent(statement)
    return "; "

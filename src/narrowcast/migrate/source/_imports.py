"""Move imports to another module or remove them, as edits of the text."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Collection

from narrowcast.migrate.source._edits import Changes, between_statements
from narrowcast.migrate.source._tree import ImportStatement, Source

GONE = ""
"""The new module of an import that is removed."""

_MODULE = re.compile(r"from\b(.*?)\bimport\b", re.DOTALL)


def move_imports(
    source: Source, changes: Changes, moved: Collection[str], home: Callable[[str], str | None]
) -> list[ast.stmt]:
    """Rewrite the imports that bind the names in ``moved``; return the statements that the caller removes.

    Args:
        home: maps an old full name to the new one, whose last part is the same; to ``GONE`` if the import
            is removed, and to None if it stays.
    """
    # For each statement, the names that move or are removed, with their new full names or GONE.
    new_names: dict[ImportStatement, dict[ast.alias, str]] = defaultdict(dict)
    for imported in source.imports:
        new = home(imported.full)
        if imported.name in moved and new is not None:
            new_names[imported.statement][imported.alias] = new

    gone: list[ast.stmt] = []
    for statement, new_by_alias in new_names.items():
        lines = _new_imports(source, statement, new_by_alias)
        modules = {_module_of(new) for new in new_by_alias.values()}
        is_whole = len(new_by_alias) == len(statement.names)
        if is_whole and not lines:
            gone.append(statement)
        elif is_whole and len(modules) == 1 and isinstance(statement, ast.ImportFrom):
            # Only the module is replaced, so that comments and brackets stay.
            (module,) = modules
            set_module(source, changes, statement, module)
        else:
            replace_names(source, changes, statement, list(new_by_alias), lines)
    return gone


def _module_of(full: str) -> str:
    return full.rpartition(".")[0]


def _new_imports(source: Source, statement: ImportStatement, new_by_alias: dict[ast.alias, str]) -> list[str]:
    """Return the statements that import the moved names of ``statement`` from their new modules."""
    from_modules: dict[str, list[str]] = defaultdict(list)
    lines: list[str] = []
    for alias, new in new_by_alias.items():
        if new == GONE:
            continue
        if isinstance(statement, ast.ImportFrom):
            from_modules[_module_of(new)].append(ast.unparse(alias))
        elif alias.asname:
            lines.append(f"import {new} as {alias.asname}")
        else:
            # "import torch.cuda.amp" binds torch. Unless another import binds it, "import torch" replaces it.
            package = new.partition(".")[0]
            is_imported = False
            for other in source.imports:
                # An import in a function or a try may not be run.
                is_run = other.statement is statement or other.statement in source.tree.body
                if is_run and other.full == other.name == package:
                    is_imported = True
            if not is_imported and f"import {package}" not in lines:
                lines.append(f"import {package}")
    for module, names in from_modules.items():
        lines.append(f"from {module} import {', '.join(names)}")
    return lines


def set_module(source: Source, changes: Changes, statement: ast.ImportFrom, module: str) -> None:
    """Import the same names from another module; comments and brackets stay."""
    match = _MODULE.match(source.code(statement))
    assert match is not None
    at = source.start(statement)
    changes.replace((at + match.start(1), at + match.end(1)), f" {module} ")


def replace_names(
    source: Source,
    changes: Changes,
    statement: ImportStatement,
    leaving: Collection[ast.alias],
    lines: list[str],
) -> None:
    """Remove the names ``leaving`` from an import statement, and insert ``lines`` after it."""
    between = between_statements(source, statement)
    names = statement.names
    kept = [alias for alias in names if alias not in leaving]
    if not kept:
        changes.replace(source.span(statement), between.join(lines))
        return

    for index, alias in enumerate(names):
        if alias in kept:
            continue
        # Remove the name with the comma after it; if no kept name follows, with the comma before it.
        if names.index(kept[-1]) > index:
            changes.replace((source.start(alias), source.start(names[index + 1])), "")
        else:
            changes.replace((source.span(names[index - 1])[1], source.span(alias)[1]), "")
    for line in lines:
        changes.insert(source.span(statement)[1], between + line)


def open_bracket(source: Source, call: ast.Call) -> int:
    """Return the offset just after the opening bracket of a call."""
    return source.text.index("(", source.span(call.func)[1]) + 1

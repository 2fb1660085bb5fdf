"""Files that keep their calls of apex: import from ``narrowcast.apex`` what it has, the rest from apex."""

from __future__ import annotations

import ast

import narrowcast.apex
from narrowcast.migrate.apex._plan import RULE, is_apex
from narrowcast.migrate.source._edits import Changes
from narrowcast.migrate.source._imports import replace_names, set_module
from narrowcast.migrate.source._tree import Source

# Of the packages that narrowcast.apex has: what it has not.
_LACKING = tuple(f"apex.parallel.{name}" for name in ("LARC", "Reducer", "multiproc", "distributed"))


def keep_with_narrowcast(source: Source, changes: Changes) -> None:
    """Import from ``narrowcast.apex`` the packages that it has; every call stays."""
    # One name is either apex's or narrowcast's.
    lacking = [one.full for one in source.references if one.name == "apex" and not _has(one.full)]
    for statement in source.nodes:
        if isinstance(statement, ast.ImportFrom) and not statement.level and is_apex(statement.module or ""):
            moved = [one for one in statement.names if _has(f"{statement.module}.{one.name}")]
            left = [f"{statement.module}.{one.name}" for one in statement.names if one not in moved]
            if not left:
                set_module(source, changes, statement, f"narrowcast.{statement.module}")
            elif moved:
                line = f"from narrowcast.{statement.module} import {', '.join(map(ast.unparse, moved))}"
                replace_names(source, changes, statement, moved, [line])
        elif isinstance(statement, ast.Import) and any(is_apex(alias.name) for alias in statement.names):
            ours = [one for one in statement.names if is_apex(one.name)]
            moved = [one for one in ours if _has(one.name) and (one.asname or not lacking)]
            left = [*lacking, *(one.name for one in ours if not _has(one.name))]
            _keep_plain(source, changes, statement, moved)
        else:
            continue
        for full in dict.fromkeys(left):
            message = f"narrowcast.apex has no {full.removeprefix('apex.')}: this still asks for apex itself"
            changes.tell(source.start(statement), RULE, f"{message} (see docs/from-apex.md)", fixed=False)
        if moved:
            changes.tell(source.start(statement), RULE, "imported from narrowcast.apex instead", fixed=True)


def _has(full: str) -> bool:
    """Return whether narrowcast.apex has a name: its packages have all public names of apex but a few."""
    parts = full.split(".")
    known = len(parts) < 2 or parts[1] in narrowcast.apex.__all__ or parts[1] == "*"
    return known and not full.startswith(_LACKING)


def _keep_plain(source: Source, changes: Changes, statement: ast.Import, moved: list[ast.alias]) -> None:
    lines: dict[str, None] = {}
    for alias in moved:
        if alias.asname or alias.name != "apex":
            lines[f"import narrowcast.{ast.unparse(alias)}"] = None
        if not alias.asname:
            lines["from narrowcast import apex"] = None
    if moved:
        replace_names(source, changes, statement, moved, list(lines))

"""Files that keep their calls of apex: import from ``narrowcast.apex`` what it has, the rest from apex."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import narrowcast.apex
from narrowcast.migrate.apex._plan import RULE, is_apex
from narrowcast.migrate.source._edits import Changes
from narrowcast.migrate.source._imports import replace_names, set_module
from narrowcast.migrate.source._tree import Source

# Of the packages that narrowcast.apex has: what it has not.
_LACKING = (
    "apex.amp.init.",
    *(f"apex.parallel.{name}." for name in ("LARC", "Reducer", "multiproc", "distributed")),
)


def keep_with_narrowcast(source: Source, changes: Changes) -> None:
    """Import from ``narrowcast.apex`` the packages that it has; every call stays."""
    # By the name that an import binds, which is either apex's or narrowcast's.
    lacking: dict[str, list[str]] = {}
    for reference in source.references:
        if not _has(reference.full):
            lacking.setdefault(reference.name, []).append(reference.full)
    for statement in source.nodes:
        if isinstance(statement, ast.ImportFrom) and not statement.level and is_apex(statement.module or ""):
            missing = {
                one: _missing(f"{statement.module}.{one.name}", one.asname or one.name, lacking)
                for one in statement.names
            }
            moved = [one for one in statement.names if not missing[one]]
            if len(moved) == len(statement.names):
                set_module(source, changes, statement, f"narrowcast.{statement.module}")
            elif moved:
                line = f"from narrowcast.{statement.module} import {', '.join(map(ast.unparse, moved))}"
                replace_names(source, changes, statement, moved, [line])
        elif isinstance(statement, ast.Import) and any(is_apex(alias.name) for alias in statement.names):
            ours = [one for one in statement.names if is_apex(one.name)]
            missing = {one: _missing(one.name, one.asname or "apex", lacking) for one in ours}
            moved = [one for one in ours if not missing[one]]
            _keep_plain(source, changes, statement, moved)
        else:
            continue
        for name in dict.fromkeys(name for names in missing.values() for name in names):
            message = f"narrowcast.apex has no {name.removeprefix('apex.')}: this still asks for apex itself"
            changes.tell(source.start(statement), RULE, f"{message} (see docs/from-apex.md)", fixed=False)
        if moved:
            changes.tell(source.start(statement), RULE, "imported from narrowcast.apex instead", fixed=True)


def _missing(full: str, bound: str, lacking: Mapping[str, list[str]]) -> list[str]:
    """Return what narrowcast.apex has not of one imported name and of what is taken of it."""
    return lacking.get(bound, []) if _has(full) else [full]


def _has(full: str) -> bool:
    """Return whether narrowcast.apex has a name: its packages have all public names of apex but a few."""
    parts = full.split(".")
    known = len(parts) < 2 or parts[1] in narrowcast.apex.__all__ or parts[1] == "*"
    return known and not f"{full}.".startswith(_LACKING)


def _keep_plain(source: Source, changes: Changes, statement: ast.Import, moved: list[ast.alias]) -> None:
    lines: dict[str, None] = {}
    for alias in moved:
        if alias.asname or alias.name != "apex":
            lines[f"import narrowcast.{ast.unparse(alias)}"] = None
        if not alias.asname:
            lines["from narrowcast import apex"] = None
    if moved:
        replace_names(source, changes, statement, moved, list(lines))

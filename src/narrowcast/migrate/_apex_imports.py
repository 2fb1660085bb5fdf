"""Imports of apex: gone with their last use."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import PurePath

from narrowcast.migrate._apex_kept import FP16_UTILS
from narrowcast.migrate._apex_plan import Plan, is_apex
from narrowcast.migrate._imports import GONE, Moves, move_imports
from narrowcast.migrate._source import Imported, Source
from narrowcast.migrate._text import import_line, reaches
from narrowcast.migrate._to_narrowcast import narrowcast_name
from narrowcast.migrate._walk import walk


def remove_imports(plan: Plan, homes: dict[str, str]) -> None:
    """Take apex's imports out, or let them follow to torch; refuse what this file may hand on."""
    source = plan.source
    moves = Moves()
    if PurePath(source.path).name == "__init__.py":
        for one in source.imports:
            if is_apex(one.full):
                plan.refuse(
                    one.statement, "what a package's __init__.py imports from apex may be imported from it"
                )
    ours = [one for one in source.imports if is_apex(one.full)]
    for one in ours:
        moves.done.add((one.scope, one.name))
        if one.full.endswith(".*"):
            _refuse_star(plan, one)
        elif (
            "?" in source.names.bound(one.scope, one.name) or len(source.names.bound(one.scope, one.name)) > 1
        ):
            plan.refuse(
                one.statement, f"{one.name} is bound to something else too: which one is used is not known"
            )

        elif _probes(source, one):
            plan.refuse(
                one.statement,
                "this asks whether apex is there, and what follows from that is not known"
                if _answers(source, one)
                else "this asks whether apex is there, and nothing here reads the answer: it can go, unless "
                "another file imports it",
            )
    used = {(one.scope, one.name) for one in source.references}
    kept = {one.full for one in ours if one.full in homes and (one.scope, one.name) in used}
    move_imports(
        source,
        plan.changes,
        moves,
        lambda full: homes[full] if full in kept else (GONE if is_apex(full) else None),
        plan.gone,
    )
    _take_out_tries(plan)
    if plan.target == "narrowcast" and plan.needs_torch and narrowcast_name(source) != "nc":
        plan.refuse(
            source.tree.body[0], "nc is the name of something else in this file, or narrowcast's is another"
        )
    wanted = [("torch", "torch")] if plan.needs_torch else []
    if plan.target == "narrowcast" and any("nc." in one.text for one in plan.changes.edits):
        wanted.append(("nc", "narrowcast"))
    for name, module in wanted:
        if not reaches(source, name, module):
            line = f"import {module}" if name == module else f"import {module} as {name}"
            plan.changes.edits.insert(0, import_line(source, line))


def _refuse_star(plan: Plan, one: Imported) -> None:
    """Refuse a star import, unless nothing that it brings is named in the file."""
    names = {
        node.id for node in plan.source.nodes if isinstance(node, ast.Name) and id(node) not in plan.done
    }
    used = sorted(names & FP16_UTILS)
    if one.full != "apex.fp16_utils.*":
        plan.refuse(one.statement, "a star import of apex: what of it is used is not known")
    elif used:
        plan.refuse(one.statement, f"a star import of apex, of which {', '.join(used)} may be used")


def _probes(source: Source, one: Imported) -> bool:
    """Whether an import is only tried: nothing of it is used, and a flag is set by whether it fails."""
    if any(used.name == one.name and used.scope is one.scope for used in source.references):
        return False
    around = source.parents[one.statement]
    if not isinstance(around, ast.Try) or (
        all(isinstance(other, ast.Import | ast.ImportFrom) for other in around.body)
        and all(_only_tells(handler) for handler in around.handlers)
        and not around.orelse
    ):
        return False
    return not any(is_apex(used.full) for used in source.references)


def _answers(source: Source, one: Imported) -> bool:
    """Whether the file reads what the ``try`` around an import sets."""
    around = source.parents[one.statement]
    set_there = _names([node for node in ast.walk(around) if isinstance(node, ast.Assign)])
    read = {node.id for node in source.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return not set_there or bool(set_there & read)


def _take_out_tries(plan: Plan) -> None:
    """A ``try`` that only looked whether apex is there goes as a whole."""
    source = plan.source
    gone = {id(one) for one in plan.gone}
    for node in source.nodes:
        if not isinstance(node, ast.Try) or node.finalbody:
            continue
        left = [one for one in (*node.body, *node.orelse) if id(one) not in gone]
        if not any(id(one) in gone for one in node.body) or not all(
            _only_tells(one, left) for one in node.handlers
        ):
            continue
        if left and not (all(map(_is_flag, left)) and source.stands_alone(node)):
            continue
        plan.gone = [one for one in plan.gone if not any(one is inner for inner in node.body)]
        if not left:
            plan.gone.append(node)
            continue
        between = source.newline + source.indent(node)
        plan.changes.replace(source.span(node), between.join(source.code(one) for one in left))
        stays = "; ".join(source.code(one) for one in left)
        plan.note(node, f"whether apex is there is no longer asked, and this stays: {stays}")


def _is_flag(statement: ast.stmt) -> bool:
    """Whether a statement sets variables to something fixed."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and all(isinstance(target, ast.Name) for target in statement.targets)
    )


def _names(statements: list[ast.stmt]) -> set[str]:
    return {
        node.id
        for one in statements
        for node in walk(one)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _only_tells(handler: ast.ExceptHandler, flags: Sequence[ast.stmt] = ()) -> bool:
    """Whether a handler raises, tells, or sets a name to None or a flag: nothing needed without apex."""
    names = _names(list(flags))
    return all(
        isinstance(one, ast.Raise | ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Call | ast.Constant))
        or (isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant) and one.value.value is None)
        or (_is_flag(one) and _names([one]) <= names)
        for one in handler.body
    )

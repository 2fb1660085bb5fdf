"""What is reached whenever something else was: a step after a backward pass."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from narrowcast.migrate._apex_steps import condition
from narrowcast.migrate._source import Source

Steps = Mapping[int, list[ast.Call]]


def steps_after(source: Source, statement: ast.stmt, name: str, steps: Steps) -> bool:
    """Whether the optimizer steps whenever ``statement`` was reached; so where its step is elsewhere."""
    own = [
        step
        for step in steps.get(id(source.function(statement)), ())
        if isinstance(step.func, ast.Attribute) and source.code(step.func.value) == name
    ]
    if not any(source.start(step) >= source.start(statement) for step in own):
        return True
    caught = any(isinstance(outer, ast.Try) and outer.handlers for outer in source.around(statement))
    leaves = (ast.Continue, ast.Break, ast.Return, *((ast.Raise,) if caught else ()))
    held: set[tuple[str, bool]] = set()
    here: ast.stmt = statement
    first = True
    while True:
        suite = source.suite(here)
        at = next(index for index, one in enumerate(suite) if one is here)
        for one in suite[at if first else at + 1 :]:
            if _always(source, one, name, held):
                return True
            if any(isinstance(node, leaves) for node in ast.walk(one)):
                return False
        first = False
        outer = source.parents[here]
        if isinstance(outer, ast.If):
            held.add(condition(source, outer.test, any(here is one for one in outer.body)))
        elif not isinstance(outer, ast.With | ast.Try):
            return False
        here = outer


def _always(source: Source, statement: ast.stmt, name: str, held: set[tuple[str, bool]]) -> bool:
    """Whether a statement steps whenever it is reached under the conditions ``held``."""
    if isinstance(statement, ast.If):
        if condition(source, statement.test, True) in held:
            return any(_always(source, one, name, held) for one in statement.body)
        if condition(source, statement.test, False) in held:
            return any(_always(source, one, name, held) for one in statement.orelse)
        return all(
            any(_always(source, one, name, held) for one in suite)
            for suite in (statement.body, statement.orelse)
        )
    if isinstance(statement, ast.With | ast.Try):
        return any(_always(source, one, name, held) for one in statement.body)
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
        and source.code(call.func.value) == name
    )

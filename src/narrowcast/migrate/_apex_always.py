"""What is reached whenever something else was: a step after a backward pass."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from narrowcast.migrate._apex_flow import Function
from narrowcast.migrate._apex_steps import condition
from narrowcast.migrate._source import Source
from narrowcast.migrate._walk import children

Steps = Mapping[int, list[ast.Call]]


def steps_after(
    source: Source, statement: ast.stmt, name: str, steps: Steps, *, failing: bool = True
) -> bool:
    """Whether the optimizer steps whenever ``statement`` was reached; so where its step is elsewhere.

    ``failing`` is whether errors that are caught count: what raises one does not come to its step.
    """
    own = [
        step
        for step in steps.get(id(source.function(statement)), ())
        if isinstance(step.func, ast.Attribute) and source.code(step.func.value) == name
    ]
    if not any(source.start(step) >= source.start(statement) for step in own):
        return True
    caught = failing and any(_catches(source, outer) for outer in source.around(statement))
    way = _Way(source, name, failing=failing, caught=caught)
    here: ast.stmt = statement
    following = source.suite(here)
    following = following[_place(here, following) :]
    while True:
        found = way.of(following)
        if found is not None:
            return found
        outer = source.parents[here]
        after: list[ast.stmt] = []
        if isinstance(outer, ast.If):
            way.held.add(condition(source, outer.test, any(here is one for one in outer.body)))
        elif isinstance(outer, ast.Try):
            in_body = any(here is one for one in outer.body)
            if in_body and failing and _catches(source, outer):
                # Some error after ``statement`` leads to a handler, and past what is for no error.
                if any(way.may_leave(one) for one in (*outer.handlers, *outer.orelse)):
                    return False
            elif in_body:
                after += outer.orelse
            if here not in outer.finalbody:
                after += outer.finalbody
        elif not isinstance(outer, ast.With):
            return False
        here = outer
        beside = source.suite(here)
        following = [*after, *beside[_place(here, beside) + 1 :]]


def _place(statement: ast.stmt, suite: list[ast.stmt]) -> int:
    return next(index for index, one in enumerate(suite) if one is statement)


def _catches(source: Source, statement: ast.AST) -> bool:
    """Whether a program goes on behind a statement in which an error was raised."""
    if isinstance(statement, ast.With):
        called = [one.context_expr.func for one in statement.items if isinstance(one.context_expr, ast.Call)]
        return any(source.names.full(one) == "contextlib.suppress" for one in called)
    return isinstance(statement, ast.Try | ast.TryStar) and any(
        not isinstance(one.body[-1], ast.Raise) for one in statement.handlers
    )


@dataclass(slots=True)
class _Way:
    """What statements come to: True where they step, False where they may leave before; else None.

    Attributes:
        caught: whether what is raised is a way out; where nothing catches it, training is over.
        held: the conditions that hold, with what they come to.
    """

    source: Source
    name: str
    failing: bool
    caught: bool
    held: set[tuple[str, bool]] = field(default_factory=set)

    def of(self, suite: Iterable[ast.stmt]) -> bool | None:
        """What comes first in a suite: a step, or a way out of it."""
        return next((found for one in suite if (found := self._statement(one)) is not None), None)

    def _statement(self, statement: ast.stmt) -> bool | None:
        if isinstance(statement, ast.If):
            return self._if(statement)
        if self.failing and _catches(self.source, statement):
            return False if self.may_leave(statement) else None
        if isinstance(statement, ast.With):
            return self.of(statement.body)
        if isinstance(statement, ast.Try):
            last = self.of(statement.finalbody)
            found = self.of([*statement.body, *statement.orelse])
            return last if last or found is None else found
        if isinstance(statement, ast.Raise):
            return not self.caught
        return True if self._steps(statement) else (False if self.may_leave(statement) else None)

    def _if(self, statement: ast.If) -> bool | None:
        for suite, holds in ((statement.body, True), (statement.orelse, False)):
            if condition(self.source, statement.test, holds) in self.held:
                return self.of(suite)
        ways = {self.of(statement.body), self.of(statement.orelse)}
        return False if False in ways else (None if None in ways else True)

    def _steps(self, statement: ast.stmt) -> bool:
        call = statement.value if isinstance(statement, ast.Expr) else None
        return (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "step"
            and self.source.code(call.func.value) == self.name
        )

    def may_leave(self, node: ast.AST, *, own_loop: bool = False) -> bool:
        """Whether what follows a statement may not be reached; in a loop of its own it may go on or end."""
        if isinstance(node, ast.Break | ast.Continue):
            return not own_loop
        if isinstance(node, ast.Return) or (isinstance(node, ast.Raise) and self.caught):
            return True
        if isinstance(node, ast.ClassDef | Function):
            return False
        loop = isinstance(node, ast.For | ast.AsyncFor | ast.While)
        if loop and any(self.may_leave(one, own_loop=True) for one in node.body):  # type: ignore[attr-defined]
            return True
        inside = node.orelse if loop else children(node)  # type: ignore[attr-defined]
        return any(
            self.may_leave(one, own_loop=own_loop)
            for one in inside
            if isinstance(one, ast.stmt | ast.ExceptHandler | ast.match_case)
        )

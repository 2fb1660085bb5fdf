"""Where the forward pass and the loss are computed: what a region of autocast has to hold.

apex casts wherever a listed function is called. A region has a beginning and an end: from the first statement
that calls a model to the last that computes the loss from it, and never across a backward pass or a step.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._source import Source
from narrowcast.migrate._walk import children, walk

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_NEVER_WHOLE = (
    *_LOOPS,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
)
_SUITES = ("body", "orelse", "finalbody")
Span = tuple[ast.stmt, ast.stmt]


@dataclass(slots=True)
class Frame:
    """One function, or the level of the module, with what its variables depend on.

    Attributes:
        losses: variables that a loss is made of, the expressions that apex scaled in this function.
        tainted: variables that depend on the output of a model.
        needed: variables that the loss depends on.
        forward: statements that call a model, by their ``id``.
    """

    source: Source
    flow: Flow
    body: list[ast.stmt]
    losses: list[ast.expr]
    is_barrier: Callable[[ast.AST], bool]
    tainted: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    forward: set[int] = field(default_factory=set)

    def spans(self) -> list[Span]:
        """The first and last statements of each region."""
        statements = [one for one in _inside(self.body) if isinstance(one, ast.stmt)]
        self.forward = {id(one) for one in statements if self._calls_model(one)}
        if not self.forward:
            return []
        self.needed = {name for loss in self.losses for name in _loads(self.source, loss)}
        assigned = [
            (_stores(self.source, one), _loads(self.source, one.value), id(one) in self.forward)
            for one in statements
            if isinstance(one, ast.Assign | ast.AugAssign | ast.AnnAssign) and one.value is not None
        ]
        while self._grow(assigned):
            pass
        return list(self._suite(self.body))

    def _grow(self, assigned: Sequence[tuple[set[str], set[str], bool]]) -> bool:
        before = len(self.tainted) + len(self.needed)
        for stored, loaded, forward in assigned:
            if forward or loaded & self.tainted:
                self.tainted |= stored
            if stored & self.needed:
                self.needed |= loaded
        return len(self.tainted) + len(self.needed) != before

    def _suite(self, suite: Sequence[ast.stmt]) -> Iterator[Span]:
        """The regions of one suite, then of those inside its statements that no region holds."""
        run: list[ast.stmt] = []
        for statement in suite:
            if self._whole(statement):
                if self._hot(statement, run):
                    run = [*run[:1], statement]
                    continue
                if not self._ends(statement):
                    continue
            if run:
                yield run[0], run[-1]
                run = []
            yield from self._within(statement)
        if run:
            yield run[0], run[-1]

    def _within(self, statement: ast.stmt) -> Iterator[Span]:
        if isinstance(statement, ast.ClassDef | Function):
            return
        for name in _SUITES:
            yield from self._suite(getattr(statement, name, None) or [])
        for handler in getattr(statement, "handlers", None) or []:
            yield from self._suite(handler.body)

    def _whole(self, statement: ast.stmt) -> bool:
        """Whether a region may hold the whole of it."""
        if self.is_barrier(statement) or isinstance(statement, _NEVER_WHOLE):
            return False
        return not any(isinstance(one, _NEVER_WHOLE) for one in _inside([statement]))

    def _ends(self, statement: ast.stmt) -> bool:
        """Whether a region should not go on past it, where there is no loss to go on to."""
        return not self.losses or isinstance(statement, ast.Return | ast.Continue | ast.Break)

    def _hot(self, statement: ast.stmt, run: Sequence[ast.stmt]) -> bool:
        if id(statement) in self.forward:
            return True
        if isinstance(statement, ast.If):
            return any(self._hot(one, run) for one in (*statement.body, *statement.orelse))
        value = getattr(statement, "value", None)
        if value is None or not _loads(self.source, value) & self.tainted:
            return False
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
            if self.losses:
                return bool(_stores(self.source, statement) & self.needed)
            follows = bool(run) and isinstance(value, ast.Call) and not _reads(value)
            return follows and isinstance(statement, ast.Assign)
        returns = isinstance(statement, ast.Return) and bool(run)
        return returns and any(isinstance(one, ast.Call) for one in walk(value))

    def _calls_model(self, statement: ast.stmt) -> bool:
        """Whether a statement itself, not one inside it, calls a model."""
        return any(
            isinstance(node, ast.Call) and (self.flow.is_forward(node) or self._passes(statement, node))
            for node in _own(statement)
        )

    def _passes(self, statement: ast.stmt, call: ast.Call) -> bool:
        """Whether a call is given a model and computes the loss from it, as ``loss_of(model, x)`` does."""
        if not self.losses or not any(self.flow.is_model(one) for one in call.args):
            return False
        return isinstance(statement, ast.Assign) and bool(
            _stores(self.source, statement) & self._named_losses()
        )

    def _named_losses(self) -> set[str]:
        return {name for loss in self.losses for name in _loads(self.source, loss)}


def _reads(value: ast.expr) -> bool:
    """Whether an expression takes a tensor out of what is computed with, as ``loss.item()``."""
    names = {node.attr for node in walk(value) if isinstance(node, ast.Attribute)}
    return bool(names & {"item", "cpu", "numpy", "detach", "tolist", "data"})


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, those of statements inside it left out."""
    if isinstance(statement, ast.ClassDef | Function):
        return
    waiting: list[ast.AST] = [
        child for child in children(statement) if not isinstance(child, ast.stmt | ast.ExceptHandler)
    ]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.Lambda):
            waiting += children(node)


def _inside(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The statements of a suite and those inside them, functions and classes not entered."""
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef | Function):
            continue
        for name in (*_SUITES, "handlers"):
            yield from _inside(getattr(node, name, None) or [])


def _loads(source: Source, node: ast.AST) -> set[str]:
    """The variables that an expression reads; ``self.x`` counts as one."""
    found = set()
    for one in walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
            found.add(f"self.{one.attr}")
        elif isinstance(one, ast.Name) and one.id != "self":
            found.add(one.id)
    return found


def _stores(source: Source, statement: ast.stmt) -> set[str]:
    """The variables that an assignment writes; of ``x[i]`` and ``x.y`` that is ``x``."""
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return {name for target in targets if target is not None for name in _written(source, target)}


def _written(source: Source, target: ast.AST) -> set[str]:
    if isinstance(target, ast.Tuple | ast.List):
        return {name for one in target.elts for name in _written(source, one)}
    if isinstance(target, ast.Subscript | ast.Starred):
        return _written(source, target.value)
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        return {f"self.{target.attr}"}
    if isinstance(target, ast.Attribute):
        return _written(source, target.value)
    return {target.id} if isinstance(target, ast.Name) else set()

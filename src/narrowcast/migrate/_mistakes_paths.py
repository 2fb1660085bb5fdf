"""Conditions that a function tests more than once, so that its paths are followed one by one."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterator

from narrowcast.migrate._mistakes_names import Script, method, text_of, within
from narrowcast.migrate._walk import children, walk

# 2**6 paths are followed through a function; conditions beyond that are taken to be open.
_MOST_CONDITIONS = 6
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def bound(node: ast.AST) -> Iterator[str]:
    """The texts that a statement binds anew."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor)):
        targets = [node.target]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    for target in targets:
        for inner in walk(target):
            if isinstance(inner, (ast.Name, ast.Attribute)) and isinstance(inner.ctx, ast.Store):
                yield text_of(inner)


def _texts(node: ast.AST) -> set[str]:
    return {text_of(one) for one in walk(node) if isinstance(one, (ast.Name, ast.Attribute))}


class Conditions:
    """The tests of one function that are followed, taken apart into conditions that hold or do not.

    ``if args.amp:`` twice is one condition, and ``if args.amp and clip:`` contains it. A condition on a name
    that the function binds twice is open, since it may have changed in between.
    """

    def __init__(self, script: Script, function: ast.AST) -> None:
        self._scalers = script.scalers
        body = [node for child in children(function) for node in within(child)]
        tests = [node.test for node in body if isinstance(node, ast.If)]
        bindings = Counter(text for node in body for text in bound(node))
        in_loops = {
            text for loop in body if isinstance(loop, _LOOPS) for one in within(loop) for text in bound(one)
        }
        counted: Counter[str] = Counter()
        texts: dict[str, set[str]] = {}
        for test in tests:
            for atom in set(self._atoms(test)):
                counted[atom] += 1
                texts.setdefault(atom, _texts(ast.parse(atom, mode="eval")))
        updates = {
            a
            for node in body
            if isinstance(node, ast.If) and self._updates(node)
            for a in self._atoms(node.test)
        }
        told = [a for a, n in counted.items() if n > 1 or (a in updates and texts[a] & in_loops)]
        self.known = [a for a in told if not any(bindings[t] > 1 for t in texts[a])][:_MOST_CONDITIONS]
        self.of_loops = {atom for atom in self.known if texts[atom] & in_loops}

    def _updates(self, node: ast.If) -> bool:
        """Whether the branch of a test ends an iteration, as where gradients are accumulated."""
        calls = [method(inner) for statement in node.body for inner in within(statement)]
        return any(used is not None and used[1] == "update" and used[0] in self._scalers for used in calls)

    def assumptions(self) -> Iterator[dict[str, bool]]:
        """Every way in which the conditions may hold; one value equals one constant at most."""
        for values in itertools.product((True, False), repeat=len(self.known)):
            chosen = dict(zip(self.known, values, strict=True))
            equal = Counter(
                atom.partition(" == ")[0] for atom, holds in chosen.items() if holds and " == " in atom
            )
            if all(n == 1 for n in equal.values()):
                yield chosen

    def holds(self, test: ast.expr, assumed: dict[str, bool]) -> bool | None:
        """Whether a test holds under what is assumed; None where that does not say."""
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.holds(test.operand, assumed)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            values = [self.holds(value, assumed) for value in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        atom, positive = self._atom(test)
        value = assumed.get(atom)
        return None if value is None else value is positive

    def _atoms(self, test: ast.expr) -> Iterator[str]:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self._atoms(test.operand)
        elif isinstance(test, ast.BoolOp):
            for value in test.values:
                yield from self._atoms(value)
        elif not isinstance(test, ast.Constant):
            yield self._atom(test)[0]

    def _atom(self, test: ast.expr) -> tuple[str, bool]:
        """A condition's text, and whether the test asks that it holds or that it does not."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, operator, right = text_of(test.left), test.ops[0], text_of(test.comparators[0])
            if left in self._scalers and right == "None":
                return left, isinstance(operator, (ast.IsNot, ast.NotEq))
            if isinstance(operator, (ast.IsNot, ast.NotEq, ast.NotIn)):
                same = {ast.IsNot: "is", ast.NotEq: "==", ast.NotIn: "in"}[type(operator)]
                return f"{left} {same} {right}", False
        return text_of(test), True

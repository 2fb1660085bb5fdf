"""From a scaled backward pass to the step of each optimizer: what looks at its gradients there."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from narrowcast.migrate._apex_flow import Flow
from narrowcast.migrate._apex_gradients import Lookers, name_of
from narrowcast.migrate._apex_plan import Plan
from narrowcast.migrate._apex_steps import Block, Blocks, exclusive, in_plain_branch

_BETWEEN = (
    "gradients may be looked at here between two backward passes of one step, where a scaler cannot unscale: "
    "it does so once, after the last"
)
_ELSEWHERE = (
    "gradients may be looked at here after a backward pass that apex was told not to unscale, and the step "
    "is elsewhere: a scaler unscales once a step"
)


class Windows:
    """The statements of one file that look at scaled gradients, and whose."""

    def __init__(self, plan: Plan, flow: Flow, blocks: Blocks, steps: list[ast.Call]) -> None:
        self._plan, self._source, self._blocks = plan, plan.source, blocks
        self._lookers = Lookers(plan.source, flow, blocks, steps)
        self._steps: dict[int, list[tuple[ast.Call, str]]] = defaultdict(list)
        for step in steps:
            assert isinstance(step.func, ast.Attribute)
            owner = self._source.code(step.func.value)
            self._steps[id(self._source.function(step))].append((step, owner))

    def looks(self) -> Iterator[tuple[ast.stmt, str]]:
        """Each statement that looks, with the name of each optimizer whose gradients are scaled there."""
        inside: dict[int, list[ast.stmt]] = defaultdict(list)
        for node in self._source.nodes:
            if isinstance(node, ast.stmt):
                inside[id(self._source.function(node))].append(node)
        for function in self._blocks.by_function.keys() | self._steps.keys():
            for statement in inside[function]:
                how = self._lookers.looks(statement)
                if how is None or in_plain_branch(self._source, statement, self._blocks):
                    continue
                for name in self._owners(function, statement, inside[function]):
                    if not self._is_between(function, statement, name, how):
                        yield statement, name

    def _owners(self, function: int, at: ast.stmt, inside: list[ast.stmt]) -> list[str]:
        """The optimizers that step after ``at`` on gradients of a backward pass before it."""
        start, source = self._source.start(at), self._source
        own = self._blocks.by_function.get(function, [])
        since: list[tuple[int, list[str], Block | None]] = [
            (b.start, [source.code(one) for one in b.optimizers], b) for b in own if b.start < start
        ]
        names = list(dict.fromkeys(name for _, name in self._steps[function]))
        if not own:
            calls = [source.start(one) for one in inside if self._scales(one)]
            since = [(one, names, None) for one in calls if one < start] if calls else [(-1, names, None)]
        found = []
        for begin, owners, block in since:
            for name in owners:
                stepped = [step for step, owner in self._steps[function] if owner == name]
                if any(begin < source.start(one) < start and not self._apart(one, at) for one in stepped):
                    continue
                if any(source.start(one) >= start for one in stepped):
                    found.append(name)
                elif not stepped and block is not None:
                    found.append(name)
                    if _delays(block):
                        self._plan.refuse(at, _ELSEWHERE)
        return list(dict.fromkeys(found))

    def _scales(self, statement: ast.stmt) -> bool:
        """Whether a simple statement calls a function of this file that goes backward."""
        if hasattr(statement, "body"):
            return False
        return any(
            isinstance(node, ast.Call) and name_of(node) in self._lookers.trains
            for node in ast.walk(statement)
        )

    def _apart(self, one: ast.AST, other: ast.stmt) -> bool:
        return exclusive(self._source, self._source.statement(one), other)

    def _is_between(self, function: int, at: ast.stmt, name: str, how: str) -> bool:
        """Whether another backward pass comes before the step; refused where the look may matter."""
        source, start = self._source, self._source.start(at)
        after = [
            source.start(step)
            for step, owner in self._steps[function]
            if owner == name and source.start(step) > start and not self._apart(step, at)
        ]
        end = min(after, default=len(source.text))
        later = [
            block
            for block in self._blocks.by_function.get(function, [])
            if start < block.start < end
            and name in {source.code(one) for one in block.optimizers}
            and not self._apart(block.statement, at)
        ]
        if not later:
            return False
        if how == "sure" or not self._feeds(at, later):
            self._plan.refuse(at, _BETWEEN)
        return True

    def _feeds(self, at: ast.stmt, later: list[Block]) -> bool:
        """Whether a statement computes what a later loss is made of."""
        needed = {text for block in later for text in _names(block.loss)}
        around = self._source.function(at) or self._source.tree
        assigns = [node for node in ast.walk(around) if isinstance(node, ast.Assign)]
        before = -1
        while len(needed) != before:
            before = len(needed)
            for node in assigns:
                if needed & {text for target in node.targets for text in _names(target)}:
                    needed |= _names(node.value)
        targets = at.targets if isinstance(at, ast.Assign) else []
        return bool(needed & {text for target in targets for text in _names(target)})


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _delays(block: Block) -> bool:
    return len(block.call.args) > 4 or any(
        one.arg == "delay_unscale" and getattr(one.value, "value", None) is not False
        for one in block.call.keywords
    )

"""Add autocast regions around the forward pass and the loss, wherever a model of apex is called.

apex casts wherever a listed function is called; a region has a beginning and an end. It goes from the first
statement that calls a model to the last that computes the loss, and never across a backward pass or a step.
"""

from __future__ import annotations

import ast

from narrowcast.migrate.apex._plan import AUTOCAST, Plan
from narrowcast.migrate.apex._training import Level, Training
from narrowcast.migrate.source._edits import wrap
from narrowcast.migrate.source._tree import walk

Span = tuple[ast.stmt, ast.stmt]
_BCE = (
    "binary cross entropy of probabilities, which autocast refuses on CUDA: use BCEWithLogitsLoss on logits"
)
_BCE_NAMES = ("BCELoss", "binary_cross_entropy")


class Regions:
    """The regions of one file, each as its first and its last statement."""

    def __init__(self, plan: Plan, training: Training) -> None:
        self.plan = plan
        self.source = plan.source
        self._autocast = AUTOCAST[plan.target]
        self.spans: list[Span] = []
        self.has_forward = False
        self._barriers = self._find_barriers()
        self._covered: set[int] = set()
        for run in training.runs:
            losses = {name for block, _ in run.blocks for name in _names(block.loss)}
            for _, levels in run.blocks:
                self._add_training(losses, levels)
        self._note_others()
        self._refuse_cross_entropy()

    def _find_barriers(self) -> set[int]:
        """Return the ids of statements that no region may hold: backward passes, steps, setups."""
        found = set()
        for call in self.source.all_calls:
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            alone = isinstance(self.source.parents[call], ast.Expr)
            if name in ("scale_loss", "initialize") or (name in ("backward", "step") and alone):
                found |= {id(one) for one in self.source.around(call)}
        return found

    def _add_training(self, losses: set[str], levels: list[Level]) -> None:
        """Add the region of the forward pass before a block, in the innermost suite that has one."""
        for level in levels:
            start = max((i + 1 for i, one in enumerate(level.before) if id(one) in self._barriers), default=0)
            run = level.before[start:]
            last = max((i for i, one in enumerate(run) if self._stores(one) & losses), default=-1)
            forward = [i for i, one in enumerate(run) if self._is_forward(one, losses)]
            if last < 0 and forward:
                last = forward[-1]
            computed = [i for i, one in enumerate(run[: last + 1]) if self._computes(one, losses)]
            first = min(forward + computed, default=None)
            if first is not None and first <= last:
                self._add(run[first], run[last])
                self.has_forward = self.has_forward or bool(forward)
                if forward:
                    return

    def _is_forward(self, statement: ast.stmt, losses: set[str]) -> bool:
        """Return whether a statement calls a model, or passes one to a function that computes the loss."""
        if self.plan.calls_model(statement):
            return True
        return bool(self._stores(statement) & losses) and any(
            isinstance(node, ast.Call) and any(self.plan.is_model(one) for one in node.args)
            for node in walk(statement)
        )

    def _computes(self, statement: ast.stmt, losses: set[str]) -> bool:
        calls = any(isinstance(node, ast.Call) for node in walk(statement))
        return calls and bool(self._stores(statement) & losses)

    def _note_others(self) -> None:
        """Report calls of a model outside of the training steps, as in validation: they run in fp32 now."""
        for call in self.source.all_calls:
            if id(call) not in self._covered and self.plan.is_forward(call):
                self.has_forward = True
                self.plan.note(call, f"this runs in fp32 now: {self._autocast} around it casts it too")

    def _add(self, first: ast.stmt, last: ast.stmt) -> None:
        suite = self.source.suite(first)
        between = suite[suite.index(first) : suite.index(last) + 1]
        for statement in between:
            if not self.source.stands_alone(statement):
                self.plan.refuse(statement, "the forward pass shares its line with another statement")
            for node in walk(statement):
                self._covered.add(id(node))
                if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
                    self.plan.refuse(
                        node, "the forward pass waits here for other code, which would be cast too"
                    )
        self.spans.append((first, last))

    def _stores(self, statement: ast.stmt) -> set[str]:
        return {
            name
            for node in walk(statement)
            if isinstance(getattr(node, "ctx", None), ast.Store)
            and isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
            for name in _names(node.value if isinstance(node, ast.Subscript) else node)
        }

    def _refuse_cross_entropy(self) -> None:
        if self.plan.device == '"cpu"' or not self.spans:
            return
        for reference in self.source.references:
            if reference.full.rpartition(".")[2] in _BCE_NAMES:
                self.plan.refuse(reference.node, _BCE)

    def write(self, scaler: str | None, *, always: bool) -> None:
        """Wrap each region in ``with autocast(...)``; ``always``: mixed precision is on there."""
        for first, last in self.spans:
            how = [self.plan.device, "dtype=torch.float16"]
            if scaler is not None and not always:
                how.append(f"enabled={scaler}.is_enabled()")
            header = f"with {self._autocast}({', '.join(how)}):"
            wrap(self.source, self.plan.changes, first, last, header)
            self.plan.note(first, "the region in which operators are cast: the forward pass and the loss")


def _names(node: ast.AST) -> set[str]:
    """Return the variables in an expression; ``self.x`` counts as one."""
    found = set()
    for one in walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
            found.add(f"self.{one.attr}")
        elif isinstance(one, ast.Name) and one.id != "self":
            found.add(one.id)
    return found

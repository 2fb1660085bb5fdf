"""Find mistakes in the order of the calls in one function.

Each function is read on its own. After a call of other code that may scale, unscale or step, nothing is
known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

from narrowcast.migrate._scalers import Scalers
from narrowcast.migrate.source._tree import Function, method_of, receiver_of, suites_of

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
# Nodes whose suites may not run. ``suites_of`` yields the handlers of a try and the cases of a match as
# suites too.
_BRANCHES = (ast.If, ast.Try, ast.Match, ast.ExceptHandler, ast.match_case)
_SCHEDULER = re.compile(r"sched", re.IGNORECASE)
_SCALER_METHODS = (
    "scale", "unscale_", "clip_grad_norm_", "clip_grad_value_", "step", "step_together", "update",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake, with the scaler, the optimizer and the code that its message names."""

    rule: str
    node: ast.expr
    scaler: str
    optimizer: str = "optimizer"
    code: str = ""


@dataclass(slots=True)
class _State:
    """What is known of the gradients at one point of a function.

    Attributes:
        scaled: the scaler of the last scaled backward pass since the last step; None if that is not certain.
        mixed: whether gradients may have come in another way too.
        may_be_unscaled: whether the gradients may have been unscaled since that backward pass.
        unscaled: optimizers that ``unscale_`` was called for since the last scaled backward pass, step of the
            scaler or update. A step of the optimizer itself does not count: the scaler does not see it.
        stepped: whether the scaler stepped since the last backward pass.
        updated: the call of ``update`` since that step; None if there was none.
        may_skip: the scaler whose step, since the last backward pass and in this iteration of the innermost
            loop, may have been skipped. None if there was no step, and in a branch, whose condition may ask
            whether it was skipped.
    """

    scaled: str | None = None
    mixed: bool = False
    may_be_unscaled: bool = False
    unscaled: frozenset[str] = frozenset()
    stepped: bool = False
    updated: ast.expr | None = None
    may_skip: str | None = None

    def forget(self) -> None:
        """Set everything to unknown: nothing is reported that depends on what came before."""
        self.forget_gradients()
        self.stepped = False
        self.updated = self.may_skip = None

    def forget_gradients(self) -> None:
        """Set the gradients to unknown, as after a step has used them."""
        self.scaled = None
        self.mixed = self.may_be_unscaled = False
        self.unscaled = frozenset()


class Order:
    """Follow the calls in each function of a file, in the order of its statements."""

    def __init__(self, scalers: Scalers) -> None:
        self._scalers = scalers
        self._source = scalers.source
        self._mistakes: list[Mistake] = []

    def mistakes(self) -> list[Mistake]:
        """Return every mistake that the order of calls shows."""
        if self._scalers.scalers:
            self._read(self._source.tree.body, _State())
            for node in self._source.nodes:
                if isinstance(node, Function):
                    self._read(node.body, _State())
        return self._mistakes

    def _report(self, rule: str, node: ast.expr, scaler: str) -> None:
        optimizer = self._scalers.optimizer_after(node)
        self._mistakes.append(Mistake(rule, node, scaler, optimizer, self._source.code(node)))

    def _read(self, suite: list[ast.stmt], state: _State) -> None:
        """Read the statements of a suite, changing ``state``."""
        for statement in suite:
            if isinstance(statement, DEFINITIONS):
                continue
            for node in self._own_nodes(statement):
                self._read_node(node, state)

            for inner in self._suites(statement):
                if isinstance(statement, _BRANCHES) and not self._is_assumed(statement):
                    self._read_branch(inner, state)
                else:
                    self._read(inner, state)
            # After a loop, a scheduler steps once an epoch, and need not wait for single steps.
            if isinstance(statement, _LOOPS):
                state.may_skip = None

    def _is_assumed(self, statement: ast.stmt) -> bool:
        """Return whether a statement is an ``if`` whose condition ``Scalers.assumed`` decides."""
        return isinstance(statement, ast.If) and self._scalers.assumed(statement.test) is not None

    def _suites(self, statement: ast.stmt) -> Iterable[list[ast.stmt]]:
        """Return the suites of a statement; of an ``if`` that is assumed only the one that runs."""
        if isinstance(statement, ast.If) and self._is_assumed(statement):
            return [statement.body if self._scalers.assumed(statement.test) else statement.orelse]
        return suites_of(statement)

    def _read_branch(self, suite: list[ast.stmt], state: _State) -> None:
        """Read a suite that may not run: whatever it changes is not known after it."""
        at_start = copy(state)
        # The condition may make a scheduler in the branch wait for the step, so none is reported there.
        at_start.may_skip = None
        at_end = copy(at_start)
        self._read(suite, at_end)
        if at_end != at_start:  # the suite changed something, and it may not have run
            state.forget()

    def _own_nodes(self, statement: ast.stmt) -> list[ast.AST]:
        """Return the calls and attributes of a statement outside of its suites, in the order they run."""
        nodes: list[ast.AST] = []
        waiting: list[ast.AST] = [statement]
        while waiting:
            node = waiting.pop()
            # Of (scaler.scale(loss) if use_amp else loss), follow the part with mixed precision.
            if isinstance(node, ast.IfExp):
                node = self._scalers.chosen(node)
            if isinstance(node, ast.Call | ast.Attribute):
                nodes.append(node)
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                    waiting.append(child)
        # The stack gives a call before its arguments, and the last argument first: reverse both orders.
        nodes.reverse()
        return nodes

    def _read_node(self, node: ast.AST, state: _State) -> None:
        if isinstance(node, ast.Attribute):
            # A gradient that the file assigns may have any scale: it may be an average, or of another loss.
            if node.attr == "grad" and not isinstance(node.ctx, ast.Load):
                state.mixed = True
            return
        assert isinstance(node, ast.Call)
        scaler = self._scalers.scaler_of(node, *_SCALER_METHODS)
        if self._scalers.is_backward(node):
            self._read_backward(node, state)
        elif scaler is not None:
            self._read_scaler_call(node, scaler, state)
        elif self._scalers.is_clip(node):
            if state.scaled and not state.may_be_unscaled and not state.mixed:
                self._report("clip-before-unscale", node, state.scaled)
        elif self._scalers.may_hide_steps(node) or self._unscales_by_hand(node):
            state.forget()
        elif method_of(node) == "step":
            self._read_step(node, state)

    def _unscales_by_hand(self, call: ast.Call) -> bool:
        """Return whether the scale is read to compute with it, and not only printed or compared."""
        parent = self._source.parents[call]
        return method_of(call) == "get_scale" and isinstance(parent, ast.BinOp | ast.Assign)

    def _read_backward(self, call: ast.Call, state: _State) -> None:
        scaler = self._scalers.scaler_of_loss(call)
        state.stepped = False
        state.updated = state.may_skip = None
        if scaler is None:
            state.mixed = True
            return
        # With several optimizers the loss may be that of another one.
        if state.unscaled and len(self._scalers.stepped_optimizers()) == 1:
            self._report("backward-after-unscale", call, scaler)
        state.scaled = scaler
        state.unscaled = frozenset()
        state.may_be_unscaled = False

    def _read_scaler_call(self, call: ast.Call, scaler: str, state: _State) -> None:
        method = method_of(call)
        if method == "scale":
            # A backward pass of this loss will come before the next step.
            state.updated = None
        elif method == "update":
            state.updated = call if state.stepped else None
            state.unscaled = frozenset()
        elif method == "unscale_":
            for optimizer in call.args:
                state.unscaled |= {self._source.code(optimizer)}
            state.may_be_unscaled = True
        elif method.startswith("clip_"):
            state.may_be_unscaled = True
        elif len(call.args) > 1:
            # A closure runs backward passes inside the step.
            state.forget()
        else:
            # This is a second step after the update, without a backward pass since the first step.
            if state.updated is not None:
                self._report("update-between-steps", state.updated, scaler)
            state.forget_gradients()
            state.stepped = True
            state.may_skip = scaler

    def _read_step(self, call: ast.Call, state: _State) -> None:
        """Read the step of a scheduler or an optimizer."""
        receiver = receiver_of(call)
        if _SCHEDULER.search(self._source.code(receiver)):
            # As a part of an expression it may run only if the step was taken.
            is_alone = isinstance(self._source.parents[call], ast.Expr)
            if state.may_skip is not None and is_alone:
                self._report("scheduler-on-skip", call, state.may_skip)
        elif self._scalers.is_optimizer(receiver) and not call.args:
            if state.scaled and not state.mixed:
                self._report("step-without-scaler", call, state.scaled)
            state.scaled = None
            state.mixed = False

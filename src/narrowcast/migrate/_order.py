"""Mistakes that the order of calls shows, in one function and in those that it calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

from narrowcast.migrate._scalers import Scalers
from narrowcast.migrate.source._tree import (
    Function,
    Source,
    children,
    method_of,
    receiver_of,
    suites_of,
    walk,
)

Found = tuple[str, ast.expr, str, str]
"""A mistake: its rule, its place, the scaler, and the code to write."""

DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
SCALED_ELSEWHERE = re.compile(r"scal|accelerat|fabric|stepper|deepspeed|apex", re.IGNORECASE)
_SCHEDULER = re.compile(r"sched", re.IGNORECASE)
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
# Not linear in the gradient, so wrong for a scaled one.
_MEASURES = ("norm", "vector_norm", "get_total_norm", "clamp", "clamp_", "pow")
_OF_SCALERS = (
    "scale",
    "unscale_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "step",
    "step_together",
    "update",
)
_MOST_CALLS, _DEEPEST = 2_000, 4  # that are followed


@dataclass(slots=True)
class _State:
    """Known state of the gradients at one point of a function.

    Attributes:
        scaled: the scaler of the last scaled backward pass since the last step; None if that is not certain.
        mixed: whether gradients may have come in another way too.
        unscaled: whether the gradients may have been unscaled since.
        stepped: whether the scaler stepped since the last backward pass.
        updated: the update since that step.
        plain: the last backward pass since the last step, if it was certainly not scaled.
        unscaled_ones: optimizers that ``unscale_`` was called for since the last step or update.
        stepped_ones: optimizers that the scaler stepped since the last backward pass.
        zeroed: optimizers whose gradients were zeroed since a scaled backward pass, each with the call.
        may_skip: the scaler, if it stepped before in this pass of the innermost loop.
        lost: the scaler of gradients that were scaled, and the call that may have unscaled them.
    """

    scaled: str | None = None
    mixed: bool = False
    unscaled: bool = False
    stepped: bool = False
    updated: ast.expr | None = None
    plain: ast.Call | None = None
    unscaled_ones: frozenset[str] = frozenset()
    stepped_ones: frozenset[str] = frozenset()
    zeroed: tuple[tuple[str, ast.Call], ...] = ()
    may_skip: str | None = None
    lost: tuple[str, ast.Call] | None = None

    def forget(self, call: ast.Call | None = None) -> None:
        """Set everything to unknown; ``call`` may have changed it."""
        lost = self.lost
        if call is not None and self.scaled and not self.unscaled and not self.mixed:
            lost = (self.scaled, call)
        self.__init__(mixed=True, unscaled=True, lost=lost)  # type: ignore[misc]

    def after_step(self) -> None:
        """Forget the gradients, which a step has used."""
        self.scaled, self.mixed, self.unscaled = None, False, False
        self.plain, self.lost, self.zeroed = None, None, ()
        self.unscaled_ones = frozenset()


class Order(Scalers):
    """Follows the statements of each function of a file, and the calls of functions of the same file."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._reported: list[Found] = []
        # While a call is followed: the functions around it, and the caller's names for their parameters.
        self._inside: list[ast.AST] = []
        self._renamed: dict[str, str] = {}
        self._followed = 0

    def in_order(self) -> list[Found]:
        """Return every mistake that the order of calls shows."""
        bodies: list[ast.AST] = [self.source.tree]
        bodies += [node for node in self.source.nodes if isinstance(node, Function)]
        for body in bodies if self._scalers else ():
            self._visit(body.body, _State())  # type: ignore[attr-defined]
        return self._reported

    def _visit(self, suite: list[ast.stmt], state: _State) -> None:
        """Follow the statements of a suite, changing ``state``."""
        for statement in suite:
            if isinstance(statement, DEFINES):
                continue
            for node in self._own_nodes(statement):
                self._event(node, state)
            assumed = self._assumed(statement.test) if isinstance(statement, ast.If) else None
            if assumed is not None:
                self._visit(statement.body if assumed else statement.orelse, state)  # type: ignore[attr-defined]
                continue
            for inner in suites_of(statement):
                if isinstance(statement, ast.If | ast.Try | ast.Match | ast.ExceptHandler | ast.match_case):
                    before = copy(state)
                    before.may_skip = None
                    branch = copy(before)
                    self._visit(inner, branch)
                    if branch != before:
                        state.forget()
                else:
                    self._visit(inner, state)
            if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
                state.may_skip = None

    def _own_nodes(self, statement: ast.stmt) -> Iterator[ast.AST]:
        """Yield the expressions of a statement itself, innermost calls first."""
        for child in children(statement):
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                left_out: set[ast.AST] = set()
                inner: list[ast.AST] = []
                for node in walk(child):
                    if isinstance(node, ast.IfExp) and self._chosen(node) is not node:
                        left_out.update({node.body, node.orelse} - {self._chosen(node)})
                    if node in left_out or self.source.parents[node] in left_out:
                        left_out.add(node)
                    elif isinstance(node, ast.Call | ast.Attribute):
                        inner.append(node)
                yield from reversed(inner)

    def _event(self, node: ast.AST, state: _State) -> None:
        if self.source.sets_gradient(node):
            state.mixed = True
        elif isinstance(node, ast.Call):
            self._call(node, method_of(node), state)

    def _report(self, rule: str, node: ast.expr, scaler: str, code: str = "") -> None:
        self._reported.append((rule, node, scaler, code))

    def _call(self, node: ast.Call, name: str, state: _State) -> None:
        is_own = name in self._functions and self.source.code(receiver_of(node)) == "self"
        if name == "backward" and not is_own:
            self._backward(node, state)
        elif (scaler := self._scaler_of(node, *_OF_SCALERS)) is not None:
            self._scaler_call(node, name, scaler, state)
        elif self._is_clip(node) or self._measures(node):
            self._read_of_gradients(node, state)
        elif name in ("step", "zero_grad") and self._optimizer_call(node, name, state):
            pass
        elif self._may_decide(node):
            self._follow(node, state)
        elif name == "get_scale" and self._computes(node):
            state.forget()

    def _scaler_call(self, node: ast.Call, name: str, scaler: str, state: _State) -> None:
        if name == "scale":
            state.updated = None
            is_thrown_away = isinstance(self.source.parents[node], ast.Expr) and node.args
            if is_thrown_away and self._goes_backward(node.args[0]):
                self._report("backward-without-scale", node, scaler)
                state.mixed = True
        elif name == "unscale_":
            self._unscale(node, scaler, state)
        elif name == "update":
            state.updated = node if state.stepped else None
            state.unscaled_ones = frozenset()
        elif name in ("step", "step_together"):
            self._scaler_step(node, scaler, state)
        else:
            state.unscaled, state.lost = True, None

    def _read_of_gradients(self, node: ast.Call, state: _State) -> None:
        rule = "clip-before-unscale" if self._is_clip(node) else "grad-before-unscale"
        if state.scaled and not state.unscaled and not state.mixed:
            self._report(rule, node, state.scaled)
        elif state.lost is not None:
            self._report("not-followed", node, state.lost[0], self.source.code(state.lost[1].func))

    def _optimizer_call(self, node: ast.Call, name: str, state: _State) -> bool:
        """Handle a call of an optimizer or a scheduler; return whether it is one."""
        receiver = receiver_of(node)
        if name == "step" and _SCHEDULER.search(self.source.code(receiver)):
            if state.may_skip is not None and isinstance(self.source.parents[node], ast.Expr):
                self._report("scheduler-on-skip", node, state.may_skip, self.source.code(node))
            return True
        if not self._is_optimizer(receiver) or (name == "step" and node.args):
            return False
        text = self._text(receiver)
        if name == "zero_grad":
            if state.scaled:
                state.zeroed = (*state.zeroed, (text, node))
            return True
        if state.scaled and not state.mixed:
            self._report("step-without-scaler", node, state.scaled)
        elif text in state.stepped_ones:
            self._report("step-twice", node, min(self._scalers))
        state.scaled, state.mixed, state.lost, state.plain = None, False, None, None
        return True

    def _backward(self, node: ast.Call, state: _State) -> None:
        is_torchs = self.source.names.full(node.func) == "torch.autograd.backward"
        loss = self._chosen(node.args[0] if is_torchs and node.args else receiver_of(node))
        is_of_a_tensor = is_torchs or not node.args  # engine.backward(loss) may scale it
        scaler = self._scaler_of(loss, "scale") or self._scaled_names.get(self.source.code(loss))
        state.stepped, state.updated, state.may_skip = False, None, None
        state.stepped_ones, state.zeroed = frozenset(), ()
        if scaler is None:
            is_plain = is_of_a_tensor and state.scaled is None and not state.mixed and self._is_plain(loss)
            state.plain = node if is_plain else None
            state.mixed = True
            return
        if state.unscaled_ones and len(self._stepped_texts()) == 1:
            self._report("backward-after-unscale", node, scaler)
        state.plain, state.lost, state.unscaled_ones = None, None, frozenset()
        state.scaled, state.unscaled = scaler, False

    def _is_plain(self, loss: ast.expr) -> bool:
        """Return whether a loss was certainly not scaled: no function of this file or scaler made it."""
        waiting, seen = [loss], set()
        for one in waiting:
            for node in walk(one):
                if isinstance(node, ast.Call):
                    own = isinstance(node.func, ast.Attribute) and self.source.code(node.func.value) == "self"
                    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    if called in self._functions or (own and not self._is_object(f"self.{called}")):
                        return False
                text = self.source.code(node) if isinstance(node, ast.Name | ast.Attribute) else ""
                if SCALED_ELSEWHERE.search(text):
                    return False
                if text and text not in seen:
                    seen.add(text)
                    waiting += self._made.get(text, [])
        # A parameter may be scaled by the caller.
        function = self.source.function(loss)
        arguments = [] if function is None else [one.arg for one in function.args.args]
        return not seen & set(arguments) - {"self"} - self._models(seen)

    def _models(self, names: set[str]) -> set[str]:
        """Return those of some names that are called: models and criterions, not losses."""
        called = {self.source.code(call.func) for call in self.source.all_calls}
        return {name for name in names if name in called}

    def _goes_backward(self, loss: ast.expr) -> bool:
        """Return whether ``loss.backward()`` stands in the function of ``loss``."""
        text, function = self.source.code(loss), self.source.function(loss)
        return any(
            method_of(call) == "backward"
            and self.source.code(receiver_of(call)) == text
            and self.source.function(call) is function
            for call in self.source.all_calls
        )

    def _unscale(self, node: ast.Call, scaler: str, state: _State) -> None:
        for one in node.args:
            text = self._text(one)
            if text in state.unscaled_ones:
                self._report("unscale-twice", node, scaler)
            state.unscaled_ones |= {text}
        state.unscaled, state.lost = True, None

    def _scaler_step(self, node: ast.Call, scaler: str, state: _State) -> None:
        if len(node.args) + len(node.keywords) > 1:  # a closure, which goes backward inside
            state.forget()
            return
        if state.updated is not None:
            self._report("update-between-steps", state.updated, scaler)
        if state.plain is not None and state.scaled is None:
            self._report("backward-without-scale", state.plain, scaler)
        texts = {self._text(one) for one in node.args[:1]}
        for text, zeroing in state.zeroed:
            if text in texts:
                self._report("zeroed-before-step", zeroing, scaler, self.source.code(zeroing))
        state.after_step()
        state.stepped, state.may_skip = True, scaler
        state.stepped_ones |= texts

    def _follow(self, call: ast.Call, state: _State) -> None:
        """Follow a function or method of this file; forget everything if that is not possible."""
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        known = self._functions.get(name, [])
        self._followed += 1
        if len(known) != 1 or known[0] in self._inside or self._followed > _MOST_CALLS:
            state.forget(call)
            return
        if len(self._inside) >= _DEEPEST:
            state.forget(call)
            return
        function = known[0]
        parameters = [one.arg for one in [*function.args.posonlyargs, *function.args.args]]
        if parameters[:1] == ["self"]:
            parameters = parameters[1:]
        renamed = {name: self._text(one) for name, one in zip(parameters, call.args, strict=False)}
        renamed |= {one.arg: self._text(one.value) for one in call.keywords if one.arg is not None}
        before, self._renamed = self._renamed, renamed
        self._inside.append(function)
        self._visit(function.body, state)
        self._inside.pop()
        self._renamed = before

    def _text(self, node: ast.expr) -> str:
        """Return the code of an argument, in the names of the function whose calls are followed."""
        code = self.source.code(node)
        first, dot, rest = code.partition(".")
        return self._renamed.get(first, first) + dot + rest

    def _may_decide(self, call: ast.Call) -> bool:
        """Return whether a call may scale, unscale or step out of sight."""
        func = call.func
        name = getattr(func, "attr", getattr(func, "id", ""))
        of_self = isinstance(func, ast.Attribute) and self.source.code(func.value) == "self"
        if name in self._functions and (of_self or isinstance(func, ast.Name)):
            return True
        if of_self and not self._is_object(f"self.{name}"):
            return True
        given = [self.source.code(one) for one in [*call.args, *(one.value for one in call.keywords)]]
        return any(one in self._scalers for one in given)

    def _is_clip(self, call: ast.Call) -> bool:
        name = (self.source.names.full(call.func) or self.source.code(call.func)).rpartition(".")[2]
        uses_scaler = any(f"{scaler}." in self.source.code(call) for scaler in self._scalers)
        return name in _CLIPS and not uses_scaler

    def _measures(self, call: ast.Call) -> bool:
        """Return whether a call computes a norm or a limit of a gradient."""
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        parts = [*call.args, *([receiver_of(call)] if isinstance(call.func, ast.Attribute) else [])]
        grads = (one for part in parts for one in walk(part) if isinstance(one, ast.Attribute))
        return name in _MEASURES and any(one.attr == "grad" for one in grads)

    def _computes(self, call: ast.Call) -> bool:
        """Return whether the value of a call may divide gradients: it is not only printed or compared."""
        return isinstance(self.source.parents[call], ast.BinOp | ast.AugAssign | ast.Assign)

"""Find mistakes in hand-written mixed precision from the order of calls in one function.

A mistake is reported only if it holds for every branch. Nothing is reported if it depends on a function of
this file, or on another function that gets the scaler.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

from narrowcast.migrate.source._edits import Changes, Target
from narrowcast.migrate.source._tree import (
    Function,
    Source,
    argument,
    children,
    is_constant,
    method_of,
    receiver_of,
    suites_of,
    walk,
)

_TELLING = re.compile(r"GradScaler|autocast|unscale_|\.scale\(")
_OPTIMIZER = re.compile(r"(?<![a-z])opt(im(izers?)?)?(?![a-z])|optim", re.IGNORECASE)
_SCALER = re.compile(r"scaler$", re.IGNORECASE)
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
# Not linear in the gradient, so wrong for a scaled one.
_MEASURES = ("norm", "vector_norm", "get_total_norm", "clamp", "clamp_", "pow")
_REGIONS = ("torch.autocast", "torch.amp.autocast", "narrowcast.autocast")
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_IGNORE = re.compile(r"#\s*narrowcast:\s*ignore(?:\[([\w\s,-]*)\])?")


# Name in kebab case: why it is a mistake, and what to write; ``{code}`` is the text of the statement.
RULES = {
    "clip-before-unscale": (
        "the gradients are still multiplied by the loss scale, so that a limit on their norm "
        "or value clips nearly every step to almost nothing",
        "on the line before: {scaler}.unscale_({optimizer})",
    ),
    "grad-before-unscale": (
        "the gradient is still multiplied by the loss scale, and so is what is computed from it",
        "on a line before: {scaler}.unscale_({optimizer})",
    ),
    "step-without-scaler": (
        "the loss was scaled and the optimizer steps by itself: nothing checks for infinities, "
        "and gradients that were not unscaled are too large by the loss scale",
        "{scaler}.step({optimizer})",
    ),
    "update-missing": (
        "the scale is never updated: it cannot back off where gradients overflow, and torch "
        "raises at the next step",
        "on a line after the last step: {scaler}.update()",
    ),
    "update-between-steps": (
        "the scale is updated between two steps of one backward pass: the gradients of the second "
        "were scaled with the old scale and are unscaled with the new one",
        "{scaler}.update() once, after the last step",
    ),
    "backward-in-region": (
        "the backward pass runs inside the autocast region, where its own operators may be cast once more",
        "{code} behind the region, with the indentation of its with",
    ),
}


def lint(source: Source, target: Target) -> Changes:
    """Report the mistakes of one file, one for each line and rule, unless a comment switches the rule off."""
    changes = Changes()
    if not _TELLING.search(source.text):
        return changes
    scan = _Scan(source)
    seen: set[tuple[int, str]] = set()
    for rule, node, scaler, code in sorted(scan.found(), key=lambda one: source.start(one[1])):
        begin, end = source.lines(node)
        is_ignored = any(_is_ignored(rule, line) for line in source.text[begin:end].splitlines())
        if (node.lineno, rule) not in seen and not is_ignored:
            reason, correction = RULES[rule]
            told = correction.format(scaler=scaler, optimizer=scan.optimizer_after(node), code=code)
            changes.report(source.start(node), rule, f"{reason}; write {told}", fixed=False)
        seen.add((node.lineno, rule))
    return changes


def _is_ignored(rule: str, line: str) -> bool:
    """Return whether a comment switches ``rule`` off: every rule, or with ``[update-missing]`` that one."""
    found = _IGNORE.search(line)
    if found is None:
        return False
    return found[1] is None or rule in {name.strip() for name in found[1].split(",")}


Found = tuple[str, ast.expr, str, str]


@dataclass(slots=True)
class _State:
    """Known state of the gradients at one point of a function.

    Attributes:
        scaled: the scaler of the last scaled backward pass since the last step; None if that is not certain.
        mixed: whether gradients may have come in another way too.
        unscaled: whether the gradients may have been unscaled since.
        stepped: whether the scaler stepped since the last backward pass.
        updated: the update since that step.
    """

    scaled: str | None = None
    mixed: bool = False
    unscaled: bool = False
    stepped: bool = False
    updated: ast.expr | None = None

    def forget(self) -> None:
        """Set everything to unknown."""
        self.scaled, self.mixed, self.unscaled, self.stepped, self.updated = None, True, True, False, None


class _Scan:
    """The mistakes of one file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._functions = {node.name for node in source.nodes if isinstance(node, Function)}
        self._made: dict[str, list[ast.expr]] = {}
        for node in source.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._made.setdefault(source.code(target), []).append(node.value)
        self._scalers = self._find_scalers()
        self._scaled_names = self._find_scaled_names()
        self._reported: list[Found] = []

    def found(self) -> list[Found]:
        """Return every mistake: its rule, its place, the scaler, and the text to write."""
        bodies: list[ast.AST] = [self.source.tree]
        bodies += [node for node in self.source.nodes if isinstance(node, Function)]
        for body in bodies if self._scalers else ():
            self._visit(body.body, _State())  # type: ignore[attr-defined]
        return [*self._reported, *self._updates_missing(), *self._in_regions()]

    # Scalers and optimizers

    def _find_scalers(self) -> set[str]:
        """Return the texts of scalers: made as one and not disabled, or used as only a scaler is."""
        found = set()
        for text, values in self._made.items():
            for value in (one for one in values if isinstance(one, ast.Call)):
                name = self.source.names.full(value.func) or ""
                known = name.startswith(("torch.", "narrowcast.", "apex.")) and name.endswith("GradScaler")
                if known and not is_constant(argument(value, 5, "enabled"), False):
                    found.add(text)
        for call in self.source.all_calls:
            if method_of(call) in ("scale", "unscale_") and len(call.args) == 1:
                text = self.source.code(receiver_of(call))
                if text not in self._made and _SCALER.search(text):
                    found.add(text)
        return found

    def _find_scaled_names(self) -> dict[str, str]:
        """Return the names of scaled losses, each with its scaler: ``scaled = scaler.scale(loss)``."""
        found = {}
        for node in self.source.nodes:
            value = node.value if isinstance(node, ast.Assign) else getattr(node, "iter", None)
            if isinstance(value, ast.Call) and (scaler := self._scaler_of(value, "scale")):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[union-attr]
                found.update({self.source.code(target): scaler for target in targets})
        return found

    def _scaler_of(self, node: ast.AST, *methods: str) -> str | None:
        """Return the scaler on which one of these methods is called."""
        if method_of(node) not in methods:
            return None
        text = self.source.code(receiver_of(node))  # type: ignore[arg-type]
        return text if text in self._scalers else None

    def _is_optimizer(self, node: ast.expr) -> bool:
        code = self.source.code(node)
        made = [one.func for one in self._made.get(code, []) if isinstance(one, ast.Call)]
        if made:
            names = [self.source.names.full(one) or "" for one in made]
            return all(name.startswith("torch.optim.") and "lr_scheduler" not in name for name in names)
        return bool(_OPTIMIZER.search(code)) and "sched" not in code.lower()

    def optimizer_after(self, node: ast.AST) -> str:
        """Return the optimizer that steps next after ``node``, for the corrected line."""
        if method_of(node) == "step" and self._scaler_of(node, "step") is None:
            return self.source.code(receiver_of(node))  # type: ignore[arg-type]
        begin = self.source.start(node)
        for call in self.source.all_calls:
            if self._scaler_of(call, "step") and call.args and self.source.start(call) > begin:
                return self.source.code(call.args[0])
        return "optimizer"

    # Order of calls

    def _visit(self, suite: list[ast.stmt], state: _State) -> None:
        """Follow the statements of a suite, changing ``state``."""
        for statement in suite:
            if isinstance(statement, _DEFINES):
                continue
            for node in self._own_nodes(statement):
                self._event(node, state)
            for inner in suites_of(statement):
                if isinstance(statement, ast.If | ast.Try | ast.Match | ast.ExceptHandler | ast.match_case):
                    branch = copy(state)
                    self._visit(inner, branch)
                    if branch != state:
                        state.forget()
                else:
                    self._visit(inner, state)

    def _own_nodes(self, statement: ast.stmt) -> Iterator[ast.AST]:
        """Yield the expressions of a statement itself, innermost calls first."""
        for child in children(statement):
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                inner = [one for one in walk(child) if isinstance(one, ast.Call | ast.Attribute)]
                yield from reversed(inner)

    def _event(self, node: ast.AST, state: _State) -> None:
        if self.source.sets_gradient(node):
            state.mixed = True
        elif isinstance(node, ast.Call):
            self._call(node, method_of(node), state)

    def _call(self, node: ast.Call, name: str, state: _State) -> None:
        if name == "backward":
            self._backward(node, state)
        elif self._scaler_of(node, "unscale_", "clip_grad_norm_", "clip_grad_value_"):
            state.unscaled = True
        elif (scaler := self._scaler_of(node, "step", "step_together")) is not None:
            if state.updated is not None:
                self._reported.append(("update-between-steps", state.updated, scaler, ""))
            state.scaled, state.mixed, state.unscaled, state.stepped = None, False, False, True
        elif self._scaler_of(node, "update"):
            state.updated = node if state.stepped else None
        elif self._is_clip(node) or self._measures(node):
            rule = "clip-before-unscale" if self._is_clip(node) else "grad-before-unscale"
            if state.scaled and not state.unscaled and not state.mixed:
                self._reported.append((rule, node, state.scaled, ""))
        elif name == "step" and not node.args and self._is_optimizer(receiver_of(node)):
            if state.scaled and not state.mixed:
                self._reported.append(("step-without-scaler", node, state.scaled, ""))
            state.scaled, state.mixed = None, False
        elif self._may_decide(node) or (name == "get_scale" and self._computes(node)):
            state.forget()

    def _backward(self, node: ast.Call, state: _State) -> None:
        loss = receiver_of(node)
        scaler = self._scaler_of(loss, "scale") or self._scaled_names.get(self.source.code(loss))
        state.stepped, state.updated = False, None
        if scaler is None:
            state.mixed = True
        else:
            state.scaled, state.unscaled = scaler, False

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

    def _may_decide(self, call: ast.Call) -> bool:
        """Return whether a call may scale, unscale or step out of sight."""
        func = call.func
        name = getattr(func, "attr", getattr(func, "id", ""))
        if name in self._functions or (
            isinstance(func, ast.Attribute) and self.source.code(func.value) == "self"
        ):
            return not self._scaler_of(call, name)
        given = [self.source.code(one) for one in [*call.args, *(one.value for one in call.keywords)]]
        return any(one in self._scalers for one in given)

    # Mistakes that the position shows

    def _updates_missing(self) -> Iterator[Found]:
        """Report scalers of this file that step, and that nothing updates by any name."""
        updated = {
            self.source.code(receiver_of(call)).rpartition(".")[2]
            for call in self.source.all_calls
            if method_of(call) == "update"
        }
        given = {self.source.code(one) for call in self.source.all_calls for one in call.args}
        for text in sorted(self._scalers & self._made.keys() - given):
            steps = [call for call in self.source.all_calls if self._scaler_of(call, "step") == text]
            scales = [call for call in self.source.all_calls if self._scaler_of(call, "scale") == text]
            in_reach = "." not in text or any(
                self.source.function(one) is self.source.function(step) for one in scales for step in steps
            )
            if steps and scales and in_reach and text.rpartition(".")[2] not in updated:
                yield "update-missing", steps[-1], text, ""

    def _in_regions(self) -> Iterator[Found]:
        """Report the first backward pass in each region."""
        seen: set[int] = set()
        for call in self.source.all_calls:
            region = self._region_around(call) if method_of(call) == "backward" else None
            if region is not None and id(region) not in seen:
                seen.add(id(region))
                code = self.source.code(self.source.statement(call)).splitlines()[0]
                yield "backward-in-region", call, "scaler", code

    def _region_around(self, call: ast.AST) -> ast.AST | None:
        for outer in self.source.around(call):
            opened: list[ast.expr] = []
            if isinstance(outer, ast.With):
                opened = [item.context_expr for item in outer.items]
            elif isinstance(outer, Function):
                opened = outer.decorator_list
            for one in opened:
                full = self.source.names.full(one.func) if isinstance(one, ast.Call) else None
                if isinstance(one, ast.Call) and full in _REGIONS:
                    return None if is_constant(argument(one, 2, "enabled"), False) else outer
            if isinstance(outer, Function | ast.Lambda | ast.ClassDef):
                return None
        return None

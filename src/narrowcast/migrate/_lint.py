"""Find mistakes in hand-written mixed precision, from the order of calls and from where they stand.

Functions and methods of the file are followed where they are called. Conditions on mixed precision, such as
``if self.use_amp:``, are taken to hold; under any other condition a mistake is reported only if it holds for
every branch. Where it depends on a function of another file, that is said instead (``not-followed``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from narrowcast.migrate._order import DEFINES, SCALED_ELSEWHERE, Found, Order
from narrowcast.migrate.source._edits import Changes, Target
from narrowcast.migrate.source._tree import (
    Function,
    Source,
    argument,
    is_constant,
    method_of,
    receiver_of,
    walk,
)

_TELLING = re.compile(r"GradScaler|autocast|unscale_|\.scale\(")
_STEPS = re.compile(r"\.step\(")
_REGIONS = ("torch.autocast", "torch.amp.autocast", "narrowcast.autocast")
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
    "backward-without-scale": (
        "the gradients are not multiplied by the loss scale, and the scaler's step divides them by it",
        "{scaler}.scale(loss).backward()",
    ),
    "backward-after-unscale": (
        "scaled gradients are added to gradients that are unscaled already",
        "{scaler}.unscale_({optimizer}) after the last backward pass of the step",
    ),
    "unscale-twice": (
        "the gradients are divided by the loss scale a second time, for which torch raises",
        "{scaler}.unscale_({optimizer}) once a step, after its last backward pass",
    ),
    "step-twice": (
        "the scaler has stepped this optimizer, which steps again on the same gradients, even if they are "
        "not finite",
        "{scaler}.step({optimizer}) alone",
    ),
    "zeroed-before-step": (
        "the gradients are gone before the scaler's step can use them",
        "{code} before the backward pass, or after {scaler}.step({optimizer})",
    ),
    "scheduler-on-skip": (
        "the scheduler moves on where the scaler skips the step because gradients overflowed",
        "scale = {scaler}.get_scale() before {scaler}.update(), and if {scaler}.get_scale() >= scale: {code} "
        "after it; of nc.GradScaler, if not result.skipped: {code}",
    ),
    "outside-accumulation": (
        "gradients are accumulated over several backward passes, and this belongs to the step after the last",
        "{code} inside the condition of {scaler}.step({optimizer})",
    ),
    "scaler-in-loop": (
        "a new scaler is made for each step, and starts from the initial scale again",
        "{code} before the loop",
    ),
    "fp16-without-scaler": (
        "fp16 rounds gradients below 6e-8 to 0, and nothing in this file scales the loss",
        "scaler = torch.amp.GradScaler(device) before the loop, scaler.scale(loss).backward(), "
        "scaler.step({optimizer}) and scaler.update(); or take torch.bfloat16",
    ),
}

# Where a mistake depends on a call that cannot be followed.
NOT_FOLLOWED = (
    "not-followed",
    "{code} is not in this file, and may unscale the gradients: if it does not, they are still multiplied by "
    "the loss scale here, and {scaler}.unscale_({optimizer}) belongs before this line",
)


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
            names = {"scaler": scaler, "optimizer": scan.optimizer_after(node), "code": code}
            if rule == NOT_FOLLOWED[0]:
                message = NOT_FOLLOWED[1].format(**names)
            else:
                reason, correction = RULES[rule]
                message = f"{reason}; write {correction.format(**names)}"
            changes.report(source.start(node), rule, message, fixed=False)
        seen.add((node.lineno, rule))
    return changes


def _is_ignored(rule: str, line: str) -> bool:
    """Return whether a comment switches ``rule`` off: every rule, or with ``[update-missing]`` that one."""
    found = _IGNORE.search(line)
    if found is None:
        return False
    return found[1] is None or rule in {name.strip() for name in found[1].split(",")}


class _Scan(Order):
    """The mistakes of one file."""

    def found(self) -> list[Found]:
        """Return every mistake."""
        return [
            *self.in_order(),
            *self._updates_missing(),
            *self._in_regions(),
            *self._outside_accumulation(),
            *self._in_loops(),
            *self._without_scaler(),
        ]

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
            for opening in opened:
                made = self._made.get(self.source.code(opening), [])
                for one in [self._chosen(value) for value in [opening, *made]]:
                    full = self.source.names.full(one.func) if isinstance(one, ast.Call) else None
                    if isinstance(one, ast.Call) and full in _REGIONS:
                        return None if is_constant(argument(one, 2, "enabled"), False) else outer
            if isinstance(outer, Function | ast.Lambda | ast.ClassDef):
                return None
        return None

    def _outside_accumulation(self) -> Iterator[Found]:
        """Report ``unscale_`` and ``update`` at each micro-batch, where ``step`` waits for the last."""
        steps = [call for call in self.source.all_calls if self._scaler_of(call, "step") and call.args]
        for step in steps:
            scaler, waits = self._scaler_of(step, "step"), self._counted_around(step)
            loop = self._loop_around(step)
            if not waits or loop is None:
                continue
            here = [one for one in self.source.all_calls if self._loop_around(one) is loop]
            outside = [one for one in here if not self._counted_around(one)]
            unscales = [one for one in here if self._scaler_of(one, "unscale_") == scaler and one.args]
            same = self.source.code(step.args[0])
            for one in outside:
                if one in unscales and self.source.code(one.args[0]) == same:
                    yield "outside-accumulation", one, str(scaler), self.source.code(one)
            # torch accepts an update after unscale_, or after the step of another optimizer.
            if unscales or any(self._scaler_of(one, "step") == scaler for one in outside):
                continue
            for one in outside:
                if self._scaler_of(one, "update") == scaler:
                    yield "outside-accumulation", one, str(scaler), self.source.code(one)

    def _counted_around(self, node: ast.AST) -> bool:
        """Return whether ``node`` stands under a condition such as ``(i + 1) % 4 == 0``."""
        return any(isinstance(one, ast.If) and _is_counted(one.test) for one in self.source.around(node))

    def _in_loops(self) -> Iterator[Found]:
        """Report scalers that are made in the loop that scales with them."""
        for call in self.source.all_calls:
            parent = self.source.parents[call]
            if not isinstance(parent, ast.Assign) or not self._makes_scaler(call):
                continue
            text, loop = self.source.code(parent.targets[0]), self._loop_around(call)
            here = [one for one in self.source.all_calls if self._loop_around(one) is loop]
            scales = any(self._scaler_of(one, "scale") == text for one in here)
            steps = [one for one in here if self._scaler_of(one, "step") == text and one.args]
            # One for each of several optimizers is right.
            made = set()
            for one in self.source.nodes:
                if isinstance(one, ast.Assign) and self._loop_around(one) is loop:
                    made.add(self.source.code(one.targets[0]))
            is_old = steps and self.source.code(steps[0].args[0]) not in made
            if loop is not None and scales and is_old:
                yield "scaler-in-loop", call, text, self.source.code(parent)

    def _without_scaler(self) -> Iterator[Found]:
        """Report a backward pass of a loss that was computed in fp16, in a file that scales none."""
        code = "".join(re.sub(r"#.*", "", line) for line in self.source.text.splitlines())
        if SCALED_ELSEWHERE.search(code) or not _STEPS.search(code):
            return
        regions = [one for one in self.source.all_calls if self._is_fp16_region(one)]
        functions = [self.source.function(one) for one in regions]
        steps = [
            one
            for one in self.source.all_calls
            if method_of(one) == "step" and self._is_optimizer(receiver_of(one))
        ]
        stepping = [self.source.function(one) for one in steps]
        for call in self.source.all_calls:
            function = self.source.function(call)
            if method_of(call) == "backward" and function in functions and function in stepping:
                yield "fp16-without-scaler", call, "scaler", ""

    def _is_fp16_region(self, call: ast.Call) -> bool:
        """Return whether a call opens a region in fp16, by name or because that is CUDA's default."""
        if self.source.names.full(call.func) not in _REGIONS:
            return False
        if is_constant(argument(call, 2, "enabled"), False):
            return False
        dtype = argument(call, 1, "dtype")
        if dtype is None:
            return is_constant(argument(call, 0, "device_type"), "cuda")
        return self.source.names.full(dtype) in ("torch.float16", "torch.half")

    def _loop_around(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost loop around ``node`` in its function."""
        for outer in self.source.around(node):
            if isinstance(outer, ast.For | ast.AsyncFor | ast.While):
                return outer
            if isinstance(outer, (*DEFINES,)):
                return None
        return None


def _is_counted(test: ast.expr) -> bool:
    """Return whether a condition holds once in so many passes, as ``(i + 1) % 4 == 0``."""
    return any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) for one in walk(test))

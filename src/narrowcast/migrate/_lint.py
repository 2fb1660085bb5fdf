"""Find mistakes in hand-written mixed precision, from the order of calls and from where they stand.

Only mistakes that train on wrong numbers in silence are looked for: torch raises for the others, such as
``unscale_`` twice or no ``update``, at the first steps. Conditions on mixed precision, such as
``if self.use_amp:``, are taken to hold. What a branch under any other condition changes is unknown after it,
so that a mistake after it is reported only if it holds whichever way the condition went.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from narrowcast.migrate._order import DEFINITIONS, Mistake, Order
from narrowcast.migrate._scalers import Scalers
from narrowcast.migrate.source._edits import Changes, Target
from narrowcast.migrate.source._tree import Function, Source, method_of, receiver_of

_USES_AMP = re.compile(r"GradScaler|autocast|unscale_|\.scale\(")
# Libraries that scale the loss themselves, and losses that were scaled elsewhere.
_SCALED_ELSEWHERE = re.compile(r"scal(?!ar)|accelerat|fabric|stepper|deepspeed|apex", re.IGNORECASE)
_IGNORE = re.compile(r"#\s*narrowcast:\s*ignore(?:\[([\w\s,-]*)\])?")

# For each rule, why it is a mistake, and what to write instead. ``{code}`` is the text of the call, and for
# backward-in-region the first line of its statement.
RULES = {
    "clip-before-unscale": (
        "the gradients are still multiplied by the loss scale, so that a limit on their norm "
        "or value clips nearly every step to almost nothing",
        "on the line before: {scaler}.unscale_({optimizer})",
    ),
    "step-without-scaler": (
        "the loss was scaled and the optimizer steps by itself: nothing checks for infinities, "
        "and gradients that were not unscaled are too large by the loss scale",
        "{scaler}.step({optimizer})",
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
    "scheduler-on-skip": (
        "the scheduler moves on where the scaler skips the step because gradients overflowed",
        "scale = {scaler}.get_scale() before {scaler}.update(), and if {scaler}.get_scale() >= scale: {code} "
        "after it; of nc.GradScaler, if not result.skipped: {code}",
    ),
    "fp16-without-scaler": (
        "fp16 rounds gradients below 6e-8 to 0, and nothing in this file scales the loss",
        "scaler = torch.amp.GradScaler(device) before the loop, scaler.scale(loss).backward(), "
        "scaler.step({optimizer}) and scaler.update(); or take torch.bfloat16",
    ),
}


def lint(source: Source, target: Target) -> Changes:
    """Report the mistakes of one file, one for each line and rule, unless a comment switches the rule off."""
    changes = Changes()
    if not _USES_AMP.search(source.text):
        return changes
    scalers = Scalers(source)
    mistakes = [
        *Order(scalers).mistakes(),
        *_backward_in_regions(scalers),
        *_backward_without_scale(scalers),
        *_fp16_without_scaler(scalers),
    ]

    seen: set[tuple[int, str]] = set()
    for mistake in sorted(mistakes, key=lambda mistake: source.start(mistake.node)):
        place = (mistake.node.lineno, mistake.rule)
        if place not in seen and not _is_ignored(source, mistake):
            reason, correction = RULES[mistake.rule]
            correction = correction.format(
                scaler=mistake.scaler, optimizer=mistake.optimizer, code=mistake.code
            )
            message = f"{reason}; write {correction}"
            changes.report(source.start(mistake.node), mistake.rule, message, fixed=False)
        seen.add(place)
    return changes


def _is_ignored(source: Source, mistake: Mistake) -> bool:
    """Return whether a comment on the lines of the mistake switches off its rule, or all rules."""
    begin, end = source.span_of_lines(mistake.node)
    for comment in _IGNORE.finditer(source.text[begin:end]):
        names = comment[1]
        if names is None or mistake.rule in re.split(r"[\s,]+", names):
            return True
    return False


def _backward_in_regions(scalers: Scalers) -> Iterator[Mistake]:
    """Report the first backward pass in each region."""
    source = scalers.source
    seen: list[ast.AST] = []
    for call in source.all_calls:
        if method_of(call) != "backward":
            continue
        # Moving the code out of the region fixes all of its backward passes, so the first is enough.
        region = _region_around(scalers, call)
        if region is not None and region not in seen:
            seen.append(region)
            code = source.code(source.statement(call)).splitlines()[0]
            yield Mistake("backward-in-region", call, "scaler", code=code)


def _region_around(scalers: Scalers, call: ast.AST) -> ast.AST | None:
    """Return the ``with`` or the decorated function that opens the innermost region around a call."""
    for outer in scalers.source.around(call):
        for opening in _openings(outer):
            is_on = scalers.region_state(opening)
            if is_on is not None:
                return outer if is_on else None
        if isinstance(outer, DEFINITIONS):
            return None
    return None


def _openings(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that may open a region around what is inside a node, the innermost first."""
    if isinstance(node, ast.With):
        return [item.context_expr for item in reversed(node.items)]
    return node.decorator_list[::-1] if isinstance(node, Function) else []


def _backward_without_scale(scalers: Scalers) -> Iterator[Mistake]:
    """Report backward passes in a function that calls a scaler's step, in a file that scales no loss."""
    source = scalers.source
    for call in source.all_calls:
        # scaler.scale(loss) as a statement of its own discards its result, and scales nothing.
        if scalers.scaler_of(call, "scale") and not isinstance(source.parents[call], ast.Expr):
            return

    scaler_stepping_in = {}
    for call in source.all_calls:
        scaler = scalers.scaler_of(call, "step")
        # A closure that is given to step may scale the loss. A scaler of another file may scale there.
        if scaler is not None and len(call.args) == 1 and scaler in scalers.made:
            scaler_stepping_in[source.function(call)] = scaler
    for call in source.all_calls:
        function = source.function(call)
        # Leave out engine.backward(loss), which may scale the loss itself.
        is_of_tensor = scalers.is_backward(call) and not call.args
        if function in scaler_stepping_in and is_of_tensor and not _may_be_scaled(scalers, call):
            yield Mistake("backward-without-scale", call, scaler_stepping_in[function])


def _may_be_scaled(scalers: Scalers, backward: ast.Call) -> bool:
    """Return whether the loss of a backward pass may have been scaled by a caller or by another library."""
    source = scalers.source
    loss = receiver_of(backward)
    function = source.function(backward)
    if function is not None:
        arguments = function.args
        for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if parameter.arg == source.code(loss):
                return True
    for value in [loss, *scalers.made.get(source.code(loss), [])]:
        if _SCALED_ELSEWHERE.search(source.code(value)):
            return True
    return False


def _fp16_without_scaler(scalers: Scalers) -> Iterator[Mistake]:
    """Report a backward pass of a loss that was computed in fp16, in a file that scales none."""
    source = scalers.source
    for line in source.text.splitlines():
        if _SCALED_ELSEWHERE.search(line.partition("#")[0]):
            return
    # Report only where region, backward pass and step are in one function: otherwise a caller may scale.
    functions_in_fp16 = []
    functions_that_step = []
    for call in source.all_calls:
        if scalers.is_fp16_region(call):
            functions_in_fp16.append(source.function(call))
        elif method_of(call) == "step" and scalers.is_optimizer(receiver_of(call)):
            functions_that_step.append(source.function(call))
    for call in source.all_calls:
        function = source.function(call)
        trains_in_fp16 = function in functions_in_fp16 and function in functions_that_step
        if method_of(call) == "backward" and trains_in_fp16:
            yield Mistake("fp16-without-scaler", call, "scaler")

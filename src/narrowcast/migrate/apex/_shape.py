"""Find the canonical training step of apex's documentation in a file, or say why it is not there.

::

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()

``amp.initialize`` may stand under an ``if``, and the block under another with the same condition, whose
``else`` trains without mixed precision. Nothing is followed into functions: the model and the optimizer are
known by the text of their names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from narrowcast.migrate.source._edits import is_one_line
from narrowcast.migrate.source._tree import (
    Function,
    Source,
    called_name,
    is_constant,
    is_plain,
    method_of,
    receiver_of,
)

_INITIALIZE_ORDER = ("models", "optimizers", "enabled", "opt_level")
_SCALE_LOSS_ORDER = ("loss", "optimizers")
# Arguments of amp.initialize whose default may be written out.
_DEFAULTS = {"enabled": True, "loss_scale": "dynamic", "num_losses": 1}
_LEVELS = {
    "O0": "opt_level O0 is fp32: remove apex from this script, or choose O1",
    "O2": "opt_level O2 keeps half weights and fp32 masters, as narrowcast.apex does",
    "O3": "opt_level O3 trains a half model without a loss scale, which has no equivalent: choose O1 first",
}
_JUMPS = (ast.Continue, ast.Break, ast.Return, ast.Raise, ast.Yield, ast.YieldFrom)


class NotCanonicalError(Exception):
    """A file stays on apex's API: ``node`` is the place, and ``reason`` also says what to write instead."""

    def __init__(self, node: ast.AST, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


def refuse(node: ast.AST, reason: str) -> NoReturn:
    """Leave the file on apex's API, for this reason."""
    raise NotCanonicalError(node, reason)


@dataclass(frozen=True, slots=True)
class Setup:
    """The statement of ``amp.initialize``, the names it is given, and the test of the ``if`` around it."""

    statement: ast.stmt
    model: str
    optimizer: str
    condition: str | None


@dataclass(frozen=True, slots=True)
class Block:
    """The ``with amp.scale_loss(...)``, its loss, and the statements in it that clip."""

    statement: ast.With
    call: ast.Call
    loss: str
    clips: list[ast.stmt]


@dataclass(frozen=True, slots=True)
class Shape:
    """The canonical training step of one file.

    Attributes:
        between: the statements from the block to the step.
        step: the statement ``optimizer.step()``.
        forward: the statements of the forward pass and the loss.
    """

    setup: Setup
    block: Block
    between: list[ast.stmt]
    step: ast.stmt
    forward: list[ast.stmt]


@dataclass(frozen=True, slots=True)
class _Surrounding:
    """A suite around the block, split at the statement that is the block or contains it."""

    before: list[ast.stmt]
    statement: ast.stmt
    after: list[ast.stmt]


def read_shape(source: Source) -> Shape:
    """Return the canonical training step of a file.

    Raises:
        NotCanonicalError: the file has another shape.
    """
    setup = _read_setup(source)
    block = _read_block(source, setup)
    surroundings = _surroundings(source, setup, block)
    step, between = _find_step(source, setup, surroundings)
    shape = Shape(setup, block, between, step, _find_forward(source, setup, block, surroundings))
    _check_flow(source, shape)
    _check_rest(source, shape, surroundings)
    _check_cleared(source, shape, surroundings)
    return shape


def _only_call(source: Source, name: str) -> ast.Call:
    """Return the one call of a function of ``apex.amp`` in the file."""
    uses = source.uses_of(f"apex.amp.{name}")
    if not uses:
        # The file uses another function of apex.amp, or read_shape would not be called: this always refuses.
        for reference in source.references:
            if reference.full.startswith("apex.amp."):
                reason = f"amp.{name} is not in this file: only a training loop in one file is rewritten"
                refuse(reference.node, reason)
    # With two of them, it is not known which of the file's models, losses and steps belong together.
    if len(uses) > 1:
        refuse(uses[1].node, f"a second amp.{name}: only a training loop with one is rewritten")
    call = source.call_of(uses[0].node)
    if call is None or not is_plain(call):
        refuse(uses[0].node, f"amp.{name} with arguments that are not written out here")
    return call


def _arguments(call: ast.Call, order: tuple[str, ...]) -> dict[str, ast.expr]:
    """Return the arguments of a call by their names."""
    if len(call.args) > len(order):
        refuse(call, f"{called_name(call)} with settings by their places: write them by name")
    arguments = dict(zip(order, call.args, strict=False))
    for keyword in call.keywords:
        arguments[str(keyword.arg)] = keyword.value
    return arguments


def _name(source: Source, call: ast.Call, arguments: dict[str, ast.expr], argument: str) -> str:
    """Return the text of an argument that has to be a name."""
    value = arguments.get(argument)
    if not isinstance(value, ast.Name | ast.Attribute):
        reason = f"expected one name as {argument} of amp.{called_name(call)}"
        refuse(call, f"{reason}: take it out of its list, or compute it before")
    return source.code(value)


# ---- amp.initialize


def _read_setup(source: Source) -> Setup:
    call = _only_call(source, "initialize")
    arguments = _arguments(call, _INITIALIZE_ORDER)
    model = _name(source, call, arguments, "models")
    optimizer = _name(source, call, arguments, "optimizers")

    # The statement can be removed only if it assigns the two objects to their own names, or assigns nothing.
    statement = source.statement(call)
    assigned = source.code(statement).partition("=")[0].strip(" ()")
    names = [name.strip() for name in assigned.split(",")]
    is_assigned = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    is_to_own_names = is_assigned and names == [model, optimizer]
    is_removable = isinstance(statement, ast.Expr) or is_to_own_names
    if not is_removable or statement.value is not call or not source.stands_alone(statement):  # type: ignore[attr-defined]
        refuse(
            call,
            f"expected {model}, {optimizer} = amp.initialize({model}, {optimizer}, ...) alone on its line",
        )

    _check_level(source, call, arguments.pop("opt_level", None))
    for name in arguments.keys() - {"models", "optimizers", "verbosity"}:
        if name not in _DEFAULTS or not is_constant(arguments[name], _DEFAULTS[name]):
            refuse(arguments[name], f"{name} of amp.initialize has no equivalent in torch.amp")
    return Setup(statement, model, optimizer, _condition_around(source, statement))


def _check_level(source: Source, call: ast.Call, level: ast.expr | None) -> None:
    """Refuse every level but O1, written out or as the one value of a name."""
    # As in apex's documentation: opt_level = "O1", and then opt_level=opt_level.
    if isinstance(level, ast.Name):
        values: list[ast.AST | None] = []
        for node in source.parents:
            if isinstance(node, ast.arg) and node.arg == level.id:
                values.append(None)  # a parameter: its value is the caller's
            elif isinstance(node, ast.Name) and node.id == level.id and isinstance(node.ctx, ast.Store):
                values.append(getattr(source.parents[node], "value", None))
        if len(values) == 1 and isinstance(values[0], ast.Constant):
            level = values[0]
    if level is None or is_constant(level, "O1"):
        return
    if not isinstance(level, ast.Constant):
        refuse(call, "opt_level is read when the script runs, and may be one that keeps half weights")
    unknown = f"opt_level {level.value!r} is none of O0, O1, O2 and O3 (with the letter O)"
    refuse(call, _LEVELS.get(str(level.value), unknown))


def _condition_around(source: Source, statement: ast.stmt) -> str | None:
    """Return the test of the ``if`` around ``amp.initialize``; None outside of an ``if``."""
    condition = None
    inner: ast.AST = statement
    for outer in source.around(statement):
        if isinstance(outer, ast.Module | Function):
            break
        reason = "amp.initialize stands in another block than one if"
        if not isinstance(outer, ast.If) or inner not in outer.body:
            refuse(statement, reason)
        test = source.code(outer.test)
        # if __name__ == "__main__" holds in every script.
        if "__name__" not in test:
            if condition is not None:
                refuse(statement, reason)
            condition = test
        inner = outer
    return condition


# ---- the block and its step


def _read_block(source: Source, setup: Setup) -> Block:
    call = _only_call(source, "scale_loss")
    item = source.parents[call]
    block = source.parents[item]
    if not isinstance(item, ast.withitem) or not isinstance(block, ast.With):
        refuse(call, "amp.scale_loss outside a with statement")
    if len(block.items) > 1 or not source.stands_alone(block) or is_one_line(source, block):
        refuse(call, "amp.scale_loss shares its line or with statement: split it first")

    arguments = _arguments(call, _SCALE_LOSS_ORDER)
    loss = _name(source, call, arguments, "loss")
    optimizer = _name(source, call, arguments, "optimizers")
    further = arguments.keys() - {*_SCALE_LOSS_ORDER}
    if further:
        refuse(
            call,
            f"{' and '.join(sorted(further))} of amp.scale_loss: only one backward pass a step is rewritten",
        )
    # A parameter of another name may be another optimizer.
    if optimizer != setup.optimizer:
        refuse(call, f"amp.initialize was given {setup.optimizer}, and amp.scale_loss {optimizer}")

    if not isinstance(item.optional_vars, ast.Name):
        refuse(call, "expected with amp.scale_loss(loss, optimizer) as scaled_loss")
    _check_body(source, block, item.optional_vars.id)
    return Block(block, call, loss, block.body[1:])


def _check_body(source: Source, block: ast.With, scaled: str) -> None:
    """Refuse a block that does more than a backward pass of the scaled loss, and clipping behind it."""
    first, *clips = block.body
    reason = f"expected {scaled}.backward() in the block of amp.scale_loss, and nothing else but clipping"
    if not isinstance(first, ast.Expr) or not source.code(first).startswith(f"{scaled}.backward("):
        refuse(first, reason)
    for statement in clips:
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call) or "clip_grad" not in called_name(call):
            refuse(statement, reason)
    inside = set(ast.walk(block))
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id == scaled and node not in inside:
            refuse(node, f"{scaled} is used outside of the block of amp.scale_loss")


def _surroundings(source: Source, setup: Setup, block: Block) -> list[_Surrounding]:
    """Return the suite of the block, and if that suite is of an ``if``, the suite around the ``if`` too."""
    # The step may stand in either suite: it is often shared by the branches with and without mixed precision.
    statements: list[ast.stmt] = [block.statement]
    outer = source.parents[block.statement]
    if isinstance(outer, ast.If):
        if block.statement not in outer.body or source.code(outer.test) != setup.condition:
            refuse(outer, "the backward pass is in an if, whose condition is not that of amp.initialize")
        statements.append(outer)

    surroundings = []
    for statement in statements:
        suite = source.suite(statement)
        index = suite.index(statement)
        surroundings.append(_Surrounding(suite[:index], statement, suite[index + 1 :]))
    return surroundings


def _find_step(
    source: Source, setup: Setup, surroundings: list[_Surrounding]
) -> tuple[ast.stmt, list[ast.stmt]]:
    """Return the first step of the optimizer after the block, and the statements between the two."""
    between: list[ast.stmt] = []
    for surrounding in surroundings:
        for statement in surrounding.after:
            is_step = source.code(statement) == f"{setup.optimizer}.step()"
            if is_step and source.stands_alone(statement):
                return statement, between
            between.append(statement)
    reason = f"no {setup.optimizer}.step() follows this block in its suite, alone on its line"
    refuse(surroundings[0].statement, f"{reason}: write the block and the step in one loop body")


def _find_forward(
    source: Source, setup: Setup, block: Block, surroundings: list[_Surrounding]
) -> list[ast.stmt]:
    """Return the statements from the first that uses the model to the last that sets the loss."""
    # Prefer the inner suite: if both set the loss, the outer one only initializes it.
    forward: list[ast.stmt] = []
    for surrounding in surroundings:
        forward = list(surrounding.before)
        while forward and not _has(source, forward[-1], block.loss, ast.Store):
            forward.pop()
        if forward:
            break
    while forward and not _computes_with(source, forward[0], setup.model):
        forward.pop(0)
    if not forward:
        reason = f"no statement before this block computes {block.loss} with {setup.model}"
        refuse(block.statement, f"{reason}, by these names and in its suite")
    for statement in forward:
        if not source.stands_alone(statement):
            refuse(statement, "the forward pass shares its line with another statement")
    return forward


def _computes_with(source: Source, statement: ast.stmt, model: str) -> bool:
    # model.train() and model.zero_grad() stand alone, and compute nothing.
    return not isinstance(statement, ast.Expr) and _has(source, statement, model, ast.Load)


def _has(source: Source, statement: ast.stmt, name: str, context: type[ast.expr_context]) -> bool:
    """Return whether a statement loads or stores a name."""
    for node in ast.walk(statement):
        is_used = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, context)
        if is_used and source.code(node) == name:
            return True
    return False


# ---- refuse what would train differently with a scaler than with apex


def _nodes(statements: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


def _check_flow(source: Source, shape: Shape) -> None:
    """Refuse code that may skip the scaler's update after a backward pass."""
    # Without the update, the scaler raises when the next iteration unscales gradients again.
    for node in _nodes(shape.between):
        if isinstance(node, _JUMPS):
            reason = "this may leave between the backward pass and the step, which a scaler refuses"
            refuse(node, f"{reason}: step in an if instead")
    # Only a try in this function can be seen. If a caller catches an exception, nothing trains on wrong
    # numbers either: this function makes a new scaler in its next call, or a scaler that was made outside
    # raises at the next unscale_.
    for outer in source.around(shape.block.statement):
        if isinstance(outer, Function):
            break
        if isinstance(outer, ast.Try) and outer.handlers:
            reason = "an exception that is caught here may skip the scaler's update"
            refuse(outer, f"{reason}: put the try into the caller")


def _check_rest(source: Source, shape: Shape, surroundings: list[_Surrounding]) -> None:
    """Refuse other backward passes and steps, and gradients that are used where they may be scaled."""
    known = set(ast.walk(shape.block.statement)) | set(ast.walk(shape.step))
    # The else of the block's if trains without mixed precision.
    outer = surroundings[-1].statement
    if isinstance(outer, ast.If):
        known |= set(_nodes(outer.orelse))
    unscaled = set(_nodes(shape.between))
    for node in source.nodes:
        if node in known or not isinstance(node, ast.Attribute):
            continue
        # The scaler would divide gradients by a scale that they were not multiplied by.
        if node.attr == "backward" and source.call_of(node) is not None:
            refuse(node, "a backward pass without amp.scale_loss: put it into a block of amp.scale_loss")
        # Such a step would use scaled gradients, or the same gradients a second time.
        if node.attr == "step" and source.code(node.value) == shape.setup.optimizer:
            refuse(
                node, "another step of this optimizer, or one that is passed on: step once, behind the block"
            )
        # In apex, gradients are unscaled everywhere outside of the blocks.
        if node.attr == "grad" and node not in unscaled:
            reason = "gradients are used here, and those of a scaler may be scaled"
            refuse(node, f"{reason}: use them between the backward pass and the step")


def _check_cleared(source: Source, shape: Shape, surroundings: list[_Surrounding]) -> None:
    """Refuse gradients that are not cleared for each step: scaled and unscaled ones would add up."""
    # The statements that run after the block: the rest of its suite, then what follows the if around it.
    after: list[ast.stmt] = []
    for surrounding in surroundings:
        for statement in surrounding.before:
            if _clears(source, shape.setup, statement):
                return
        after += surrounding.after
    for statement in after:
        # A jump between the step and zero_grad skips zero_grad: the next backward pass would add to old
        # gradients.
        if any(isinstance(node, _JUMPS) for node in ast.walk(statement)):
            break
        if statement not in shape.between and _clears(source, shape.setup, statement):
            return
    reason = f"{shape.setup.optimizer}.zero_grad() does not stand beside this step"
    refuse(shape.step, f"{reason}: clear the gradients once for each step, in its suite")


def _clears(source: Source, setup: Setup, statement: ast.stmt) -> bool:
    """Return whether a statement clears the gradients of the optimizer or of the model."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if call is None or method_of(call) != "zero_grad":
        return False
    return source.code(receiver_of(call)) in (setup.optimizer, setup.model)

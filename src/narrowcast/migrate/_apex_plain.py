"""Backward passes beside those of ``scale_loss``: their gradients a scaler would unscale unasked."""

from __future__ import annotations

import ast
from collections import defaultdict

from narrowcast.migrate._apex_calls import Calls
from narrowcast.migrate._apex_flow import Flow
from narrowcast.migrate._apex_plan import Plan
from narrowcast.migrate._apex_setup import Scaler
from narrowcast.migrate._apex_steps import Blocks, exclusive, in_plain_branch, is_backward
from narrowcast.migrate._source import Source

_WHY = (
    "a backward pass without amp.scale_loss, whose gradients the scaler's step would divide by the scale: "
    "put it into a block of amp.scale_loss"
)


def plain_backwards(
    plan: Plan, flow: Flow, calls: Calls, blocks: Blocks, steps: list[ast.Call]
) -> list[ast.Call]:
    """The ``loss.backward()`` in place of a block, in another branch: each is to be scaled too.

    Others that give gradients to a step which becomes the scaler's are refused in ``plan``.
    """
    source = plan.source
    scaled = {id(step) for step in steps}
    training = {id(source.function(step)) for step in steps} | blocks.by_function.keys()
    own = "backward" in calls.functions
    plain = [
        one
        for one in source.nodes
        if isinstance(one, ast.Call) and is_backward(one) and _is_plain(source, flow, one, own=own)
    ]
    marked = {id(one) for one in plain}
    called: dict[int, list[ast.Call]] = defaultdict(list)
    for one in source.nodes:
        if isinstance(one, ast.Call) and (id(one) in marked or _is_step(flow, one)):
            called[id(source.function(one))].append(one)
    found = []
    for function, inside in called.items():
        made = blocks.by_function.get(function, [])
        names = {block.name for block in made}
        for node in inside:
            if id(node) not in marked or blocks.around(source, node) is not None:
                continue
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if (isinstance(owner, ast.Name) and owner.id in names) or in_plain_branch(source, node, blocks):
                continue
            statement = source.statement(node)
            if _is_simple(node) and any(exclusive(source, one.statement, statement) for one in made):
                found.append(node)
                continue
            following = [one for one in inside if source.start(one) > source.start(node)]
            step = next((one for one in following if _is_step(flow, one)), None)
            # The step of another optimizer, without apex, may be what these gradients are for.
            if id(step) in scaled or (step is None and _reaches(source, node, calls, training)):
                plan.refuse(node, _WHY)
    return found


def scale_plain(plan: Plan, backward: ast.Call, scaler: Scaler) -> None:
    """Scale the loss of one of ``plain_backwards``: off, a scaler leaves it as it is."""
    assert isinstance(backward.func, ast.Attribute)
    loss, name = backward.func.value, scaler.at(plan.source, backward)
    plan.changes.replace(plan.source.span(loss), f"{name}.scale({plan.source.code(loss)})")
    plan.note(backward, "this branch goes backward from a plain loss: it is scaled as in the other")


def _reaches(source: Source, node: ast.Call, calls: Calls, training: set[int]) -> bool:
    """Whether gradients of a backward pass that no step follows may meet those that are scaled."""
    function = source.function(node)
    if function is None or id(function) in training:
        return True
    return any(id(source.function(call)) in training for call in calls.by_name[function.name])


def _is_simple(node: ast.Call) -> bool:
    return not node.args and isinstance(node.func, ast.Attribute)


def _is_plain(source: Source, flow: Flow, node: ast.Call, *, own: bool) -> bool:
    """Whether a call goes backward from a loss; a trainer's own ``backward`` is given one, and does not."""
    assert isinstance(node.func, ast.Attribute)
    if not node.args or source.names.full(node.func) == "torch.autograd.backward":
        return True
    owner = node.func.value
    known = flow.is_model(owner) or flow.is_optimizer(owner) or source.code(owner) in ("self", "cls")
    return not own and not known


def _is_step(flow: Flow, node: ast.Call) -> bool:
    """Whether a call is the step of an optimizer: of one that is known, or by its name."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
        return False
    return flow.is_optimizer(node.func.value) or flow.looks_like_optimizer(node.func.value)

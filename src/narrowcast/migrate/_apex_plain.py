"""Backward passes beside those of ``scale_loss``: their gradients a scaler would unscale unasked."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from narrowcast.migrate._apex_plan import Plan
from narrowcast.migrate._apex_steps import Blocks, in_plain_branch, is_backward

_WHY = (
    "a backward pass without amp.scale_loss, whose gradients the scaler's step would divide by the scale: "
    "put it into a block of amp.scale_loss"
)


def check_plain_backwards(plan: Plan, blocks: Blocks, steps: Iterable[ast.Call], *, always: bool) -> None:
    """Refuse in ``plan`` what gives gradients that are not scaled to a step that becomes the scaler's.

    Args:
        always: whether mixed precision is on whenever the script runs, so that no branch is one without it.
    """
    source = plan.source
    scaled = {id(step) for step in steps}
    calls: dict[int, list[ast.Call]] = defaultdict(list)
    for one in source.nodes:
        if _loss_of(one) is not None or _is_step(one):
            assert isinstance(one, ast.Call)
            calls[id(source.function(one))].append(one)
    for function, made in blocks.by_function.items():
        names = {block.name for block in made}
        inside = calls[function]
        for node in inside:
            of = _loss_of(node)
            if of is None or blocks.around(source, node) is not None:
                continue
            if isinstance(of, ast.Name) and of.id in names:
                continue
            if not always and in_plain_branch(source, node, blocks):
                continue
            # The step of another optimizer, without apex, may be what these gradients are for.
            following = (one for one in inside if one.lineno > node.lineno and _is_step(one))
            if id(next(following, None)) in scaled:
                plan.refuse(node, _WHY)


def _loss_of(node: ast.AST) -> ast.expr | None:
    """Of ``loss.backward()`` the loss; a trainer's own ``backward`` is given one, and that is none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_backward(node):
        return None if node.args else node.func.value
    return None


def _is_step(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and "sched" not in ast.unparse(node.func.value).lower()
    )

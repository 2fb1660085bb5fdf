"""``binary_cross_entropy``: torch.autocast refuses it on CUDA whatever it is given, apex refused halves.

A script of apex that works gives it float32. It stays as it is where a region can end before it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._apex_plan import Plan
from narrowcast.migrate._apex_regions import Span
from narrowcast.migrate._source import Source

_FUNCTIONS = {"torch.nn.functional.binary_cross_entropy", "torch.binary_cross_entropy"}
_LOSSES = {"torch.nn.BCELoss", "torch.nn.modules.BCELoss", "torch.nn.modules.loss.BCELoss"}
_MOVES = ("cuda", "to", "cpu")
# What computes the same outside of a region as inside: shapes, formats, and what is read of the loss.
_ALIKE = {
    "append", "contiguous", "cuda", "detach", "expand_as", "fill_", "flatten", "float", "item", "ones_like",
    "permute", "reshape", "size", "squeeze", "to", "transpose", "type_as", "unsqueeze", "view", "view_as",
    "zeros_like", "double", "cpu", "long", "backward", "scale_loss",
}  # fmt: skip
_CALLED_UNSEEN = ("forward", "__call__")
_WHY = (
    "binary_cross_entropy is refused inside a region on CUDA: use BCEWithLogitsLoss, or compute the loss "
    "after the region"
)


def read_banned(plan: Plan, flow: Flow) -> list[ast.Call]:
    """The calls of it, before which regions end; those that are not sure are refused in ``plan``."""
    source = plan.source
    found: list[ast.Call] = []
    if plan.device == '"cpu"':
        return found  # there a region computes it in float32
    for reference in source.references:
        call = plan.call_of(reference)
        if reference.full in _FUNCTIONS and call is not None:
            found.append(call)
        elif reference.full in _LOSSES and call is not None:
            calls = _calls_of(source, call)
            if calls is None:
                plan.refuse(call, _WHY)
            found += calls or []
        elif reference.full in _FUNCTIONS | _LOSSES:
            plan.refuse(reference.node, _WHY)
    found = list({id(one): one for one in found}.values())
    frames = {
        id(source.function(one)) for one in source.nodes if isinstance(one, ast.Call) and flow.is_forward(one)
    }
    for call in found:
        function = source.function(call)
        unseen = function is not None and function.name in _CALLED_UNSEEN
        if unseen or id(function) not in frames or not _is_apart(source, call, found):
            plan.refuse(call, _WHY)
    return found


def refuse_inside(plan: Plan, spans: list[Span], banned: list[ast.Call]) -> None:
    """Refuse regions that call a function of the file which computes it."""
    source = plan.source
    bodies = {one.name: one for one in source.nodes if isinstance(one, Function)}
    reached = {one.name for call in banned if (one := source.function(call)) is not None}
    while more := {name for name, one in bodies.items() if name not in reached and _called(one) & reached}:
        reached |= more
    for first, last in spans:
        if any(_called(one) & reached for one in source.between(first, last)):
            plan.refuse(first, _WHY)


def _calls_of(source: Source, made: ast.Call) -> list[ast.Call] | None:
    """The calls of the loss that an expression makes; None where they are not all known."""
    top = _moved(source, made)
    parent = source.parents[top]
    if isinstance(parent, ast.Call) and parent.func is top:
        return [parent]
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1:
        return None
    name = source.code(parent.targets[0])
    uses = [
        one for one in source.nodes if isinstance(one, ast.Name | ast.Attribute) and source.code(one) == name
    ]
    calls = []
    for use in uses:
        above = source.parents[use]
        moved = _moved(source, use)
        if isinstance(above, ast.Call) and above.func is use:
            calls.append(above)
        elif isinstance(use.ctx, ast.Store):
            value = getattr(above, "value", None)
            if value is not top and not (value is not None and source.code(value).startswith(f"{name}.")):
                return None
        elif not _is_kept(source, moved, name) and not _is_handed(source, use, name):
            return None
    return calls


def _moved(source: Source, node: ast.expr) -> ast.expr:
    """``node`` with the ``.cuda()`` or ``.to(device)`` behind it."""
    while isinstance(outer := source.parents[node], ast.Attribute) and outer.attr in _MOVES:
        call = source.parents[outer]
        if not isinstance(call, ast.Call):
            break
        node = call
    return node


def _is_kept(source: Source, moved: ast.expr, name: str) -> bool:
    above = source.parents[moved]
    if isinstance(above, ast.Assign):
        return all(source.code(one) == name for one in above.targets)
    return isinstance(above, ast.Expr)


def _is_handed(source: Source, use: ast.expr, name: str) -> bool:
    """Whether a function of the file takes it under the same name."""
    above = source.parents[use]
    if isinstance(above, ast.keyword):
        call = source.parents[above]
        return above.arg == name and isinstance(call, ast.Call) and bool(_functions(source, call))
    if not isinstance(above, ast.Call):
        return False
    at = next((index for index, one in enumerate(above.args) if one is use), None)
    takers = _functions(source, above)
    return (
        bool(takers)
        and at is not None
        and all(at < len(one.args.args) and one.args.args[at].arg == name for one in takers)
    )


def _functions(source: Source, call: ast.Call) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        one
        for one in source.nodes
        if isinstance(one, Function) and isinstance(call.func, ast.Name) and one.name == call.func.id
    ]


def _is_apart(source: Source, call: ast.Call, banned: list[ast.Call]) -> bool:
    """Whether all else in the expression computes outside of a region what it computes inside."""
    top: ast.AST = call
    while not isinstance(source.parents[top], ast.stmt):
        top = source.parents[top]
    known = {id(one) for one in banned}
    known |= {id(one) for one, full in source.calls() if full in _LOSSES}
    own = {one.name for one in source.nodes if isinstance(one, Function)}
    for node in ast.walk(top):
        if isinstance(node, ast.Lambda | ast.comprehension | ast.Await | ast.NamedExpr):
            return False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult | ast.Pow):
            return False
        if isinstance(node, ast.Call) and id(node) not in known and _name(node) not in _ALIKE - own:
            return False
    return True


def _called(node: ast.AST) -> set[str]:
    return set(_names_called(node))


def _names_called(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and (name := _name(one)):
            yield name


def _name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""

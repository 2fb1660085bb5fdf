"""Mistakes that show by where a call stands: in a region, in a loop, on a module."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from narrowcast.migrate._mistakes_flow import Seen
from narrowcast.migrate._mistakes_names import Script, argument, method, text_of, within

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def mistakes_of_places(script: Script) -> Iterator[Seen]:
    """Every mistake that needs no path to be seen."""
    yield from _inside_regions(script)
    yield from _scalers_with_bf16(script)
    yield from _scalers_unused(script)
    yield from _half_weights(script)
    yield from _schedulers_first(script)
    if script.is_mixed and not script.on_cpu_only:
        yield from _host_syncs(script)


def ancestors(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """What a node stands in, from inside out, up to its function or the script."""
    while node in script.parents:
        node = script.parents[node]
        yield node
        if isinstance(node, _FUNCTIONS):
            return


def region_around(script: Script, node: ast.AST) -> tuple[str, ast.AST] | None:
    """Whose region a node runs in, and its ``with`` or function; None outside and where it is off."""
    for outer in ancestors(script, node):
        if isinstance(outer, (ast.With, ast.AsyncWith)):
            for item in reversed(outer.items):
                opened = script.region(item.context_expr)
                if opened is not None:
                    return opened[0], outer
                if isinstance(item.context_expr, ast.Call) and "enabled" in {
                    keyword.arg for keyword in item.context_expr.keywords
                }:
                    return None  # a region that is off inside one that is on
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in outer.decorator_list:
                opened = script.region(decorator)
                if opened is not None:
                    return opened[0], outer
    return None


def is_backward(script: Script, node: ast.AST) -> bool:
    """Whether a call goes backward from a loss."""
    used = method(node)
    if script.called(node) == "torch.autograd.backward":
        return True
    return used is not None and used[1] == "backward" and used[0] not in ("super()", "ctx")


def is_step(script: Script, node: ast.AST) -> bool:
    """Whether a call steps an optimizer, by a scaler or not."""
    used = method(node)
    return used is not None and used[1] == "step" and used[0] in script.optimizers | set(script.scalers)


def _inside_regions(script: Script) -> Iterator[Seen]:
    """The first backward and the first step in each region."""
    told = set()
    for call in sorted(script.calls, key=lambda call: (call.lineno, call.col_offset)):
        backward = is_backward(script, call)
        if not backward and not is_step(script, call):
            continue
        around = region_around(script, call)
        if around is None or (around[0] == "narrowcast" and not backward):
            continue  # a step takes effect at once in a region of narrowcast
        rule = "backward-in-region" if backward else "step-in-region"
        if (rule, around[1]) not in told:
            told.add((rule, around[1]))
            yield Seen(rule, call, "scaler")


def _scalers_with_bf16(script: Script) -> Iterator[Seen]:
    if {script.region_format(call) for call in script.regions} != {"bf16"}:
        return
    for text, calls in script.made_scalers.items():
        for call in calls:
            if argument(call, 5, "enabled") is None:
                yield Seen("scaler-with-bf16", call, text)


def _scalers_unused(script: Script) -> Iterator[Seen]:
    """Scalers of this file that step and never scale, or never update."""
    used: dict[str, dict[str, list[ast.Call]]] = {}
    for call in script.calls:
        receiver = method(call)
        if receiver and receiver[0] in script.scalers:
            used.setdefault(receiver[0], {}).setdefault(receiver[1], []).append(call)
    for text, names in used.items():
        if text not in script.made_scalers or text in script.handed_out or "step" not in names:
            continue
        if "scale" not in names:
            yield Seen("scale-missing", names["step"][0], text, _first_argument(names["step"][0]))
        elif "update" not in names:
            yield Seen("update-missing", names["step"][-1], text, _first_argument(names["step"][-1]))


def _first_argument(call: ast.Call) -> str | None:
    return text_of(call.args[0]) if call.args else None


def _half_weights(script: Script) -> Iterator[Seen]:
    """``model.half()`` of a trained module, in a script that opens regions or scales losses."""
    if not (script.regions or script.scalers):
        return
    for call in script.calls:
        used = method(call)
        if used is None or not isinstance(call.func, ast.Attribute):
            continue
        narrow = used[1] == "half" and not call.args
        if used[1] == "to":
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            narrow = any(script.qualified(value) in ("torch.float16", "torch.half") for value in values)
        if not narrow or _is_conditional(script, call):
            continue
        outer = script.parents.get(call)
        if isinstance(outer, ast.Attribute) and outer.attr == "float":
            continue
        kept = {target for target, value in script.assignments if value is call}
        if used[0] in script.modules or (isinstance(call.func.value, ast.Call) and kept & script.modules):
            yield Seen("half-weights", call, "scaler")


def _is_conditional(script: Script, node: ast.AST) -> bool:
    return any(isinstance(outer, (ast.If, ast.IfExp)) for outer in ancestors(script, node))


def _schedulers_first(script: Script) -> Iterator[Seen]:
    """A scheduler that moves before the optimizer's step in one block of statements."""
    for node in [script.tree, *script.nodes] if script.schedulers and script.scalers else ():
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list):
                continue
            waiting: ast.Call | None = None
            for statement in block:
                call = statement.value if isinstance(statement, ast.Expr) else None
                if waiting is None and call is not None and _moves(script, call):
                    waiting = call if isinstance(call, ast.Call) else None
                elif any(is_step(script, inner) for inner in within(statement)):
                    if waiting is not None and call is not None:
                        yield Seen("scheduler-before-step", waiting, "scaler")
                    break


def _moves(script: Script, node: ast.expr) -> bool:
    used = method(node)
    return used is not None and used[1] == "step" and used[0] in script.schedulers


def _host_syncs(script: Script) -> Iterator[Seen]:
    """Reads from the device in each iteration of the innermost loop that goes backward or steps."""
    told = set()
    for loop in script.nodes:
        if not isinstance(loop, _LOOPS):
            continue
        inside = [node for statement in loop.body for node in within(statement)]
        own = [node for node in inside if next(_loops_around(script, node), None) is loop]
        trains = [node for node in own if is_backward(script, node) or _steps_by_itself(script, node)]
        if not trains:
            continue
        losses = _losses(script, trains)
        usual = {outer for node in trains for outer in _branches(script, node, loop)}
        for node in own:
            if not isinstance(node, ast.expr) or not _reads(script, node, losses):
                continue
            if set(_branches(script, node, loop)) <= usual and node.lineno not in told:
                told.add(node.lineno)
                yield Seen("host-sync", node, "scaler")


def _steps_by_itself(script: Script, node: ast.AST) -> bool:
    used = method(node)
    return used is not None and used[1] == "step" and used[0] in script.steppers


def _loops_around(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    return (outer for outer in ancestors(script, node) if isinstance(outer, _LOOPS))


def _branches(script: Script, node: ast.AST, loop: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """The conditional branches between a node and its loop: (statement, whether the first branch)."""
    inner = node
    for outer in ancestors(script, node):
        if outer is loop:
            return
        if isinstance(outer, (ast.If, ast.IfExp)):
            body = outer.body if isinstance(outer.body, list) else [outer.body]
            yield outer, inner in body
        elif isinstance(outer, (ast.ExceptHandler, ast.BoolOp)):
            yield outer, True
        inner = outer


def _losses(script: Script, trains: list[ast.AST]) -> set[str]:
    """The texts of what goes backward, or into a step of a Stepper."""
    found = set()
    for call in trains:
        used = method(call)
        parts = list(call.args) if isinstance(call, ast.Call) else []
        if (
            used
            and used[1] == "backward"
            and isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
        ):
            parts.append(call.func.value)
        for part in parts:
            if isinstance(part, ast.Call) and (inner := method(part)) and inner[0] in script.scalers:
                part = part.args[0] if part.args else part  # noqa: PLW2901
            if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                found.add(text_of(part))
    return found


def _reads(script: Script, node: ast.expr, losses: set[str]) -> bool:
    """Whether an expression waits for the device: ``.item()``, ``.cpu().numpy()``, a loss that is printed."""
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value) in losses
    used = method(node)
    if used is not None and isinstance(node, ast.Call):
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else node
        if used[1] in ("item", "tolist") and not node.args:
            roots = {script.qualified(one) or "" for one in ast.walk(receiver) if isinstance(one, ast.Name)}
            return not any(root.split(".")[0] == "numpy" for root in roots) and ".numpy()" not in used[0]
        return used[1] == "numpy" and (".cpu()" in used[0] or used[0].removesuffix(".detach()") in losses)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "float"):
        return any(
            text_of(one).removesuffix(".detach()").removesuffix(".data") in losses for one in node.args
        )
    return False

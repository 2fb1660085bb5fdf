"""Mistakes that show by where a call stands: in a region, in a loop, on a module."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from narrowcast.migrate._mistakes_flow import Seen
from narrowcast.migrate._mistakes_names import Script, ancestors, argument, method, text_of, within
from narrowcast.migrate._mistakes_regions import Regions
from narrowcast.migrate._walk import walk

_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def mistakes_of_places(script: Script) -> Iterator[Seen]:
    """Every mistake that needs no path to be seen."""
    regions = Regions(script)
    yield from _inside_regions(script, regions)
    yield from _scalers_with_bf16(script, regions)
    yield from _scalers_unused(script)
    if regions.calls or script.scalers:
        yield from _half_weights(script)
    yield from _schedulers_first(script)
    if regions.is_mixed and not regions.on_cpu_only:
        yield from _host_syncs(script)


def _inside_regions(script: Script, regions: Regions) -> Iterator[Seen]:
    """The first backward and the first step in each region, by a function of this file too."""
    told = set()
    for call in sorted(script.calls, key=lambda call: (call.lineno, call.col_offset)):
        trains = regions.trains(call)
        around = regions.around(call) if trains else None
        if around is None:
            continue
        opened, region = around
        for rule in sorted(f"{what}-in-region" for what in trains):
            if opened.kind == "narrowcast" and rule == "step-in-region":
                continue  # a step takes effect at once in a region of narrowcast
            if (rule, region) not in told:
                told.add((rule, region))
                yield Seen(rule, call, "scaler")


def _scalers_with_bf16(script: Script, regions: Regions) -> Iterator[Seen]:
    if {regions.format(call) for call in regions.calls} != {"bf16"}:
        return
    for text, calls in script.made_scalers.items():
        for call in calls:
            if argument(call, 5, "enabled") is None and all(keyword.arg for keyword in call.keywords):
                yield Seen("scaler-with-bf16", call, text)


def _scalers_unused(script: Script) -> Iterator[Seen]:
    """Scalers of this file that step and never scale, or never update."""
    backwards = [call for call in script.calls if script.is_backward(call)]
    plain = [call for call in backwards if ".scale(" not in text_of(call.func)]
    for text in script.scalers.keys() & script.made_scalers.keys() - script.handed_out:
        steps, scales = script.used.get((text, "step"), []), script.used.get((text, "scale"), [])
        # Another file may scale and update by an attribute of what it is handed, or builds on.
        same = {name for one, name in script.used if one.rpartition(".")[2] == text.rpartition(".")[2]}
        if steps and "scale" not in same and (backwards if "." not in text else plain):
            yield Seen("scale-missing", steps[0], text, _first_argument(steps[0]))
        elif steps and scales and "update" not in same:
            functions = {script.source.function(call) for call in scales}
            if "." not in text or script.source.function(steps[-1]) in functions:
                yield Seen("update-missing", steps[-1], text, _first_argument(steps[-1]))


def _first_argument(call: ast.Call) -> str | None:
    return text_of(call.args[0]) if call.args else None


def _half_weights(script: Script) -> Iterator[Seen]:
    """``model.half()`` of a trained module, in a script that opens regions or scales losses."""
    for call in script.calls:
        used = method(call)
        if used is None or not isinstance(call.func, ast.Attribute):
            continue
        narrow = used[1] == "half" and not call.args
        if used[1] == "to":
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            narrow = any(script.qualified(value) in ("torch.float16", "torch.half") for value in values)
        if not narrow or _is_conditional(script, call) or _is_after_training(script, call):
            continue
        outer = script.parents.get(call)
        if isinstance(outer, ast.Attribute) and outer.attr == "float":
            continue
        kept = {target for target, value in script.assignments if value is call}
        if used[0] in script.modules or (isinstance(call.func.value, ast.Call) and kept & script.modules):
            yield Seen("half-weights", call, "scaler")


def _is_conditional(script: Script, node: ast.AST) -> bool:
    return any(isinstance(outer, (ast.If, ast.IfExp)) for outer in ancestors(script, node))


def _is_after_training(script: Script, node: ast.Call) -> bool:
    """Whether a call stands behind all that goes backward in its function, as to save the model."""
    function = script.source.function(node)
    lines = [
        call.lineno
        for call in script.calls
        if script.is_backward(call) and script.source.function(call) is function
    ]
    return bool(lines) and max(lines) < node.lineno


def _schedulers_first(script: Script) -> Iterator[Seen]:
    """A scheduler that moves before the optimizer's step in one block of statements."""
    for node in [script.tree, *script.nodes] if script.schedulers and script.scalers else ():
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list):
                continue
            waiting: ast.expr | None = None
            for statement in block:
                call = statement.value if isinstance(statement, ast.Expr) else None
                if waiting is None and call is not None and _moves(script, call):
                    waiting = call
                elif any(script.is_step(inner) for inner in within(statement)):
                    moved = method(waiting) if waiting is not None else None
                    if moved and waiting and call and script.schedulers[moved[0]] == _stepped(call):
                        yield Seen("scheduler-before-step", waiting, "scaler")
                    break


def _stepped(call: ast.expr) -> str:
    """The text of the optimizer that is stepped, by a scaler or by itself."""
    given = call.args if isinstance(call, ast.Call) else []
    return text_of(given[0]) if given else (method(call) or ("", ""))[0]


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
        trains = [node for node in own if script.is_backward(node) or _steps_by_itself(script, node)]
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
            roots = {script.qualified(one) or "" for one in walk(receiver) if isinstance(one, ast.Name)}
            return not any(root.split(".")[0] == "numpy" for root in roots) and ".numpy()" not in used[0]
        return used[1] == "numpy" and (".cpu()" in used[0] or used[0].removesuffix(".detach()") in losses)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "float"):
        return any(
            text_of(one).removesuffix(".detach()").removesuffix(".data") in losses for one in node.args
        )
    return False

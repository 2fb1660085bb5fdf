"""Rewrite the apex part of one file as a whole, or leave it alone.

A file that is left alone keeps apex: for torch with the reasons, for narrowcast with ``narrowcast.apex``
imported in place of apex.
"""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

import narrowcast.apex
from narrowcast.migrate._torch_names import narrowcast_name
from narrowcast.migrate.apex._around import write_around, write_master_params, write_states
from narrowcast.migrate.apex._gradients import Gradients
from narrowcast.migrate.apex._plan import RULE, Plan, device_type, is_apex
from narrowcast.migrate.apex._regions import Regions
from narrowcast.migrate.apex._setup import Setup, is_reached, read_setup, write_setup
from narrowcast.migrate.apex._training import Run, Training
from narrowcast.migrate.source._edits import (
    Changes,
    Target,
    after_imports,
    insert_after,
    remove,
    require_import,
    unwrap,
)
from narrowcast.migrate.source._imports import GONE, argument_spans, move_imports, replace_names, set_module
from narrowcast.migrate.source._tree import Reference, Source, argument, is_constant, receiver_of

_UNKNOWN = {
    "half_function": "cast its inputs inside, or torch.amp.custom_fwd for a Function",
    "float_function": "cast its inputs to float32 inside a region with enabled=False",
    "promote_function": "cast its inputs to the widest type among them",
    "register_half_function": "cast explicitly where it is called",
    "register_float_function": "call it in a region with enabled=False, on inputs cast to float32",
    "register_promote_function": "cast explicitly where it is called",
}
_INSTEAD = {
    "apex.optimizers.FusedAdam": "torch.optim.AdamW(params, weight_decay=0.0, fused=True)",
    "apex.optimizers.FusedSGD": "torch.optim.SGD(params, lr, fused=True)",
    "apex.normalization.FusedLayerNorm": "torch.nn.LayerNorm, which computes the same",
    "apex.fp16_utils.to_python_float": "loss.item()",
}
# Names that the packages of narrowcast.apex lack.
_LACKING = (
    "apex.amp.init.",
    *(f"apex.parallel.{name}." for name in ("LARC", "Reducer", "multiproc", "distributed")),
)
_BY_HAND = 'keep the weights in fp32 and use a GradScaler, or nc.Stepper(model, optimizer, "O2")'
_OF_TRAINING = {f"apex.amp.{name}" for name in ("state_dict", "load_state_dict", "master_params")}
_IN_ONE = (
    "an overflow in the gradients of one of these optimizers skips only its own step, where apex skipped the "
    "steps of all; nc.GradScaler.step_together does as apex"
)
_GRAD_SCALER = re.compile(r"(torch|narrowcast)\.((cuda\.|cpu\.)?amp\.)?(grad_scaler\.)?GradScaler$")
_NATIVE = (
    "this file uses apex beside a GradScaler: remove the branches for apex, because the other branch already "
    "computes in mixed precision"
)
_EDITED_LISTS = (
    "apex's lists are edited here, and the table of torch.autocast is fixed: remove the edit and cast the "
    "inputs of {name} where it is called, or use nc.rule.op({name}, compute=...) with nc.autocast"
)
_NO_SETUP = (
    "amp.initialize is not in this file, so that it is not known what the scaler belongs to: move both into "
    "one file"
)
_OR_NARROWCAST = ", or migrate --to narrowcast, which keeps the calls"
_ELSEWHERE = "amp.scale_loss is not in this file: the backward pass is elsewhere, or does not scale"


def apex(source: Source, target: Target) -> Changes:
    """Rewrite what ``source`` does with apex."""
    if not any(is_apex(one.full) for one in source.imports):
        return Changes()
    plan = Plan(source, target, device=device_type(source))
    native = next((one for one in source.references if _GRAD_SCALER.match(one.full)), None)
    if native is not None and any(is_apex(one.full) for one in source.references):
        plan.refuse(native.node, _NATIVE)
    else:
        _rewrite(plan)
    if not plan.refused:
        return plan.changes
    left = Changes()
    if target == "narrowcast":
        _keep_with_narrowcast(source, left)
    kept = bool(left.edits)
    for at, reason in dict.fromkeys(plan.refused):
        left.report(at, RULE, f"kept, with narrowcast.apex: {reason}" if kept else reason, fixed=kept)
    return left


def _rewrite(plan: Plan) -> None:
    source = plan.source
    homes = write_around(plan)
    for reference in source.references:
        if reference.full.startswith("apex.amp.lists."):
            plan.done.add(id(reference.node))
            call = plan.source.call_of(reference.node)
            name = source.code(call.args[0]) if call is not None and call.args else '"..."'
            plan.refuse(reference.node, _EDITED_LISTS.format(name=name))
    setups = [one for ref in plan.references("amp.initialize") if (one := read_setup(plan, ref)) is not None]
    training = Training(plan, setups)
    states = plan.references("amp.state_dict", "amp.load_state_dict")
    users: list[ast.AST] = [block.statement for block in training.blocks]
    users = users or [one.node for one in states]
    if users and not setups and not plan.refused:
        plan.refuse(users[0], _NO_SETUP + (_OR_NARROWCAST if plan.target == "torch" else ""))
    for other in setups[1:]:
        plan.refuse(other.call, "a second call of amp.initialize: pass all models and optimizers to one call")
    if not plan.refused and setups:
        _write_training(plan, setups[0], training)
    refused = bool(plan.refused)
    for reference in source.references:
        if not is_apex(reference.full) or id(reference.node) in plan.done:
            continue
        if refused and reference.full in _OF_TRAINING:
            continue  # left for the reasons that were found
        if not _adam(plan, reference):
            plan.refuse(reference.node, _why(reference.full))
    _move_imports(plan, homes)
    if not plan.refused:
        remove(source, plan.changes, plan.gone)


def _adam(plan: Plan, reference: Reference) -> bool:
    """Write torch's AdamW for a FusedAdam, if it has no arguments but those that both have."""
    call = plan.source.call_of(reference.node)
    if reference.full != "apex.optimizers.FusedAdam" or call is None or len(call.args) != 1:
        return False
    given = {keyword.arg for keyword in call.keywords}
    if isinstance(call.args[0], ast.Starred) or not given <= {"lr", "betas", "eps", "weight_decay"}:
        return False
    added = "fused=True" if "weight_decay" in given else "weight_decay=0.0, fused=True"
    plan.changes.replace(plan.source.span(reference.node), "torch.optim.AdamW")
    plan.changes.insert(argument_spans(plan.source, call)[-1][2], f", {added}")
    plan.note(
        reference.node, "FusedAdam is torch.optim.AdamW with fused=True, without weight decay by default"
    )
    plan.needs_torch = True
    return True


def _why(full: str) -> str:
    name = full.rpartition(".")[2]
    if full.startswith("apex.amp.") and name in _UNKNOWN:
        return f"amp.{name} has no equivalent: {_UNKNOWN[name]}"
    if full == "apex.amp":
        return "apex.amp itself is passed on or compared: only call its functions"
    if full in _INSTEAD:
        return f"{full} stays: write {_INSTEAD[full]} first"
    advice = f": {_BY_HAND}" if full.startswith("apex.fp16_utils.") else ""
    return f"{full} has no equivalent that computes the same{advice}"


# The training step


def _write_training(plan: Plan, setup: Setup, training: Training) -> None:
    source = plan.source
    gradients = Gradients(training)
    gradients.check()
    if not training.blocks and setup.optimizers:
        plan.refuse(setup.call, _ELSEWHERE)
    regions = Regions(plan, training)
    if not regions.has_forward and not plan.refused:
        plan.refuse(setup.call, "no call of the model is in this file, around which a region could stand")
    if plan.refused:
        return
    states = plan.references("amp.state_dict", "amp.load_state_dict")
    always = is_reached(source, setup, [first for first, _ in regions.spans])
    if not always and not setup.optimizers:
        plan.refuse(setup.call, "amp.initialize without an optimizer, which may not be reached: give it one")
        return
    users: list[ast.AST] = [one.node for one in states]
    for run in training.runs:
        users += run.steps
        users += [level.statement for _, levels in run.blocks for level in levels]
    if users and not always:
        users += [first for first, _ in regions.spans]
    scaler, lines = write_setup(plan, setup, users)
    if scaler is not None:
        for run in training.runs:
            _write_run(plan, run, scaler)
        gradients.unscale(scaler)
        write_states(plan, states, scaler)
        write_master_params(plan, gradients)
    regions.write(scaler, always=always)
    plan.needs_torch = True
    if lines:
        at = after_imports(source, tried=True)
        blank = "" if source.text[at:].startswith(source.newline) else source.newline
        plan.changes.insert(at, source.newline + "".join(line + source.newline for line in lines) + blank)


def _write_run(plan: Plan, run: Run, scaler: str) -> None:
    """Scale each loss, step by the scaler, and update it once."""
    source, changes = plan.source, plan.changes
    for step in run.steps:
        statement = source.statement(step)
        changes.replace(source.span(step), f"{scaler}.step({source.code(receiver_of(step))})")
        if step is run.steps[-1]:
            insert_after(source, changes, statement, f"{scaler}.update()")
    for block, _ in run.blocks:
        statement, call = block.statement, block.statement.body[0].value  # type: ignore[attr-defined]
        scaled = f"{scaler}.scale({source.code(block.loss)})"
        changes.replace(source.span(receiver_of(call)), scaled)
        unwrap(source, changes, statement, statement.body)
        plan.note(block.call, "amp.scale_loss is the scaler's scale; the step unscales")
        if argument(block.call, 4, "delay_unscale") is not None:
            plan.note(block.call, "delay_unscale goes: the step unscales once")
        if argument(block.call, 2, "loss_id") is not None:
            plan.note(block.call, "loss_id goes: one scaler serves all losses")
        if len(block.optimizers) > 1:
            plan.note(block.call, _IN_ONE)


# Imports


def _move_imports(plan: Plan, homes: dict[str, str]) -> None:
    """Remove the imports of apex, or move them to torch; refuse what other files may import from here."""
    source = plan.source
    ours = [one for one in source.imports if is_apex(one.full)]
    moved = {one.name for one in ours}
    for one in ours:
        if PurePath(source.path).name == "__init__.py" or one.name in source.exported:
            plan.refuse(one.statement, "other files may import this name of apex from here")
        elif one.full.endswith(".*"):
            plan.refuse(one.statement, "a star import of apex: import what is used by name, or remove it")
        elif not source.names.is_only(one.name):
            plan.refuse(
                one.statement, f"{one.name} is bound to something else too: which one is used is not known"
            )
    used = {one.name for one in source.references}
    kept = {one.full for one in ours if one.full in homes and one.name in used}

    def home(full: str) -> str | None:
        return homes[full] if full in kept else (GONE if is_apex(full) else None)

    move_imports(source, plan.changes, moved, home, plan.gone)
    _remove_tries(plan)
    uses_narrowcast = plan.target == "narrowcast" and any("nc." in one.text for one in plan.changes.edits)
    if plan.needs_torch:
        require_import(source, plan.changes, "torch", "torch")
    if uses_narrowcast:
        require_import(source, plan.changes, "nc", "narrowcast")
        if narrowcast_name(source) != "nc":
            plan.refuse(source.tree.body[0], "nc is the name of something else in this file: rename it first")


def _remove_tries(plan: Plan) -> None:
    """Remove a ``try`` that holds only imports of apex, whose handlers raise, print or set names to None."""
    gone = {id(one) for one in plan.gone}
    for node in plan.source.nodes:
        if not isinstance(node, ast.Try) or not any(id(one) in gone for one in node.body):
            continue
        harmless = (ast.Raise, ast.Pass)
        for one in (statement for handler in node.handlers for statement in handler.body):
            calls = isinstance(one, ast.Expr) and isinstance(one.value, ast.Call | ast.Constant)
            clears = isinstance(one, ast.Assign) and is_constant(one.value, None)
            if not isinstance(one, harmless) and not calls and not clears:
                plan.refuse(
                    node,
                    "this checks for apex: import it without try, and set the flag to True",
                )
        if all(id(one) in gone for one in node.body) and not node.orelse and not node.finalbody:
            plan.gone = [one for one in plan.gone if one not in node.body]
            plan.gone.append(node)
        elif not all(isinstance(one, ast.Import | ast.ImportFrom) for one in (*node.body, *node.orelse)):
            plan.refuse(node, "apex is imported in a try with other statements: import it on its own first")


# ---- files that keep their calls of apex


def _keep_with_narrowcast(source: Source, changes: Changes) -> None:
    """Import from ``narrowcast.apex`` the packages that it has; every call stays."""
    # By the name that an import binds, which is either apex's or narrowcast's.
    lacking: dict[str, list[str]] = {}
    for reference in source.references:
        if not _has(reference.full):
            lacking.setdefault(reference.name, []).append(reference.full)
    by_statement: dict[ast.Import | ast.ImportFrom, dict[ast.alias, list[str]]] = {}
    for one in source.imports:
        if is_apex(one.full):
            missing = lacking.get(one.name, []) if _has(one.full) else [one.full]
            by_statement.setdefault(one.statement, {})[one.alias] = missing
    for statement, missing_of in by_statement.items():
        moved = [alias for alias, missing in missing_of.items() if not missing]
        if isinstance(statement, ast.ImportFrom) and len(moved) == len(statement.names):
            set_module(source, changes, statement, f"narrowcast.{statement.module}")
        elif moved:
            replace_names(source, changes, statement, moved, _from_narrowcast(statement, moved))
        for name in dict.fromkeys(name for missing in missing_of.values() for name in missing):
            message = f"narrowcast.apex has no {name.removeprefix('apex.')}: this still asks for apex itself"
            changes.report(source.start(statement), RULE, f"{message} (see docs/from-apex.md)", fixed=False)
        if moved:
            changes.report(source.start(statement), RULE, "imported from narrowcast.apex instead", fixed=True)


def _has(full: str) -> bool:
    """Return whether narrowcast.apex has a name: its packages have all public names of apex but a few."""
    parts = full.split(".")
    known = len(parts) < 2 or parts[1] in narrowcast.apex.__all__ or parts[1] == "*"
    return known and not f"{full}.".startswith(_LACKING)


def _from_narrowcast(statement: ast.Import | ast.ImportFrom, moved: list[ast.alias]) -> list[str]:
    """Return the statements that import names of apex from narrowcast."""
    if isinstance(statement, ast.ImportFrom):
        return [f"from narrowcast.{statement.module} import {', '.join(map(ast.unparse, moved))}"]
    lines: dict[str, None] = {}
    for alias in moved:
        if alias.asname or alias.name != "apex":
            lines[f"import narrowcast.{ast.unparse(alias)}"] = None
        if not alias.asname:
            lines["from narrowcast import apex"] = None
    return list(lines)

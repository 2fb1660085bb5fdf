"""Rewrite the apex part of one file as a whole, or leave its calls as they are.

A file whose shape is not the canonical one keeps its calls of apex, and the reason is reported. If the target
is narrowcast, ``narrowcast.apex`` is then imported in place of apex.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import PurePath

from narrowcast.migrate.apex._rewrite import RULE, Writer
from narrowcast.migrate.apex._shape import NotCanonicalError, read_shape, refuse
from narrowcast.migrate.source._edits import Changes, Target, remove, require_import
from narrowcast.migrate.source._imports import GONE, move_imports, replace_names, set_module
from narrowcast.migrate.source._tree import (
    Imported,
    ImportStatement,
    Reference,
    Source,
    is_plain,
)

_AMP_CALLS = (
    "apex.amp.initialize",
    "apex.amp.scale_loss",
    "apex.amp.master_params",
    "apex.amp.state_dict",
    "apex.amp.load_state_dict",
)
_DDP = ("apex.parallel.DistributedDataParallel", "apex.parallel.distributed.DistributedDataParallel")
_TORCH_DDP = "torch.nn.parallel.DistributedDataParallel"
# Arguments of apex's DDP that change how it sends gradients, but not their values.
_DDP_ARGUMENTS = {"message_size", "delay_allreduce", "num_allreduce_streams", "retain_allreduce_buffers"}
_DDP_NOTE = (
    "torch's DistributedDataParallel needs a gradient for each parameter in each step "
    "(find_unused_parameters=True where some have none)"
)
_SYNCBN = "apex.parallel.convert_syncbn_model"
_TORCH_SYNCBN = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
_SYNCBN_NOTE = "torch's SyncBatchNorm: in a process group it needs CUDA when it trains"

# What the user should write instead of a name that is not rewritten.
_FUNCTIONS = {
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
_BY_HAND = 'keep the weights in fp32 and use a GradScaler, or nc.Stepper(model, optimizer, "O2")'
_EDITED_LISTS = (
    "apex's lists are edited here, and the table of torch.autocast is fixed: remove the edit and cast the "
    "inputs of {name} where it is called, or use nc.rule.op({name}, compute=...) with nc.autocast"
)
_BESIDE_TORCH = (
    "this file uses apex beside a GradScaler: remove the branches for apex, because the other branch already "
    "computes in mixed precision"
)
_GRAD_SCALER = re.compile(r"(torch|narrowcast)\.((cuda\.|cpu\.)?amp\.)?(grad_scaler\.)?GradScaler$")
# What the packages of narrowcast.apex offer, listed here because importing them would import torch. amp.init
# is left out: narrowcast.apex has it only to raise an error.
_NAMES_IN_NARROWCAST = {
    "amp": (
        "_amp_state",
        "disable_casts",
        "float_function",
        "half_function",
        "initialize",
        "lists",
        "load_state_dict",
        "master_params",
        "promote_function",
        "register_float_function",
        "register_half_function",
        "register_promote_function",
        "scale_loss",
        "state_dict",
    ),
    "optimizers": (
        "FusedAdagrad",
        "FusedAdam",
        "FusedLAMB",
        "FusedMixedPrecisionLamb",
        "FusedNovoGrad",
        "FusedSGD",
    ),
    "parallel": (
        "DistributedDataParallel",
        "SyncBatchNorm",
        "convert_syncbn_model",
        "create_syncbn_process_group",
    ),
}


def apex(source: Source, target: Target) -> Changes:
    """Rewrite what ``source`` does with apex, or import it from ``narrowcast.apex``."""
    changes = Changes()
    if not _apex_imports(source):
        return changes
    try:
        _rewrite(source, target, changes)
    except NotCanonicalError as reason:
        return _keep(source, target, reason)
    return changes


def _is_apex(full: str) -> bool:
    return full == "apex" or full.startswith("apex.")


def _apex_imports(source: Source) -> list[Imported]:
    return [imported for imported in source.imports if _is_apex(imported.full)]


def _rewrite(source: Source, target: Target, changes: Changes) -> None:
    """Rewrite all of the file.

    Raises:
        NotCanonicalError: it has another shape.
    """
    _check_imports(source)
    references = [reference for reference in source.references if _is_apex(reference.full)]
    _check_names(source, references)

    # A file may have apex's DDP alone, and the training loop elsewhere.
    if source.uses_of(*_AMP_CALLS):
        shape = read_shape(source)
        Writer(source, target, shape, changes).write()
        require_import(source, changes, "torch", "torch")
    for reference in source.uses_of(*_DDP):
        _write_ddp(source, changes, reference)
    for reference in source.uses_of(_SYNCBN):
        _write_syncbn(source, changes, reference)
    _move_imports(source, changes)


def _check_imports(source: Source) -> None:
    """Refuse imports whose uses may not all be in sight."""
    for imported in _apex_imports(source):
        if PurePath(source.path).name == "__init__.py" or imported.name in source.exported:
            refuse(imported.statement, "other files may import this name of apex from here")
        if imported.full.endswith(".*"):
            refuse(imported.statement, "a star import of apex: import what is used by name, or remove it")
        if not source.names.is_only_imported(imported.name):
            reason = f"{imported.name} is bound to something else too: which one is used is not known"
            refuse(imported.statement, reason)


def _check_names(source: Source, references: list[Reference]) -> None:
    """Refuse names of apex that have no equivalent in torch, and say what to write."""
    has_scaler = any(_GRAD_SCALER.match(reference.full) for reference in source.references)
    for reference in references:
        node, full = reference.node, reference.full
        # A file with a GradScaler has two training loops, so that every use of apex in it is refused.
        if has_scaler:
            refuse(node, _BESIDE_TORCH)
        if full.startswith("apex.amp.lists."):
            # Take the function from an edit such as FP16_FUNCS.append("softmax").
            name = '"..."'
            call = source.call_of(node)
            if call is not None and call.args:
                name = source.code(call.args[0])
            refuse(node, _EDITED_LISTS.format(name=name))
        if full not in (*_AMP_CALLS, *_DDP, _SYNCBN):
            refuse(node, _why(full))


def _why(full: str) -> str:
    """Return why a name of apex is not rewritten, and what to write in its place."""
    name = full.rpartition(".")[2]
    if full.startswith("apex.amp.") and name in _FUNCTIONS:
        return f"amp.{name} has no equivalent: {_FUNCTIONS[name]}"
    if full == "apex.amp":
        return "apex.amp itself is passed on or compared: only call its functions"
    if full in _INSTEAD:
        return f"{full} stays: first write {_INSTEAD[full]}"
    reason = f"{full} has no equivalent that computes the same"
    if full.startswith("apex.fp16_utils."):
        reason += f": {_BY_HAND}"
    return reason


# ---- apex.parallel


def _write_ddp(source: Source, changes: Changes, reference: Reference) -> None:
    call = source.call_of(reference.node)
    if call is not None:
        keywords = {keyword.arg for keyword in call.keywords}
        if not is_plain(call) or len(call.args) != 1 or keywords - _DDP_ARGUMENTS:
            refuse(call, f"{reference.full} with other arguments than apex's, or the model by keyword")
        if call.keywords:
            # torch's DistributedDataParallel takes none of these arguments of apex's.
            after_model = source.span(call.args[0])[1]
            closing_bracket = source.span(call)[1] - 1
            changes.replace((after_model, closing_bracket), "")
        changes.report(source.start(call), RULE, _DDP_NOTE, fixed=True)
    elif "isinstance" not in source.code(source.parents[reference.node]):
        refuse(reference.node, f"{reference.full} is passed on: call it here")

    # A bare name stays as it is, since its import moves to torch; a dotted name is replaced here.
    if "." in source.code(reference.node):
        changes.replace(source.span(reference.node), _TORCH_DDP)
        require_import(source, changes, "torch", "torch")


def _write_syncbn(source: Source, changes: Changes, reference: Reference) -> None:
    call = source.call_of(reference.node)
    if call is None:
        refuse(reference.node, f"{reference.full} is passed on: call it here")
    if len(call.args) != 1 or call.keywords:
        refuse(reference.node, f"{reference.full} with other arguments than the model: leave them out")
    changes.replace(source.span(reference.node), _TORCH_SYNCBN)
    changes.report(source.start(reference.node), RULE, _SYNCBN_NOTE, fixed=True)
    require_import(source, changes, "torch", "torch")


# ---- imports of a file that is rewritten


def _move_imports(source: Source, changes: Changes) -> None:
    """Remove the imports of apex, or move them to torch."""
    moved = {imported.name for imported in _apex_imports(source)}
    gone = move_imports(source, changes, moved, _new_home)
    for node in source.nodes:
        if not isinstance(node, ast.Try):
            continue
        imports_of_apex = [statement for statement in node.body if statement in gone]
        if imports_of_apex:
            _check_try(node)
        # Remove a try that would be empty without its imports.
        if imports_of_apex == node.body:
            gone = [statement for statement in gone if statement not in node.body]
            gone.append(node)
    remove(source, changes, gone)


def _new_home(full: str) -> str | None:
    if full in _DDP:
        return _TORCH_DDP
    return GONE if _is_apex(full) else None


def _check_try(node: ast.Try) -> None:
    """Refuse a ``try`` that does more than import apex and report that it is missing."""
    for statement in [*node.body, *node.orelse, *node.finalbody]:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            refuse(node, "apex is imported in a try with other statements: import it on its own first")
    for handler in node.handlers:
        for statement in handler.body:
            is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if not is_call and not isinstance(statement, ast.Raise | ast.Pass):
                refuse(node, "this checks for apex: import it without try, and set the flag to True")


# ---- files that keep their calls of apex


def _keep(source: Source, target: Target, why: NotCanonicalError) -> Changes:
    """Leave the calls as they are; for narrowcast import them from ``narrowcast.apex``."""
    changes = Changes()
    message = why.reason
    if target == "narrowcast":
        _import_from_narrowcast(source, changes)
    else:
        message += "; migrate --to narrowcast keeps the calls, with narrowcast.apex"
    imports_moved = bool(changes.edits)
    if imports_moved:
        message = f"kept, with narrowcast.apex: {message}"
    changes.report(source.start(why.node), RULE, message, fixed=imports_moved)
    return changes


def _import_from_narrowcast(source: Source, changes: Changes) -> None:
    """Import from ``narrowcast.apex`` the packages that it has; every call stays."""
    # The import of a name moves only if narrowcast.apex has everything that the file uses through that name,
    # since a name cannot stand for apex in one place and for narrowcast.apex in another.
    missing_by_name: dict[str, list[str]] = defaultdict(list)
    for reference in source.references:
        if _is_apex(reference.full) and not _has(reference.full):
            missing_by_name[reference.name].append(reference.full)

    moved: dict[ImportStatement, list[ast.alias]] = defaultdict(list)
    for imported in _apex_imports(source):
        missing = missing_by_name[imported.name]
        if not _has(imported.full):
            missing = [imported.full]
        if not missing:
            moved[imported.statement].append(imported.alias)
        for full in dict.fromkeys(missing):
            reason = f"narrowcast.apex has no {full.removeprefix('apex.')}: this still asks for apex itself"
            reason += " (see docs/from-apex.md)"
            changes.report(source.start(imported.statement), RULE, reason, fixed=False)

    for statement, aliases in moved.items():
        # Where all names move, only the module is replaced, so that comments and brackets stay.
        if isinstance(statement, ast.ImportFrom) and len(aliases) == len(statement.names):
            set_module(source, changes, statement, f"narrowcast.{statement.module}")
        else:
            replace_names(source, changes, statement, aliases, _narrowcast_imports(statement, aliases))
        changes.report(source.start(statement), RULE, "imported from narrowcast.apex instead", fixed=True)


def _has(full: str) -> bool:
    """Return whether narrowcast.apex has what apex calls ``full``, as ``"apex.amp.scale_loss"``."""
    # The package, a name in it, and attributes of that. The first two may be missing, or a star.
    _, *parts = full.split(".")
    if not parts or parts == ["*"]:
        return True
    if parts[0] not in _NAMES_IN_NARROWCAST:
        return False
    return len(parts) == 1 or parts[1] in ("*", *_NAMES_IN_NARROWCAST[parts[0]])


def _narrowcast_imports(statement: ImportStatement, aliases: list[ast.alias]) -> list[str]:
    """Return the statements that import these names of apex from narrowcast."""
    lines = []
    for alias in aliases:
        code = ast.unparse(alias)
        if isinstance(statement, ast.ImportFrom):
            lines.append(f"from narrowcast.{statement.module} import {code}")
        elif code != "apex":
            lines.append(f"import narrowcast.{code}")
        # "import apex" and "import apex.amp" bind apex, which "import narrowcast.apex.amp" does not.
        if isinstance(statement, ast.Import) and not alias.asname:
            lines.append("from narrowcast import apex")
    return list(dict.fromkeys(lines))

"""Rewrite the apex part of one file as a whole, or leave its calls as they are.

A file that has another shape than the canonical one keeps apex: for torch with the reason, for narrowcast
with ``narrowcast.apex`` imported in place of apex.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import PurePath

import narrowcast.apex
from narrowcast.migrate.apex._rewrite import RULE, Writer
from narrowcast.migrate.apex._shape import NotCanonicalError, read_shape, refuse
from narrowcast.migrate.source._edits import Changes, Target, remove, require_import
from narrowcast.migrate.source._imports import GONE, move_imports, replace_names, set_module
from narrowcast.migrate.source._tree import (
    ImportStatement,
    Reference,
    Source,
    is_constant,
    is_plain,
)

_AMP_CALLS = {
    f"apex.amp.{name}"
    for name in ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")
}
_DDP = ("apex.parallel.DistributedDataParallel", "apex.parallel.distributed.DistributedDataParallel")
_TORCH_DDP = "torch.nn.parallel.DistributedDataParallel"
# Arguments of apex's DDP that say how it sends gradients, and change no number.
_DDP_ARGUMENTS = {"message_size", "delay_allreduce", "num_allreduce_streams", "retain_allreduce_buffers"}
_DDP_NOTE = (
    "torch's DistributedDataParallel needs a gradient for each parameter in each step "
    "(find_unused_parameters=True where some have none)"
)
_SYNCBN = "apex.parallel.convert_syncbn_model"
_TORCH_SYNCBN = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
_SYNCBN_NOTE = "torch's SyncBatchNorm: in a process group it needs CUDA when it trains"

# What to write in place of what is not rewritten.
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
# Names that the packages of narrowcast.apex lack.
_LACKING = (
    "apex.amp.init.",
    "apex.parallel.LARC.",
    "apex.parallel.Reducer.",
    "apex.parallel.multiproc.",
    "apex.parallel.distributed.",
)


def apex(source: Source, target: Target) -> Changes:
    """Rewrite what ``source`` does with apex, or import it from ``narrowcast.apex``."""
    changes = Changes()
    if not any(_is_apex(imported.full) for imported in source.imports):
        return changes
    try:
        _rewrite(source, target, changes)
    except NotCanonicalError as reason:
        return _keep(source, target, reason)
    return changes


def _is_apex(full: str) -> bool:
    return full == "apex" or full.startswith("apex.")


def _rewrite(source: Source, target: Target, changes: Changes) -> None:
    """Rewrite all of the file.

    Raises:
        NotCanonicalError: it has another shape.
    """
    _check_imports(source)
    references = [reference for reference in source.references if _is_apex(reference.full)]
    _check_names(source, references)
    if any(reference.full in _AMP_CALLS for reference in references):
        shape = read_shape(source)
        Writer(source, target, shape, changes).write()
        require_import(source, changes, "torch", "torch")
    for reference in references:
        if reference.full in _DDP or reference.full == _SYNCBN:
            _write_parallel(source, changes, reference)
    _move_imports(source, changes)


def _check_imports(source: Source) -> None:
    """Refuse imports whose uses may not all be in sight."""
    for imported in source.imports:
        if not _is_apex(imported.full):
            continue
        if PurePath(source.path).name == "__init__.py" or imported.name in source.exported:
            told = "other files may import this name of apex from here"
        elif imported.full.endswith(".*"):
            told = "a star import of apex: import what is used by name, or remove it"
        elif not source.names.is_only(imported.name):
            told = f"{imported.name} is bound to something else too: which one is used is not known"
        else:
            continue
        refuse(imported.statement, told)


def _check_names(source: Source, references: list[Reference]) -> None:
    """Refuse names of apex that have no equivalent in torch, and say what to write."""
    has_scaler = any(_GRAD_SCALER.match(reference.full) for reference in source.references)
    for reference in references:
        if has_scaler:
            refuse(reference.node, _BESIDE_TORCH)
        if reference.full.startswith("apex.amp.lists."):
            call = source.call_of(reference.node)
            name = source.code(call.args[0]) if call is not None and call.args else '"..."'
            refuse(reference.node, _EDITED_LISTS.format(name=name))
        if reference.full not in _AMP_CALLS and reference.full not in (*_DDP, _SYNCBN):
            refuse(reference.node, _why(reference.full))


def _why(full: str) -> str:
    name = full.rpartition(".")[2]
    if full.startswith("apex.amp.") and name in _FUNCTIONS:
        return f"amp.{name} has no equivalent: {_FUNCTIONS[name]}"
    if full == "apex.amp":
        return "apex.amp itself is passed on or compared: only call its functions"
    if full in _INSTEAD:
        return f"{full} stays: write {_INSTEAD[full]} first"
    advice = f": {_BY_HAND}" if full.startswith("apex.fp16_utils.") else ""
    return f"{full} has no equivalent that computes the same{advice}"


def _write_parallel(source: Source, changes: Changes, reference: Reference) -> None:
    """Write torch's DistributedDataParallel, or its conversion of batch norms."""
    call = source.call_of(reference.node)
    is_ddp = reference.full in _DDP
    if call is not None:
        known = _DDP_ARGUMENTS if is_ddp else set()
        unknown = [keyword.arg for keyword in call.keywords if keyword.arg not in known]
        if not is_plain(call) or len(call.args) != 1 or unknown:
            told = f"{reference.full} with arguments that torch's does not have"
            refuse(reference.node, told)
        end = source.span(call)[1] - 1
        if call.keywords:
            changes.replace((source.span(call.args[0])[1], end), "")
        changes.report(source.start(call), RULE, _DDP_NOTE if is_ddp else _SYNCBN_NOTE, fixed=True)
    elif not is_ddp or "isinstance" not in source.code(source.parents[reference.node]):
        refuse(reference.node, f"{reference.full} is passed on: call it here")

    # The import of DDP alone moves to torch, and its uses keep the name.
    if not is_ddp or "." in source.code(reference.node):
        changes.replace(source.span(reference.node), _TORCH_DDP if is_ddp else _TORCH_SYNCBN)
        require_import(source, changes, "torch", "torch")


def _move_imports(source: Source, changes: Changes) -> None:
    """Remove the imports of apex, or move them to torch."""
    used = {reference.name for reference in source.references}
    moved = {imported.name for imported in source.imports if _is_apex(imported.full)}
    unused_ddp = {one.full for one in source.imports if one.full in _DDP and one.name not in used}

    def home(full: str) -> str | None:
        if full in _DDP and full not in unused_ddp:
            return _TORCH_DDP
        return GONE if _is_apex(full) else None

    gone = move_imports(source, changes, moved, home)
    for node in source.nodes:
        if isinstance(node, ast.Try) and any(statement in gone for statement in node.body):
            _check_try(node)
            # Without its imports the try holds nothing.
            if all(statement in gone for statement in node.body):
                gone = [statement for statement in gone if statement not in node.body]
                gone.append(node)
    remove(source, changes, gone)


def _check_try(node: ast.Try) -> None:
    """Refuse a ``try`` around an import of apex that does anything but import, raise or print."""
    for statement in [*node.body, *node.orelse, *node.finalbody]:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            told = "apex is imported in a try with other statements: import it on its own first"
            refuse(node, told)
    for handler in node.handlers:
        for statement in handler.body:
            prints = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            clears = isinstance(statement, ast.Assign) and is_constant(statement.value, None)
            if not isinstance(statement, ast.Raise | ast.Pass) and not prints and not clears:
                told = "this checks for apex: import it without try, and set the flag to True"
                refuse(node, told)


# ---- files that keep their calls of apex


def _keep(source: Source, target: Target, why: NotCanonicalError) -> Changes:
    """Leave the calls as they are; for narrowcast import them from ``narrowcast.apex``."""
    changes = Changes()
    if target == "narrowcast":
        _import_from_narrowcast(source, changes)
    is_kept = bool(changes.edits)
    message = f"kept, with narrowcast.apex: {why.reason}" if is_kept else why.reason
    if target == "torch":
        message += "; migrate --to narrowcast keeps the calls, with narrowcast.apex"
    changes.report(source.start(why.node), RULE, message, fixed=is_kept)
    return changes


def _import_from_narrowcast(source: Source, changes: Changes) -> None:
    """Import from ``narrowcast.apex`` the packages that it has; every call stays."""
    # By the name that an import binds, which is either apex's or narrowcast's.
    lacking: dict[str, list[str]] = defaultdict(list)
    for reference in source.references:
        if not _has(reference.full):
            lacking[reference.name].append(reference.full)

    moved: dict[ImportStatement, list[ast.alias]] = defaultdict(list)
    for imported in source.imports:
        if not _is_apex(imported.full):
            continue
        missing = lacking[imported.name] if _has(imported.full) else [imported.full]
        if not missing:
            moved[imported.statement].append(imported.alias)
        for full in dict.fromkeys(missing):
            name = full.removeprefix("apex.")
            message = (
                f"narrowcast.apex has no {name}: this still asks for apex itself (see docs/from-apex.md)"
            )
            message += " (see docs/from-apex.md)"
            changes.report(source.start(imported.statement), RULE, message, fixed=False)

    for statement, aliases in moved.items():
        if isinstance(statement, ast.ImportFrom) and len(aliases) == len(statement.names):
            set_module(source, changes, statement, f"narrowcast.{statement.module}")
        else:
            replace_names(source, changes, statement, aliases, _narrowcast_imports(statement, aliases))
        changes.report(source.start(statement), RULE, "imported from narrowcast.apex instead", fixed=True)


def _has(full: str) -> bool:
    """Return whether narrowcast.apex has a name: its packages have all public names of apex but a few."""
    parts = full.split(".")
    is_known = len(parts) < 2 or parts[1] in narrowcast.apex.__all__ or parts[1] == "*"
    return is_known and not f"{full}.".startswith(_LACKING)


def _narrowcast_imports(statement: ImportStatement, aliases: list[ast.alias]) -> list[str]:
    """Return the statements that import these names of apex from narrowcast."""
    if isinstance(statement, ast.ImportFrom):
        names = ", ".join(ast.unparse(alias) for alias in aliases)
        return [f"from narrowcast.{statement.module} import {names}"]
    lines = []
    for alias in aliases:
        if alias.asname or alias.name != "apex":
            lines.append(f"import narrowcast.{ast.unparse(alias)}")
        # "import apex.amp" binds apex.
        if not alias.asname and "from narrowcast import apex" not in lines:
            lines.append("from narrowcast import apex")
    return lines

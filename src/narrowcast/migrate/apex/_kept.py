"""Files that keep their calls of apex: import from ``narrowcast.apex`` what it has, the rest from apex."""

from __future__ import annotations

import ast

from narrowcast.migrate.apex._plan import RULE, is_apex
from narrowcast.migrate.source._edits import Changes
from narrowcast.migrate.source._imports import replace_names, set_module
from narrowcast.migrate.source._tree import Source

FP16_UTILS = {
    "BN_convert_float", "DynamicLossScaler", "FP16Model", "FP16_Optimizer", "LossScaler", "clip_grad_norm",
    "convert_module", "convert_network", "master_params_to_model_params", "model_grads_to_master_grads",
    "network_to_half", "prep_param_lists", "to_python_float", "tofp16",
}  # fmt: skip
_LISTS = ("functional_overrides", "tensor_overrides", "torch_overrides")
# What each module of narrowcast.apex has; empty: everything that apex had.
OFFERED: dict[str, set[str]] = {
    "apex": {"amp", "optimizers", "parallel"},
    "apex.amp": {
        "_amp_state", "disable_casts", "float_function", "half_function", "init", "initialize", "lists",
        "load_state_dict", "master_params", "promote_function", "register_float_function",
        "register_half_function", "register_promote_function", "scale_loss", "shutdown", "state_dict",
    },
    "apex.amp._amp_state": set(),
    "apex.amp.lists": set(_LISTS),
    **{f"apex.amp.lists.{name}": set() for name in _LISTS},
    "apex.optimizers": {
        "FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD",
    },
    "apex.parallel": {
        "DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model",
        "create_syncbn_process_group",
    },
}  # fmt: skip


def keep_with_narrowcast(source: Source, changes: Changes) -> None:
    """Import from ``narrowcast.apex`` what it has; every call stays."""
    for statement in source.nodes:
        if isinstance(statement, ast.ImportFrom) and not statement.level and is_apex(statement.module or ""):
            _keep_from(source, changes, statement)
        elif isinstance(statement, ast.Import) and any(is_apex(alias.name) for alias in statement.names):
            _keep_plain(source, changes, statement)


def _has(full: str) -> bool:
    """Return whether narrowcast.apex has a name; below its modules only the first part counts."""
    module = full
    while module not in OFFERED:
        if not module:
            return False
        module = module.rpartition(".")[0]
    rest = full.removeprefix(module).removeprefix(".").partition(".")[0]
    return not rest or not OFFERED[module] or rest in OFFERED[module]


def _tell(source: Source, changes: Changes, node: ast.AST, full: str) -> None:
    name = full.removeprefix("apex.")
    message = (
        f"narrowcast.apex has no {name}: this still asks for apex itself (docs/from-apex.md says what else)"
    )
    changes.tell(source.start(node), RULE, message, fixed=False)


def _home(module: str, name: str) -> str | None:
    """Return the module of narrowcast.apex, by apex's name for it, that has a name."""
    if module in OFFERED and (name == "*" or not OFFERED[module] or name in OFFERED[module]):
        return module
    # apex defines some names in a file of a package; here the package has them.
    package = module.rpartition(".")[0]
    return package if module not in OFFERED and name in OFFERED.get(package, ()) else None


def _keep_from(source: Source, changes: Changes, statement: ast.ImportFrom) -> None:
    module = statement.module or ""
    homes: dict[str, list[ast.alias]] = {}
    for alias in statement.names:
        home = _home(module, alias.name)
        if home is None:
            _tell(source, changes, statement, f"{module}.{alias.name}")
        else:
            homes.setdefault(home, []).append(alias)
    if not homes:
        return
    changes.tell(source.start(statement), RULE, "imported from narrowcast.apex instead", fixed=True)
    moved = [alias for aliases in homes.values() for alias in aliases]
    if len(homes) == 1 and len(moved) == len(statement.names):
        set_module(source, changes, statement, f"narrowcast.{next(iter(homes))}")
        return
    lines = [
        f"from narrowcast.{home} import {', '.join(map(ast.unparse, aliases))}"
        for home, aliases in homes.items()
    ]
    replace_names(source, changes, statement, moved, lines)


def _keep_plain(source: Source, changes: Changes, statement: ast.Import) -> None:
    # One name is either apex's or narrowcast's.
    lacking = [one for one in source.references if one.name == "apex" and not _has(one.full)]
    for reference in lacking:
        _tell(source, changes, reference.node, reference.full)
    ours = []
    for alias in statement.names:
        if is_apex(alias.name) and alias.name not in OFFERED:
            _tell(source, changes, statement, alias.name)
        elif is_apex(alias.name) and (alias.asname or not lacking):
            ours.append(alias)
    if not ours:
        return
    lines: dict[str, None] = {}
    for alias in ours:
        if alias.asname or alias.name != "apex":
            lines[f"import narrowcast.{ast.unparse(alias)}"] = None
        if not alias.asname:
            lines["from narrowcast import apex"] = None
    replace_names(source, changes, statement, ours, list(lines))
    changes.tell(source.start(statement), RULE, "imported from narrowcast.apex instead", fixed=True)

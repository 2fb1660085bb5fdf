"""Imports of a file whose calls stay: from ``narrowcast.apex`` what it answers for, the rest as it is."""

from __future__ import annotations

import ast

from narrowcast.migrate._apex_plan import RULE, is_apex
from narrowcast.migrate._changes import Changes
from narrowcast.migrate._fragments import from_module, without_names
from narrowcast.migrate._source import Source

FP16_UTILS = {
    "BN_convert_float", "DynamicLossScaler", "FP16Model", "FP16_Optimizer", "LossScaler", "clip_grad_norm",
    "convert_module", "convert_network", "master_params_to_model_params", "model_grads_to_master_grads",
    "network_to_half", "prep_param_lists", "to_python_float", "tofp16",
}  # fmt: skip
_LISTS = ("functional_overrides", "tensor_overrides", "torch_overrides")
# What each module of narrowcast.apex has; empty: all that apex had.
OFFERED: dict[str, set[str]] = {
    "apex": {"amp", "fp16_utils", "multi_tensor_apply", "optimizers", "parallel", "transformer"},
    "apex.amp": {
        "_amp_state", "disable_casts", "float_function", "half_function", "init", "initialize", "lists",
        "load_state_dict", "master_params", "promote_function", "register_float_function",
        "register_half_function", "register_promote_function", "scale_loss", "shutdown", "state_dict",
    },
    "apex.amp._amp_state": set(),
    "apex.amp.lists": set(_LISTS),
    **{f"apex.amp.lists.{name}": set() for name in _LISTS},
    "apex.fp16_utils": FP16_UTILS,
    "apex.multi_tensor_apply": {"MultiTensorApply", "multi_tensor_applier"},
    "apex.optimizers": {
        "FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD",
    },
    "apex.parallel": {
        "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model",
        "create_syncbn_process_group",
    },
    "apex.transformer": {"amp"},
    "apex.transformer.amp": {"GradScaler"},
}  # fmt: skip
_INSTEAD = {
    "apex.contrib": "torch.nn has layers for most",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear",
    "apex.normalization": "torch.nn.LayerNorm for FusedLayerNorm, torch.nn.RMSNorm for FusedRMSNorm",
    "apex.parallel.LARC": "timm.optim.Lars; no optimizer of torch scales a layer's rate by its norms",
    "apex.parallel.multiproc": "torchrun, which starts the processes",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.RNN": "torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN",
}


def keep_with_narrowcast(source: Source, changes: Changes) -> None:
    """Import from ``narrowcast.apex`` what it has of what was imported from apex; every call stays."""
    for statement in source.nodes:
        if isinstance(statement, ast.ImportFrom) and not statement.level and is_apex(statement.module or ""):
            _keep_from(source, changes, statement)
        elif isinstance(statement, ast.Import) and any(is_apex(alias.name) for alias in statement.names):
            _keep_plain(source, changes, statement)


def _has(full: str) -> bool:
    """Whether narrowcast.apex has something; of what is not a module of it the first name counts."""
    home = full
    while home not in OFFERED:
        if not home:
            return False
        home = home.rpartition(".")[0]
    rest = full.removeprefix(home).removeprefix(".").partition(".")[0]
    return not rest or not OFFERED[home] or rest in OFFERED[home]


def _tell(source: Source, changes: Changes, node: ast.AST, full: str) -> None:
    found = next((text for name, text in _INSTEAD.items() if f"{full}.".startswith(f"{name}.")), None)
    message = f"narrowcast.apex has no {full.removeprefix('apex.')}: this still asks for apex itself"
    changes.tell(
        source.start(node), RULE, message + (f"; in place of it: {found}" if found else ""), fixed=False
    )


def _home(module: str, name: str) -> str | None:
    """The module of narrowcast.apex, by apex's name for it, from which a name can be imported."""
    if module in OFFERED and (name == "*" or not OFFERED[module] or name in OFFERED[module]):
        return module
    # Names that stand in a file of a package of apex are those of the package here.
    package = module.rpartition(".")[0]
    return package if module not in OFFERED and name in OFFERED.get(package, ()) else None


def _keep_from(source: Source, changes: Changes, statement: ast.ImportFrom) -> None:
    module, code = statement.module or "", source.code(statement)
    names = [alias.name for alias in statement.names]
    homes = {name: home for name in names if (home := _home(module, name)) is not None}
    left = [name for name in names if name not in homes]
    for name in left:
        _tell(source, changes, statement, f"{module}.{name}")
    if not homes:
        return
    changes.tell(source.start(statement), RULE, "imported from narrowcast.apex instead", fixed=True)
    if not left and set(homes.values()) == {module}:
        at = source.start(statement) + code.index(module, len("from"))
        changes.insert(at, "narrowcast.")
        return
    lines = [without_names(code, homes)]
    for home in dict.fromkeys(homes.values()):
        part = without_names(code, [name for name in names if homes.get(name) != home])
        lines.append(from_module(part or "", f"narrowcast.{home}"))
    _replace(source, changes, statement, [line for line in lines if line])


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
    rest = without_names(source.code(statement), [alias.name for alias in ours])
    lines = [rest] if rest is not None else []
    for alias in ours:
        if alias.asname:
            lines.append(f"import narrowcast.{alias.name} as {alias.asname}")
        else:
            if alias.name != "apex":
                lines.append(f"import narrowcast.{alias.name}")
            lines.append("from narrowcast import apex")
    _replace(source, changes, statement, lines)
    changes.tell(source.start(statement), RULE, "imported from narrowcast.apex instead", fixed=True)


def _replace(source: Source, changes: Changes, statement: ast.stmt, lines: list[str]) -> None:
    between = source.newline + source.indent(statement) if source.stands_alone(statement) else "; "
    changes.replace(source.span(statement), between.join(dict.fromkeys(lines)))

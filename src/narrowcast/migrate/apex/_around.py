"""What apex has around the training step: DDP, batch norms, fused optimizers, lists of functions, states."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from narrowcast.migrate.apex._gradients import Gradients
from narrowcast.migrate.apex._plan import Plan
from narrowcast.migrate.apex._setup import Scaler
from narrowcast.migrate.source._edits import Target
from narrowcast.migrate.source._imports import argument_spans, drop_arguments
from narrowcast.migrate.source._tree import Reference, is_constant, is_plain

_TORCH_DDP = "torch.nn.parallel.DistributedDataParallel"


@dataclass(frozen=True, slots=True)
class _Call:
    """torch's call for one of apex.

    Attributes:
        fixed: arguments that torch has not: they must have this value, and go.
        gone: arguments that go whatever they are.
        added: arguments that torch needs for the same result, unless they are given.
        positions: how many arguments may be given by position.
    """

    name: str
    told: str
    fixed: dict[str, object] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    added: dict[str, str] = field(default_factory=dict)
    positions: int = 1


_DDP = _Call(
    _TORCH_DDP,
    "torch's DistributedDataParallel needs a gradient for each parameter in each step "
    "(find_unused_parameters=True where some have none)",
    {"gradient_average": True, "gradient_predivide_factor": 1.0, "allreduce_always_fp32": False},
    ("message_size", "delay_allreduce", "num_allreduce_streams", "retain_allreduce_buffers"),
)
_SAME = "computes the same"
_ADAM: dict[str, object] = {"bias_correction": True, "amsgrad": False, "set_grad_none": True}
_SGD: dict[str, object] = {"wd_after_momentum": False, "materialize_master_grads": True}
_CALLS = {
    "parallel.DistributedDataParallel": _DDP,
    "parallel.distributed.DistributedDataParallel": _DDP,
    "parallel.convert_syncbn_model": _Call(
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        "torch's SyncBatchNorm: in a process group it needs CUDA when it trains",
        {"channel_last": False},
        positions=2,
    ),
    "normalization.FusedLayerNorm": _Call(
        "torch.nn.LayerNorm", _SAME, gone=("memory_efficient",), positions=3
    ),
    "optimizers.FusedAdam": _Call(
        "torch.optim.AdamW",
        _SAME,
        _ADAM | {"adam_w_mode": True},
        added={"weight_decay": "0.0", "fused": "True"},
        positions=2,
    ),
    "optimizers.FusedSGD": _Call("torch.optim.SGD", _SAME, _SGD, added={"fused": "True"}, positions=6),
}
_ADAM_L2 = _Call(
    "torch.optim.Adam", _SAME, _ADAM | {"adam_w_mode": False}, added={"fused": "True"}, positions=2
)
_LISTS = ("functional_overrides", "torch_overrides", "tensor_overrides")
_COMPUTE = {"FP16_FUNCS": "lower", "CASTS": "promote", "SEQUENCE_CASTS": "promote", "FP32_FUNCS": "fp32"}
_STAYS_FP32 = (
    "{name} stays as torch.autocast has it, on CUDA in fp32: its tables cannot be edited (cast its input, or "
    "migrate --to narrowcast for a rule)"
)
_NO_LISTS = (
    "apex's lists are edited for {name}, and torch.autocast's cannot be: cast its inputs explicitly, or "
    "migrate --to narrowcast for a rule"
)
_FINDS_ITSELF = "leave this line out once, and the scale finds itself again"
_OF_APEX: dict[Target, str] = {
    "torch": f"one that apex saved does not load into it: {_FINDS_ITSELF}",
    "narrowcast": "one that apex saved does not load into it: make it once with "
    f"loss_scale=nc.scaling.from_state(state)[0], or {_FINDS_ITSELF}",
}


def write_around(plan: Plan) -> dict[str, str]:
    """Rewrite these calls; returns the new full names of imports that keep their name."""
    for name, call in _CALLS.items():
        for reference in plan.references(name):
            _replace_call(plan, reference, call)
    _python_floats(plan)
    return {f"apex.{name}": _TORCH_DDP for name, call in _CALLS.items() if call is _DDP}


def _replace_call(plan: Plan, reference: Reference, new: _Call) -> None:
    source, call = plan.source, plan.call_of(reference)
    name = reference.full.rpartition(".")[2]
    plan.done.add(id(reference.node))
    if call is None and new is _DDP and "isinstance" in source.code(source.parents[reference.node]):
        pass  # both are torch's class after the import has moved
    elif call is None or not is_plain(call) or len(call.args) > new.positions:
        plan.refuse(reference.node, f"{name} with arguments that are not written out by name: write them out")
        return
    else:
        given = {str(one.arg): one.value for one in call.keywords}
        if name == "FusedAdam" and is_constant(given.get("adam_w_mode"), False):
            new = _ADAM_L2
        for word, value in given.items():
            if word in new.fixed and not is_constant(value, new.fixed[word]):
                asked = f"{name}({word}={source.code(value)})"
                plan.refuse(value, f"{asked}: {new.name} has no such way")
        gone = {*new.fixed, *new.gone}
        drop_arguments(source, plan.changes, call, gone)
        kept = [one for one in argument_spans(source, call) if getattr(one[0], "arg", "") not in gone]
        added = [f", {word}={value}" for word, value in new.added.items() if word not in given]
        if added and kept:
            plan.changes.insert(kept[-1][2], "".join(added))
        plan.note(call, f"{name} as {new.name}: {new.told}")
    if new is not _DDP or "." in source.code(reference.node):
        plan.changes.replace(source.span(reference.node), new.name)
        plan.needs_torch = True


def _python_floats(plan: Plan) -> None:
    """``to_python_float(loss)`` becomes ``loss.item()``; a star import brings the name too."""
    source, name = plan.source, "to_python_float"
    nodes = [one.node for one in plan.references(f"fp16_utils.{name}")]
    if any(one.full == "apex.fp16_utils.*" for one in source.imports) and name not in source.names.taken():
        nodes += [node for node in source.nodes if isinstance(node, ast.Name) and node.id == name]
    for node in nodes:
        call = source.parents[node]
        if isinstance(call, ast.Call) and call.func is node and len(call.args) == 1 and not call.keywords:
            value = source.code(call.args[0])
            simple = isinstance(call.args[0], ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            plan.changes.replace(source.span(call), f"{value if simple else f'({value})'}.item()")
            plan.note(call, f"{name} is the tensor's item()")
            plan.done.add(id(node))


def write_lists(plan: Plan) -> list[str]:
    """Remove edits of apex's lists; returns the rules that replace them, for narrowcast."""
    edits: dict[str, list[tuple[ast.stmt, str, str]]] = {}
    kinds = [f"amp.lists.{module}.{kind}" for module in _LISTS for kind in _COMPUTE]
    for reference in plan.references(*(f"{kind}.{way}" for kind in kinds for way in ("append", "remove"))):
        plan.done.add(id(reference.node))
        call = plan.call_of(reference)
        kind, way = reference.full.split(".")[-2:]
        name = call.args[0] if call is not None and len(call.args) == 1 else None
        statement = plan.source.statement(reference.node)
        alone = isinstance(statement, ast.Expr) and statement.value is call
        if not alone or not isinstance(name, ast.Constant):
            plan.refuse(reference.node, "an edit of apex's lists that is computed: append or remove one name")
            continue
        edits.setdefault(str(name.value), []).append((statement, way, kind))
        plan.gone.append(statement)
    rules = []
    for word, made in edits.items():
        added = [kind for _, way, kind in made if way == "append"]
        removed = [kind for _, way, kind in made if way == "remove"]
        first = made[0][0]
        if plan.target == "narrowcast":
            compute = _COMPUTE[added[-1]] if added else "as-is"
            rules.append(f'nc.rule.op("{word}", compute="{compute}")')
            plan.note(first, f"the edit of the lists is the rule {rules[-1]}")
        elif added and removed == ["FP32_FUNCS"]:
            plan.note(first, _STAYS_FP32.format(name=word))
        else:
            plan.refuse(first, _NO_LISTS.format(name=word))
    return rules


def write_master_params(plan: Plan, gradients: Gradients) -> None:
    """``amp.master_params(optimizer)`` becomes the parameters of its model, or those of its groups."""
    source = plan.source
    for reference in plan.references("amp.master_params"):
        call = plan.call_of(reference)
        plan.done.add(id(reference.node))
        if call is None or len(call.args) != 1 or call.keywords:
            plan.refuse(reference.node, "amp.master_params without its optimizer written out")
            continue
        optimizer = source.code(call.args[0])
        code = f'[p for group in {optimizer}.param_groups for p in group["params"]]'
        makers, here = gradients.makers_of(optimizer), source.function(call)
        if len(makers) == 1:
            made, model = makers[0]
            parameter = here is not None and model in {one.arg for one in here.args.args}
            if parameter or source.function(made) in (here, None):
                code = f"{model}.parameters()"
        plan.changes.replace(source.span(call), code)
        plan.note(call, "amp.master_params is the parameters of the model, which stay in fp32")


def write_states(plan: Plan, states: list[Reference], scaler: Scaler) -> None:
    """``amp.state_dict`` and ``amp.load_state_dict`` become those of the scaler."""
    for reference in states:
        plan.done.add(id(reference.node))
        method = reference.full.rpartition(".")[2]
        plan.changes.replace(
            plan.source.span(reference.node), f"{scaler.at(plan.source, reference.node)}.{method}"
        )
        told = "the state is the scaler's"
        plan.note(reference.node, told if method == "state_dict" else f"{told}; {_OF_APEX[plan.target]}")

"""What apex had around the training step: DDP, batch norms, fused optimizers, lists of functions."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from narrowcast.migrate._apex_plan import Plan
from narrowcast.migrate._arguments import argument_spans, is_plain, open_bracket
from narrowcast.migrate._source import Reference

_DDP_ONLY = {
    "message_size", "delay_allreduce", "shared_param", "allreduce_trigger_params", "retain_allreduce_buffers",
    "num_allreduce_streams", "allreduce_communicators", "prof",
}  # fmt: skip
_DDP_CHANGES = {"gradient_average": True, "gradient_predivide_factor": 1.0, "allreduce_always_fp32": False}


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """torch's optimizer for one of apex, and the arguments that must be as given, or go."""

    name: str
    fixed: dict[str, object]
    gone: tuple[str, ...]
    added: dict[str, str]
    in_place: int = 2


_FLOAT = "to_python_float"
_SET = {"set_grad_none": True}
_ADAM = _Optimizer(
    "Adam",
    {"bias_correction": True, "adam_w_mode": False, "amsgrad": False, **_SET},
    ("bias_correction", "adam_w_mode", "amsgrad", "set_grad_none"),
    {"fused": "True"},
)
_OPTIMIZERS = {
    "apex.optimizers.FusedAdam": _Optimizer(
        "AdamW",
        {"bias_correction": True, "adam_w_mode": True, "amsgrad": False, **_SET},
        ("bias_correction", "adam_w_mode", "amsgrad", "set_grad_none"),
        {"weight_decay": "0.0", "fused": "True"},
    ),
    "apex.optimizers.FusedSGD": _Optimizer(
        "SGD",
        {"wd_after_momentum": False, "materialize_master_grads": True},
        ("wd_after_momentum", "materialize_master_grads", "set_grad_none"),
        {"fused": "True"},
        6,
    ),
    "apex.optimizers.FusedAdagrad": _Optimizer(
        "Adagrad",
        {"adagrad_w_mode": False, **_SET},
        ("adagrad_w_mode", "set_grad_none"),
        {"lr": "1e-2", "fused": "True"},
    ),
}
_NORM_MODULES = ("", ".fused_layer_norm")
_LISTS = ("functional_overrides", "torch_overrides", "tensor_overrides")
_WIDER = {"FP16_FUNCS": 0, "CASTS": 1, "SEQUENCE_CASTS": 1, "FP32_FUNCS": 2}


def write_around(plan: Plan) -> dict[str, str]:
    """Rewrite the calls; returns the new full names of what imports may go on importing under their names."""
    homes: dict[str, str] = {}
    for full, write in (
        ("parallel.DistributedDataParallel", _ddp),
        ("parallel.convert_syncbn_model", _syncbn),
        ("parallel.SyncBatchNorm", _syncbn_layer),
    ):
        inside = full.replace("parallel.", "parallel.distributed.")
        home = write(plan, plan.references(full, inside))
        if home:
            homes |= {f"apex.{full}": home, f"apex.{inside}": home}
    for name, optimizer in _OPTIMIZERS.items():
        for reference in plan.references(name.removeprefix("apex.")):
            _fused(plan, reference, optimizer)
    for reference in plan.references(*(f"normalization{where}.FusedLayerNorm" for where in _NORM_MODULES)):
        _layer_norm(plan, reference)
    _disable_casts(plan)
    _python_floats(plan)
    return homes


def _python_floats(plan: Plan) -> None:
    """``to_python_float(loss)`` is ``loss.item()``, where a star brought the name too."""
    source = plan.source
    names = [one.node for one in plan.references(f"fp16_utils.{_FLOAT}", f"fp16_utils.fp16util.{_FLOAT}")]
    if any(one.full == "apex.fp16_utils.*" for one in source.imports) and _FLOAT not in source.names.taken():
        names += [node for node in source.nodes if isinstance(node, ast.Name) and node.id == _FLOAT]
    for name in names:
        call = source.parents[name]
        if not isinstance(call, ast.Call) or call.func is not name or len(call.args) != 1 or call.keywords:
            continue
        value = source.code(call.args[0])
        simple = isinstance(call.args[0], ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        plan.changes.replace(source.span(call), f"{value if simple else f'({value})'}.item()")
        plan.note(call, f"{_FLOAT} is the tensor's item()")
        plan.handled(name)


def _rename(plan: Plan, reference: Reference, full: str) -> None:
    """Write the full name of torch's where apex's stood, unless a name is imported for it."""
    plan.handled(reference)
    if "." in plan.source.code(reference.node):
        plan.changes.replace(plan.source.span(reference.node), full)
        plan.needs_torch = True


def _ddp(plan: Plan, references: list[Reference]) -> str | None:
    for reference in references:
        call = plan.call_of(reference)
        if call is None:
            if not _asked(plan, reference):
                plan.refuse(reference.node, "apex's DistributedDataParallel is used as a value")
            _rename(plan, reference, "torch.nn.parallel.DistributedDataParallel")
            continue
        if not is_plain(call) or len(call.args) > 1:
            plan.refuse(
                call, "apex's DistributedDataParallel with arguments that are not written out by name"
            )
        for keyword in call.keywords:
            if keyword.arg in _DDP_CHANGES and not _same(keyword.value, _DDP_CHANGES[str(keyword.arg)]):
                plan.refuse(
                    keyword.value, f"{keyword.arg} of apex's DistributedDataParallel: torch's has none"
                )
        dropped = {keyword.arg for keyword in call.keywords} & (_DDP_ONLY | _DDP_CHANGES.keys())
        _drop(plan, call, dropped)
        plan.note(
            call,
            "torch's DistributedDataParallel: it needs a gradient for each parameter in each step "
            "(find_unused_parameters=True where some have none)",
        )
        _rename(plan, reference, "torch.nn.parallel.DistributedDataParallel")
    return "torch.nn.parallel.DistributedDataParallel"


def _syncbn(plan: Plan, references: list[Reference]) -> str | None:
    for reference in references:
        call = plan.call_of(reference)
        plan.handled(reference)
        if call is None or not is_plain(call):
            plan.refuse(reference.node, "convert_syncbn_model without its arguments written out")
            continue
        for keyword in call.keywords:
            if keyword.arg == "channel_last" and not _same(keyword.value, False):
                plan.refuse(keyword.value, "channel_last: torch's SyncBatchNorm takes x.contiguous() layouts")
        _drop(plan, call, {"channel_last"} & {keyword.arg for keyword in call.keywords})
        plan.needs_torch = True
        plan.changes.replace(
            plan.source.span(reference.node), "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
        )
        plan.note(call, "torch's SyncBatchNorm: in a process group it needs CUDA when it trains")
    return None


def _syncbn_layer(plan: Plan, references: list[Reference]) -> str | None:
    for reference in references:
        call = plan.call_of(reference)
        if call is not None and (
            len(call.args) > 6 or {"channel_last", "fuse_relu"} & {keyword.arg for keyword in call.keywords}
        ):
            plan.refuse(call, "channel_last and fuse_relu of apex's SyncBatchNorm: torch's has neither")
        _rename(plan, reference, "torch.nn.SyncBatchNorm")
    return "torch.nn.SyncBatchNorm"


def _layer_norm(plan: Plan, reference: Reference) -> None:
    call = plan.call_of(reference)
    plan.handled(reference)
    if call is None or not is_plain(call) or len(call.args) > 3:
        plan.refuse(reference.node, "FusedLayerNorm without its arguments written out")
        return
    _drop(plan, call, {"memory_efficient"} & {keyword.arg for keyword in call.keywords})
    plan.needs_torch = True
    plan.changes.replace(plan.source.span(reference.node), "torch.nn.LayerNorm")
    plan.note(call, "FusedLayerNorm as torch.nn.LayerNorm, which computes the same")


def _fused(plan: Plan, reference: Reference, optimizer: _Optimizer) -> None:
    call = plan.call_of(reference)
    plan.handled(reference)
    name = reference.full.rpartition(".")[2]
    if call is None or not is_plain(call) or len(call.args) > optimizer.in_place:
        plan.refuse(reference.node, f"{name} with arguments that are not written out by name")
        return
    if any(one.arg == "adam_w_mode" and _same(one.value, False) for one in call.keywords):
        optimizer = _ADAM
    for keyword in call.keywords:
        if keyword.arg in optimizer.fixed and not _same(keyword.value, optimizer.fixed[keyword.arg]):
            asked = f"{name}({keyword.arg}={plan.source.code(keyword.value)})"
            plan.refuse(keyword.value, f"{asked}: torch.optim.{optimizer.name} has no such way")
    given = {str(keyword.arg) for keyword in call.keywords}
    if len(call.args) > 1:
        given.add("lr")
    _drop(plan, call, given & set(optimizer.gone))
    added = [f"{word}={value}" for word, value in optimizer.added.items() if word not in given]
    spans = [one for one in argument_spans(plan.source, call) if _word(one[0]) not in optimizer.gone]
    if not spans:
        plan.refuse(call, f"{name} without parameters")
        return
    plan.changes.insert(spans[-1][2], "".join(f", {one}" for one in added))
    plan.needs_torch = True
    plan.changes.replace(plan.source.span(reference.node), f"torch.optim.{optimizer.name}")
    plan.note(call, f"{name} as torch.optim.{optimizer.name}(fused=True), which computes the same")


def _drop(plan: Plan, call: ast.Call, names: set[str | None] | set[str]) -> None:
    """Take arguments out of a call, each with the comma that goes with it."""
    spans = argument_spans(plan.source, call)
    kept = [index for index, one in enumerate(spans) if _word(one[0]) not in names]
    for index, (node, start, end) in enumerate(spans):
        if _word(node) not in names:
            continue
        if any(one < index for one in kept):
            before = spans[index - 1][2]
            plan.changes.replace((before, end), "")
        elif index + 1 < len(spans):
            plan.changes.replace((start, spans[index + 1][1]), "")
        else:
            plan.changes.replace((open_bracket(plan.source, call), plan.source.span(call)[1] - 1), "")


def _word(node: ast.expr | ast.keyword) -> str:
    return node.arg or "**" if isinstance(node, ast.keyword) else ""


def _same(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def _asked(plan: Plan, reference: Reference) -> bool:
    parent = plan.source.parents[reference.node]
    inner = plan.source.parents[parent] if isinstance(parent, ast.Tuple) else parent
    return isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "isinstance"


def _disable_casts(plan: Plan) -> None:
    for reference in plan.references("amp.disable_casts"):
        call = plan.call_of(reference)
        if call is None or call.args or call.keywords:
            plan.refuse(reference.node, "amp.disable_casts without its call")
            continue
        plan.handled(reference)
        plan.changes.replace(
            plan.source.span(call), f"{plan.spelling.autocast}({plan.device}, enabled=False)"
        )
        plan.note(call, "amp.disable_casts as a region that is off: functions take the formats that come")


@dataclass(frozen=True, slots=True)
class _ListEdit:
    statement: ast.stmt
    method: str
    names: tuple[str, ...]
    place: str


def write_lists(plan: Plan) -> list[str]:
    """Take out edits of apex's lists; returns the rules that stand for them, for narrowcast."""
    edits = []
    for reference in plan.references(
        *(
            f"amp.lists.{module}.{kind}.{method}"
            for module in _LISTS
            for kind in _WIDER
            for method in ("append", "remove", "extend", "insert")
        )
    ):
        plan.handled(reference)
        edit = _list_edit(plan, reference)
        if edit is not None:
            edits.append(edit)
    rules = []
    for name in dict.fromkeys(name for edit in edits for name in edit.names):
        rules += _rule(plan, name, [edit for edit in edits if name in edit.names])
    plan.gone += [edit.statement for edit in edits]
    return rules


def _list_edit(plan: Plan, reference: Reference) -> _ListEdit | None:
    call = plan.call_of(reference)
    kind, method = reference.full.split(".")[-2:]
    last = call.args[-1] if call is not None and call.args else None
    statement = plan.source.statement(reference.node)
    words = last.elts if isinstance(last, ast.List | ast.Tuple) else [last]
    names = tuple(str(word.value) for word in words if isinstance(word, ast.Constant))
    if not isinstance(statement, ast.Expr) or statement.value is not call or len(names) != len(words):
        plan.refuse(reference.node, "an edit of apex's lists that is computed")
        return None
    return _ListEdit(statement, method, names, kind)


def _rule(plan: Plan, name: str, edits: list[_ListEdit]) -> list[str]:
    """The rule that stands for the edits of one function, where the target has rules."""
    added = [edit for edit in edits if edit.method != "remove"]
    removed = [edit for edit in edits if edit.method == "remove"]
    first = edits[0].statement
    place = added[-1].place if added else None
    if plan.target == "narrowcast":
        compute = {"FP16_FUNCS": "lower", "FP32_FUNCS": "fp32", None: "as-is"}.get(place, "promote")
        plan.note(first, f'the edit of the lists is the rule nc.rule.op("{name}", compute="{compute}")')
        return [f'nc.rule.op("{name}", compute="{compute}")']
    if place is not None and removed and _WIDER[place] < _WIDER[removed[-1].place]:
        plan.note(
            first,
            f"{name} stays as torch.autocast has it, on CUDA in fp32: its tables cannot be edited (cast its "
            "input, or migrate --to narrowcast for a rule)",
        )
        return []
    plan.refuse(
        first,
        f"apex's lists are edited for {name}, and torch.autocast's cannot be: cast its inputs explicitly, or "
        "migrate --to narrowcast for a rule",
    )
    return []

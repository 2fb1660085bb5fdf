"""Rewrite what surrounds the training step: DDP, batch norms, ``master_params`` and states."""

from __future__ import annotations

from narrowcast.migrate.apex._gradients import Gradients
from narrowcast.migrate.apex._plan import Plan
from narrowcast.migrate.source._edits import Target
from narrowcast.migrate.source._imports import drop_arguments
from narrowcast.migrate.source._tree import Reference, is_constant, is_plain

_TORCH_DDP = "torch.nn.parallel.DistributedDataParallel"
_DDP = ("parallel.DistributedDataParallel", "parallel.distributed.DistributedDataParallel")
_DDP_FIXED: dict[str, object] = {
    "gradient_average": True,
    "gradient_predivide_factor": 1.0,
    "allreduce_always_fp32": False,
}
_DDP_GONE = {"message_size", "delay_allreduce", "num_allreduce_streams", "retain_allreduce_buffers"}
_DDP_NOTE = (
    "torch's DistributedDataParallel needs a gradient for each parameter in each step "
    "(find_unused_parameters=True where some have none)"
)
_SYNCBN = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
_SYNCBN_NOTE = "torch's SyncBatchNorm: in a process group it needs CUDA when it trains"
_FINDS_ITSELF = "leave this line out once, and the scale adapts again"
_OF_APEX: dict[Target, str] = {
    "torch": f"a state that apex saved does not load: {_FINDS_ITSELF}",
    "narrowcast": "a state that apex saved does not load: make the scaler once with "
    f"loss_scale=nc.scaling.from_state(state)[0], or {_FINDS_ITSELF}",
}


def write_around(plan: Plan) -> dict[str, str]:
    """Rewrite DDP and batch norms; returns the new full names of imports that keep their name."""
    for reference in plan.references(*_DDP):
        _replace_call(plan, reference, _TORCH_DDP, _DDP_FIXED, _DDP_GONE, _DDP_NOTE)
    for reference in plan.references("parallel.convert_syncbn_model"):
        _replace_call(plan, reference, _SYNCBN, {"channel_last": False}, set(), _SYNCBN_NOTE)
    return {f"apex.{name}": _TORCH_DDP for name in _DDP}


def _replace_call(
    plan: Plan, reference: Reference, new: str, fixed: dict[str, object], gone: set[str], note: str
) -> None:
    """Replace a name of apex by ``new``; ``fixed`` arguments must have their value, and are removed."""
    source, call = plan.source, plan.source.call_of(reference.node)
    plan.done.add(id(reference.node))
    is_test = new == _TORCH_DDP and "isinstance" in source.code(source.parents[reference.node])
    if call is not None and is_plain(call) and len(call.args) == 1:
        for keyword in call.keywords:
            if keyword.arg in fixed and not is_constant(keyword.value, fixed[keyword.arg]):
                plan.refuse(
                    keyword.value, f"{keyword.arg}={source.code(keyword.value)}: {new} has no such option"
                )
        drop_arguments(source, plan.changes, call, gone | fixed.keys())
        plan.note(call, note)
    elif not is_test:
        plan.refuse(reference.node, f"{reference.full} without its arguments written out by name")
    if new != _TORCH_DDP or "." in source.code(reference.node):
        plan.changes.replace(source.span(reference.node), new)
        plan.needs_torch = True


def write_master_params(plan: Plan, gradients: Gradients) -> None:
    """Replace ``amp.master_params(optimizer)`` by the parameters of its model, or of its groups."""
    source = plan.source
    for reference in plan.references("amp.master_params"):
        call = plan.source.call_of(reference.node)
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
            # By its groups clipping becomes one call of the scaler, also where arguments hide the maker.
            joins = plan.target == "narrowcast" and "clip_grad" in source.code(source.statement(call))
            if source.function(made) is here or (not joins and (parameter or source.function(made) is None)):
                code = f"{model}.parameters()"
        plan.changes.replace(source.span(call), code)
        plan.note(call, "amp.master_params is the parameters of the model, which stay in fp32")


def write_states(plan: Plan, states: list[Reference], scaler: str) -> None:
    """Replace ``amp.state_dict`` and ``amp.load_state_dict`` by those of the scaler."""
    for reference in states:
        plan.done.add(id(reference.node))
        method = reference.full.rpartition(".")[2]
        plan.changes.replace(plan.source.span(reference.node), f"{scaler}.{method}")
        told = "the state is the scaler's"
        plan.note(reference.node, told if method == "state_dict" else f"{told}; {_OF_APEX[plan.target]}")

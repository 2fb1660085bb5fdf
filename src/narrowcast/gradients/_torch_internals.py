"""Names of torch that its documentation does not promise; ``tests/gradients`` fails when one moves."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from narrowcast.casting import skipped_by_dynamo

# Of torch's GradScaler: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py
OptState = torch.amp.grad_scaler.OptState

# The class of these nodes has no public name: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/functions/accumulate_grad.h
ACCUMULATE_GRAD = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)

Method = TypeVar("Method", bound=Callable[..., Any])


def untraced(method: Method) -> Method:
    """Have ``torch.compile`` call a method without tracing it; this adds nothing to an eager call."""
    return skipped_by_dynamo(method)


def nodes_below(roots: Iterable[Any]) -> list[Any]:
    """Return every node that backward from ``roots`` would visit, each once, roots included."""
    seen = set(roots)
    nodes = list(seen)
    for node in nodes:  # the loop also visits the nodes that it appends
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


def leaf_of(node: Any) -> torch.Tensor | None:
    """Return the leaf whose gradient ``node`` accumulates; None for a node inside the graph."""
    return node.variable if type(node) is ACCUMULATE_GRAD else None  # type: ignore[attr-defined]


def multiply_and_check(tensors: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply tensors of one device and dtype by ``factor`` in place, as ``torch.amp.GradScaler`` unscales.

    Sets ``found_inf`` to 1 if a tensor held a NaN or an infinity before. This is one kernel, except for bf16
    on CUDA.
    """
    if tensors[0].dtype == torch.bfloat16 and tensors[0].is_cuda:
        # CUDA's kernel does not take bf16: https://github.com/pytorch/pytorch/issues/127176
        found_inf.masked_fill_(~torch.stack(norms(tensors, math.inf)).isfinite().all(), 1.0)
        for tensor in tensors:
            tensor.copy_(tensor.float().mul_(factor))
        return
    # The operator has no public name: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, factor)


def checks_in_one_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``multiply_and_check`` is one kernel for tensors of ``dtype`` on ``device``."""
    return device.type == "cpu" or dtype != torch.bfloat16


def move_as_torch(
    scale: torch.Tensor,
    good_steps: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """Update a scale by the rule of ``torch.amp.GradScaler``, in place and on the device."""
    # The operator has no public name:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py
    torch._amp_update_scale_(scale, good_steps, found_inf, growth_factor, backoff_factor, growth_interval)


def norms(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of each dense tensor, accumulated in fp32 or, for fp64, in fp64; 0 for an empty one."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    if order != math.inf or all(map(torch.Tensor.numel, tensors)):
        # One kernel for all, as torch.nn.utils.get_total_norm calls:
        # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/utils/clip_grad.py
        return list(torch._foreach_norm(list(tensors), order, dtype=dtype))

    # A rank may hold an empty tensor, for whose largest magnitude torch raises.
    results = []
    for tensor in tensors:
        if tensor.numel():
            results += norms([tensor], order)
        else:
            results.append(torch.zeros((), dtype=dtype, device=tensor.device))
    return results


def norms_of_rows(rows: torch.Tensor, order: float) -> torch.Tensor:
    """Return the norm of each row, accumulated as in ``norms``."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    row_norms: torch.Tensor = torch.linalg.vector_norm(rows, order, dim=1, dtype=dtype)
    return row_norms


def norms_in_own_dtype(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of each tensor, in its dtype: for bf16 on a CPU in half the time of ``norms``."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/utils/clip_grad.py
    return list(torch._foreach_norm(list(tensors), order))


def all_gather(gathered: torch.Tensor, row: torch.Tensor, group: Any) -> None:
    """Gather the ``row`` of every rank into ``gathered``, in the order of the ranks."""
    # torch 2.13 renamed the function, and warns of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, row, group=group)


def multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device in place, in few kernels."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/utils/clip_grad.py
    torch._foreach_mul_(list(tensors), factor)


def clamp(tensors: Sequence[torch.Tensor], low: float, high: float) -> None:
    """Clamp tensors of one device in place, in few kernels; NaN stays NaN."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/utils/clip_grad.py
    torch._foreach_clamp_min_(list(tensors), low)
    torch._foreach_clamp_max_(list(tensors), high)


Group = tuple[torch.device, torch.dtype, Sequence[int], list[torch.Tensor]]
"""Tensors of one device and dtype: the device, the dtype, the positions of the tensors in the list that was
grouped, and the tensors."""

_DTYPE = attrgetter("dtype")
# The answer stays the same for the whole process, and every check of gradients needs it.
_has_accelerator = functools.cache(torch.accelerator.is_available)


def by_device_and_dtype(tensors: list[torch.Tensor]) -> list[Group]:
    """Group tensors by device and dtype."""
    # Without an accelerator all are on the CPU, and comparing dtypes takes half the time of torch's function.
    if not _has_accelerator() and len(set(map(_DTYPE, tensors))) == 1:
        return [(tensors[0].device, tensors[0].dtype, range(len(tensors)), tensors)]
    # Has no public name: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_foreach_utils.py
    group_tensors: Any = torch._C._group_tensors_by_device_and_dtype
    # First without positions, which takes less time: most models have one group, and need none.
    grouped = group_tensors([tensors], False)
    if len(grouped) == 1:
        ((device, dtype),) = grouped
        return [(device, dtype, range(len(tensors)), tensors)]
    groups: list[Group] = []
    for (device, dtype), ([members], positions) in group_tensors([tensors], True).items():
        groups.append((device, dtype, positions, members))
    return groups


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py
ASKED_BY_SCALERS = "_step_supports_amp_scaling"
"""The attribute of an optimizer that a scaler's step reads first; torch has no public name for it."""


def wants_the_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step has an argument ``grad_scaler`` for the scaler; torch deprecates that."""
    # takes_grad_scale comes first: for an optimizer of weights.hold, it raises if low-precision parameters
    # still have gradients that the fp32 masters did not get.
    if not takes_grad_scale(optimizer) or is_torchs_own(optimizer):
        return False
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step skips and unscales by itself, by ``found_inf`` and ``grad_scale``."""
    return bool(getattr(optimizer, ASKED_BY_SCALERS, False))


def starts_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next step allocates momentum, which torch's fused SGD leaves unwritten on a skip."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py, _fused_sgd
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if optimizer.state.get(parameter, {}).get("momentum_buffer") is None:
                return True
            break  # the first parameter tells: the step allocates the buffers of a group all at once
    return False


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step needs a closure, as those of LBFGS and SAM do."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and (closure.default is inspect.Parameter.empty or steps_twice(optimizer))


def steps_twice(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step moves the weights twice, as SAM does.

    The first move uses the gradients that are there, the second those that the closure computes. So the step
    needs a closure, although the default of that argument is None.
    """
    # The usual SAM: https://github.com/davda54/sam/blob/main/sam.py
    return hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")


def copied(value: Any) -> Any:
    """Copy tensors and the containers around them; share anything else, which may not be copyable."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_pytree.py
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def is_capturing() -> bool:
    """Return whether this thread captures a CUDA graph, in which a host sync is an error."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its class is one of ``torch.optim``, whose steps work without ``grad_scale``."""
    return type(optimizer).__module__.startswith("torch.optim")


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep schedulers from warning that the optimizer has not stepped, after a skipped first step."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/lr_scheduler.py
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scheduler of torch was made for it, which wraps its ``step``."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/lr_scheduler.py
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")

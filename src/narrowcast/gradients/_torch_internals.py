"""Every name of torch without a promise of stability that this room needs, in one place."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

__all__ = ["OptState"]

NO_GRAPH_TASK = -1
ACCUMULATE_GRAD = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)

Method = TypeVar("Method", bound=Callable[..., Any])


def untraced(method: Method) -> Method:
    """Decorator: ``torch.compile`` calls the method and does not look inside.

    It loads the compiler at the first call, as torch's own optimizers do.
    """
    hidden: Method = vars(torch)["_disable_dynamo"](method)
    return hidden


def graph_task_id() -> int:
    """Number of the backward pass that this thread is working for; NO_GRAPH_TASK outside of one."""
    number: int = torch._C._current_graph_task_id()
    return number


def multiply_and_check(tensors: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply tensors of one device and dtype by ``factor`` in place; set ``found_inf`` to 1 where one of
    them held a NaN or an infinity before. What ``torch.amp.GradScaler`` unscales with.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, factor)


def move_as_torch(
    scale: torch.Tensor,
    good_steps: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """One transition of ``torch.amp.GradScaler``'s rule, in place and on the device."""
    torch._amp_update_scale_(scale, good_steps, found_inf, growth_factor, backoff_factor, growth_interval)


def norms(tensors: Sequence[torch.Tensor], order: float, *, wide: bool = False) -> list[torch.Tensor]:
    """The norm of each dense tensor, accumulated in fp32 (fp64 for fp64, or ``wide``); 0 of an empty one."""
    dtype = torch.float64 if wide or tensors[0].dtype == torch.float64 else torch.float32
    if order == math.inf and any(tensor.numel() == 0 for tensor in tensors):
        # torch knows no largest magnitude of nothing; a rank may hold an empty part of a parameter.
        zero = torch.zeros((), dtype=dtype, device=tensors[0].device)
        some = iter(norms(there, order, wide=wide) if (there := [t for t in tensors if t.numel()]) else ())
        return [next(some) if tensor.numel() else zero for tensor in tensors]
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def all_gather(gathered: torch.Tensor, row: torch.Tensor, group: Any) -> None:
    """``row`` of every rank side by side; torch 2.13 renamed the function, and warns of the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, row, group=group)


def multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device in place."""
    torch._foreach_mul_(list(tensors), factor)


def clamp(tensors: Sequence[torch.Tensor], low: float, high: float) -> None:
    """Clamp tensors of one device in place; NaN stays NaN."""
    torch._foreach_clamp_min_(list(tensors), low)
    torch._foreach_clamp_max_(list(tensors), high)


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Dense tensors of one dtype, copied side by side into one dimension."""
    flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


_DTYPE = attrgetter("dtype")


@functools.cache
def _only_a_cpu_here() -> bool:
    return not torch.accelerator.is_available()


Group = tuple[torch.device, torch.dtype, Sequence[int], list[torch.Tensor]]


def by_device_and_dtype(tensors: list[torch.Tensor]) -> list[Group]:
    """Tensors sorted by device and dtype, with the position of each."""
    if _only_a_cpu_here() and len(set(map(_DTYPE, tensors))) == 1:  # half of the time of the general way
        return [(tensors[0].device, tensors[0].dtype, range(len(tensors)), tensors)]
    group: Any = torch._C._group_tensors_by_device_and_dtype
    grouped = group([tensors], False)
    if len(grouped) > 1:
        return [(*key, positions, members) for key, ([members], positions) in group([tensors], True).items()]
    return [(*key, range(len(tensors)), members) for key, ([members], _) in grouped.items()]


_WANTS_THE_SCALER: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _takes_the_scaler(step: Any) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


ASKED_BY_SCALERS = "_step_supports_amp_scaling"
"""The attribute of an optimizer that ``torch.amp.GradScaler.step`` looks at first."""


def wants_the_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step takes the scaler itself as ``grad_scaler``, by the contract that torch deprecates."""
    if not takes_grad_scale(optimizer):
        return False
    if "step" in vars(optimizer):  # wrapped by a scheduler or another library
        return _takes_the_scaler(optimizer.step)
    kind = type(optimizer)
    if kind not in _WANTS_THE_SCALER:
        _WANTS_THE_SCALER[kind] = _takes_the_scaler(optimizer.step)
    return _WANTS_THE_SCALER[kind]


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step skips and unscales by itself, by its attributes ``found_inf`` and ``grad_scale``."""
    return bool(getattr(optimizer, ASKED_BY_SCALERS, False))


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it asks for the loss again and again, as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, in which the host must not wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class is of ``torch.optim``, whose steps do without ``grad_scale`` and ``found_inf``."""
    return type(optimizer).__module__.startswith("torch.optim")


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep schedulers from warning that no optimizer has stepped yet, when its first step was skipped."""
    with suppress(AttributeError):  # of a class with slots
        optimizer._opt_called = True  # type: ignore[attr-defined]

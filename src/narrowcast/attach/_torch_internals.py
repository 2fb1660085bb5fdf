"""Private names of torch that this package uses; ``tests/attach`` fails when one moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from narrowcast.gradients import ACCUMULATE_GRAD

NO_GRAPH_TASK = -1

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that this thread works for; NO_GRAPH_TASK outside of one.

Each pass of the autograd engine has its own number, nested ones too, in every thread that works for it.
torch offers no public name.
"""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/engine.cpp

# By ``vars``, since torch.jit does not export the name for type checkers:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/jit/_trace.py
is_jit_tracing: Callable[[], bool] = vars(torch.jit)["is_tracing"]


def leaves_and_functions(roots: Iterable[Any]) -> tuple[list[torch.Tensor], set[type]]:
    """Walk the graph that backward from nodes ``roots`` would visit: 0.15 microseconds a node.

    Returns:
        The leaves below ``roots``, which would get a gradient, and the custom ``autograd.Function`` classes
        in the graph.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_cpp_function.cpp
    # Called at each scaled backward pass. ``narrowcast.gradients.nodes_below`` and a second loop would take a
    # fifth longer.
    seen = set(roots)
    nodes = list(seen)
    leaves = []
    for node in nodes:  # the loop appends to the list
        for below, _ in node.next_functions:
            if below is None or below in seen:
                continue
            seen.add(below)
            if type(below) is ACCUMULATE_GRAD:
                leaves.append(below.variable)  # type: ignore[attr-defined]
            else:
                nodes.append(below)
    functions = set()
    for kind in set(map(type, nodes)):
        if issubclass(kind, torch.autograd.function.BackwardCFunction):
            functions.add(getattr(kind, "_forward_cls", kind))
    return leaves, functions


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether ``torch.func`` (``grad``, ``vmap``) wraps ``tensor``, whose data cannot be read."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/functorch/init.cpp
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def without_layers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside all layers of ``torch.func``; that of ``vmap`` has every row in it."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/functorch/init.cpp
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_fsdp(module: torch.nn.Module) -> bool:
    """Return whether FSDP shards ``module``: ``fully_shard``, or a wrapper of FSDP1."""
    # By name, as both are imported only where they are used.
    names = {cls.__name__ for cls in type(module).__mro__}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"})


def fsdp_param_dtype(module: Any) -> torch.dtype | None:
    """Return what the mixed precision of FSDP casts the weights of ``module`` to; None: it leaves them."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_init_utils.py
    if hasattr(module, "_get_fsdp_state"):  # of fully_shard: the user's module may have a mixed_precision too
        policy = module._get_fsdp_state()._mp_policy
    else:  # a wrapper of FSDP1
        policy = module.mixed_precision
    dtype: torch.dtype | None = policy.param_dtype
    return dtype


_register_hook: Any = torch.Tensor.register_hook  # torch's own, which an attachment replaces


def register_hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
    """Call ``tensor.register_hook`` on a leaf so that the hook runs before those that it already has.

    The engine calls a leaf's hooks in the order of ``_backward_hooks``, and ``register_hook`` cannot prepend.
    Handles of the reordered hooks keep working, since they go by key.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_hook.cpp
    handle: RemovableHandle = _register_hook(tensor, hook)
    hooks = tensor._backward_hooks
    assert hooks is not None
    for key in list(hooks):
        if key != handle.id:
            hooks[key] = hooks.pop(key)
    return handle

"""Names of torch that its documentation does not promise; ``tests/weights`` fails when one moves."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_iter

# torch has no public base class of batch and instance norms.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/batchnorm.py
NORM_BASE = torch.nn.modules.batchnorm._NormBase

# torch's wrapper around every ``step``, which calls the step hooks. It has no public name.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py
_STEP_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in few kernels, rounding to nearest where that is narrower."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/asgd.py
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def add_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Add each source to its target, in the target's dtype."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py
    if targets:
        torch._foreach_add_(list(targets), list(sources))


# A count that every in-place write increases; writes through ``.data`` do not. Read of every parameter at
# every step, so it is no Python function, which would take ten times as long.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/variable.h
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def is_held_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Return whether a tensor, a view or a graph uses this memory too, which no public name tells."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/StorageMethods.cpp
    holders: int = torch._C._storage_Use_Count(storage._cdata)
    return holders > 1


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in nested containers; torch/utils/_pytree.py."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds this rank's part of a DTensor; any other tensor is returned as it is.

    ``DTensor.to_local`` returns a view of it, which is another tensor.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/tensor/_api.py
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether it is a DTensor, without importing the class, which takes a second."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step of the optimizer's class without torch's wrapper, which calls step hooks.

    Other wrappers, inside torch's, remain.
    """
    # torch marks its wrapper as ``hooked``.
    step: Callable[..., Any] = type(optimizer).step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def is_hook_table(attribute: str) -> bool:
    """Return whether this attribute of an optimizer holds its hooks."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py
    return attribute.startswith("_optimizer_") and attribute.endswith("_hooks")


def is_outermost_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the running step was not called by another step of the same optimizer.

    To be called in a step hook: a class that calls ``super().step()`` has its hooks called twice. A counter
    would be wrong after a step that raised, so this reads the stack.
    """
    depth = 0
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _STEP_WRAPPER and frame.f_locals.get("self") is optimizer:
            depth += 1
    return depth <= 1

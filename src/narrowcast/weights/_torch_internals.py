"""Names of torch that its documentation does not promise. ``tests/weights`` fails when one of them moves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = vars(torch)["_disable_dynamo"]
"""Decorator: torch.compile calls the function and does not look inside."""

_STEP_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Each source into its target, in as few kernels as torch can, rounded to nearest even where narrower."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def add_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Each source added to its target, in the target's dtype."""
    if targets:
        torch._foreach_add_(list(targets), list(sources))


def version_of(tensor: torch.Tensor) -> int:
    """A count that every in-place write to the tensor raises; writes through ``.data`` do not."""
    return tensor._version


def is_held_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor, which a view or a graph may have, has this memory beside the object at hand."""
    holders: int = torch._C._storage_Use_Count(storage._cdata)
    return holders > 1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or the tensor that a DTensor holds on this rank: itself, where to_local() gives a view."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Asked of the tensor, since importing DTensor takes a second that most runs need not spend."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step that torch wrapped to call step hooks; everything else wrapped around it stays."""
    step: Callable[..., Any] = type(optimizer).step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def is_hook_table(attribute: str) -> bool:
    """Whether this attribute of an optimizer holds its hooks."""
    return attribute.startswith("_optimizer_") and attribute.endswith("_hooks")


def is_outermost_step(optimizer: torch.optim.Optimizer) -> bool:
    """Inside a step hook: whether no other step of the same optimizer encloses the step that called it.

    A class that calls ``super().step()`` has its hooks called twice. A counter would be wrong after a step
    that raised, so the stack itself is asked.
    """
    depth = 0
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _STEP_WRAPPER and frame.f_locals.get("self") is optimizer:
            depth += 1
    return depth <= 1

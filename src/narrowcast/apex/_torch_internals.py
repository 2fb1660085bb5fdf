"""Names of torch that its documentation does not promise. ``tests/apex`` fails when one of them moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer class's step as it was before torch wrapped it to call step hooks."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def is_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor may share memory with one that it is a part of, as gradients in DDP's buckets."""
    return tensor._is_view()


def version_of(tensor: torch.Tensor) -> int:
    """A count that every in-place write to the tensor raises; writes through ``.data`` do not."""
    return tensor._version


def add_all(targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor]) -> None:
    """Each term added to its dense target, in place."""
    if targets:
        torch._foreach_add_(list(targets), list(terms))


REPLICATE = "_replicate_for_data_parallel"
"""The method of a module that ``DataParallel`` calls for each copy on another device."""


def replica_of(module: Any) -> Any:
    """What the class of ``module`` makes for ``DataParallel``: a shallow copy."""
    return getattr(type(module), REPLICATE)(module)

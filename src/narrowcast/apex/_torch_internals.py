"""Names of torch that its documentation does not promise. ``tests/apex`` fails when one of them changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a view, as gradients in the buckets of DDP are."""
    return tensor._is_view()


def version_of(tensor: torch.Tensor) -> int:
    """Return a count that every in-place write to the tensor raises. Writes through ``.data`` do not.

    Source: ``VariableVersion`` in torch/csrc/autograd/variable.h, c10/core/TensorImpl.h.
    """
    return tensor._version


def add_all(targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor]) -> None:
    """Add each term to its dense target, in place."""
    if targets:
        torch._foreach_add_(list(targets), list(terms))

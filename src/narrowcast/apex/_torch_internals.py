"""Names of torch that its documentation does not promise. ``tests/apex`` fails when one of them changes."""

from __future__ import annotations

import torch


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a view, as gradients in the buckets of DDP are."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_variable.cpp
    return tensor._is_view()

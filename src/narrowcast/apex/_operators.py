"""Which operators of PyTorch's dispatcher the functions on apex's lists call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.policy import TABLES, overloads_of

FUNCTIONAL, TORCH, TENSOR = "torch.nn.functional", "torch", "torch.Tensor"
MODULES: dict[str, Any] = {FUNCTIONAL: torch.nn.functional, TORCH: torch, TENSOR: torch.Tensor}

# What a name calls, where it is not the operator of its own name.
_CALLED = {
    "cross_entropy": "cross_entropy_loss",
    "grid_sample": "grid_sampler",
    "interpolate": " ".join(op for op in TABLES["cuda"] if "upsample" in op),
    "nll_loss": "nll_loss nll_loss2d",
    "sub": "sub rsub",
    "truediv": "div",
}
# What Tensor.cpu moves stays in its type; that apex cast it was a fault.
_NOTHING = frozenset({"cpu"})

# Functions in Python that are to compute in float32 as a whole: their operators have uses of their own that
# are not on the lists, as the product in local_response_norm. x **= 2 makes x another tensor, as apex did.
WHOLE = frozenset({
    "__ipow__", "interpolate", "local_response_norm", "multilabel_soft_margin_loss", "norm", "normalize",
    "softmin",
})  # fmt: skip

RECURRENT = (
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
"""apex runs recurrent layers and cells in half, though they are on no list."""


@functools.cache
def operators_of(name: str) -> tuple[str, ...]:
    """The overloads that a function of this name calls, as ``"softmax.int"``; empty where there are none."""
    if name in _NOTHING or name == "__ipow__":
        return ()
    word = _word(name)
    called = _CALLED.get(word, word).split()
    return tuple(dict.fromkeys(overload for op in called for overload in overloads_of(op)))


def is_known(name: str) -> bool:
    """Whether ``operators_of`` knows all that the name stands for."""
    return name in _NOTHING or bool(operators_of(name))


def function_in_python(module: str, name: str) -> Callable[..., Any] | None:
    """The function of ``module`` where it is written in Python; None where it is not, or not there."""
    found = getattr(MODULES[module], name, None)
    return found if inspect.isfunction(found) else None


@functools.cache
def _word(name: str) -> str:
    """``"add"`` for ``"__radd__"``."""
    if not (name.startswith("__") and name.endswith("__")):
        return name
    word = name.strip("_")
    if overloads_of(word) or word in _CALLED:
        return word
    short = word[1:]
    return short if word[:1] in "ri" and (overloads_of(short) or short in _CALLED) else word


INSIDE = (
    "_safe_softmax", "chain_matmul", "corrcoef", "cov", "cumulative_trapezoid", "einsum", "ldexp",
    "linalg_matmul", "linalg_matrix_power", "linalg_multi_dot", "linalg_pinv", "matrix_exp", "matrix_power",
    "mvlgamma", "pairwise_distance", "square", "sum_to_size", "tensordot", "trapezoid", "trapz",
)  # fmt: skip
"""Operators on no list that are made of listed ones in C++, where apex cast nothing.

Found by tests/apex, where every operator that PyTorch has samples of is compared with itself without casts.
"""

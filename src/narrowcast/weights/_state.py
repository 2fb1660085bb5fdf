"""The state that an optimizer keeps for one parameter, handed to another parameter of another dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from narrowcast.weights._rounding import LOW_DTYPES

# Counts and coefficients that torch's optimizers keep as tensors: they have no parameter's dtype.
_SCALARS = {"step", "mu_product", "eta", "mu"}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, however deep in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16 and float16 as float32, exact; the tensor itself where it has another dtype."""
    return tensor.detach().to(torch.float32) if tensor.dtype in LOW_DTYPES else tensor


def widen_state(optimizer: torch.optim.Optimizer, low: torch.Tensor, working: torch.Tensor) -> None:
    """Hand the state of ``low`` to the float32 parameter ``working``."""
    if low in optimizer.state:
        optimizer.state[working] = _with_tensors(optimizer.state.pop(low), lambda _, t: widened(t))


def narrow_state(optimizer: torch.optim.Optimizer, working: torch.Tensor, low: torch.Tensor) -> None:
    """Hand the state of ``working`` back to ``low``, rounded to nearest, as torch loads a float32 state."""

    def narrowed(key: Any, tensor: torch.Tensor) -> torch.Tensor:
        counts = key in _SCALARS if low.dim() == 0 else tensor.dim() == 0
        return tensor if counts or tensor.dtype != torch.float32 else tensor.to(low.dtype)

    if working in optimizer.state:
        optimizer.state[low] = _with_tensors(optimizer.state.pop(working), narrowed)


def _with_tensors(value: Any, change: Callable[[Any, torch.Tensor], torch.Tensor], key: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        return change(key, value)
    if isinstance(value, dict):
        # Changed in place: an optimizer may hold the dict elsewhere too.
        for name, item in value.items():
            value[name] = _with_tensors(item, change, name)
        return value
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, change, key) for item in value)
    return value

"""FP32 without the rounding inside its ops: what differs from plain FP32 is rounding noise of FP32 itself.

A bias before a batch norm has a gradient of exactly zero; FP32 gives it 1e-6 or so, by how its sums round.
Weights moved in their last bit do not show that, since the order of a sum rounds the same way each time
(measured: 1 % of such a gradient changes); sums that do not round do (measured: 100 %, where 1e-5 of a
gradient that means something changes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NO_DOUBLE = ("mps", "meta")


class ExactOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it every op on fp32 tensors computes in float64 and rounds its result to fp32 once.

    Left as they are: ops that return views, write in place, draw random numbers or have no float64 kernel;
    the running statistics of a normalization are not moved. NaN, infinities and subnormals are those of
    float64, rounded. Slow: for a step, not for a training.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        _mapped([*args, *kwargs.values()], tensors.append)
        if not _can_be_exact(func, tensors) or kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        wide_args = _mapped(list(args), _widened)
        wide_kwargs = {name: _mapped(value, _widened) for name, value in kwargs.items()}
        try:
            return _mapped(func(*wide_args, **wide_kwargs), _rounded)
        except (RuntimeError, TypeError):  # no kernel for float64; torch raises NotImplementedError or these
            return func(*args, **kwargs)


def _can_be_exact(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    schema = func._schema
    aliases = any(value.alias_info is not None for value in (*schema.arguments, *schema.returns))
    if func.namespace != "aten" or aliases or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if any(t.device.type in _NO_DOUBLE or t.layout != torch.strided for t in tensors):
        return False
    floating = {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    return floating == {torch.float32}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [_mapped(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value

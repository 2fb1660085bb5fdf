"""Methods of ``torch.Tensor``: those of its own, and those that have the name of a listed torch function."""

from torch import Tensor as MODULE

from narrowcast.apex.amp.lists import torch_overrides

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

_ARITHMETIC = ("add", "div", "mul", "sub", "truediv")
_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
_CASTS = [f"__{prefix}{word}__" for prefix in ("", "i", "r") for word in _ARITHMETIC]
_CASTS += [f"__{word}__" for word in _COMPARISONS]


def _methods(*names: str) -> list[str]:
    return [name for name in names if hasattr(MODULE, name)]


FP16_FUNCS = _methods("__matmul__", *torch_overrides.FP16_FUNCS)
FP32_FUNCS = _methods("__ipow__", "__pow__", "__rpow__", "cpu", *torch_overrides.FP32_FUNCS)
CASTS = _methods(*_CASTS, *torch_overrides.CASTS)
SEQUENCE_CASTS: list[str] = []

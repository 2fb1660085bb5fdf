"""Methods of ``torch.Tensor``: its operators, and methods with the name of a listed ``torch`` function."""

from torch import Tensor as MODULE

from narrowcast.apex.amp.lists import torch_overrides

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

_OPERATORS = [
    "__add__", "__div__", "__mul__", "__sub__", "__truediv__",
    "__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__",
    "__radd__", "__rdiv__", "__rmul__", "__rsub__", "__rtruediv__",
    "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__",
]  # fmt: skip


# Not every listed function of torch is a method of tensors too.
def _existing(*names: str) -> list[str]:
    return [name for name in names if hasattr(MODULE, name)]


FP16_FUNCS = _existing("__matmul__", *torch_overrides.FP16_FUNCS)
FP32_FUNCS = _existing("__ipow__", "__pow__", "__rpow__", "cpu", *torch_overrides.FP32_FUNCS)
CASTS = _existing(*_OPERATORS, *torch_overrides.CASTS)
SEQUENCE_CASTS: list[str] = []

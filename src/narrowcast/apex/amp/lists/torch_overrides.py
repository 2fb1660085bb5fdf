"""Functions of ``torch``. ``bmm``, ``baddbmm`` and ``addbmm`` run in half, as in apex on CUDA since 9.1."""

import torch as MODULE

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

FP16_FUNCS = [
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
    "prelu", "addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm",
]  # fmt: skip
FP32_FUNCS = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm",
]  # fmt: skip
CASTS = [
    "addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul", "eq", "equal", "ge", "gt",
    "le", "lt", "ne",
]  # fmt: skip
SEQUENCE_CASTS = ["cat", "stack"]

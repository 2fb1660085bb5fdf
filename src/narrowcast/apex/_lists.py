"""apex's lists of functions: what runs in half, in float32, in the widest type among its inputs, or never.

They are lists that a person edits before ``amp.initialize``. A name is that of a function of the module.
``bmm``, ``baddbmm`` and ``addbmm`` are in half on every machine, as apex had them on CUDA 9.1 and later.
"""

from __future__ import annotations

from typing import Any

import torch

_BINARY_CROSS_ENTROPY = (
    "binary_cross_entropy computes log(x) of numbers that half rounds to 0 or 1, so that the loss would be "
    "infinite. Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) in place of a sigmoid before it, "
    "which is safe in any format; or call it in float32: register it with amp.register_float_function("
    "torch.nn.functional, 'binary_cross_entropy') before amp.initialize, or cast its inputs"
)
_CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
)  # fmt: skip

FUNCTIONAL_FP16 = [*_CONVOLUTIONS, "linear"]
FUNCTIONAL_FP32 = [
    "interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax", "gelu", "layer_norm",
    "group_norm", "local_response_norm", "normalize", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss",
    "nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss",
    "triplet_margin_loss", "ctc_loss",
]  # fmt: skip
FUNCTIONAL_BANNED = [("binary_cross_entropy", _BINARY_CROSS_ENTROPY)]

TORCH_FP16 = [
    *_CONVOLUTIONS, "prelu", "addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm",
]  # fmt: skip
TORCH_FP32 = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm",
]  # fmt: skip
TORCH_CASTS = [
    "addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul", "eq", "equal", "ge", "gt",
    "le", "lt", "ne",
]  # fmt: skip
TORCH_SEQUENCE_CASTS = ["cat", "stack"]

_ARITHMETIC = ("add", "div", "mul", "sub", "truediv")


def _of_tensor(*names: str) -> list[str]:
    return [name for name in names if hasattr(torch.Tensor, name)]


TENSOR_FP16 = _of_tensor("__matmul__", *TORCH_FP16)
TENSOR_FP32 = _of_tensor("__ipow__", "__pow__", "__rpow__", "cpu", *TORCH_FP32)
TENSOR_CASTS = _of_tensor(
    *(f"__{prefix}{word}__" for prefix in ("", "i", "r") for word in _ARITHMETIC),
    *(f"__{word}__" for word in ("eq", "ge", "gt", "le", "lt", "ne")),
    *TORCH_CASTS,
)
TENSOR_SEQUENCE_CASTS: list[str] = []

ORIGINAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "functional_overrides": {
        "FP16_FUNCS": (*FUNCTIONAL_FP16,),
        "FP32_FUNCS": (*FUNCTIONAL_FP32,),
        "BANNED_FUNCS": (*FUNCTIONAL_BANNED,),
    },
    "torch_overrides": {
        "FP16_FUNCS": (*TORCH_FP16,),
        "FP32_FUNCS": (*TORCH_FP32,),
        "CASTS": (*TORCH_CASTS,),
        "SEQUENCE_CASTS": (*TORCH_SEQUENCE_CASTS,),
    },
    "tensor_overrides": {
        "FP16_FUNCS": (*TENSOR_FP16,),
        "FP32_FUNCS": (*TENSOR_FP32,),
        "CASTS": (*TENSOR_CASTS,),
        "SEQUENCE_CASTS": (*TENSOR_SEQUENCE_CASTS,),
    },
}
"""The lists before anybody edited them."""

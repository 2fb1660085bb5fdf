"""Which operators multiply (matmuls, convolutions, attention, recurrent layers), and how large they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = tuple[int, ...]

# Position of the first of the two matrices among the arguments.
_MATRICES = {"mm": 0, "matmul": 0, "bmm": 0, "mv": 0, "addmm": 1, "_addmm_activation": 1, "baddbmm": 1}
_CONVOLUTIONS = (
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "_convolution",
    "convolution_overrideable",
    "convolution_backward",
    "mkldnn_convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "miopen_convolution",
    "thnn_conv2d",
    "_slow_conv2d_forward",
    "_convolution_pointwise",
)
_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward")
_ATTENTION = ("scaled_dot_product_", "_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")
_LINEAR = ("linear", "mkldnn_linear", "_linear_pointwise")
_SCALED = ("_scaled_mm", "_scaled_grouped_mm")  # fp8
_NAMES = frozenset((*_MATRICES, *_CONVOLUTIONS, *_RECURRENT, *_LINEAR, *_SCALED, "einsum", "addbmm", "addmv"))


def is_product(name: str) -> bool:
    """Return whether the operator ``name``, such as ``"aten::mm"``, multiplies, in forward or backward."""
    space, _, op = name.partition("::")
    return space in ("aten", "mkldnn") and (op in _NAMES or op.startswith(_ATTENTION))


def product_size(name: str, shapes: Sequence[Shape | None]) -> tuple[str, Shape]:
    """Return kind and size of a product.

    Args:
        name: of the operator.
        shapes: of its arguments by position; None for what is not a tensor.

    Returns:
        ``("matmul", (M, N, K))`` for an M x K matrix times a K x N one, ``("batched matmul", (B, M, N, K))``,
        ``("convolution", input + weight)``, ``("attention", query + key)`` or ``("recurrent layer", input)``.
    """
    op = name.partition("::")[2]
    # Backward of these gets the gradient of the output first.
    first = "backward" in op and (op.startswith(_ATTENTION) or op in _CONVOLUTIONS)
    given = [shape or () for shape in shapes[int(first) :]]
    one, two = [*given[_MATRICES.get(op, 0) :], (), ()][:2]
    if op.startswith(_ATTENTION):
        return "attention", one + two
    if op in _RECURRENT:
        return "recurrent layer", one
    if op in _CONVOLUTIONS:
        return "convolution", one + two
    if op in _LINEAR:
        two = two[::-1]  # the weight is stored N x K
    if len(one) == 3 and len(two) == 3:
        return "batched matmul", (one[0], one[1], two[2], one[2])
    return "matmul", (math.prod(one[:-1]), two[-1] if len(two) > 1 else 1, one[-1] if one else 1)


def same_size(kind: str, shape: Sequence[int]) -> tuple[str, Shape]:
    """Return what products of one size share: the three matmuls of a linear layer permute its sizes."""
    if kind == "matmul":
        return kind, tuple(sorted(shape))
    if kind == "batched matmul":
        return kind, (shape[0], *sorted(shape[1:]))
    return kind, tuple(shape)

"""Arithmetic on what a profiler recorded: which part of a step an op belongs to, products by size, casts.

Nothing here runs a profiler, so that each rule can be tested with ops made by hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

PRODUCTS, CASTS, OTHER, OPTIMIZER, LOADING, PYTHON = (
    "products",
    "casts",
    "other_ops",
    "optimizer",
    "loading",
    "python",
)
PARTS = (PRODUCTS, CASTS, OTHER, OPTIMIZER, LOADING, PYTHON)
# Records that torch's optimizers and DataLoader put around what they do.
_STEP, _LOADER = "Optimizer.step#", "enumerate(DataLoader)#"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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
_OTHERS = ("einsum", "addbmm", "addmv", "convolution_backward")
_PRODUCT_NAMES = frozenset((*_MATRICES, *_CONVOLUTIONS, *_RECURRENT, *_LINEAR, *_OTHERS))
# A cast is a copy, made by these, or again by autograd where the gradient goes the other way.
_CASTING = ("to", "_to_copy", "copy_")
_CAST_BACKWARD = ("ToCopyBackward0", "autograd::engine::evaluate_function: ToCopyBackward0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that an op was given: its shape, its dtype without ``torch.``, and where its storage is."""

    shape: tuple[int, ...]
    dtype: str
    storage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An op as it was recorded, with those that it called.

    Attributes:
        name: as the profiler has it, such as ``"aten::mm"``.
        start_ns: of the profiler's clock.
        duration_ns: on the host, children included.
        device_ns: of the kernels on a device that it launched itself, its children's left out.
        thread: in which it ran.
        operands: its tensors by position; None for what is no tensor.
        children: in the order of their start.
    """

    name: str
    start_ns: int = 0
    duration_ns: int = 0
    device_ns: int = 0
    thread: int = 1
    operands: tuple[Operand | None, ...] = ()
    children: tuple[Op, ...] = ()


def cast_of(op: Op) -> tuple[Operand, Operand] | None:
    """Destination and source of a copy from one of fp32, bf16 and fp16 to another; else None."""
    if op.name != "aten::copy_" or len(op.operands) < 2:
        return None
    into, source = op.operands[:2]
    if into is None or source is None or into.dtype == source.dtype:
        return None
    return (into, source) if {into.dtype, source.dtype} <= _ITEM_BYTES.keys() else None


def casts_in(op: Op) -> Iterator[tuple[Operand, Operand]]:
    """Every cast in ``op``, itself included; what a DataLoader does is none of the region's."""
    if op.name.startswith(_LOADER):
        return
    cast = cast_of(op)
    if cast is not None:
        yield cast
    for child in op.children:
        yield from casts_in(child)


def parts_ns(ops: Iterable[Op], *, device: bool) -> dict[str, int]:
    """Nanoseconds of each part but ``PYTHON``, which is what the ops leave of a step.

    An op belongs to the part that its own name says, else to that of the op which called it: the softmax
    inside an attention is the attention's, a copy between formats inside a linear layer is a cast, and a
    product is a product inside an optimizer too.

    Args:
        ops: the outermost ones.
        device: whether time is that of kernels on the device, or that of ops on the host.
    """
    sums = dict.fromkeys(PARTS, 0)
    for op in ops:
        _add_parts(op, PYTHON, sums, device=device)
    sums.pop(PYTHON)
    return sums


def _add_parts(op: Op, inherited: str, sums: dict[str, int], *, device: bool) -> None:
    part = _part_of(op, inherited)
    own = op.device_ns if device else max(0, op.duration_ns - sum(c.duration_ns for c in op.children))
    sums[OTHER if device and part == PYTHON else part] += own
    for child in op.children:
        _add_parts(child, part, sums, device=device)


def _part_of(op: Op, inherited: str) -> str:
    name, part = op.name, inherited
    if inherited in (LOADING, CASTS):
        return inherited
    if name.startswith(_LOADER):
        part = LOADING
    elif _is_cast(op):
        part = CASTS
    elif is_product(op):
        part = PRODUCTS
    elif name.startswith(_STEP):
        part = OPTIMIZER
    if part != PYTHON:
        return part
    is_op = "::" in name and not name.startswith(("autograd::", "torch::autograd::"))
    return OTHER if is_op or name.startswith("## Call CompiledFxGraph") else PYTHON


def _is_cast(op: Op) -> bool:
    casting = op.name.startswith("aten::") and op.name[6:] in _CASTING
    return (casting or op.name in _CAST_BACKWARD) and next(casts_in(op), None) is not None


def is_product(op: Op) -> bool:
    """Whether ``op`` is a matrix product, a convolution, an attention, or the backward of one."""
    space, _, name = op.name.partition("::")
    return space in ("aten", "mkldnn") and (name in _PRODUCT_NAMES or name.startswith(_ATTENTION))


def innermost_products(op: Op) -> Iterator[Op]:
    """The products in ``op`` that call no other product."""
    found = False
    for child in op.children:
        for product in innermost_products(child):
            found = True
            yield product
    if not found and is_product(op):
        yield op


def product_size(op: Op) -> tuple[str, tuple[int, ...]]:
    """Kind and size of a product.

    Returns:
        ``("matmul", (M, N, K))`` for an M x K matrix times a K x N one, ``("batched matmul", (B, M, N, K))``,
        ``("convolution", input shape + weight shape)``, ``("attention", query shape + key shape)`` or
        ``("recurrent layer", input shape)``.
    """
    name = op.name.partition("::")[2]
    given = list(op.operands)
    if name == "convolution_backward":
        given = given[1:]
    if name.startswith(_ATTENTION):
        given = given[1:] if "backward" in name else given
        return "attention", _shape(given, 0) + _shape(given, 1)
    if name in _RECURRENT:
        return "recurrent layer", _shape(given, 0)
    if name in _CONVOLUTIONS or name == "convolution_backward":
        return "convolution", _shape(given, 0) + _shape(given, 1)
    at = _MATRICES.get(name, 0)
    first, second = _shape(given, at), _shape(given, at + 1)
    if name in _LINEAR:
        second = second[::-1]  # its weight is stored N x K
    if len(first) == 3 and len(second) == 3:
        return "batched matmul", (first[0], first[1], second[2], first[2])
    rows = 1
    for size in first[:-1]:
        rows *= size
    return "matmul", (rows, second[-1] if len(second) > 1 else 1, first[-1] if first else 1)


def _shape(operands: list[Operand | None], position: int) -> tuple[int, ...]:
    operand = operands[position] if position < len(operands) else None
    return () if operand is None else operand.shape


def products_by_size(ops: Iterable[Op], *, device: bool) -> list[dict[str, Any]]:
    """Time and number of products of each size, the one that takes the most time first.

    A linear layer's three products, its forward and its two backward ones, have the same three numbers in
    another order; they are of one size, named in the order of the first.

    Returns:
        ``kind``, ``shape``, ``count`` and ``each_ns`` of each size: the median, since a machine that does
        something else for a moment makes one product out of hundreds last ten times as long.
    """
    found: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], list[int]]] = {}
    for op in ops:
        for product in innermost_products(op):
            kind, shape = product_size(product)
            same = shape
            if kind == "matmul":
                same = tuple(sorted(shape))
            elif kind == "batched matmul":
                same = (shape[0], *sorted(shape[1:]))
            _, times = found.setdefault((kind, same), (shape, []))
            times.append(_device_ns(product) if device else product.duration_ns)
    rows = [
        {"kind": kind, "shape": shape, "count": len(times), "each_ns": statistics.median(times)}
        for (kind, _), (shape, times) in found.items()
    ]
    return sorted(rows, key=lambda row: -row["count"] * row["each_ns"])


def _device_ns(op: Op) -> int:
    return op.device_ns + sum(_device_ns(child) for child in op.children)


def sum_of_casts(ops: Iterable[Op], weights: frozenset[int]) -> dict[str, int]:
    """Casts counted, with what they read and write in bytes.

    Args:
        ops: the outermost ones.
        weights: storages of the parameters.

    Returns:
        ``count`` and ``bytes``, of all; ``weight_count`` and ``weight_bytes``, of parameters.
    """
    sums = {"count": 0, "bytes": 0, "weight_count": 0, "weight_bytes": 0}
    for op in ops:
        for into, source in casts_in(op):
            moved = _bytes(into) + _bytes(source)
            sums["count"] += 1
            sums["bytes"] += moved
            if source.storage in weights:
                sums["weight_count"] += 1
                sums["weight_bytes"] += moved
    return sums


def _bytes(operand: Operand) -> int:
    size = _ITEM_BYTES[operand.dtype]
    for length in operand.shape:
        size *= length
    return size


def outermost_ops(ops: Iterable[Op]) -> Iterator[Op]:
    """Ops that Python or autograd called, without those that ops called."""
    for op in ops:
        around = op.name.startswith((_STEP, _LOADER)) or op.name in _CAST_BACKWARD
        if around or _part_of(op, PYTHON) == PYTHON:
            yield from outermost_ops(op.children)
        else:
            yield op


def union_ns(intervals: Iterable[tuple[int, int]], start: int, end: int) -> int:
    """How much of the time from ``start`` to ``end`` is covered by any of ``intervals``."""
    covered, reached = 0, start
    for begins, ends in sorted(intervals):
        fresh = min(ends, end) - max(begins, reached)
        if fresh > 0:
            covered += fresh
            reached = min(ends, end)
    return covered

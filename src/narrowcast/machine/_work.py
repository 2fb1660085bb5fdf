"""What is measured: matmuls and convolutions, forward and backward, and additions, in several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CAST_MATMUL = "matmul_with_casts"
# The forward pass is one product. The backward pass is two of the same size: one for each operand's gradient.
_PRODUCTS_PER_CALL = 3
# The major part of the first compute capability that has TF32.
_TF32_CAPABILITY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One size of a kind of work.

    Attributes:
        numbers: n of an n x n matmul; batch, channels and side of a convolution; elements of an addition.
        size: ``"small"``, ``"medium"`` or ``"large"``; None for a step on the way, which is never shown.
    """

    numbers: tuple[int, ...]
    size: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A kind of work, its shapes from the smallest on, and the formats in which it is measured.

    ``matmul`` and ``convolution`` (3x3, padded, as many channels out as in) have their operands in the format
    already; ``matmul_with_casts`` has them in fp32 and casts both at each call, as autocast does with tensors
    that it has not cast before; the backward pass casts their gradients back. A call is what training does:
    the forward pass, and the backward pass for both operands. ``add`` adds two tensors into a third, and
    stands for all elementwise work that waits for memory. It is forward alone, as its backward pass computes
    nothing.
    """

    kind: str
    formats: tuple[str, ...]
    shapes: tuple[Shape, ...]

    def amount(self, shape: Shape) -> int:
        """Return the operations of one call, a multiply-add as two; of an addition the elements."""
        if self.kind == "add":
            return shape.numbers[0]
        if self.kind == "convolution":
            batch, channels, side = shape.numbers
            forward = 2 * batch * channels * channels * 9 * side * side
        else:
            forward = 2 * shape.numbers[0] ** 3
        return _PRODUCTS_PER_CALL * forward

    def tensor_shape(self, shape: Shape) -> list[int]:
        """Return the shape of the first operand."""
        if self.kind == "add":
            return list(shape.numbers)
        if self.kind == "convolution":
            batch, channels, side = shape.numbers
            return [batch, channels, side, side]
        return [shape.numbers[0]] * 2

    def prepare(self, shape: Shape, format_name: str, device: str) -> Callable[[], object]:
        """Make the operands and return a call that does the work once, as ``Work`` describes it."""
        dtype = DTYPES[format_name]
        operand_dtype = torch.float32 if self.kind == _CAST_MATMUL else dtype
        random = torch.Generator(device=device).manual_seed(0)

        def operand(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=random, device=device).to(operand_dtype)

        first_shape = self.tensor_shape(shape)
        first = operand(*first_shape)
        if self.kind == "add":
            second = operand(*first_shape)
            result = torch.empty_like(first)
            return lambda: torch.add(first, second, out=result)

        if self.kind == "convolution":
            channels = shape.numbers[1]
            second = operand(channels, channels, 3, 3)
        else:
            second = operand(*first_shape)
        operands = (first.requires_grad_(), second.requires_grad_())
        # The result has the shape of the first operand and the dtype of the format, and so has its gradient.
        gradient = operand(*first_shape).to(dtype)

        def forward_and_backward() -> torch.Tensor:
            if self.kind == "convolution":
                result = F.conv2d(first, second, padding=1)
            elif self.kind == _CAST_MATMUL:
                result = first.to(dtype) @ second.to(dtype)
            else:
                result = first @ second
            torch.autograd.grad(result, operands, gradient)
            return result

        return forward_and_backward


def _shapes(*numbers: tuple[int, ...], named: tuple[int, int, int]) -> tuple[Shape, ...]:
    """Return a shape for each of ``numbers``; those at the three indices ``named`` have a size."""
    size_at = dict(zip(named, ("small", "medium", "large"), strict=True))
    return tuple(Shape(numbers=each, size=size_at.get(index)) for index, each in enumerate(numbers))


# The shapes of matmuls, then of convolutions, then of additions. Some lie between the named sizes, so that
# the time of a call can be predicted from that of the shape before it.
_CPU_SHAPES = (
    # The smallest shapes are for CPUs on which a low format takes hundreds of times as long as fp32.
    _shapes((32,), (64,), (128,), (256,), (512,), (1024,), named=(1, 4, 5)),
    _shapes((1, 8, 8), (1, 16, 16), (1, 32, 32), (4, 64, 32), (4, 256, 28), named=(1, 3, 4)),
    _shapes((2**12,), (2**18,), (2**22,), named=(0, 1, 2)),
)
_GPU_SHAPES = (
    _shapes((256,), (512,), (1024,), (2048,), (4096,), (8192,), named=(0, 3, 5)),
    _shapes((1, 64, 28), (4, 64, 56), (32, 128, 28), (64, 256, 56), named=(0, 2, 3)),
    _shapes((2**16,), (2**22,), (2**26,), named=(0, 1, 2)),
)


def work_for(device_type: str, *, has_tf32: bool = False) -> tuple[Work, ...]:
    """Return every kind of work in sizes for a CPU or a GPU."""
    matmuls, convolutions, additions = _CPU_SHAPES if device_type == "cpu" else _GPU_SHAPES
    formats = ("fp32", "bf16", "fp16")
    with_tf32 = ("fp32", "tf32", "bf16", "fp16") if has_tf32 else formats
    return (
        Work(kind="matmul", formats=with_tf32, shapes=matmuls),
        Work(kind=_CAST_MATMUL, formats=formats, shapes=matmuls),
        Work(kind="convolution", formats=with_tf32, shapes=convolutions),
        Work(kind="add", formats=formats, shapes=additions),
    )


def work_for_auto(device_type: str, candidate: str) -> tuple[Work, ...]:
    """Return the few kinds of work that decide ``auto``: matmuls and a convolution of medium size.

    The smaller shapes come first, so that the measurement can end at one of them if calls take long, as in
    emulated bf16. They have no size, as they are only steps on the way.
    """
    works = []
    for work in work_for(device_type):
        if work.kind == "add":
            continue
        shapes = []
        for shape in work.shapes:
            if shape.size == "medium":
                shapes.append(shape)
                break
            shapes.append(Shape(numbers=shape.numbers))
        works.append(Work(kind=work.kind, formats=("fp32", candidate), shapes=tuple(shapes)))
    return tuple(works)


def has_tf32(gpu: dict[str, Any]) -> bool:
    """Return whether a device multiplies in TF32, as GPUs of NVIDIA do from compute capability 8.0 on.

    Args:
        gpu: the device as ``gather_facts`` describes it. Only GPUs of NVIDIA have a ``capability``.
    """
    major = (gpu.get("capability") or "0").split(".")[0]
    return int(major) >= _TF32_CAPABILITY


@contextmanager
def float32_as(precision: str) -> Iterator[None]:
    """Compute fp32 matmuls and convolutions exactly (``"ieee"``) or in TF32 (``"tf32"``) within the block."""
    backends = torch.backends
    places = (
        backends.cuda.matmul,
        backends.cudnn.conv,  # type: ignore[attr-defined]  # set by name in torch.backends.cudnn
        backends.mkldnn.matmul,  # type: ignore[attr-defined]
        backends.mkldnn.conv,  # type: ignore[attr-defined]
    )
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = precision
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.fp32_precision = was

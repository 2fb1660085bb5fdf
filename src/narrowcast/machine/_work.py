"""The work whose rate is measured: matmuls, a convolution and an addition, each at three sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CAST_MATMUL = "matmul_with_casts"
_TF32_CAPABILITY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One size of a kind of work.

    Attributes:
        numbers: n of an n x n product; batch, channels and side of a convolution; elements of an addition.
        size: ``"small"``, ``"medium"`` or ``"large"``; None for a step on the way, which is never shown.
    """

    numbers: tuple[int, ...]
    size: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A kind of work, its shapes from the smallest on, and the formats in which it is measured.

    ``matmul`` and ``convolution`` (3x3, padded, as many channels out as in) have their operands in the format
    already; ``matmul_with_casts`` has them in fp32 and casts both at each call, as autocast does with what it
    sees for the first time; ``add`` adds two tensors into a third, and stands for all elementwise work that
    waits for memory. Each is a forward call.
    """

    kind: str
    formats: tuple[str, ...]
    shapes: tuple[Shape, ...]

    def flop_count(self, shape: Shape) -> int | None:
        """Return the floating-point operations of one call; a multiply-add counts as two."""
        if self.kind == "add":
            return None
        if self.kind == "convolution":
            batch, channels, side = shape.numbers
            return 2 * batch * channels * channels * 9 * side * side
        return 2 * shape.numbers[0] ** 3

    def element_count(self, shape: Shape) -> int | None:
        """Return the elements of the result of an addition; None for other work."""
        return shape.numbers[0] if self.kind == "add" else None

    def amount(self, shape: Shape) -> int:
        """Return what the time of one call grows with."""
        return self.flop_count(shape) or self.element_count(shape) or 1

    def tensor_shape(self, shape: Shape) -> list[int]:
        """Return the shape of the first operand."""
        if self.kind == "add":
            return list(shape.numbers)
        if self.kind == "convolution":
            batch, channels, side = shape.numbers
            return [batch, channels, side, side]
        return [shape.numbers[0]] * 2

    def prepare(self, shape: Shape, format_name: str, device: str) -> Callable[[], object]:
        """Make the operands and return a call that does the work once."""
        dtype, random = DTYPES[format_name], torch.Generator(device=device).manual_seed(0)

        def operand(*sizes: int) -> torch.Tensor:
            made = torch.randn(*sizes, generator=random, device=device)
            return made if self.kind == _CAST_MATMUL else made.to(dtype)

        first = operand(*self.tensor_shape(shape))
        if self.kind == "convolution":
            channels = shape.numbers[1]
            weight = operand(channels, channels, 3, 3)
            return lambda: F.conv2d(first, weight, padding=1)
        second = operand(*self.tensor_shape(shape))
        if self.kind == "matmul":
            return lambda: first @ second
        if self.kind == "add":
            result = torch.empty_like(first)
            return lambda: torch.add(first, second, out=result)
        return lambda: first.to(dtype) @ second.to(dtype)


def work_for(device_type: str, *, has_tf32: bool = False) -> tuple[Work, ...]:
    """Return every kind of work in sizes for a CPU or a GPU, with steps between them."""
    product, convolution, elements = _CPU_SHAPES if device_type == "cpu" else _GPU_SHAPES
    exact = ("fp32", "tf32", "bf16", "fp16") if has_tf32 else ("fp32", "bf16", "fp16")
    without = ("fp32", "bf16", "fp16")
    return (
        Work(kind="matmul", formats=exact, shapes=product),
        Work(kind=_CAST_MATMUL, formats=without, shapes=product),
        Work(kind="convolution", formats=exact, shapes=convolution),
        Work(kind="add", formats=without, shapes=elements),
    )


def has_tf32(gpu: dict[str, Any]) -> bool:
    """Return whether a GPU of ``gather_facts`` multiplies in TF32: NVIDIA's from capability 8.0 on."""
    return gpu["capability"] is not None and int(gpu["capability"].split(".")[0]) >= _TF32_CAPABILITY


@contextmanager
def float32_as(precision: str) -> Iterator[None]:
    """Make fp32 products exact (``"ieee"``) or TF32 (``"tf32"``) on every backend, and put it back."""
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


def _shapes(*numbers: tuple[int, ...], named: tuple[int, int, int]) -> tuple[Shape, ...]:
    sizes = dict(zip(named, ("small", "medium", "large"), strict=True))
    return tuple(Shape(numbers=one, size=sizes.get(at)) for at, one in enumerate(numbers))


_CPU_SHAPES = (
    _shapes((64,), (128,), (256,), (512,), (1024,), (2048,), named=(0, 3, 5)),
    _shapes((1, 16, 16), (1, 32, 32), (4, 64, 32), (4, 256, 28), named=(0, 2, 3)),
    _shapes((2**12,), (2**18,), (2**22,), named=(0, 1, 2)),
)
_GPU_SHAPES = (
    _shapes((256,), (512,), (1024,), (2048,), (4096,), (8192,), named=(0, 3, 5)),
    _shapes((1, 64, 28), (4, 64, 56), (32, 128, 28), (64, 256, 56), named=(0, 2, 3)),
    _shapes((2**16,), (2**22,), (2**26,), named=(0, 1, 2)),
)

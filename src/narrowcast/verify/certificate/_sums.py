"""Two gradients of one parameter compared in float64, and norms over several parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_CHUNK = 1 << 22
# Used if no rounding was measured: FP32 sums in another order differ by 1e-7 to 1e-6 of the whole.
_SAME = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over the elements of two gradients: of the squares of each, products, and squared differences.

    Attributes:
        missing: ``"first"``, ``"second"`` or ``"both"``: which gradient was None; it counts as zeros.
    """

    first: float
    second: float
    product: float
    difference: float
    missing: str | None = None


def compared(first: torch.Tensor | None, second: torch.Tensor | None, *, scale: float = 1.0) -> Sums:
    """Compare two gradients of one parameter.

    Args:
        first: floating or complex, dense or sparse, any shape and device; None counts as zeros.
        second: like ``first``; divided by ``scale``, in float64, first.

    Needs 64 MiB more, and dense copies of sparse ones. A sum is NaN or infinite if an element is.
    """
    if first is None or second is None:
        square, other = _square(first), _square(second) / (scale * scale)
        missing = "both" if first is second else "first" if first is None else "second"
        return Sums(first=square, second=other, product=0.0, difference=square + other, missing=missing)
    a, b = _values(first), _values(second)
    square, other, product, difference = _sums(a, b.to(a.device), scale)
    return Sums(first=square, second=other, product=product, difference=difference)


def _square(gradient: torch.Tensor | None) -> float:
    if gradient is None:
        return 0.0
    values = _values(gradient)
    return _sums(values, values)[0]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.detach()
    if values.layout != torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.device.type == "mps":  # has no float64
        values = values.cpu()
    return values.reshape(-1)


def _sums(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> list[float]:
    totals = torch.zeros(4, dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), _CHUNK):
        x, y = a[start : start + _CHUNK].double(), b[start : start + _CHUNK].double()
        if scale != 1.0:
            y = y / scale
        difference = y - x
        totals += torch.stack([x.dot(x), y.dot(y), x.dot(y), difference.dot(difference)])
    found: list[float] = totals.tolist()
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """A parameter, and its FP32 gradient ``compared`` with others.

    Attributes:
        error: with the mixed gradient of the same batch.
        noise: with the FP32 gradient of another batch; None: there was none, so that only the relative error
            counts.
        rounding: with an FP32 gradient that rounds differently; None: not measured.
    """

    name: str
    shape: tuple[int, ...]
    error: Sums
    noise: Sums | None
    rounding: Sums | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Norms over several parameters, and their ratios."""

    gradient: float
    mixed: float
    product: float
    error: float
    noise: float
    rounding: float

    @classmethod
    def of(cls, measured: Sequence[Measured]) -> Totals:
        errors = [one.error for one in measured]
        return cls(
            gradient=math.sqrt(math.fsum(error.first for error in errors)),
            mixed=_root(error.second for error in errors),
            product=math.fsum(_or_inf(error.product) for error in errors),
            error=_root(error.difference for error in errors),
            noise=_root(one.noise.difference for one in measured if one.noise),
            rounding=_root(one.rounding.difference for one in measured if one.rounding),
        )

    @property
    def error_over_noise(self) -> float | None:
        return None if self.no_noise else self.error / self.noise

    @property
    def relative_error(self) -> float | None:
        return self.error / self.gradient if self.gradient > 0 else None

    @property
    def cosine(self) -> float | None:
        if not (self.gradient > 0 and 0 < self.mixed < math.inf):
            return None
        return max(-1.0, min(1.0, self.product / self.gradient / self.mixed))

    @property
    def no_noise(self) -> bool:
        """Whether the batches differ by no more than FP32's rounding, as a shuffled full batch does."""
        return not self.noise > max(2 * self.rounding, _SAME * self.gradient) or math.isinf(self.noise)


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _root(squares: Iterable[float]) -> float:
    return math.sqrt(math.fsum(map(_or_inf, squares)))

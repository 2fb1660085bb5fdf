"""Two gradients of one parameter compared in float64, and norms over several parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch

_CHUNK = 1 << 22
# Sums of errors that are kept apart, of every eighth batch each, so that memory does not grow with batches.
_GROUPS = 8
FEWEST_BATCHES = 4
"""From so many on, bias and variance are told apart."""
# Spread between batches of log(error over noise), as if seen in so many batches more: four alone know it
# badly. Measured in an MLP and in CNNs with and without batch norm on scikit-learn's digits, it grows with
# the share of bias in the error. With these, intervals from four batches held the value of 256 in at least
# 95 % of 40 draws or more for each model and k = 1, 32, 256; 0.35 alone held it in 72 % where bias decides.
_USUAL_SPREAD, _SPREAD_OF_BIAS = 0.35, 0.45
_USUAL_BATCHES = 8
# Student's t for 97.5 %, by degrees of freedom: those of the usual spread, and 3 to 7 of the groups.
_T = {11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131}
# Used if no rounding was measured: FP32 sums in another order differ by 1e-7 to 1e-6 of the whole.
_SAME = 1e-5


class Sums(NamedTuple):
    """Sums over the elements of two gradients: of the squares of each, products, and squared differences.

    Attributes:
        missing: ``"first"``, ``"second"`` or ``"both"``: which gradient was None; it counts as zeros.
    """

    first: float
    second: float
    product: float
    difference: float
    missing: str | None = None

    @classmethod
    def mean(cls, sums: Sequence[Self]) -> Self:
        """Average the sums of several batches; ``missing`` is what all of them miss."""
        *numbers, missing = zip(*sums, strict=True)
        means = (sum(column) / len(sums) for column in numbers)
        return cls(*means)._replace(missing=missing[0] if len(set(missing)) == 1 else None)


def compared(first: torch.Tensor | None, second: torch.Tensor | None, *, scale: float = 1.0) -> Sums:
    """Compare two gradients of one parameter.

    Args:
        first: floating or complex, dense or sparse, any shape and device; None counts as zeros.
        second: like ``first``; divided by ``scale``, in float64, first.

    Needs 64 MiB more, and dense copies of sparse ones. A sum is NaN or infinite if an element is.
    """
    given = [None if gradient is None else _values(gradient) for gradient in (first, second)]
    like = next((values for values in given if values is not None), torch.zeros(0))
    a, b = (torch.zeros_like(like) if values is None else values for values in given)
    b, totals = b.to(a.device), torch.zeros(4, dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), _CHUNK):
        x, y = a[start : start + _CHUNK].double(), b[start : start + _CHUNK].double() / scale
        difference = y - x
        totals += torch.stack([x.dot(x), y.dot(y), x.dot(y), difference.dot(difference)])
    absent = [name for name, values in zip(("first", "second"), given, strict=True) if values is None]
    return Sums(*totals.tolist())._replace(missing="both" if len(absent) == 2 else "".join(absent) or None)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.detach()
    if values.layout != torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.device.type == "mps":  # has no float64
        values = values.cpu()
    return values.reshape(-1)


@dataclass(frozen=True, slots=True)
class Measured:
    """A parameter, and its FP32 gradient ``compared`` with others.

    Attributes:
        error: with the mixed gradient of the same batch.
        noise: with the FP32 gradient of another batch; None: there was none, so that only the relative error
            counts.
        rounding: with an FP32 gradient that rounds differently; None: not measured.
        moments: from ``FEWEST_BATCHES`` batches on; else None.
    """

    name: str
    shape: tuple[int, ...]
    error: Sums
    noise: Sums | None
    rounding: Sums | None
    moments: Moments | None = None


class Estimate(NamedTuple):
    """A number with the ends of its 95 % interval; NaN: not known."""

    value: float
    low: float = math.nan
    high: float = math.nan


class Squares(NamedTuple):
    """Squared norms: of the bias (without clipping, so it may be negative), the error, and the noise."""

    bias: float
    error: float
    noise: float

    def over_noise(self, k: float) -> float:
        return (self.error + (k - 1) * self.bias) / self.noise


@dataclass(frozen=True, slots=True)
class Moments:
    """Bias, error and noise of gradients, squared, from several batches; sums over parameters are sums.

    Attributes:
        squares: of all batches.
        without: of all batches but those of each group.
    """

    squares: Squares
    without: tuple[Squares, ...]

    @classmethod
    def total(cls, moments: Sequence[Self | None]) -> Self | None:
        """Return those of several parameters together; None if one is None or of other batches."""
        known = [one for one in moments if one is not None]
        if not known or len(known) < len(moments) or len({len(one.without) for one in known}) > 1:
            return None
        added = [
            Squares(*map(math.fsum, zip(*rows, strict=True)))
            for rows in zip(*((one.squares, *one.without) for one in known), strict=True)
        ]
        return cls(added[0], tuple(added[1:]))

    @property
    def bias(self) -> float:
        """The squared bias, at least zero."""
        return max(0.0, self.squares.bias)

    def at(self, k: float) -> Estimate:
        """Return error over noise of the mean of ``k`` gradients.

        The interval is Student's, of the logarithm, from a jackknife over the groups of batches whose
        variance is averaged with the usual one. Its lower end does not fall as k grows.
        """
        if not all(one.noise > 0 and math.isfinite(sum(one)) for one in (self.squares, *self.without)):
            return Estimate(math.nan)
        square = self.squares._replace(bias=self.bias).over_noise(k)
        if square == 0:
            return Estimate(0.0, 0.0, 0.0)
        jackknifed, groups = [one.over_noise(k) for one in self.without], len(self.without)
        middle = sum(jackknifed) / groups
        variance = sum((one - middle) ** 2 for one in jackknifed) * (groups - 1) / groups / (2 * square) ** 2
        freedom = _USUAL_BATCHES + groups - 1
        share = (k - 1) * self.bias / self.squares.noise / square
        usual = _USUAL_SPREAD + _SPREAD_OF_BIAS * share
        variance = (_USUAL_BATCHES * usual**2 / (groups - 1) + (groups - 1) * variance) / freedom
        value, factor = math.sqrt(square), math.exp(min(700.0, _T[freedom] * math.sqrt(variance)))
        low = value / factor
        return Estimate(value, max(low, self.at(1).low) if k > 1 else low, value * factor)

    def most(self, limit: float) -> float:
        """Return the largest k with ``at(k).value < limit``; below 1 if there is none, perhaps infinite."""
        room = limit**2 * self.squares.noise - self.squares.error
        if room <= 0 or self.bias == 0:
            return math.inf if room > 0 else 0.0
        return 1 + room / self.bias


@dataclass(slots=True)
class _Groups:
    """Differences of gradients, summed over the batches of each group, in fp32 in CPU memory.

    Attributes:
        squares: of each group, the sum of squared norms.
        counts: of each group, how many batches.
    """

    vectors: list[torch.Tensor] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, first: torch.Tensor, second: torch.Tensor, scale: float = 1.0) -> None:
        at = sum(self.counts) % _GROUPS
        if at == len(self.vectors):
            self.vectors.append(torch.zeros(first.numel(), dtype=torch.float32))
            self.squares.append(0.0)
            self.counts.append(0)
        self.counts[at] += 1
        for start in range(0, first.numel(), _CHUNK):
            here = slice(start, start + _CHUNK)
            difference = second[here].double() / scale - first[here].to(second.device).double()
            self.squares[at] += float(difference.dot(difference))
            self.vectors[at][here] += difference.to("cpu", torch.float32)

    def moments(self, left_out: Sequence[int | None]) -> list[tuple[float, float]]:
        """Return, for each group left out, the squared mean of the rest and their mean square.

        The squared mean is estimated without bias, so it may be negative.
        """
        groups = range(len(self.vectors))
        products = torch.zeros(len(groups), len(groups), dtype=torch.float64)
        step = _CHUNK // _GROUPS
        for start in range(0, self.vectors[0].numel(), step):
            rows = torch.stack([vector[start : start + step].double() for vector in self.vectors])
            products += rows @ rows.T
        found = []
        for without in left_out:
            kept = [group for group in groups if group != without]
            count, squares = sum(self.counts[g] for g in kept), math.fsum(self.squares[g] for g in kept)
            of_sum = float(products[kept][:, kept].sum())
            found.append(((of_sum - squares) / (count * (count - 1)), squares / count))
        return found


class Batches:
    """Gradients of one parameter for several batches, as they come; keeps 17 copies in fp32 at most.

    Args:
        size: elements of the parameter, of which a complex one has two each.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._first: torch.Tensor | None = None
        self._sums: list[Sums] = []
        self._errors, self._differences = _Groups(), _Groups()

    def add(self, fp32: torch.Tensor | None, mixed: torch.Tensor | None, *, scale: float = 1.0) -> None:
        """Add a batch, whose mixed gradient is divided by ``scale``; None counts as zeros."""
        self.add_fp32(fp32)
        self._sums.append(compared(fp32, mixed, scale=scale))
        self._errors.add(self._flat(fp32), self._flat(mixed), scale)

    def add_fp32(self, fp32: torch.Tensor | None) -> None:
        """Add a batch for its noise alone."""
        values = self._flat(fp32)
        if self._first is None:  # differences from it are exact where batches hardly differ
            self._first = values.cpu().clone()
        self._differences.add(self._first, values)

    def _flat(self, gradient: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(self._size) if gradient is None else _values(gradient)

    def measured(self, name: str, shape: tuple[int, ...], rounding: Sums | None) -> Measured:
        """Return what was measured; ``rounding`` is that of the first batch."""
        error, count = Sums.mean(self._sums), sum(self._differences.counts)
        if count < 2:
            return Measured(name, shape, error, None, rounding)
        tells = count == len(self._sums) >= FEWEST_BATCHES
        left_out = [None, *range(len(self._errors.counts) if tells else 0)]
        differences = self._differences.moments(left_out)
        # Twice the variance of a gradient; NaN stays.
        noise = [0.0 if square < of_mean else 2 * (square - of_mean) for of_mean, square in differences]
        moments = None
        if tells:
            errors = self._errors.moments(left_out)
            every, *without = (Squares(*one, level) for one, level in zip(errors, noise, strict=True))
            moments = Moments(every, tuple(without))
        first, variance = error.first, noise[0] / 2
        between = Sums(first=first, second=first, product=first - variance, difference=noise[0])
        return Measured(name, shape, error, between, rounding, moments)


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

    def error_over_noise(self, moments: Moments | None, x: float) -> float | None:
        """Return that of the mean of ``x`` gradients, or as measured where it is not known."""
        level = math.nan if moments is None else moments.at(x).value
        if self.no_noise:
            return None
        return self.error / self.noise if math.isnan(level) else level

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

"""``nc.observe.ExponentHistogram``: how large numbers are, and what a cast to a format would make of them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.errors import ScaleError, SettingError
from narrowcast.formats import Format, round_to

# Exponents of the smallest subnormal and of the largest number of float32, the bits of its fraction, and the
# mask of these bits.
_LOWEST, _HIGHEST = -149, 127
_BITS = 23
_FRACTION = (1 << _BITS) - 1


def _edges() -> list[int]:
    """Return the fractions, as 23-bit integers, at which the outcome of a cast changes in some format.

    It changes half a unit past zero, past the largest subnormal and past the largest number. In binary, the
    fractions there are ones and then zeros. One case differs: where the largest number is 1.1...10, as in
    OCP_E4M3, half a unit past it is 1.1...101. Its fraction is ones, a zero and a one.
    """
    edges = set()
    for ones in range(_BITS + 1):
        ones_then_zeros = _FRACTION ^ (_FRACTION >> ones)
        edges.add(ones_then_zeros)
        if ones < _BITS - 1:
            one_after_a_zero = 1 << (_BITS - 2 - ones)
            edges.add(ones_then_zeros + one_after_a_zero)
    return sorted(edges)


_EDGES = _edges()
# Bins in each binade of float32, subnormals included. Each edge has two: place 2k + 1 is for fractions equal
# to edge k, and place 2k for those between edges k - 1 and k.
_PLACES = 2 * len(_EDGES)
_BINS = (_HIGHEST - _LOWEST + 1) * _PLACES
# Bins of the numbers that are in no binade.
_ZERO, _INFINITE, _NAN = _BINS, _BINS + 1, _BINS + 2
# The bits of an infinity as an integer. NaN is larger.
_INFINITY = 0xFF << _BITS
# Numbers that are counted at once, which limits the memory of intermediate results.
_CHUNK = 1 << 22
_LARGEST_SHIFT = 500
_TOO_WIDE = (torch.float64, torch.complex128)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastCounts:
    """What a cast to a format does to the numbers of a histogram, as counts::

        counts = histogram.cast_to(nc.formats.FLOAT16, scale=1024)
        print(counts.shares["flushed"], counts)

    Attributes:
        format: the name of the format.
        scale: the power of two that each number was multiplied by before the cast, exactly.
        zeros, infinities, nans: were zero, infinite or NaN before the cast.
        flushed: became zero, and were not.
        subnormal: became smaller than the smallest normal number, and kept part of their digits.
        normal: became normal numbers.
        overflowed: went past the largest number (to infinity, NaN, or the largest number if it saturates).
    """

    format: str
    scale: float
    zeros: int
    flushed: int
    subnormal: int
    normal: int
    overflowed: int
    infinities: int
    nans: int

    @property
    def total(self) -> int:
        """All numbers, NaN included."""
        return self.zeros + self.nonzero + self.infinities + self.nans

    @property
    def nonzero(self) -> int:
        """Numbers that are finite and not zero."""
        return self.flushed + self.subnormal + self.normal + self.overflowed

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the finite non-zero numbers, by outcome; empty if there are none."""
        if not self.nonzero:
            return {}
        return {
            "flushed": self.flushed / self.nonzero,
            "subnormal": self.subnormal / self.nonzero,
            "normal": self.normal / self.nonzero,
            "overflowed": self.overflowed / self.nonzero,
        }

    def __str__(self) -> str:
        if not self.nonzero:
            return f"{self.format} at scale {self.scale:g}: no finite number but zero"
        flushed, subnormal, normal, overflowed = self.shares.values()
        return (
            f"{self.format} at scale {self.scale:g}: "
            f"{100 * flushed:.2f} % flushed to zero, {100 * subnormal:.2f} % subnormal, "
            f"{100 * normal:.2f} % normal, {100 * overflowed:.2f} % overflow"
        )


class ExponentHistogram:
    """Count numbers by their exponent, over many tensors, without waiting for the device::

        histogram = nc.observe.ExponentHistogram()
        activation.register_hook(histogram.add)  # its gradient
        loss.backward()
        print(histogram.cast_to(nc.formats.FLOAT16, scale=1024))

    What a cast would flush to zero, make subnormal or overflow is exact, as if each number had been
    multiplied and cast (nearest, ties to even), for every format and power of two. The counts take 200 KiB a
    device; adding takes about twenty-five passes over the tensor.
    """

    def __init__(self) -> None:
        self._counts: dict[torch.device, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count the numbers of a tensor; returns None, so that it can be a gradient hook.

        Args:
            tensor: any shape and device; float32, float16, bfloat16, fp8 or complex64 (two numbers each). Of
                a sparse COO tensor the stored numbers count, of a DTensor those of this rank.

        Raises:
            SettingError: not a tensor, or of another dtype. float64 has exponents that are not counted.
        """
        if not isinstance(tensor, torch.Tensor):
            raise SettingError(f"expected a tensor, got {type(tensor).__name__}")
        if tensor.dtype in _TOO_WIDE or not (tensor.is_floating_point() or tensor.is_complex()):
            raise SettingError(
                f"expected a tensor in float32 or a narrower floating-point format, got {tensor.dtype}: "
                "make it one by x.float()"
            )
        # A hook may run in any mode; counts that were made in inference mode could not be added to later.
        with torch.inference_mode(False), torch.no_grad():
            values: Any = tensor.detach()
            if hasattr(values, "to_local"):
                values = values.to_local()
            if values.layout == torch.sparse_coo:
                values = values.coalesce().values()
            if values.is_complex():
                values = torch.view_as_real(values.resolve_conj())
            for part in values.reshape(-1).split(_CHUNK):
                self._count(_bins_of(part.float()))

    def _count(self, bins: torch.Tensor) -> None:
        counts = self._counts.get(bins.device)
        if counts is None:
            counts = torch.zeros(_NAN + 1, dtype=torch.int64, device=bins.device)
            self._counts[bins.device] = counts
        if bins.device.type == "cpu":
            counts += torch.bincount(bins, minlength=_NAN + 1)
        else:
            # bincount would wait for the device, to learn the largest bin.
            counts.index_add_(0, bins, torch.ones_like(bins, dtype=torch.int64))

    def clear(self) -> None:
        """Set every count to zero."""
        self._counts.clear()

    # ---- reading: waits for the devices

    def _read(self) -> Counter[int]:
        """Return the counts of bins that are not empty, in rising order."""
        # Each device counts for itself, so that adding never waits.
        total = torch.zeros(_NAN + 1, dtype=torch.int64)
        for counts in self._counts.values():
            total += counts.cpu()
        filled = total.nonzero().flatten()
        return Counter(dict(zip(filled.tolist(), total[filled].tolist(), strict=True)))

    @property
    def total(self) -> int:
        """How many numbers were added, NaN included."""
        return self._read().total()

    @property
    def exponents(self) -> dict[int, int]:
        """Number of x with 2**e <= abs(x) < 2**(e + 1), by e, rising, down to -149 (subnormals)."""
        counts: Counter[int] = Counter()
        for index, count in self._read().items():
            if index < _BINS:
                counts[index // _PLACES + _LOWEST] += count
        return dict(counts)

    def cast_to(self, format: Format, *, scale: float = 1.0) -> CastCounts:
        """Count what the numbers become when multiplied by ``scale`` and cast to ``format``; exact.

        Raises:
            SettingError: ``format`` is not one of ``nc.formats``.
            ScaleError: ``scale`` is not a power of two from 2**-500 to 2**500.
        """
        _check_format(format)
        shift = _shift_of(scale)
        read = self._read()
        outcomes = dict.fromkeys(("flushed", "subnormal", "normal", "overflowed"), 0)
        for index, count in read.items():
            if index < _BINS:
                outcomes[_outcome(format, index, shift)] += count
        return CastCounts(
            format=format.name,
            scale=float(scale),
            zeros=read[_ZERO],
            infinities=read[_INFINITE],
            nans=read[_NAN],
            **outcomes,
        )

    def largest_scale(self, format: Format) -> float | None:
        """Return the largest power of two with which no finite number overflows ``format``.

        None if no number is finite and other than zero. The numbers of the next step may need a smaller one.
        """
        _check_format(format)
        bins = [index for index in self._read() if index < _BINS]
        if not bins:
            return None
        # This shift takes the largest number counted to the format's largest exponent. If the number then
        # rounds past the format's largest number, the shift is too large.
        largest = bins[-1]
        shift = format.max_exponent - (largest // _PLACES + _LOWEST)
        while _outcome(format, largest, shift) == "overflowed":
            shift -= 1
        return 2.0**shift

    def __str__(self) -> str:
        counts = self._read()
        exponents = list(self.exponents)
        span = "no exponent"
        if exponents:
            span = f"exponents {exponents[0]} to {exponents[-1]}"
        others = f"{counts[_ZERO]} zeros, {counts[_INFINITE]} infinities, {counts[_NAN]} NaN"
        return f"{counts.total()} numbers: {others}, {span}"


@functools.cache
def _edges_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(_EDGES, dtype=torch.int32, device=device)


def _bins_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bin of each float32 number, by integer arithmetic, as a CPU may flush subnormals to zero."""
    magnitude = values.view(torch.int32) & 0x7FFFFFFF
    # A subnormal is magnitude * 2**-149. Converted to a float, which is exact, the integer has the same
    # fraction as the subnormal, and an exponent that is larger by 149.
    whole = magnitude.float().view(torch.int32)
    is_subnormal = magnitude >> _BITS == 0
    above_lowest = torch.where(is_subnormal, (whole >> _BITS) - 127, (magnitude >> _BITS) - 127 - _LOWEST)
    fraction = torch.where(is_subnormal, whole, magnitude) & _FRACTION

    edges = _edges_on(values.device)
    before = torch.bucketize(fraction, edges, out_int32=True)  # how many edges are smaller
    not_after = torch.bucketize(fraction, edges, right=True, out_int32=True)  # smaller or equal
    bins = above_lowest * _PLACES + before + not_after
    bins = torch.where(magnitude == 0, _ZERO, bins)
    bins = torch.where(magnitude == _INFINITY, _INFINITE, bins)
    return torch.where(magnitude > _INFINITY, _NAN, bins)


def _outcome(format: Format, index: int, shift: int) -> str:
    """Return the outcome of the numbers of a bin. It is the same for all, so the smallest one is cast."""
    above_lowest, place = divmod(index, _PLACES)
    edge, is_at_edge = divmod(place, 2)
    fraction = _EDGES[edge]
    if not is_at_edge:
        fraction = _EDGES[edge - 1] + 1
    smallest = math.ldexp((1 << _BITS) + fraction, above_lowest + _LOWEST - _BITS + shift)
    value = round_to(format, smallest)
    if not math.isfinite(value):
        return "overflowed"
    if value == 0:
        return "flushed"
    return "subnormal" if value < format.smallest_normal else "normal"


def _check_format(format: Format) -> None:
    if not isinstance(format, Format):
        raise SettingError(f"expected a format, as nc.formats.FLOAT16, got {format!r}")


def _shift_of(scale: float) -> int:
    fraction, exponent = 0.0, 0
    if isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale):
        fraction, exponent = math.frexp(scale)
    if fraction != 0.5 or abs(exponent - 1) > _LARGEST_SHIFT:  # a power of two is 0.5 * 2**exponent
        raise ScaleError(f"expected a power of two from 2**-500 to 2**500 as scale, got {scale!r}")
    return exponent - 1

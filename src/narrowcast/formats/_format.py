"""The number formats that PyTorch computes and stores in, as records; their dtypes; exact rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING

from narrowcast.errors import SettingError

if TYPE_CHECKING:
    import torch


class Specials(StrEnum):
    """Which codes are not finite numbers, and so whether the format has infinities and -0.0.

    ``IEEE``: the all-ones exponent encodes infinities (significand zero) and NaNs (any other significand).
    ``NAN_ALL_ONES``: the all-ones code, with either sign, is NaN; there are no infinities (OCP E4M3).
    ``NAN_NEGATIVE_ZERO``: the code of -0.0 is the only NaN; there are no infinities and no -0.0 (fnuz).
    """

    IEEE = "ieee"
    NAN_ALL_ONES = "nan-all-ones"
    NAN_NEGATIVE_ZERO = "nan-negative-zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A number format: a sign bit, a biased exponent, and a significand with a hidden leading bit.

    Exponent field E > 0 and significand field T encode (1 + T / 2**significand_bits) * 2**(E - bias).
    E = 0 encodes zero and the subnormals: (T / 2**significand_bits) * 2**(1 - bias).

    Args:
        name: the constant's name in ``narrowcast.formats``.
        standard: the issuing body and the document that define the format.
        storage_bits: bits that one number occupies in memory; TF32 keeps its 19 bits in a 32-bit word.
        exponent_bits: width of the exponent field.
        significand_bits: width of the significand field, without the hidden bit.
        bias: the power of two is the exponent field minus ``bias``.
        specials: which codes are infinities and NaNs.

    A Python float represents exactly every number of these formats, and their ``flush_threshold`` and
    ``overflow_threshold``.

    >>> from narrowcast.formats import FLOAT16
    >>> FLOAT16.max, FLOAT16.eps
    (65504.0, 0.0009765625)
    """

    name: str
    standard: str
    storage_bits: int
    exponent_bits: int
    significand_bits: int
    bias: int
    specials: Specials

    @property
    def has_infinity(self) -> bool:
        """Whether the format has infinities. Without them overflow gives NaN."""
        return self.specials is Specials.IEEE

    @property
    def has_negative_zero(self) -> bool:
        """Whether -0.0 has a code. Without one, -0.0 and negative numbers that round to zero give 0.0."""
        return self.specials is not Specials.NAN_NEGATIVE_ZERO

    @property
    def min_exponent(self) -> int:
        """Power of two of ``smallest_normal``."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Power of two of ``max``: 2**max_exponent <= max < 2**(max_exponent + 1)."""
        largest_field = (1 << self.exponent_bits) - 1  # all ones
        if self.specials is Specials.IEEE:
            # All ones encode infinities and NaNs, so the largest numbers have the exponent field below.
            largest_field -= 1
        return largest_field - self.bias

    @property
    def max(self) -> float:
        """Largest finite number."""
        # The significand in units of its last bit: all ones, with the hidden bit.
        units = (2 << self.significand_bits) - 1
        if self.specials is Specials.NAN_ALL_ONES:
            # The code with all bits set is NaN, so the largest number has a significand one unit smaller.
            units -= 1
        return math.ldexp(units, self.max_exponent - self.significand_bits)

    @property
    def min(self) -> float:
        """Lowest finite number, ``-max``, as in ``torch.finfo``."""
        return -self.max

    @property
    def smallest_normal(self) -> float:
        """Smallest number above zero that has full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest number above zero, and the distance between subnormals."""
        return math.ldexp(1.0, self.min_exponent - self.significand_bits)

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next number above it, twice the unit roundoff."""
        return math.ldexp(1.0, -self.significand_bits)

    @property
    def overflow_threshold(self) -> float:
        """``max`` plus half a unit in its last place: nearest-even rounding overflows above this.

        The threshold itself is a tie. It overflows too if the code of ``max`` is odd, which it is in all
        formats except OCP E4M3.
        """
        return self.max + math.ldexp(0.5, self.max_exponent - self.significand_bits)

    @property
    def flush_threshold(self) -> float:
        """Half the smallest subnormal: nearest-even rounding takes this and smaller magnitudes to zero."""
        return self.smallest_subnormal / 2


FLOAT32 = Format(
    name="FLOAT32",
    standard="IEEE 754-2019 binary32",
    storage_bits=32,
    exponent_bits=8,
    significand_bits=23,
    bias=127,
    specials=Specials.IEEE,
)
"""IEEE 754 single precision."""

# The whitepaper does not define the rounding from float32, and hardware differs: PTX has one conversion with
# ties away from zero (cvt.rna.tf32.f32, sm_80) and one with ties to even (cvt.rn.tf32.f32, sm_90).
TF32 = Format(
    name="TF32",
    standard="NVIDIA A100 Tensor Core GPU Architecture whitepaper, 2020, TensorFloat-32",
    storage_bits=32,
    exponent_bits=8,
    significand_bits=10,
    bias=127,
    specials=Specials.IEEE,
)
"""NVIDIA's TensorFloat-32: the range of float32 with the precision of float16."""

# Intel's document has no subnormals in arithmetic. PyTorch's conversions keep them, and so does round_to.
BFLOAT16 = Format(
    name="BFLOAT16",
    standard="Google Brain bfloat16; Intel BFLOAT16 Hardware Numerics Definition, 338302-001US, 2018",
    storage_bits=16,
    exponent_bits=8,
    significand_bits=7,
    bias=127,
    specials=Specials.IEEE,
)
"""The range of float32 with 8 significant bits."""

FLOAT16 = Format(
    name="FLOAT16",
    standard="IEEE 754-2019 binary16",
    storage_bits=16,
    exponent_bits=5,
    significand_bits=10,
    bias=15,
    specials=Specials.IEEE,
)
"""IEEE 754 half precision."""

OCP_E4M3 = Format(
    name="OCP_E4M3",
    standard="OCP 8-bit Floating Point Specification (OFP8) 1.0, E4M3",
    storage_bits=8,
    exponent_bits=4,
    significand_bits=3,
    bias=7,
    specials=Specials.NAN_ALL_ONES,
)
"""fp8 of the Open Compute Project with NaN but no infinities, up to 448."""

OCP_E5M2 = Format(
    name="OCP_E5M2",
    standard="OCP 8-bit Floating Point Specification (OFP8) 1.0, E5M2",
    storage_bits=8,
    exponent_bits=5,
    significand_bits=2,
    bias=15,
    specials=Specials.IEEE,
)
"""fp8 of the Open Compute Project with NaN and infinities, up to 57344."""

E4M3FNUZ = Format(
    name="E4M3FNUZ",
    standard="Graphcore, AMD and Qualcomm, arXiv 2206.02915, 2022, 1.4.3 with bias 8",
    storage_bits=8,
    exponent_bits=4,
    significand_bits=3,
    bias=8,
    specials=Specials.NAN_NEGATIVE_ZERO,
)
"""fp8 without infinities or negative zero, up to 240."""

E5M2FNUZ = Format(
    name="E5M2FNUZ",
    standard="Graphcore, AMD and Qualcomm, arXiv 2206.02915, 2022, 1.5.2 with bias 16",
    storage_bits=8,
    exponent_bits=5,
    significand_bits=2,
    bias=16,
    specials=Specials.NAN_NEGATIVE_ZERO,
)
"""fp8 without infinities or negative zero, up to 57344."""

FORMATS = (FLOAT32, TF32, BFLOAT16, FLOAT16, OCP_E4M3, OCP_E5M2, E4M3FNUZ, E5M2FNUZ)
"""Every format of this package, for tests that try each."""

# The names of torch's dtypes, because this package does not import torch. No dtype stores TF32.
_DTYPE_NAMES = {
    FLOAT32: "float32",
    BFLOAT16: "bfloat16",
    FLOAT16: "float16",
    OCP_E4M3: "float8_e4m3fn",
    OCP_E5M2: "float8_e5m2",
    E4M3FNUZ: "float8_e4m3fnuz",
    E5M2FNUZ: "float8_e5m2fnuz",
}


def torch_dtype(format: Format) -> torch.dtype:
    """Return the torch dtype that stores ``format``.

    Raises:
        SettingError: no dtype stores ``format``. PyTorch only computes in TF32, on float32 tensors.

    Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.dtype

    >>> from narrowcast.formats import OCP_E4M3, torch_dtype
    >>> torch_dtype(OCP_E4M3)
    torch.float8_e4m3fn
    """
    import torch

    if format not in _DTYPE_NAMES:
        stored = ", ".join(known.name for known in _DTYPE_NAMES)
        raise SettingError(f"no torch dtype stores {format.name}: use one of {stored}")
    dtype = getattr(torch, _DTYPE_NAMES[format])
    assert isinstance(dtype, torch.dtype)
    return dtype


def round_to(format: Format, x: float, *, saturate: bool = False) -> float:
    """Round ``x`` to ``format``, to nearest with ties to even, in one exact step.

    NaN gives NaN. The sign is kept: -0.0, and negative numbers that round to zero, give -0.0, or 0.0 if the
    format has no -0.0. Subnormals are rounded like any other number and never flushed.

    Overflow is decided after rounding with an unlimited exponent (IEEE 754-2019, 7.4), so a number that
    rounds to ``max`` does not overflow. Overflow and an infinite ``x`` give an infinity, or NaN if the format
    has no infinities. With ``saturate`` they give ``max`` with the sign of ``x``, as in OFP8 1.0.

    PyTorch's conversion to OCP E4M3 saturates since 2.13 (pull request 178817), and gave NaN before. Its
    conversions to other formats do not saturate.

    Args:
        format: the format to round to.
        x: a Python float, or a number that ``float`` converts, which may itself round (a large int).
        saturate: return ``max`` or ``-max`` instead of an infinity or NaN on overflow.

    >>> from narrowcast.formats import FLOAT16, round_to
    >>> round_to(FLOAT16, 1 + 2**-11), round_to(FLOAT16, 65520.0)
    (1.0, inf)
    """
    x = float(x)
    if math.isnan(x):
        return math.nan
    if abs(x) > format.overflow_threshold:
        magnitude = math.inf
    else:
        # The power of two of x; frexp gives one more. Subnormals have the unit of the smallest normal number.
        exponent = max(math.frexp(x)[1] - 1, format.min_exponent)
        unit = Fraction(2) ** (exponent - format.significand_bits)
        # Python rounds a fraction to the nearest integer, and a tie to the even one.
        magnitude = float(round(abs(Fraction(x)) / unit) * unit)

    if magnitude > format.max:
        if saturate:
            magnitude = format.max
        elif format.has_infinity:
            magnitude = math.inf
        else:
            return math.nan
    if magnitude == 0.0 and not format.has_negative_zero:
        return 0.0
    return math.copysign(magnitude, x)

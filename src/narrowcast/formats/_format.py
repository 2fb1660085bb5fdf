"""A binary floating-point format as a record: what its standard fixes, and the limits that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from narrowcast.errors import SettingError

# Every value has to be exact in a Python float (IEEE 754 binary64), and so has max + half a unit.
_WIDEST_SIGNIFICAND_BITS = 51
_LARGEST_EXPONENT = 1022
_SMALLEST_EXPONENT = -1073


class Specials(StrEnum):
    """Which codes are not finite numbers. Infinities and -0.0 follow from it.

    ``IEEE``: the all-ones exponent is kept for infinities (significand zero) and NaNs (any other).
    ``NAN_ALL_ONES``: only the code of all ones, with either sign, is NaN; no infinities (OCP E4M3).
    ``NAN_NEGATIVE_ZERO``: the one NaN is the code that would be -0.0; no infinities, no -0.0 (fnuz).
    """

    IEEE = "ieee"
    NAN_ALL_ONES = "nan-all-ones"
    NAN_NEGATIVE_ZERO = "nan-negative-zero"

    def __repr__(self) -> str:
        return f"Specials.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A number format: one sign bit, then a biased exponent, then a significand with a hidden leading bit.

    With exponent field E > 0 and significand field T it means (1 + T / 2**significand_bits) * 2**(E - bias).
    With E = 0 it is subnormal: (T / 2**significand_bits) * 2**(1 - bias), and zero if T is 0 too.

    Args:
        name: the constant's name in ``narrowcast.formats``.
        standard: issuing body and document that define the format.
        storage_bits: bits that one number occupies in memory; TF32 keeps its 19 in a 32-bit word.
        exponent_bits: width of the exponent field, in bits.
        significand_bits: width of the trailing significand field, in bits, without the hidden bit.
        bias: what is subtracted from the exponent field to get the power of two.
        specials: which codes are infinities and NaNs, and so whether there is a -0.0.

    Raises:
        SettingError: an empty name, a width or bias that is no integer or too small, ``specials`` of
            another type, fields that do not fit the storage, or numbers that a Python float cannot hold
            exactly, half the smallest and half a unit past ``max`` included.

    >>> from narrowcast.formats import FLOAT16
    >>> FLOAT16.max, FLOAT16.bits
    (65504.0, 16)
    """

    name: str
    standard: str
    storage_bits: int
    exponent_bits: int
    significand_bits: int
    bias: int
    specials: Specials

    def __post_init__(self) -> None:
        for field in ("name", "standard"):
            if not getattr(self, field):
                raise SettingError(f"{field} must say what the format is, not {getattr(self, field)!r}")
        for field, least in (("exponent_bits", 2), ("significand_bits", 1), ("storage_bits", 4), ("bias", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or value < least:
                raise SettingError(f"{self.name}: {field} must be an integer, {least} or more, not {value!r}")
        if not isinstance(self.specials, Specials):
            known = ", ".join(map(repr, Specials))
            raise SettingError(f"{self.name}: specials must be one of {known}, not {self.specials!r}")
        if self.storage_bits < self.bits:
            raise SettingError(
                f"{self.name}: the fields need 1 + {self.exponent_bits} + {self.significand_bits} bits, more "
                f"than storage_bits = {self.storage_bits}: make storage_bits at least {self.bits}"
            )
        self._check_that_numbers_are_exact()

    def _check_that_numbers_are_exact(self) -> None:
        smallest, largest = self.min_exponent - self.significand_bits, self.max_exponent
        if (
            self.significand_bits > _WIDEST_SIGNIFICAND_BITS
            or largest > _LARGEST_EXPONENT
            or smallest < _SMALLEST_EXPONENT
        ):
            raise SettingError(
                f"{self.name}: numbers from 2**{smallest} to 2**{largest} with {self.significand_bits} "
                f"significand bits are not all exact in a Python float (2**{_SMALLEST_EXPONENT} to "
                f"2**{_LARGEST_EXPONENT}, {_WIDEST_SIGNIFICAND_BITS} bits): narrow it or move its bias"
            )

    @property
    def bits(self) -> int:
        """Bits of one code: sign, exponent and significand. Fewer than ``storage_bits`` in TF32 (19)."""
        return 1 + self.exponent_bits + self.significand_bits

    @property
    def code_count(self) -> int:
        """Number of codes, NaNs and infinities included; codes run from 0 to ``code_count - 1``."""
        return 1 << self.bits

    @property
    def sign_bit(self) -> int:
        """The code whose only set bit is the sign."""
        return 1 << (self.bits - 1)

    @property
    def largest_finite_code(self) -> int:
        """Code of ``max``; the codes from 0 to it are the non-negative finite numbers in rising order."""
        all_ones = self.sign_bit - 1
        if self.specials is Specials.IEEE:
            return all_ones - (1 << self.significand_bits)
        return all_ones - 1 if self.specials is Specials.NAN_ALL_ONES else all_ones

    @property
    def infinity_code(self) -> int | None:
        """Code of +infinity, or None where the format has no infinities."""
        return self.largest_finite_code + 1 if self.has_infinity else None

    @property
    def nan_code(self) -> int:
        """The code that NaN is encoded as: positive and quiet where there are several."""
        if self.specials is Specials.NAN_NEGATIVE_ZERO:
            return self.sign_bit
        if self.specials is Specials.NAN_ALL_ONES:
            return self.sign_bit - 1
        # IEEE 754-2019, 6.2.1: a quiet NaN has the first bit of the trailing significand set.
        return self.largest_finite_code + 1 + (1 << (self.significand_bits - 1))

    @property
    def has_infinity(self) -> bool:
        """Whether +infinity and -infinity have codes; without them overflow gives NaN."""
        return self.specials is Specials.IEEE

    @property
    def has_negative_zero(self) -> bool:
        """Whether -0.0 has a code; without one -0.0, and negative numbers that flush to zero, become 0.0."""
        return self.specials is not Specials.NAN_NEGATIVE_ZERO

    @property
    def min_exponent(self) -> int:
        """Power of two of ``smallest_normal``, and of the unit that subnormals share with it."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Power of two of ``max``: 2**max_exponent <= max < 2**(max_exponent + 1)."""
        return (self.largest_finite_code >> self.significand_bits) - self.bias

    @property
    def max(self) -> float:
        """Largest finite number, exact."""
        hidden = 1 << self.significand_bits
        trailing = self.largest_finite_code & (hidden - 1)
        return math.ldexp(hidden + trailing, self.max_exponent - self.significand_bits)

    @property
    def min(self) -> float:
        """Lowest finite number, ``-max``, exact; as in ``torch.finfo``, not the smallest above zero."""
        return -self.max

    @property
    def smallest_normal(self) -> float:
        """Smallest number above zero that has the full precision, exact."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest number above zero, and the distance between all subnormals, exact."""
        return math.ldexp(1.0, self.min_exponent - self.significand_bits)

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next number above it, exact (half of it is the unit roundoff)."""
        return math.ldexp(1.0, -self.significand_bits)

    @property
    def overflow_threshold(self) -> float:
        """Half a unit past ``max``, exact: beyond it nearest-even rounding overflows, below it gives ``max``.

        The threshold itself is a tie: it overflows where the code of ``max`` is odd (all formats here but
        OCP E4M3, which keeps it).
        """
        return self.max + math.ldexp(0.5, self.max_exponent - self.significand_bits)

    @property
    def flush_threshold(self) -> float:
        """Half the smallest subnormal, exact: nearest-even rounding flushes it, and all below it, to zero."""
        return self.smallest_subnormal / 2

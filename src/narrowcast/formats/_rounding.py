"""Round one number at a time in exact integers, as the reference for the fast conversions."""

from __future__ import annotations

import math
from enum import StrEnum
from fractions import Fraction

from narrowcast.errors import SettingError, near_names
from narrowcast.formats._codec import Units, units_of
from narrowcast.formats._format import Format


class RoundingMode(StrEnum):
    """How to choose between the two neighbours of a number that the format cannot represent.

    ``NEAREST_EVEN``: the nearer one; for a tie, the one with the even code (IEEE 754-2019, 4.3.1).
    ``TOWARD_ZERO``: the one of smaller magnitude (IEEE 754-2019, 4.3.2).
    ``STOCHASTIC``: the one of larger magnitude, with a probability equal to the fraction of the way to it.

    >>> from narrowcast.formats import FLOAT16, RoundingMode, round_to
    >>> round_to(FLOAT16, 1 + 2**-11 + 2**-13, RoundingMode.TOWARD_ZERO)
    1.0
    """

    NEAREST_EVEN = "nearest-even"
    TOWARD_ZERO = "toward-zero"
    STOCHASTIC = "stochastic"

    def __repr__(self) -> str:
        return f"RoundingMode.{self.name}"


def round_to(
    format: Format,
    x: float,
    mode: RoundingMode | str = RoundingMode.NEAREST_EVEN,
    *,
    u: float | Fraction | None = None,
    saturate: bool = False,
) -> float:
    """Round ``x`` to ``format`` in one exact step and return it as a Python float.

    NaN gives NaN. The sign is kept: -0.0, and negative numbers that round to zero, give -0.0, or 0.0 if the
    format has no -0.0. Subnormals are rounded like any other number and never flushed.

    Overflow is decided after rounding with an unlimited exponent (IEEE 754-2019, 7.4), so a number that
    rounds to ``max`` does not overflow. Overflow and an infinite ``x`` give an infinity, or NaN if the format
    has no infinities; with ``saturate``, ``max`` with the sign of ``x``, as in OFP8 1.0. ``TOWARD_ZERO``
    gives ``max`` for every finite overflow. PyTorch's conversion to OCP E4M3 saturates since 2.13 (pull
    request 178817) and gave NaN before. Its conversions to other formats do not saturate.

    Args:
        format: the format to round to.
        x: a Python float, or a number that ``float`` converts.
        mode: a ``RoundingMode`` or its value.
        u: the random number of stochastic rounding, 0 <= u < 1. ``x`` is rounded to the larger magnitude if
            ``u`` is below the exact fraction.
        saturate: return ``max`` instead of an infinity or NaN on overflow.

    Raises:
        SettingError: the mode is unknown; stochastic rounding has no ``u`` or one outside [0, 1); ``u`` is
            given for another mode.

    >>> from narrowcast.formats import FLOAT16, round_to
    >>> round_to(FLOAT16, 1 + 2**-11), round_to(FLOAT16, 1 + 2**-11, "stochastic", u=0.25)
    (1.0, 1.0009765625)
    """
    mode = _checked_mode(mode, u)
    x = float(x)
    if math.isnan(x):
        return math.nan
    if math.isinf(x):
        return _overflowed(format, x, saturate=saturate)
    if x == 0.0:
        return _signed(format, 0.0, x)
    if math.frexp(x)[1] - 1 > format.max_exponent:
        magnitude = math.inf
    else:
        units = units_of(format, abs(x))
        magnitude = math.ldexp(units.whole + _goes_away(units, mode, u), units.unit_exponent)
    if magnitude > format.max:
        return _overflowed(format, x, saturate=saturate or mode is RoundingMode.TOWARD_ZERO)
    return _signed(format, magnitude, x)


def _checked_mode(mode: RoundingMode | str, u: float | Fraction | None) -> RoundingMode:
    known = [str(each) for each in RoundingMode]
    if mode not in known:
        raise SettingError(f'"{mode}" is not a rounding mode. {near_names(str(mode), known)}')
    mode = RoundingMode(mode)
    if mode is not RoundingMode.STOCHASTIC:
        if u is not None:
            raise SettingError(f"{mode} rounding uses no random number: leave out u, or use stochastic")
    elif u is None:
        raise SettingError("stochastic rounding needs a random number: pass u, 0 <= u < 1")
    elif not 0 <= u < 1:
        raise SettingError(f"u must be in [0, 1), not {u}")
    return mode


def _goes_away(units: Units, mode: RoundingMode, u: float | Fraction | None) -> bool:
    """Return whether to round to the neighbour of larger magnitude."""
    if mode is RoundingMode.TOWARD_ZERO:
        return False
    if mode is RoundingMode.STOCHASTIC:
        assert u is not None
        return Fraction(u) < Fraction(units.rest, units.divisor)
    twice = 2 * units.rest
    return twice > units.divisor or (twice == units.divisor and units.whole % 2 == 1)


def _overflowed(format: Format, x: float, *, saturate: bool) -> float:
    if saturate:
        return math.copysign(format.max, x)
    return math.copysign(math.inf, x) if format.has_infinity else math.nan


def _signed(format: Format, magnitude: float, x: float) -> float:
    if magnitude == 0.0 and not format.has_negative_zero:
        return 0.0
    return math.copysign(magnitude, x)

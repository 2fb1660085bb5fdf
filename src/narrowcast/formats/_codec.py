"""Convert codes to numbers and back, exactly."""

from __future__ import annotations

import math
from typing import NamedTuple

from narrowcast.errors import SettingError
from narrowcast.formats._format import Format


class Units(NamedTuple):
    """An exact magnitude: ``(whole + rest / divisor) * 2**unit_exponent``, with 0 <= rest < divisor."""

    whole: int
    rest: int
    divisor: int
    unit_exponent: int


def units_of(format: Format, magnitude: float) -> Units:
    """Express ``magnitude`` (finite, above zero) in units in the last place of ``format``.

    The exponent has no upper limit: past ``format.max`` the units keep growing, as in a wider format. It has
    a lower limit: subnormals share the unit of the smallest normal number.
    """
    exponent = math.frexp(magnitude)[1] - 1
    unit_exponent = max(exponent, format.min_exponent) - format.significand_bits
    numerator, divisor = magnitude.as_integer_ratio()
    if unit_exponent < 0:
        numerator <<= -unit_exponent
    else:
        divisor <<= unit_exponent
    whole, rest = divmod(numerator, divisor)
    return Units(whole, rest, divisor, unit_exponent)


def decode(format: Format, code: int) -> float:
    """Return the exact number that ``code`` encodes in ``format``.

    A code has ``format.bits`` bits, sign first. For TF32 it is the float32 word shifted right by 13. A NaN
    code gives ``math.nan`` without sign and payload. Subnormals are never flushed.

    Raises:
        SettingError: ``code`` is below 0 or not below ``format.code_count``.

    >>> from narrowcast.formats import FLOAT16, decode
    >>> decode(FLOAT16, 0x7BFF)
    65504.0
    """
    if not 0 <= code < format.code_count:
        raise SettingError(f"expected a {format.name} code from 0 to {format.code_count - 1}, got {code}")
    sign = -1.0 if code & format.sign_bit else 1.0
    magnitude_code = code & (format.sign_bit - 1)
    if magnitude_code == format.infinity_code:
        return sign * math.inf
    if magnitude_code > format.largest_finite_code:
        return math.nan
    if code == format.sign_bit and not format.has_negative_zero:
        return math.nan
    exponent_field, trailing = divmod(magnitude_code, 1 << format.significand_bits)
    if exponent_field == 0:
        return sign * math.ldexp(trailing, format.min_exponent - format.significand_bits)
    significand = (1 << format.significand_bits) + trailing
    return sign * math.ldexp(significand, exponent_field - format.bias - format.significand_bits)


def encode(format: Format, x: float) -> int:
    """Return the code of ``x`` in ``format``, without rounding.

    Every NaN gives ``format.nan_code``. Infinities, -0.0 and subnormals give their own codes.

    Raises:
        SettingError: ``x`` is not a number of the format: it needs rounding, exceeds ``max``, or is an
            infinity or -0.0 that the format lacks.

    >>> from narrowcast.formats import OCP_E4M3, encode
    >>> hex(encode(OCP_E4M3, 448.0))
    '0x7e'
    """
    if math.isnan(x):
        return format.nan_code
    sign = format.sign_bit if math.copysign(1.0, x) < 0 else 0
    if x == 0.0:
        if sign and not format.has_negative_zero:
            raise _not_a_number_of(format, x)
        return sign
    if math.isinf(x):
        if format.infinity_code is None:
            raise _not_a_number_of(format, x)
        return sign + format.infinity_code
    whole, rest, _, unit_exponent = units_of(format, abs(x))
    if rest or abs(x) > format.max:
        raise _not_a_number_of(format, x)
    # The hidden bit of a normal number adds one to the exponent field, so the field starts one lower.
    exponent_field = unit_exponent + format.significand_bits - format.min_exponent
    return sign + (exponent_field << format.significand_bits) + whole


def _not_a_number_of(format: Format, x: float) -> SettingError:
    name = format.name
    return SettingError(f"{x!r} cannot be represented in {name}: round it first with round_to({name}, {x!r})")

"""The range of a loss scale: what float32 can multiply by and divide by again."""

from __future__ import annotations

import math
import struct

from narrowcast.errors import ScaleError

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: devices may flush a smaller one to zero, and below 2**-128 its inverse is
infinite, so that unscaling would lie."""
LARGEST_SCALE = 2.0**127
"""The largest power of two in float32."""


def check_scale(scale: float, name: str = "loss scale") -> None:
    """Refuses what is no number from 2**-126 to 2**127, the ends included, with ScaleError."""
    if not is_number(scale):
        raise ScaleError(f"expected a {name} that is a number, got {scale!r}")
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ScaleError(f"expected a positive, finite {name} from 2**-126 to 2**127, got {scale!r}")


def check_limits(scale: float, min_scale: float, max_scale: float) -> None:
    """Refuses, with ScaleError, any of the three that is no scale, and a scale outside the other two.

    They are compared as float32, since a scale that comes back from a device is one.
    """
    check_scale(scale)
    check_scale(min_scale, "min_scale")
    check_scale(max_scale, "max_scale")
    if not min_scale <= max_scale:
        raise ScaleError(f"min_scale must be at most max_scale, got {min_scale!r} and {max_scale!r}")
    if not to_float32(min_scale) <= to_float32(scale) <= to_float32(max_scale):
        raise ScaleError(
            f"scale must be from min_scale to max_scale, here {min_scale!r} to {max_scale!r}, got {scale!r}"
        )


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def to_float32(value: float) -> float:
    """``value`` rounded to nearest float32, infinite where it leaves the range."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded

"""``Off``, ``Static`` and ``Dynamic`` loss scales, as values without torch."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Protocol, Self

from narrowcast.errors import ScaleError

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: devices may flush a smaller one to zero, and below 2**-128 its inverse is
infinite, so that unscaling would lie."""
LARGEST_SCALE = 2.0**127
"""The largest power of two in float32."""


class LossScale(Protocol):
    """What every loss scale answers. ``scale`` is the factor that a loss is multiplied by."""

    @property
    def scale(self) -> float: ...

    def after_step(self, *, overflow: bool) -> Self:
        """The loss scale for the next step, given whether this one's gradients were non-finite."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """No scaling: the factor is 1 and stays 1."""

    @property
    def scale(self) -> float:
        return 1.0

    def after_step(self, *, overflow: bool) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """A factor that never moves.

    Raises:
        ScaleError: at construction, unless ``scale`` is a normal, positive, finite float32.
    """

    scale: float

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def after_step(self, *, overflow: bool) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """torch.amp's rule: back off at every overflow, grow after so many good steps in a row.

    Attributes:
        scale: the factor now; torch starts at 2**16.
        growth_factor: multiplied in after ``growth_interval`` good steps in a row; above 1.
        backoff_factor: multiplied in after a step with a non-finite gradient; between 0 and 1.
        growth_interval: good steps in a row before the scale grows; at least 1.
        good_steps: good steps since the last growth or overflow (torch's ``_growth_tracker``).

    A product is that of the float32 scale with the factor in double precision, rounded to float32, as in
    torch. Two deviations: a backoff stops at 2**-126, the smallest normal float32, where torch's goes on to
    0 and then trains on NaN; and a growth past 2**127 is not taken, where torch refuses only one past the
    largest float32.

    Source: ``torch.amp.GradScaler`` and ``torch._amp_update_scale_``.

    Raises:
        ScaleError: at construction, for a field outside its range.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0

    def __post_init__(self) -> None:
        _check_scale(self.scale)
        if not (_is_number(self.growth_factor) and 1.0 < self.growth_factor < math.inf):
            raise ScaleError(f"growth_factor must be above 1 and finite, got {self.growth_factor!r}")
        if not (_is_number(self.backoff_factor) and 0.0 < self.backoff_factor < 1.0):
            raise ScaleError(f"backoff_factor must be between 0 and 1, got {self.backoff_factor!r}")
        if not _is_whole(self.growth_interval) or self.growth_interval < 1:
            raise ScaleError(
                f"growth_interval must be a whole number of at least 1, got {self.growth_interval!r}"
            )
        if not _is_whole(self.good_steps) or not 0 <= self.good_steps < self.growth_interval:
            raise ScaleError(
                f"good_steps must be a whole number from 0 to growth_interval - 1, got {self.good_steps!r}"
            )

    def after_step(self, *, overflow: bool) -> Self:
        if overflow:
            scale = max(_float32(_float32(self.scale) * self.backoff_factor), SMALLEST_SCALE)
            return replace(self, scale=scale, good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        grown = _float32(_float32(self.scale) * self.growth_factor)
        return replace(self, scale=grown if grown <= LARGEST_SCALE else self.scale, good_steps=0)


def parse(text: str) -> LossScale:
    """A loss scale from the words of a command line: ``dynamic``, ``off``, or a number for a fixed one.

    Raises:
        ScaleError: for any other word, and for a number that cannot scale a loss.
    """
    word = text.strip().lower()
    if word == "dynamic":
        return Dynamic()
    if word == "off":
        return Off()
    try:
        scale = float(word)
    except ValueError:
        raise ScaleError(
            f"expected a loss scale of 'dynamic', 'off' or a positive number such as 1024, got {text!r}"
        ) from None
    return Static(scale=scale)


def _check_scale(scale: float) -> None:
    if not _is_number(scale):
        raise ScaleError(f"expected a loss scale that is a number, got {scale!r}")
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ScaleError(f"expected a positive, finite loss scale from 2**-126 to 2**127, got {scale!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _float32(value: float) -> float:
    """``value`` rounded to nearest float32, infinite where it leaves the range."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded

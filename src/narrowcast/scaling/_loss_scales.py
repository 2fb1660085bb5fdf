"""Loss scales as frozen values: ``Off``, ``Static`` and ``Dynamic``; a step returns the next value."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from typing import Protocol, Self

from narrowcast.errors import ScaleError, did_you_mean

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. Devices may flush a smaller scale to zero, and the inverse of 2**-128 or less
overflows float32."""
LARGEST_SCALE = 2.0**127
"""The largest power of two in float32."""

RULES = ("torch", "apex", "megatron")
"""Names of the rules by which a ``Dynamic`` scale moves."""
# Rules of earlier versions -> the rule to use now. The earlier rules backed off at the same overflows, but
# grew one step later after the start and after each overflow.
_REPLACED = {"deepspeed": "megatron", "deepspeed_consecutive": "apex"}


class LossScale(Protocol):
    """The interface of every loss scale: ``scale``, and ``after_step``, which returns the next value.

    >>> from narrowcast.scaling import Dynamic, LossScale
    >>> loss_scale: LossScale = Dynamic(scale=1024.0)
    >>> loss_scale.after_step(overflow=True).scale
    512.0
    """

    @property
    def scale(self) -> float:
        """The factor that the loss is multiplied by."""
        ...

    def after_step(self, *, overflow: bool) -> Self:
        """Return the loss scale for the next step.

        Args:
            overflow: whether any gradient of this step was NaN or infinite.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """Do not scale: the factor is 1 and stays 1.

    >>> from narrowcast.scaling import Off
    >>> Off().after_step(overflow=True).scale
    1.0
    """

    @property
    def scale(self) -> float:
        return 1.0

    def after_step(self, *, overflow: bool) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """Scale by a factor that never changes.

    >>> from narrowcast.scaling import Static
    >>> Static(scale=128.0).after_step(overflow=True).scale
    128.0

    Raises:
        ScaleError: at construction, unless ``scale`` is a number from 2**-126 to 2**127.
    """

    scale: float

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def after_step(self, *, overflow: bool) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """Decrease the scale at an overflow and increase it after a number of good steps, by a library's rule.

    >>> from narrowcast.scaling import Dynamic
    >>> loss_scale = Dynamic(scale=1024.0, growth_interval=2)
    >>> loss_scale = loss_scale.after_step(overflow=True)
    >>> loss_scale.scale
    512.0
    >>> loss_scale.after_step(overflow=False).after_step(overflow=False).scale
    1024.0

    Attributes:
        scale: the factor now, from ``min_scale`` to ``max_scale``; torch starts at 2**16.
        growth_factor: multiplied in after ``growth_interval`` good steps in a row; above 1.
        backoff_factor: multiplied in at an overflow once hysteresis is used up; between 0 and 1.
        growth_interval: good steps in a row before the scale grows; at least 1.
        good_steps: good steps so far since the last growth or overflow (torch's ``_growth_tracker``).
        rule: how overflows and good steps are counted, see below.
        hysteresis: number of overflows until the scale backs off; at least 1.
        hysteresis_left: how many overflows are left until then, from 0 to ``hysteresis``. None, at
            construction, stands for ``hysteresis``. ``dataclasses.replace`` keeps the present number, so pass
            ``hysteresis_left`` (or None) together with another ``hysteresis``.
        min_scale: lower limit; from 2**-126, the smallest normal float32.
        max_scale: upper limit; up to 2**127.

    Every overflow resets ``good_steps`` to 0. Apart from that the rules differ:

    - ``"torch"``: every overflow backs off; ``hysteresis`` must be 1.
    - ``"apex"``: an overflow subtracts 1 from ``hysteresis_left``, and the scale backs off when that is 0. A
      good step resets ``hysteresis_left`` to ``hysteresis``.
    - ``"megatron"``: as ``"apex"``, but only a growth resets ``hysteresis_left``.

    The float32 scale is multiplied by the factor in double precision and the product is rounded to float32,
    as in torch and apex. Megatron rounds its factors to float32 first. That gives the same for powers of two,
    and the factors that Megatron ships are such powers. If the product overflows float32, the scale does not
    grow, as in torch.

    Deviations: torch has no limits, so its scale can fall to 0, where it trains on NaN, and rise to the
    largest float32. Megatron has no upper limit.

    Source: ``torch._amp_update_scale_``; apex ``csrc/update_scale_hysteresis.cu``; Megatron-LM 0.16
    ``DynamicGradScaler.update``.

    Raises:
        ScaleError: at construction, for a field outside its range.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0
    rule: str = "torch"
    hysteresis: int = 1
    hysteresis_left: int | None = None
    min_scale: float = SMALLEST_SCALE
    max_scale: float = LARGEST_SCALE

    def __post_init__(self) -> None:
        _check_limits(self.scale, self.min_scale, self.max_scale)
        if not (_is_number(self.growth_factor) and 1.0 < self.growth_factor < math.inf):
            raise ScaleError(f"growth_factor must be above 1 and finite, got {self.growth_factor!r}")
        if not (_is_number(self.backoff_factor) and 0.0 < self.backoff_factor < 1.0):
            raise ScaleError(f"backoff_factor must be between 0 and 1, got {self.backoff_factor!r}")
        if not _is_whole(self.growth_interval) or self.growth_interval < 1:
            raise ScaleError(
                f"growth_interval must be a whole number of at least 1, got {self.growth_interval!r}"
            )
        self._check_rule()
        if not _is_whole(self.good_steps) or not 0 <= self.good_steps < self.growth_interval:
            raise ScaleError(
                f"good_steps must be a whole number from 0 to growth_interval - 1, got {self.good_steps!r}"
            )

    def after_step(self, *, overflow: bool) -> Self:
        assert self.hysteresis_left is not None  # ``_check_rule`` has replaced None
        # A scale on a device is a float32, so the products are rounded to float32.
        scale = to_float32(self.scale)
        if overflow:
            # With 1 left, this overflow is the one that backs off. With 0 left, an earlier one did, and each
            # further overflow backs off too.
            if self.hysteresis_left > 1:
                return self._moved_to(self.scale, 0, self.hysteresis_left - 1)
            lower = max(to_float32(scale * self.backoff_factor), to_float32(self.min_scale))
            # The rule of torch does not count overflows, so its ``hysteresis_left`` stays 1.
            left = 1 if self.rule == "torch" else 0
            return self._moved_to(lower, 0, left)

        good_steps = self.good_steps + 1
        if good_steps < self.growth_interval:
            # apex counts overflows in a row. Megatron counts all overflows since the last growth.
            left = self.hysteresis if self.rule == "apex" else self.hysteresis_left
            return self._moved_to(self.scale, good_steps, left)

        # The scale does not grow past float32, as in torch; counting starts again all the same.
        grown = to_float32(scale * self.growth_factor)
        if math.isinf(grown):
            return self._moved_to(self.scale, 0, self.hysteresis)
        return self._moved_to(min(grown, to_float32(self.max_scale)), 0, self.hysteresis)

    def _moved_to(self, scale: float, good_steps: int, hysteresis_left: int) -> Self:
        # This runs at each step, and a rule makes only valid values of valid ones. So leave out the
        # constructor, which would check them again.
        moved = object.__new__(type(self))
        for name in _DYNAMIC_FIELDS:
            object.__setattr__(moved, name, getattr(self, name))
        object.__setattr__(moved, "scale", scale)
        object.__setattr__(moved, "good_steps", good_steps)
        object.__setattr__(moved, "hysteresis_left", hysteresis_left)
        return moved

    def _check_rule(self) -> None:
        """Check the rule and its hysteresis; set ``hysteresis_left`` if it is None."""
        if self.rule not in RULES:
            replacement = _REPLACED.get(str(self.rule))
            if replacement is not None:
                raise ScaleError(
                    f"rule {self.rule!r} is gone: use {replacement!r}, which backs off at the same overflows "
                    "and grows after growth_interval good steps"
                )
            raise ScaleError(f"unknown rule {self.rule!r}. {did_you_mean(str(self.rule), RULES)}")
        if not _is_whole(self.hysteresis) or self.hysteresis < 1:
            raise ScaleError(f"hysteresis must be a whole number of at least 1, got {self.hysteresis!r}")
        if self.rule == "torch" and self.hysteresis != 1:
            raise ScaleError(
                f"rule 'torch' backs off at every overflow: hysteresis must be 1, got {self.hysteresis!r}. "
                f"Rules with hysteresis: {', '.join(RULES[1:])}."
            )
        # None is the default: a new loss scale has all of its overflows left. A saved state has a number.
        if self.hysteresis_left is None:
            object.__setattr__(self, "hysteresis_left", self.hysteresis)
        elif not _is_whole(self.hysteresis_left) or not 0 <= self.hysteresis_left <= self.hysteresis:
            raise ScaleError(
                f"hysteresis_left must be a whole number from 0 to hysteresis, here {self.hysteresis}, "
                f"got {self.hysteresis_left!r}"
            )


_DYNAMIC_FIELDS = tuple(field.name for field in fields(Dynamic))


def parse(text: str) -> LossScale:
    """Parse a loss scale from a command line: ``dynamic``, ``off``, or a number for a fixed scale.

    Raises:
        ScaleError: for any other word, and for a number outside 2**-126 to 2**127.
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


def check_loss_scale(loss_scale: LossScale) -> LossScale:
    """Return ``loss_scale``; raise ScaleError unless it is an ``Off``, a ``Static`` or a ``Dynamic``."""
    if not isinstance(loss_scale, Off | Static | Dynamic):
        raise ScaleError(
            "expected a loss scale of narrowcast.scaling, such as Dynamic(...) or Static(scale=8.0), got "
            f"{loss_scale!r}"
        )
    return loss_scale


def _check_scale(scale: float, name: str = "loss scale") -> None:
    if not _is_number(scale):
        raise ScaleError(f"expected a {name} that is a number, got {scale!r}")
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ScaleError(f"expected a positive, finite {name} from 2**-126 to 2**127, got {scale!r}")


def _check_limits(scale: float, min_scale: float, max_scale: float) -> None:
    """Raise ScaleError if any of the three is not a valid scale, or ``scale`` is outside the limits.

    ``scale`` is compared with the limits as float32: if it was read from a device, it was rounded to float32,
    and so may lie past a limit by the rounding.
    """
    _check_scale(scale)
    _check_scale(min_scale, "min_scale")
    _check_scale(max_scale, "max_scale")
    if not min_scale <= max_scale:
        raise ScaleError(f"min_scale must be at most max_scale, got {min_scale!r} and {max_scale!r}")
    if not to_float32(min_scale) <= to_float32(scale) <= to_float32(max_scale):
        raise ScaleError(
            f"scale must be from min_scale to max_scale, here {min_scale!r} to {max_scale!r}, got {scale!r}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def to_float32(value: float) -> float:
    """Round to the nearest float32, and to an infinity beyond the range of float32."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded

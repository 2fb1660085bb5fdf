"""What every loss scale answers, and the two that never move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from narrowcast.scaling._range import check_scale


class LossScale(Protocol):
    """What every loss scale answers. ``scale`` is the factor that a loss is multiplied by."""

    @property
    def scale(self) -> float: ...

    def after_step(self, *, overflow: bool, amax: float | None = None) -> Self:
        """The loss scale for the next step.

        Args:
            overflow: whether any gradient of this step was NaN or infinite.
            amax: the largest absolute value among this step's unscaled gradients, before clipping; only
                ``LogMax`` reads it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """No scaling: the factor is 1 and stays 1."""

    @property
    def scale(self) -> float:
        return 1.0

    def after_step(self, *, overflow: bool, amax: float | None = None) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """A factor that never moves.

    Raises:
        ScaleError: at construction, unless ``scale`` is a normal, positive, finite float32.
    """

    scale: float

    def __post_init__(self) -> None:
        check_scale(self.scale)

    def after_step(self, *, overflow: bool, amax: float | None = None) -> Self:
        return self

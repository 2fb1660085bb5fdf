"""The certificate as rows with a dot each on one logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.report._rows import ONE_LIMIT, short, shortened

MOST_ROWS = 200
_LONGEST_NAME = 160
_LOWEST, _HIGHEST = -6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One parameter: ``at`` is its place on the axis in percent; None: there is nothing to show."""

    name: str
    shape: str
    error_over_noise: str
    relative_error: str
    at: float | None
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """What is shown of a certificate.

    Attributes:
        judged: those that were judged, worst first.
        aside: those that were not, with the reason.
        more_judged: how many judged ones are not shown; they are better than all that are.
        more_aside: how many others are not shown.
        ticks: labels of the axis and their places in percent.
        limit_at: place of the limit in percent.
        above: how many judged ones are above the limit.
    """

    judged: tuple[Dot, ...]
    aside: tuple[Dot, ...]
    more_judged: int
    more_aside: int
    ticks: tuple[tuple[str, float], ...]
    limit_at: float
    above: int


def dots(certificate: Mapping[str, Any]) -> Dots:
    """The parameters of a certificate (of a summary: NaN and infinities are text), worst first."""
    parameters = certificate["parameters"]
    judged = sorted((p for p in parameters if p["judged"]), key=_badness, reverse=True)
    aside = [p for p in parameters if not p["judged"]]
    exponents = [_exponent(p) for p in judged]
    known = [exponent for exponent in exponents if exponent is not None]
    low = max(_LOWEST, min([math.floor(x) for x in known] + [-3]))
    high = min(_HIGHEST, max([math.ceil(x) for x in known] + [0]))

    def place(exponent: float) -> float:
        return round(100 * (min(max(exponent, low), high) - low) / (high - low), 2)

    def dot(parameter: Mapping[str, Any]) -> Dot:
        exponent = _exponent(parameter)
        return Dot(
            name=shortened(parameter["name"], _LONGEST_NAME) or "(no name)",
            shape=_shape(parameter["shape"]),
            error_over_noise=short(parameter["error_over_noise"]),
            relative_error=short(parameter["relative_error"]),
            at=None if exponent is None else place(exponent),
            state=_state(parameter),
            reason=shortened(parameter["reason"] or "", 2 * _LONGEST_NAME),
        )

    return Dots(
        judged=tuple(map(dot, judged[:MOST_ROWS])),
        aside=tuple(map(dot, aside[:MOST_ROWS])),
        more_judged=max(0, len(judged) - MOST_ROWS),
        more_aside=max(0, len(aside) - MOST_ROWS),
        ticks=tuple((f"{10.0**x:g}", place(x)) for x in range(low, high + 1)),
        limit_at=place(math.log10(ONE_LIMIT)),
        above=sum(_state(p) == "above" for p in judged),
    )


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def _badness(parameter: Mapping[str, Any]) -> float:
    value = _number(parameter["error_over_noise"])
    if value is None:
        return -1.0
    return math.inf if math.isnan(value) else value


def _exponent(parameter: Mapping[str, Any]) -> float | None:
    value = _number(parameter["error_over_noise"])
    if value is None:
        return None
    if math.isnan(value) or value == math.inf:
        return float(_HIGHEST)
    return math.log10(value) if value > 0 else float(_LOWEST)


def _state(parameter: Mapping[str, Any]) -> str:
    if not parameter["judged"]:
        return "not judged"
    value = _number(parameter["error_over_noise"])
    if value is None:
        return "no noise"
    return "below" if value <= ONE_LIMIT else "above"


def _shape(shape: list[int]) -> str:
    if not shape:
        return "scalar"
    said = " x ".join(str(size) for size in shape[:6])
    return said + (" ..." if len(shape) > 6 else "")

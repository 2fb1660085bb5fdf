"""Long series of numbers made short enough to draw, with their extremes and gaps kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LARGEST_DRAWN = 1e100
_SMALLEST_BINNED = 1e-12
_TREND_POINTS = 100
_TREND_FROM = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What is drawn of one series.

    Attributes:
        x: positions of the points.
        y: their values; None breaks the line, where values were not finite.
        trend_x: positions of the trend.
        trend_y: mean over each hundredth of the series; empty for a short one, which is its own trend.
        gaps_x: positions of values that cannot be drawn, at most as many as points.
        gaps: how many values cannot be drawn: NaN, infinities, and what is beyond 1e100.
        first_gap: position of the first of them.
        total: how many values there were.
    """

    x: list[float]
    y: list[float | None]
    trend_x: list[float]
    trend_y: list[float]
    gaps_x: list[float]
    gaps: int
    first_gap: float | None
    total: int


def curve(x: Sequence[float], y: Sequence[float], most: int) -> Curve:
    """``y`` over ``x`` in at most ``most`` points, the lowest and highest of each stretch among them."""
    gaps = [at for at, value in zip(x, y, strict=True) if not drawable(value)]
    size = max(1, math.ceil(len(y) / max(1, most // 3)))
    kept_x: list[float] = []
    kept_y: list[float | None] = []
    for start in range(0, len(y), size if len(y) > most else 1):
        stretch = range(start, min(start + (size if len(y) > most else 1), len(y)))
        for index in _extremes(y, stretch):
            kept_x.append(x[index])
            kept_y.append(_digits(y[index]) if drawable(y[index]) else None)
    trend = _trend(x, y)
    every = max(1, math.ceil(len(gaps) / max(1, most // 4)))
    return Curve(
        x=kept_x,
        y=kept_y,
        trend_x=[at for at, _ in trend],
        trend_y=[value for _, value in trend],
        gaps_x=gaps[::every],
        gaps=len(gaps),
        first_gap=gaps[0] if gaps else None,
        total=len(y),
    )


def drawable(value: float) -> bool:
    """Whether a plot can show ``value``: axes that reach near the largest float overflow."""
    return abs(value) <= _LARGEST_DRAWN  # False for NaN


def _extremes(y: Sequence[float], stretch: range) -> list[int]:
    """Places of the lowest and the highest value, and of the first that cannot be drawn, in order."""
    finite = [index for index in stretch if drawable(y[index])]
    broken = next((index for index in stretch if not drawable(y[index])), None)
    found = {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)} if finite else set()
    return sorted(found | ({broken} if broken is not None else set()))


def _trend(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    if len(y) < _TREND_FROM:
        return []
    found = []
    for part in range(_TREND_POINTS):
        stretch = range(part * len(y) // _TREND_POINTS, (part + 1) * len(y) // _TREND_POINTS)
        finite = [y[index] for index in stretch if drawable(y[index])]
        if finite:
            middle = (x[stretch[0]] + x[stretch[-1]]) / 2
            found.append((_digits(middle), _digits(math.fsum(finite) / len(finite))))
    return found


def _digits(value: float) -> float:
    """Six digits: more than a screen has pixels."""
    return float(f"{value:.6g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Shares of values in bins that several series have in common.

    Attributes:
        edges: one more than bins.
        shares: of each series, the share of its values in each bin, in percent.
        outside: how many values lie outside of all bins.
        logarithmic: whether the bins are equally wide on a logarithmic axis.
    """

    edges: list[float]
    shares: list[list[float]]
    outside: int
    logarithmic: bool


def histogram(series: Sequence[Sequence[float]], bins: int = 60) -> Histogram | None:
    """The series in common bins, without the fastest 0.5 % and the slowest 2.5 %.

    Returns:
        None where there is nothing to show.
    """
    binned = [value for values in series for value in values if _SMALLEST_BINNED < value <= _LARGEST_DRAWN]
    pooled = sorted(binned)
    if not pooled:
        return None
    low, high = pooled[int(len(pooled) * 0.005)], pooled[min(len(pooled) - 1, int(len(pooled) * 0.975))]
    logarithmic = high > 20 * low
    if high <= low * 1.000001:
        low, high = low * 0.9, low * 1.1
    to, back = (math.log, math.exp) if logarithmic else (float, float)
    step = (to(high) - to(low)) / bins
    edges = [back(to(low) + step * place) for place in range(bins + 1)]
    shares, outside = [], 0
    for values in series:
        counts = [0] * bins
        for value in values:
            if not low <= value <= high:
                outside += 1
                continue
            counts[min(bins - 1, max(0, int((to(value) - to(low)) / step)))] += 1
        shares.append([_digits(100 * found / max(1, len(values))) for found in counts])
    return Histogram(edges=list(map(_digits, edges)), shares=shares, outside=outside, logarithmic=logarithmic)

"""Figures of a page: curves of a capture as SVG paths and tick positions.

Positions are relative, so that one figure fits any width: paths lie in a box of 1000 by 1000 that the page
stretches (lines keep their widths), ticks are in percent. The templates add titles and captions.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.observe.capture import TimedRun
from narrowcast.report._table import NAMES
from narrowcast.report._text import milliseconds, shortened, site_name

NO_SEED = -1
"""The seed of a run that had none."""

_BOX = 1000
# More than a wide screen has pixels for, two to a stretch of the curve.
_MOST_POINTS = 900
_FEWEST_POINTS = 120
_POINTS_TOGETHER = 24_000
_MOST_MARKS = 150
_MOST_RUNS = 24
_MOST_SITES = 12
_WIDE_RANGE = 20.0
_TREND_POINTS = 100
_TREND_FROM = 200
_BINS = 60
# Sums and differences of larger values overflow a float.
_LARGEST_DRAWN = 1e100
_SMALLEST_BINNED = 1e-12
_SMALLEST_RANGE = 1e-300
_SMALLEST_IN_LOG = 1e-290
# A step of thirty years is not a measurement, and would flatten the rest of its axis.
_LONGEST_S = 1e9
_MOST_DOTS = 2_000
_LOWEST_ERROR, _HIGHEST_ERROR = 1e-6, 1e3
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

_Point = tuple[float, float | None]
_Losses = list[tuple[float, float]]
_Ticks = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One path of a figure: ``style`` names its CSS classes, ``title`` is what a pointer on it shows."""

    style: str
    path: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure.

    Attributes:
        name: identifier of its element: ``"plot-"``, its kind, and the number of a call site.
        x_ticks, y_ticks: text and position in percent.
        marks: in the order in which they are drawn.
        legend: CSS class and text of each entry.
        facts: numbers and names in its title and caption.
    """

    name: str
    x_ticks: _Ticks
    y_ticks: _Ticks
    marks: list[Mark]
    legend: list[tuple[str, str]]
    facts: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """``"loss"``, ``"difference"``, ``"times"``, ``"scale"`` or ``"errors"``, for the template."""
        return self.name.split("-")[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A series thinned out to draw.

    Attributes:
        points: position and value; None breaks the line.
        trend: mean over each hundredth of a long series; empty for a short one.
        gaps: positions of values that cannot be drawn: NaN, infinities, and beyond 1e100.
    """

    points: list[_Point]
    trend: list[_Point]
    gaps: list[float]


def run_name(run: TimedRun) -> str:
    """The run's folder, which contains format and number, and its seed where it had one."""
    return shortened(run.name, 24) + (f" (seed {run.seed})" if run.seed != NO_SEED else "")


def drawable(value: float) -> bool:
    """Whether ``value`` can be drawn; NaN and infinities cannot."""
    return abs(value) <= _LARGEST_DRAWN


def curve(x: Sequence[float], y: Sequence[float], most: int = _MOST_POINTS) -> Curve:
    """Thin out ``y`` over ``x`` to ``most`` points; the lowest and highest of each stretch stay."""
    size = math.ceil(len(y) / max(1, most // 3)) if len(y) > most else 1
    points: list[_Point] = []
    for start in range(0, len(y), size):
        for index in _extremes(y, range(start, min(start + size, len(y)))):
            points.append((x[index], y[index] if drawable(y[index]) else None))
    gaps = [at for at, value in zip(x, y, strict=True) if not drawable(value)]
    return Curve(points=points, trend=_trend(x, y), gaps=gaps)


def _extremes(y: Sequence[float], stretch: range) -> list[int]:
    """Places of the lowest and the highest value, and of the first that cannot be drawn, in order."""
    finite = [index for index in stretch if drawable(y[index])]
    broken = [index for index in stretch if not drawable(y[index])][:1]
    found = {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)} if finite else set()
    return sorted(found.union(broken))


def _trend(x: Sequence[float], y: Sequence[float]) -> list[_Point]:
    found: list[_Point] = []
    for part in range(_TREND_POINTS if len(y) >= _TREND_FROM else 0):
        stretch = range(part * len(y) // _TREND_POINTS, (part + 1) * len(y) // _TREND_POINTS)
        finite = [y[index] for index in stretch if drawable(y[index])]
        if finite:
            found.append(((x[stretch[0]] + x[stretch[-1]]) / 2, math.fsum(finite) / len(finite)))
    return found


class Axis:
    """Maps values to 0..1, on a linear scale or on a logarithmic one of ``base``, and chooses ticks."""

    def __init__(self, values: Iterable[float], *, base: float | None = None, margin: float = 0.04) -> None:
        self._base = base
        known = [self._to(value) for value in values if value > 0 or base is None]
        self._low, self._high = min(known, default=0.0), max(known, default=1.0)
        size = max(abs(self._low), abs(self._high))
        if self._high - self._low <= max(1e-9 * size, _SMALLEST_RANGE):
            spread = 0.5 if base else size / 10 if size > 1e-9 else 1.0
            self._low, self._high = self._low - spread, self._high + spread
        room = margin * (self._high - self._low)
        self._low, self._high = self._low - room, self._high + room

    def _to(self, value: float) -> float:
        return value if self._base is None else math.log(max(value, _SMALLEST_IN_LOG), self._base)

    def at(self, value: float) -> float:
        """Position of ``value``, held within the axis."""
        if self._base is not None and value <= 0:
            return 0.0
        return min(1.0, max(0.0, (self._to(value) - self._low) / (self._high - self._low)))

    def ticks(self) -> _Ticks:
        """Label and position in percent of round values, or of powers of the base."""
        powers = range(math.ceil(self._low), math.floor(self._high) + 1) if self._base else range(0)
        if self._base and len(powers) > 1:
            every = math.ceil(len(powers) / 7)
            chosen = [(self._power(n), self._base**n) for n in powers[::every]]
        else:
            low, high = (self._base**end if self._base else end for end in (self._low, self._high))
            chosen = _round_values(low, high)
        return tuple((text, round(100 * self.at(value), 2)) for text, value in chosen)

    def _power(self, exponent: int) -> str:
        if self._base == 10 and -3 <= exponent <= 4:
            return f"{10.0**exponent:g}"
        return f"{self._base:g}{str(exponent).translate(_SUPERSCRIPT)}"


def _round_values(low: float, high: float) -> list[tuple[str, float]]:
    """Three to seven multiples of 1, 2 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(size * times for times in (1, 2, 5, 10, 20) if (high - low) / (size * times) <= 6)
    values = [place * step for place in range(math.ceil(low / step), math.floor(high / step) + 1)]
    if step >= 1e-4 and max(map(abs, values), default=0.0) < 1e6:
        return [(f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}", value) for value in values]
    return [(f"{value:.3g}", value) for value in values]


def svg_path(points: Iterable[_Point], x: Axis, y: Axis, *, stepped: bool = False) -> str:
    """Draw a line through ``points``, broken where a value is None; ``stepped``: with level steps."""
    parts, drawing = [], False
    for at, value in points:
        if value is None:
            drawing = False
            continue
        across, down = f"{_BOX * x.at(at):.1f}", f"{_BOX * (1 - y.at(value)):.1f}"
        # With round ends a line of no length is a dot, so that a lone point can be seen.
        start = f"M{across} {down}h0"
        parts.append((f"H{across}V{down}" if stepped else f"L{across} {down}") if drawing else start)
        drawing = True
    return "".join(parts)


def _every(found: Sequence[float]) -> Sequence[float]:
    """At most ``_MOST_MARKS`` of them, evenly."""
    return found[:: max(1, math.ceil(len(found) / _MOST_MARKS))]


def loss_figures(runs: Sequence[TimedRun], first: str | None = None) -> tuple[list[Figure], int]:
    """Draw the losses of each call site, and what differs between formats; return how many were too many.

    ``first``: the call site that is drawn first, since it is the one that is judged.
    """
    seen = [loss["site"] for run in runs for loss in run.capture.of("loss")]
    sites = list(dict.fromkeys(seen))
    if first in sites:
        sites.remove(first)
        sites.insert(0, first)
    shown = runs[:_MOST_RUNS]
    most = _POINTS_TOGETHER // max(1, len(shown) * min(len(sites), _MOST_SITES))
    most = max(_FEWEST_POINTS, min(_MOST_POINTS, most))
    figures: list[Figure] = []
    for place, site in enumerate(sites[:_MOST_SITES]):
        figures.append(_loss_figure(place, site, shown, most))
        difference = _difference_figure(place, site, shown, most)
        figures += [] if difference is None else [difference]
    return figures, max(0, len(sites) - _MOST_SITES)


def _axes(
    curves: Iterable[Curve], *, from_zero: bool = False, base: float | None = None
) -> tuple[Axis, Axis]:
    """Return the axes of curves over backward passes; ``from_zero``: the vertical one contains 0."""
    points = [point for one in curves for point in one.points]
    values = [value for _, value in points if value is not None and (base is None or value > 0)]
    return Axis([0, *(at for at, _ in points)], margin=0), Axis([0] * from_zero + values, base=base)


def _loss_figure(place: int, site: str, runs: Sequence[TimedRun], most: int) -> Figure:
    curves: list[tuple[TimedRun, Curve]] = []
    not_finite = []
    for run in runs:
        losses = _losses(run, site)
        if not losses:
            continue
        drawn = curve([at for at, _ in losses], [value for _, value in losses], most)
        curves.append((run, drawn))
        if drawn.gaps:
            not_finite.append((run_name(run), len(drawn.gaps), len(losses), f"{drawn.gaps[0]:.0f}"))
    finite = [value for _, drawn in curves for _, value in drawn.points if value is not None]
    wide = bool(finite) and min(finite) > 0 and max(finite) > _WIDE_RANGE * min(finite)
    x, y = _axes((drawn for _, drawn in curves), base=10 if wide else None)
    marks: list[Mark] = []
    for run, drawn in curves:
        faint = " faint" if drawn.trend else ""
        title = run_name(run)
        marks.append(Mark(style=f"{run.format}{faint}", path=svg_path(drawn.points, x, y), title=title))
        if drawn.trend:
            marks.append(Mark(style=run.format, path=svg_path(drawn.trend, x, y), title=title))
        bars = "".join(f"M{_BOX * x.at(at):.1f} {_BOX}v-30" for at in _every(drawn.gaps))
        marks += [Mark(style=f"{run.format} gap", path=bars)] if bars else []
    counts = {key: sum(run.format == key for run, _ in curves) for key in NAMES}
    return Figure(
        name=f"plot-loss-{place}",
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        marks=marks,
        legend=[(key, NAMES[key]) for key, runs_of in counts.items() if runs_of],
        facts={
            "site": site_name(site),
            "counts": [(NAMES[key], runs_of) for key, runs_of in counts.items() if runs_of],
            "trend": any(drawn.trend for _, drawn in curves),
            "not_finite": not_finite,
        },
    )


def _difference_figure(place: int, site: str, runs: Sequence[TimedRun], most: int) -> Figure | None:
    """Mixed minus FP32 from one seed, and FP32 from other seeds minus FP32 from the first; None: no pair."""
    fp32, mixed = (_first_of_each_seed(site, runs, key) for key in NAMES)
    pairs = [(f"seed {seed}, mixed - FP32", fp32[seed], mixed[seed]) for seed in fp32 if seed in mixed]
    if not pairs:
        return None
    base = next(iter(fp32))
    others = [(f"FP32, seed {seed} - {base}", fp32[base], fp32[seed]) for seed in fp32 if seed != base]
    drawn = [
        (key, title, curve(*_difference(under, over), most))
        for key, lines in (("fp32", others), ("mixed", pairs))
        for title, under, over in lines
    ]
    x, y = _axes((one for _, _, one in drawn), from_zero=True)
    legend = [("fp32", "another seed in FP32")] if others else []
    return Figure(
        name=f"plot-difference-{place}",
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        marks=[
            Mark(style=f"{key} thin", path=svg_path(one.points, x, y), title=title)
            for key, title, one in drawn
        ],
        legend=[*legend, ("mixed", "mixed precision")],
        facts={"site": site_name(site), "others": bool(others)},
    )


def _first_of_each_seed(site: str, runs: Sequence[TimedRun], key: str) -> dict[int, _Losses]:
    """The losses of a format's first run from each seed, with the backwards that they came from."""
    found: dict[int, _Losses] = {}
    for run in runs:
        losses = _losses(run, site) if run.format == key else []
        if losses:
            found.setdefault(run.seed, losses)
    return found


def _losses(run: TimedRun, site: str) -> _Losses:
    return [(loss["backward"], loss["value"]) for loss in run.capture.of("loss") if loss["site"] == site]


def _difference(under: _Losses, over: _Losses) -> tuple[list[float], list[float]]:
    both = list(zip(under, over, strict=False))  # one may have been cut short
    return [at for (at, _), _ in both], [b - a for (_, a), (_, b) in both]


def histogram(series: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]], int] | None:
    """Count the series in common bins, without the fastest 0.5 % and the slowest 2.5 %.

    Returns:
        The edges of the bins, of each series the share of each bin in percent, and how many values lie
        outside; None if there are no values.
    """
    pooled = sorted(v for values in series for v in values if _SMALLEST_BINNED < v <= _LARGEST_DRAWN)
    if not pooled:
        return None
    low, high = pooled[int(len(pooled) * 0.005)], pooled[min(len(pooled) - 1, int(len(pooled) * 0.975))]
    if high <= low * 1.000001:
        low, high = low * 0.9, low * 1.1
    step = (high - low) / _BINS
    shares, outside = [], 0
    for values in series:
        counts = Counter(
            min(_BINS - 1, int((value - low) / step)) for value in values if low <= value <= high
        )
        outside += len(values) - counts.total()
        shares.append([100 * counts[place] / max(1, len(values)) for place in range(_BINS)])
    return [low + step * place for place in range(_BINS + 1)], shares, outside


def time_figure(runs: Sequence[TimedRun], times_s: Sequence[Sequence[float]], what: str) -> Figure | None:
    """Draw how long ``"steps"`` or ``"forward calls"`` took in each run, as a histogram of each format."""
    by_format: dict[str, list[float]] = {key: [] for key in NAMES}
    for run, times in zip(runs, times_s, strict=True):
        by_format[run.format] += [1e3 * time for time in times if time < _LONGEST_S]
    present = {key: values for key, values in by_format.items() if values}
    found = histogram(list(present.values()))
    if found is None:
        return None
    edges, shares, outside = found
    x, y = Axis(edges, margin=0), Axis([0, *(share for of_format in shares for share in of_format)])
    bars = [[(edges[0], 0.0), *zip(edges, [*of_format, 0.0], strict=True)] for of_format in shares]
    medians = {key: milliseconds(statistics.median(values) / 1e3) for key, values in present.items()}
    return Figure(
        name="plot-times",
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        marks=[
            Mark(style=f"{key} area", path=svg_path(points, x, y, stepped=True))
            for key, points in zip(present, bars, strict=True)
        ],
        legend=[(key, f"{NAMES[key]} {median}") for key, median in medians.items()],
        facts={
            "what": what,
            "outside": outside,
            "medians": [(NAMES[key], medians[key], len(values)) for key, values in present.items()],
        },
    )


def scale_figure(runs: Sequence[TimedRun]) -> Figure | None:
    """Draw the loss scale of mixed runs and the steps that they skipped; None: no scale, nothing skipped."""
    steps_of = [(run, run.capture.of("step")) for run in runs if run.format == "mixed"]
    drawn = []
    for run, steps in steps_of:
        if any(step["scale"] is not None or step["skipped"] for step in steps):
            scale = [math.nan if step["scale"] is None else step["scale"] for step in steps]
            skipped = [place for place, step in enumerate(steps, start=1) if step["skipped"]]
            drawn.append((run, curve(range(1, len(scale) + 1), scale), scale, skipped))
    drawn = drawn[:_MOST_RUNS]
    if not drawn:
        return None
    x, y = _axes((one for _, one, _, _ in drawn), base=2)
    marks: list[Mark] = []
    for place, (run, one, scale, skipped) in enumerate(drawn):
        style = f"mixed dash-{place % 3}"
        marks.append(
            Mark(style=style, path=svg_path(one.points, x, y, stepped=True), title=shortened(run.name, 24))
        )
        known = [(at, scale[int(at) - 1]) for at in _every(skipped) if drawable(scale[int(at) - 1])]
        dots = "".join(f"M{_BOX * x.at(at):.1f} {_BOX * (1 - y.at(v)):.1f}h0" for at, v in known)
        marks += [Mark(style="fail dots", path=dots)] if dots else []
    return Figure(
        name="plot-scale",
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        marks=marks,
        legend=[("mixed", "loss scale"), ("fail", "skipped step")],
        facts={
            "runs": [
                (run_name(run), len(skipped), len(scale), skipped[:8]) for run, _, scale, skipped in drawn
            ]
        },
    )


def error_axis(errors: Iterable[float]) -> Axis:
    """Return a logarithmic axis of whole decades that holds the errors, and 1e-3 to 1."""
    powers = [10.0 ** math.floor(math.log10(error)) for error in errors]
    return Axis([*powers, *(10 * power for power in powers), 1e-3, 1.0], base=10, margin=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnError:
    """An error; ``state`` is ``"kept"``, ``"lost"``, or ``"exempt"``: beyond a limit, but not counted."""

    value: float | str | None
    state: str = "kept"


_STYLE_OF_STATE = {"kept": "mixed dots", "exempt": "exempt", "lost": "fail cross"}


def error_figure(
    what: str,
    key: str,
    total: DrawnError,
    single: Sequence[DrawnError],
    limits: Sequence[float],
    *,
    total_exempt: str | None = None,
    exempt: Sequence[str] = (),
) -> Figure | None:
    """Draw errors as dots: of all together, and of each parameter; None: no total.

    ``limits`` are that of the total and that of a parameter, where they have one. ``total_exempt`` and
    ``exempt``: why the total and some parameters beyond them do not count.
    """
    if total.value is None:
        return None
    at_total = held_error(float(total.value))
    every = [(held_error(float(error.value)), error.state) for error in single if error.value is not None]
    x = error_axis([at_total, *(error for error, _ in every)])
    rows = [(250, 250), (720, 200)] if every else [(500, 400)]
    marks = [
        Mark(style="limit", path=f"M{_BOX * x.at(limit):.1f} {middle - half}v{2 * half}")
        for limit, (middle, half) in zip(limits, rows, strict=False)
    ]
    for state, style in _STYLE_OF_STATE.items():
        # Spread over five heights, so that equal errors do not cover each other.
        places = [
            (_BOX * x.at(error), 580 + 70 * (place % 5))
            for place, (error, of) in enumerate(every)
            if of == state
        ]
        path = "".join(f"M{at:.1f} {down}h0" for at, down in places[:_MOST_DOTS])
        if path:
            marks += _dots(style, path)
    path = f"M{_BOX * x.at(at_total):.1f} {rows[0][0]}h0"
    marks += _dots("exempt total" if total.state == "exempt" else "mixed total", path)
    legend = [("mixed-dot", "mixed precision")]
    if total_exempt or exempt:
        legend.append(("exempt-dot", "beyond the limit, not counted"))
    if limits:
        legend.append(("limit", "limit"))
    return Figure(
        name="plot-errors",
        x_ticks=x.ticks(),
        y_ticks=(("together", 75.0), ("each", 28.0)) if every else (("together", 50.0),),
        marks=marks,
        legend=legend,
        facts={
            "what": what,
            "of": key.replace("_", " "),
            "total": total.value,
            "limits": tuple(limits),
            "count": len(single),
            "lost": sum(error.state == "lost" for error in single),
            "total_exempt": total_exempt,
            "exempt": list(exempt),
            "worst": max((float(error.value) for error in single if error.value is not None), default=None),
        },
    )


def _dots(style: str, path: str) -> list[Mark]:
    """Draw dots; those that do not count are rings, made of a dot of the card's colour on a larger one."""
    marks = [Mark(style=style, path=path)]
    if style.startswith("exempt"):
        marks.append(Mark(style=f"{style} hole", path=path))
    return marks


def held_error(error: float) -> float:
    """Return an error within what the axis shows; NaN at its upper end."""
    return _HIGHEST_ERROR if math.isnan(error) else min(_HIGHEST_ERROR, max(_LOWEST_ERROR, error))

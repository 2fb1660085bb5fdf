"""Figures of a page: curves of a capture as SVG paths and tick positions.

Positions are relative, so that one figure fits any width: paths lie in a box of 1000 by 1000 that the page
stretches (lines keep their widths), ticks are in percent. The templates add titles and captions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from narrowcast.capture import OUTPUT_LIMIT, PARAMETER_LIMIT, TOTAL_LIMIT, TimedRun
from narrowcast.report._statistics import mean
from narrowcast.report._table import NAMES, exemption, total_exemption
from narrowcast.report._text import milliseconds, plural, shortened, site_name

NO_SEED = -1
"""The seed of a run that had none."""

_BOX = 1000
_MOST_POINTS = 300
_MOST_SITES = 6
_MOST_TICKS = 7
# Losses whose largest is more than this factor above their smallest are drawn on a logarithmic axis.
_WIDE_RANGE = 20.0
_MOST_DOTS = 2_000
_MOST_EXEMPT = 3
# Ends of the axis of errors, which may be zero or infinite.
_LOWEST_ERROR, _HIGHEST_ERROR = 1e-6, 1e3

_Point = tuple[float, float | None]
_Ticks = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One path of a figure: ``style`` names its CSS classes, ``title`` is what a pointer on it shows."""

    style: str
    path: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What the template needs to draw one figure.

    Attributes:
        kind: ``"loss"``, ``"speedup"`` or ``"errors"``, for the template.
        name: identifier of its element.
        x_ticks, y_ticks: text and position in percent.
        marks: in the order in which they are drawn.
        legend: CSS class and text of each entry.
        facts: numbers and names in its title and caption.
    """

    kind: str
    name: str
    x_ticks: _Ticks
    y_ticks: _Ticks
    marks: list[Mark]
    legend: list[tuple[str, str]]
    facts: Mapping[str, Any]


class Axis:
    """Maps values to 0..1, on a linear or a logarithmic scale, and chooses ticks."""

    def __init__(self, values: Iterable[float], *, log: bool = False, margin: float = 0.04) -> None:
        self._log = log
        scaled = list(map(self._scaled, values))
        low, high = min(scaled, default=0.0), max(scaled, default=1.0)

        # Values that are all the same stand in the middle.
        size = max(abs(low), abs(high))
        if high - low <= 1e-9 * size:
            half = size / 10 or 1.0  # 1.0: all are 0
            low, high = low - half, high + half

        # Lines at the ends of the range are not cut by the frame.
        room = margin * (high - low)
        self._low, self._high = low - room, high + room

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def at(self, value: float) -> float:
        """Return where ``value`` is: 0 at the low end of the axis, 1 at its high end."""
        return (self._scaled(value) - self._low) / (self._high - self._low)

    def ticks(self) -> _Ticks:
        """Return label and position in percent of round values, or of powers of ten."""
        if not self._log:
            values = _round_values(self._low, self._high)
        else:
            values = self._powers()
            # Less than two decades may hold a single power of ten.
            if len(values) < 2:
                values = _round_values(10**self._low, 10**self._high)
        return tuple((label, round(100 * self.at(value), 2)) for label, value in values)

    def _powers(self) -> list[tuple[str, float]]:
        powers = range(math.ceil(self._low), math.floor(self._high) + 1)
        every = max(1, math.ceil(len(powers) / _MOST_TICKS))
        return [(f"{10.0**power:g}", 10.0**power) for power in powers[::every]]


def _round_values(low: float, high: float) -> list[tuple[str, float]]:
    """Return two to seven multiples of 1, 2 or 5 times a power of ten."""
    # ``size`` is a power of ten that fits between ``low`` and ``high`` five to fifty times. The step is the
    # smallest of four multiples of it that fits at most six times; the largest of them always does.
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    steps = (size, 2 * size, 5 * size, 10 * size)
    step = next(step for step in steps if (high - low) / step <= 6)

    # Labels have as many decimals as the step.
    power_of_step = math.floor(math.log10(step) + 1e-9)
    form = f".{max(0, -power_of_step)}f"
    # For very small or large values that would be too many digits: their labels have as many significant
    # digits as tell neighbours apart.
    largest = max(abs(low), abs(high))
    if step < 1e-4 or largest >= 1e6:
        digits = math.floor(math.log10(largest)) - power_of_step + 1
        form = f".{max(3, digits)}g"
    places = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [(f"{place * step:{form}}", place * step) for place in places]


def svg_path(points: Iterable[_Point], x: Axis, y: Axis) -> str:
    """Draw a line through ``points``, broken where a value is None."""
    parts, is_drawing = [], False
    for at, value in points:
        if value is None:
            is_drawing = False
            continue
        across, down = f"{_BOX * x.at(at):.1f}", f"{_BOX * (1 - y.at(value)):.1f}"
        if is_drawing:
            parts.append(f"L{across} {down}")
        else:
            # With round ends a line of no length is a dot, so that a lone point can be seen.
            parts.append(f"M{across} {down}h0")
        is_drawing = True
    return "".join(parts)


def run_name(run: TimedRun) -> str:
    """Return the name of the run's folder, such as ``mixed-1``, with its seed if it had one."""
    name = shortened(run.name, 24)
    if run.seed == NO_SEED:
        return name
    return f"{name} (seed {run.seed})"


# ---- losses


def loss_figures(runs: Sequence[TimedRun], first: str | None = None) -> tuple[list[Figure], int]:
    """Draw the losses of each call site, up to six; also return how many call sites were left out.

    ``first``: the call site that is drawn first, since it is the one that is judged.
    """
    sites: dict[str, None] = {}
    for run in runs:
        for loss in run.capture.of("loss"):
            sites[loss["site"]] = None
    # Sorting is stable, so the other call sites stay in the order of their first loss.
    ordered = sorted(sites, key=lambda site: site != first)
    figures = [_loss_figure(place, site, runs) for place, site in enumerate(ordered[:_MOST_SITES])]
    return figures, max(0, len(ordered) - _MOST_SITES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gaps:
    """Why the curve of one run is broken: its losses that are not finite.

    Attributes:
        run: its name.
        losses, not_finite: how many it has, and how many of these are not finite.
        first_pass: number of the first backward pass with such a loss.
    """

    run: str
    losses: int
    not_finite: int
    first_pass: int


def _loss_figure(place: int, site: str, runs: Sequence[TimedRun]) -> Figure:
    curves: list[tuple[TimedRun, list[_Point]]] = []
    counts = Counter[str]()
    gaps: list[_Gaps] = []
    losses_per_point = 1
    for run in runs:
        losses = _losses(run, site)
        if not losses:
            continue
        counts[run.format] += 1
        curves.append((run, thinned(losses)))
        losses_per_point = max(losses_per_point, _losses_per_point(len(losses)))
        bad_passes = [backward for backward, value in losses if not math.isfinite(value)]
        if bad_passes:
            gaps.append(
                _Gaps(
                    run=run_name(run),
                    losses=len(losses),
                    not_finite=len(bad_passes),
                    first_pass=bad_passes[0],
                )
            )

    x, y = _axes_of_curves(points for _, points in curves)
    marks = []
    for run, points in curves:
        marks.append(Mark(style=run.format, path=svg_path(points, x, y), title=run_name(run)))
    legend, runs_by_format = [], []
    for side, name in NAMES.items():
        if counts[side]:
            legend.append((side, name))
            runs_by_format.append((name, counts[side]))
    return Figure(
        kind="loss",
        name=f"plot-loss-{place}",
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        marks=marks,
        legend=legend,
        facts={
            "site": site_name(site),
            "runs_by_format": runs_by_format,
            "gaps": gaps,
            "losses_per_point": losses_per_point,
        },
    )


def _losses(run: TimedRun, site: str) -> list[tuple[int, float]]:
    """Return the number of the backward pass and the value of each loss at a call site."""
    return [(loss["backward"], loss["value"]) for loss in run.capture.of("loss") if loss["site"] == site]


def thinned(losses: Sequence[tuple[float, float]]) -> list[_Point]:
    """Return at most 300 points, each the mean of some losses in a row; None where that is not finite.

    Args:
        losses: position and value of each.
    """
    points: list[_Point] = []
    losses_per_point = _losses_per_point(len(losses))
    for start in range(0, len(losses), losses_per_point):
        positions, values = zip(*losses[start : start + losses_per_point], strict=True)
        at, value = mean(positions), mean(values)
        points.append((at, value) if math.isfinite(value) else (at, None))
    return points


def _losses_per_point(count: int) -> int:
    return max(1, math.ceil(count / _MOST_POINTS))


def _axes_of_curves(curves: Iterable[Sequence[_Point]]) -> tuple[Axis, Axis]:
    """Return the axes of curves over backward passes; logarithmic where the range of losses is wide."""
    positions, values = [0.0], []
    for points in curves:
        for at, value in points:
            positions.append(at)
            if value is not None:
                values.append(value)
    lowest, highest = min(values, default=0.0), max(values, default=0.0)
    is_wide = 0 < lowest < highest / _WIDE_RANGE
    return Axis(positions, margin=0), Axis(values, log=is_wide)


# ---- the speedup


def speedup_figure(found: Mapping[str, Any], asked: float | None) -> Figure | None:
    """Draw the speedup and its interval beside what it has to reach; None: there is no interval.

    Args:
        found: the summary of a comparison.
        asked: the speedup that was asked for; None: any.
    """
    if found["speedup_interval"] is None:
        return None
    speedup, (low, high) = found["speedup"], found["speedup_interval"]
    limit = asked or 1.0
    x, y = Axis([low, high, limit], margin=0.1), Axis([0.0, 1.0], margin=0)
    return Figure(
        kind="speedup",
        name="plot-speedup",
        x_ticks=x.ticks(),
        y_ticks=(),
        marks=[
            Mark(style="limit", path=svg_path([(limit, 0.0), (limit, 1.0)], x, y)),
            Mark(style="interval", path=svg_path([(low, 0.5), (high, 0.5)], x, y)),
            Mark(style="mixed total", path=svg_path([(speedup, 0.5)], x, y)),
        ],
        legend=[
            ("mixed-dot", "speedup"),
            ("interval", "95 % interval"),
            ("limit", "asked for" if asked else "FP32"),
        ],
        facts={
            "asked": asked,
            "medians": _medians(found),
        },
    )


def _medians(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the median time of a step or a forward call in each format."""
    key = "forward_time_s_median" if found["kind"] == "inference" else "step_time_s_median"
    return [("FP32", milliseconds(found["fp32"][key])), ("mixed", milliseconds(found["mixed"][key]))]


# ---- errors


_STYLE_OF_STATE = {"kept": "mixed dots", "exempt": "exempt", "lost": "fail cross"}


class _Row(NamedTuple):
    """A row of the figure. y runs from 0 at the top to 1000 at the bottom."""

    middle: int
    half_height: int


# The error of all together, alone or above the row with that of each.
_ONLY_ROW = _Row(middle=500, half_height=400)
_UPPER_ROW = _Row(middle=250, half_height=250)
_LOWER_ROW = _Row(middle=720, half_height=200)
# Dots of the lower row are spread over five levels, so that equal errors do not cover each other.
_LEVELS, _FIRST_LEVEL, _LEVEL_HEIGHT = 5, 580, 70


def output_figure(output: Mapping[str, Any]) -> Figure | None:
    """Draw the error of outputs beside its limit; None: it was not measured."""
    if output["relative_error"] is None:
        return None
    key, limits = "relative_error", [OUTPUT_LIMIT]
    return _error_figure(_Errors(of="outputs", key=key, total=output[key], limits=limits))


def gradient_figure(certificate: Mapping[str, Any]) -> Figure | None:
    """Draw the errors of gradients, together and each, beside their limits; None: none was measured."""
    key, limits = "error_over_noise", [TOTAL_LIMIT, PARAMETER_LIMIT]
    if certificate[key] is None:
        # There was no noise, so draw relative errors. Their limits depend on why there was none, so draw no
        # limits; the certificate's "reason" gives them.
        key, limits = "relative_error", []
    if certificate[key] is None:  # now the relative error, if there was no noise
        return None

    errors = _Errors(of="gradients", key=key, total=certificate[key], limits=limits)
    errors.why_total = total_exemption(certificate)
    for parameter in certificate["parameters"]:
        if not parameter["judged"]:
            continue
        errors.parameters += 1
        errors.lost += parameter["lost"]
        state = "lost" if parameter["lost"] else "kept"
        # ``exemption`` says why an error over noise beyond its limit does not count; None if the parameter is
        # lost. Relative errors are drawn without limits, so none of them is beyond one.
        why = exemption(parameter, certificate)
        if why is not None and limits:
            state = "exempt"
            errors.why_single.append(f"{shortened(parameter['name'])}, {why}")
        if parameter[key] is not None:
            errors.single.append((float(parameter[key]), state))
    return _error_figure(errors)


@dataclass(slots=True, kw_only=True)
class _Errors:
    """What a figure of errors shows, and what it says.

    Attributes:
        of: ``"gradients"`` or ``"outputs"``.
        key: which kind of error: ``"error_over_noise"`` or ``"relative_error"``.
        total: the error of all together.
        limits: the limit of the total, and that of each parameter; empty or shorter where there is none.
        parameters, lost: how many were judged, and how many of these are lost.
        single: the error of each parameter, and ``"kept"``, ``"lost"``, or ``"exempt"``: beyond the limit,
            but not counted.
        why_total: why the total is not counted although it is beyond its limit; None if it is within it, or
            counts.
        why_single: each parameter that is not counted although it is beyond its limit, and why.
    """

    of: str
    key: str
    total: float | str
    limits: list[float]
    parameters: int = 0
    lost: int = 0
    single: list[tuple[float, str]] = field(default_factory=list)
    why_total: str | None = None
    why_single: list[str] = field(default_factory=list)


def _error_figure(errors: _Errors) -> Figure:
    total = _within_axis(float(errors.total))
    values = [value for value, _ in errors.single]
    x = _axis_of_errors([total, *map(_within_axis, values)])

    rows = {"together": _ONLY_ROW}
    if values:
        rows = {"together": _UPPER_ROW, "each": _LOWER_ROW}
    # Ticks are at the middles, in percent from the bottom.
    y_ticks = tuple((name, 100 * (_BOX - row.middle) / _BOX) for name, row in rows.items())

    marks = []
    # A limit of single errors is not drawn where there is no row of them.
    for limit, row in zip(errors.limits, rows.values(), strict=False):
        across = _BOX * x.at(limit)
        top = row.middle - row.half_height
        marks.append(Mark(style="limit", path=f"M{across:.1f} {top}v{2 * row.half_height}"))
    paths = dict.fromkeys(_STYLE_OF_STATE, "")
    for place, (value, state) in enumerate(errors.single[:_MOST_DOTS]):
        across = _BOX * x.at(_within_axis(value))
        down = _FIRST_LEVEL + _LEVEL_HEIGHT * (place % _LEVELS)
        paths[state] += f"M{across:.1f} {down}h0"
    for state, path in paths.items():
        if path:
            marks += _dots(_STYLE_OF_STATE[state], path)
    style = "mixed total" if errors.why_total is None else "exempt total"
    marks += _dots(style, f"M{_BOX * x.at(total):.1f} {rows['together'].middle}h0")

    legend = [("mixed-dot", "mixed precision")]
    if errors.why_total or errors.why_single:
        legend.append(("exempt-dot", "beyond the limit, not counted"))
    if errors.limits:
        legend.append(("limit", "limit"))
    # NaN is the worst; without the key, what max returns would depend on the order of parameters.
    worst = max(values, key=lambda value: (math.isnan(value), value), default=None)
    exempt = errors.why_single[:_MOST_EXEMPT]
    if len(errors.why_single) > _MOST_EXEMPT:
        exempt.append(f"and {plural(len(errors.why_single) - _MOST_EXEMPT, 'more parameter')}")
    return Figure(
        kind="errors",
        name="plot-errors",
        x_ticks=x.ticks(),
        y_ticks=y_ticks,
        marks=marks,
        legend=legend,
        facts={
            "of": errors.of,
            "error": errors.key.replace("_", " "),
            "total": errors.total,
            "limits": errors.limits,
            "count": errors.parameters,
            "lost": errors.lost,
            "total_exempt": errors.why_total,
            "exempt": exempt,
            "worst": worst,
        },
    )


def _dots(style: str, path: str) -> list[Mark]:
    """Draw dots; as rings, if they do not count: a smaller dot in the card's colour is drawn over each."""
    marks = [Mark(style=style, path=path)]
    if style.startswith("exempt"):
        marks.append(Mark(style=f"{style} hole", path=path))
    return marks


def _within_axis(error: float) -> float:
    """Return an error within what the axis shows; NaN at its upper end."""
    if math.isnan(error):
        return _HIGHEST_ERROR
    return min(_HIGHEST_ERROR, max(_LOWEST_ERROR, error))


def _axis_of_errors(errors: Iterable[float]) -> Axis:
    """Return a logarithmic axis of whole decades that holds the errors, and 1e-3 to 1."""
    decades = [1e-3, 1.0]
    for error in errors:
        decade = 10.0 ** math.floor(math.log10(error))
        decades += [decade, min(10 * decade, _HIGHEST_ERROR)]
    return Axis(decades, log=True, margin=0)

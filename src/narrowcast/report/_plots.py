"""The figures of a page as plain data for plotly.js: every label escaped, every colour a name.

A colour such as ``--fp32`` is a variable of the page's style, which the page's script looks up, so that one
figure fits light, dark and paper.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowcast.observe import TimedRun
from narrowcast.report._curves import Curve, curve, drawable, histogram
from narrowcast.report._printable import printable
from narrowcast.report._rows import milliseconds, shortened, site_name

NO_SEED = -1
_NAMES = {"fp32": "FP32", "mixed": "mixed"}
_MOST_POINTS = 2_000
_FEWEST_POINTS = 150
_POINTS_TOGETHER = 60_000
_MOST_SITES = 12
_MOST_RUNS = 24
_WIDE_RANGE = 20.0
_MOST_SENTENCES = 4
_MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One figure.

    Attributes:
        name: of the element that it is drawn into.
        title: a heading for it.
        said: what it shows, in sentences, for those who do not see it.
        traces: of plotly.js.
        layout: of plotly.js.
        may_be_log: whether the y axis can be logarithmic, so that a person may choose.
    """

    name: str
    title: str
    said: tuple[str, ...]
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    may_be_log: bool = False

    def drawn(self) -> dict[str, Any]:
        """What the page's script reads."""
        return {"name": self.name, "traces": self.traces, "layout": self.layout}


def label(text: str, longest: int = 60) -> str:
    """``text`` for plotly.js, which reads a few HTML tags in labels: shortened, control characters spelled
    out, markup escaped."""
    return html.escape(printable(shortened(text, longest)), quote=False)


def loss_plots(runs: Sequence[TimedRun]) -> tuple[list[Plot], int]:
    """One figure for each call site, and how many sites have none because there are too many."""
    sites = list(dict.fromkeys(loss["site"] for run in runs for loss in run.capture.of("loss")))
    shown = runs[:_MOST_RUNS]
    lines = max(1, len(shown) * min(len(sites), _MOST_SITES))
    most = max(_FEWEST_POINTS, min(_MOST_POINTS, _POINTS_TOGETHER // lines))
    plots = [_loss_plot(place, site, shown, most) for place, site in enumerate(sites[:_MOST_SITES])]
    return plots, len(sites) - len(plots)


def _loss_plot(place: int, site: str, runs: Sequence[TimedRun], most: int) -> Plot:
    traces: list[dict[str, Any]] = []
    said = []
    curves: list[tuple[TimedRun, Curve]] = []
    for run in runs:
        losses = [loss for loss in run.capture.of("loss") if loss["site"] == site]
        if losses:
            curves.append((run, curve([x["backward"] for x in losses], [x["value"] for x in losses], most)))
    named: set[str] = set()
    for run, drawn in curves:
        traces += _loss_traces(run, drawn, first=run.format not in named)
        named.add(run.format)
        if drawn.gaps:
            said.append(
                f"In {run_name(run)}, {drawn.gaps} of {drawn.total} losses are not finite (or beyond 1e100), "
                f"from backward {drawn.first_gap:.0f} on."
            )
    if len(said) > _MOST_SENTENCES:
        said[_MOST_SENTENCES:] = [f"So it is in {len(said) - _MOST_SENTENCES} more runs."]
    if said:
        said.append("There the line has a gap, and a cross stands at the bottom.")
    finite = [value for _, drawn in curves for value in drawn.y if value is not None]
    positive = bool(finite) and min(finite) > 0
    wide = positive and max(finite) > _WIDE_RANGE * min(finite)
    layout = {
        "xaxis": {"title": {"text": "backward pass"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "loss"}, "type": "log" if wide else "linear", "exponentformat": "power"},
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "height": 360,
    }
    counts = " and ".join(
        f"{sum(run.format == key for run, _ in curves)} {name}"
        for key, name in _NAMES.items()
        if any(run.format == key for run, _ in curves)
    )
    said.insert(0, f"Loss of {counts} run{'s' * (len(curves) != 1)} over backward passes.")
    if any(drawn.trend_y for _, drawn in curves):
        said.insert(1, "Faint: each loss. Strong: the mean over each hundredth of the run.")
    return Plot(
        name=f"plot-loss-{place}",
        title=f"Loss at {site_name(site)}",
        said=tuple(said),
        traces=traces,
        layout=layout,
        may_be_log=positive,
    )


def _loss_traces(run: TimedRun, drawn: Curve, *, first: bool) -> list[dict[str, Any]]:
    color = f"--{run.format}"
    text = label(run_name(run))
    common = {"type": "scatter", "mode": "lines", "legendgroup": run.format, "name": _NAMES[run.format]}
    line = {"color": color, "width": 2, "dash": "solid" if run.format == "fp32" else "4px,2px"}
    # The name stands in "text", since a template would read a "%{" in it.
    hover = {"text": text, "hovertemplate": "%{text}<br>backward %{x}<br>loss %{y:.5g}<extra></extra>"}
    only = not drawn.trend_y
    traces = [
        {
            **common,
            **hover,
            "x": drawn.x,
            "y": drawn.y,
            "line": line if only else {**line, "width": 1, "dash": "solid"},
            "opacity": 0.9 if only else 0.22,
            "showlegend": first and only,
            **({"mode": "lines+markers"} if len(drawn.x) < 3 else {}),
        }
    ]
    if not only:
        trend = {"x": drawn.trend_x, "y": drawn.trend_y, "line": line, "showlegend": first}
        traces.append({**common, **hover, **trend})
    if drawn.gaps_x:
        cross = {"symbol": "x", "size": 7, "color": color}
        traces.append(
            {
                **common,
                "mode": "markers",
                "x": drawn.gaps_x,
                "y": [0.02 if run.format == "fp32" else 0.05] * len(drawn.gaps_x),
                "yaxis": "y2",
                "marker": cross,
                "showlegend": False,
                "hovertemplate": "backward %{x}: not finite<extra></extra>",
            }
        )
    return traces


def run_name(run: TimedRun) -> str:
    """What a person calls a run: its folder, which says format and number, and its seed where it had one."""
    return shortened(run.name, 24) + (f" (seed {run.seed})" if run.seed != NO_SEED else "")


def time_plot(runs: Sequence[TimedRun], times_s: Sequence[Sequence[float]], what: str) -> Plot | None:
    """How long each took: a histogram of each format, and below it each run's own median.

    Args:
        runs: in the order in which they were made.
        times_s: of each run, warm-up left out.
        what: ``"steps"`` or ``"forward calls"``.
    """
    timed = [(run, [1e3 * time for time in times]) for run, times in zip(runs, times_s, strict=True) if times]
    by_format = {
        key: [time for run, times_ms in timed if run.format == key for time in times_ms] for key in _NAMES
    }
    present = {key: values for key, values in by_format.items() if values}
    found = histogram(list(present.values()))
    if found is None:
        return None
    traces: list[dict[str, Any]] = []
    said = []
    for (key, values), shares in zip(present.items(), found.shares, strict=True):
        median = milliseconds(statistics.median(values) / 1e3)
        traces.append(_steps_of(key, found.edges, shares, f"{_NAMES[key]}, median {median}"))
        said.append(f"{_NAMES[key]}: median {median} of {len(values)} {what}.")
    traces += _run_medians(timed[:_MOST_RUNS])
    said.append(
        f"Above: the share of {what} in each bin, first tenth of each run left out"
        + (f", {found.outside} far from the rest not shown" if found.outside else "")
        + ". Below: each run's median (dot), and from its 10th to its 90th percentile (line)."
    )
    rows = len(timed[:_MOST_RUNS])
    below = min(0.6, (rows * 20 + 20) / (260 + rows * 20))
    return Plot(
        name="plot-times",
        title=f"How long {what} took",
        said=tuple(said),
        traces=traces,
        layout={
            "xaxis": {
                "title": {"text": "milliseconds"},
                "type": "log" if found.logarithmic else "linear",
                "anchor": "y2",
            },
            "yaxis": {"title": {"text": f"% of {what}"}, "domain": [below + 0.03, 1], "rangemode": "tozero"},
            "yaxis2": {
                "domain": [0, below],
                "tickvals": list(range(rows)),
                "ticktext": [label(run.name, 14) for run, _ in timed[:_MOST_RUNS]],
                "tickfont": {"family": _MONOSPACE, "size": 11},
                "range": [rows - 0.4, -0.6],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
            "height": 320 + rows * 20,
        },
    )


def _steps_of(key: str, edges: Sequence[float], shares: Sequence[float], name: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "legendgroup": key,
        "x": list(edges),
        "y": [*shares, 0],
        "line": {
            "shape": "hv",
            "color": f"--{key}",
            "width": 1.5,
            "dash": "solid" if key == "fp32" else "4px,2px",
        },
        "fill": "tozeroy",
        "fillcolor": f"--{key}-fill",
        "hovertemplate": f"{_NAMES[key]}, from %{{x}} ms: %{{y:.2g}} %<extra></extra>",
    }


def _run_medians(timed: Sequence[tuple[TimedRun, list[float]]]) -> list[dict[str, Any]]:
    traces = []
    for row, (run, times_ms) in enumerate(timed):
        ordered = sorted(times_ms)
        low, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        median = statistics.median(ordered)
        common = {
            "type": "scatter",
            "yaxis": "y2",
            "showlegend": False,
            "legendgroup": run.format,
            "name": _NAMES[run.format],
        }
        traces.append(
            {
                **common,
                "mode": "lines",
                "x": [low, high],
                "y": [row, row],
                "line": {"color": f"--{run.format}", "width": 2},
                "hoverinfo": "skip",
            }
        )
        traces.append(
            {
                **common,
                "mode": "markers",
                "x": [median],
                "y": [row],
                "marker": {
                    "color": f"--{run.format}",
                    "size": 9,
                    "symbol": "circle" if run.format == "fp32" else "diamond",
                },
                "text": [label(run_name(run))],
                "hovertemplate": f"%{{text}}<br>median {milliseconds(median / 1e3)}<extra></extra>",
            }
        )
    return traces


def scale_plot(runs: Sequence[TimedRun]) -> Plot | None:
    """The loss scale of mixed runs over steps, with skipped ones marked; None where nothing was scaled."""
    scaled = [
        run
        for run in runs
        if run.format == "mixed"
        and any(s["scale"] is not None or s["skipped"] for s in run.capture.of("step"))
    ][:_MOST_RUNS]
    if not scaled:
        return None
    traces: list[dict[str, Any]] = []
    said = []
    for place, run in enumerate(scaled):
        steps = run.capture.of("step")
        scale = [math.nan if step["scale"] is None else step["scale"] for step in steps]
        skipped = [number for number, step in enumerate(steps, start=1) if step["skipped"]]
        traces += _scale_traces(place, run, scale, skipped)
        listed = ", ".join(map(str, skipped[:8])) + (" ..." if len(skipped) > 8 else "")
        first = f": {listed}" if skipped else ""
        said.append(f"{run_name(run)}: {len(skipped)} of {len(steps)} steps skipped{first}.")
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "optimizer step"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "loss scale"}, "type": "log", "exponentformat": "power"},
        "height": 320,
    }
    return Plot(
        name="plot-scale",
        title="Loss scale and skipped steps",
        said=tuple(said),
        traces=traces,
        layout=layout,
    )


def _scale_traces(
    place: int, run: TimedRun, scale: Sequence[float], skipped: Sequence[int]
) -> list[dict[str, Any]]:
    """A line for the scale, and a cross for each step that was skipped, at the scale that it had."""
    drawn = curve(list(range(1, len(scale) + 1)), scale, _MOST_POINTS)
    marked = skipped[:: max(1, math.ceil(len(skipped) / (_MOST_POINTS // 4)))]
    dash = ("solid", "dash", "dot")[place % 3]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": label(run.name, 20),
            "x": drawn.x,
            "y": drawn.y,
            "line": {"shape": "hv", "color": "--mixed", "width": 2, "dash": dash},
            "hovertemplate": "step %{x}: scale %{y}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "skipped",
            "showlegend": place == 0,
            "x": list(marked),
            "y": [scale[number - 1] if drawable(scale[number - 1]) else None for number in marked],
            "marker": {"symbol": "x", "size": 9, "color": "--fail"},
            "hovertemplate": "step %{x} was skipped; scale %{y}<extra></extra>",
        },
    ]

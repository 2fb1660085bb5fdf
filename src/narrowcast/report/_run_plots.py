"""Figures of runs: how long their steps took, and what their loss scale did."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from narrowcast.observe.capture import TimedRun
from narrowcast.report._curves import curve, drawable, histogram
from narrowcast.report._plots import MOST_POINTS, MOST_RUNS, NAMES, Plot, label, run_name
from narrowcast.report._rows import milliseconds

_MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def time_plot(runs: Sequence[TimedRun], times_s: Sequence[Sequence[float]], what: str) -> Plot | None:
    """How long each took: a histogram of each format, and below it each run's own median.

    Args:
        runs: in the order in which they were made.
        times_s: of each run, warm-up left out.
        what: ``"steps"`` or ``"forward calls"``.
    """
    timed = [(run, [1e3 * time for time in times]) for run, times in zip(runs, times_s, strict=True) if times]
    by_format = {
        key: [time for run, times_ms in timed if run.format == key for time in times_ms] for key in NAMES
    }
    present = {key: values for key, values in by_format.items() if values}
    found = histogram(list(present.values()))
    if found is None:
        return None
    traces: list[dict[str, Any]] = []
    said = []
    for (key, values), shares in zip(present.items(), found.shares, strict=True):
        median = milliseconds(statistics.median(values) / 1e3)
        traces.append(_steps_of(key, found.edges, shares, f"{NAMES[key]}, median {median}"))
        said.append(f"{NAMES[key]}: median {median} of {len(values)} {what}.")
    traces += _run_medians(timed[:MOST_RUNS])
    said.append(
        f"Above: the share of {what} in each bin, first tenth of each run, at least one, left out"
        + (f", {found.outside} far from the rest not shown" if found.outside else "")
        + ". Below: each run's median (dot), and from its 10th to its 90th percentile (line)."
    )
    rows = len(timed[:MOST_RUNS])
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
                "ticktext": [label(run.name, 14) for run, _ in timed[:MOST_RUNS]],
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
        "hovertemplate": f"{NAMES[key]}, from %{{x}} ms: %{{y:.2g}} %<extra></extra>",
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
            "name": NAMES[run.format],
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
    ][:MOST_RUNS]
    if not scaled:
        return None
    traces: list[dict[str, Any]] = []
    said = []
    for place, run in enumerate(scaled):
        steps = run.capture.of("step")
        scale = [math.nan if step["scale"] is None else step["scale"] for step in steps]
        skipped = [number for number, step in enumerate(steps, start=1) if step["skipped"]]
        traces += _scale_traces(place, run, scale, skipped)
        listed = ", ".join(map(str, skipped[:8])) + (" and more" if len(skipped) > 8 else "")
        first = f": {listed}" if skipped else ""
        said.append(f"{run_name(run)}: {len(skipped)} of {len(steps)} steps skipped{first}.")
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "optimizer step"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "loss scale"}, "type": "log", **_powers_of_two(traces)},
        "height": 320,
    }
    return Plot(
        name="plot-scale",
        title="Loss scale and skipped steps",
        said=tuple(said),
        traces=traces,
        layout=layout,
    )


def _powers_of_two(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ticks where scales are: they double and halve."""
    known = [value for trace in traces for value in trace["y"] if value is not None and value > 0]
    if not known:
        return {}
    low, high = math.floor(math.log2(min(known))), math.ceil(math.log2(max(known)))
    exponents = range(low, high + 1, max(1, math.ceil((high - low) / 7)))
    return {
        "tickvals": [2.0**exponent for exponent in exponents],
        "ticktext": [f"2<sup>{exponent}</sup>" for exponent in exponents],
    }


def _scale_traces(
    place: int, run: TimedRun, scale: Sequence[float], skipped: Sequence[int]
) -> list[dict[str, Any]]:
    """A line for the scale, and a cross for each step that was skipped, at the scale that it had."""
    drawn = curve(list(range(1, len(scale) + 1)), scale, MOST_POINTS)
    marked = skipped[:: max(1, math.ceil(len(skipped) / (MOST_POINTS // 4)))]
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

"""Figures of losses: the curves over each other, and what the format changes against what the seed does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowcast.observe.capture import TimedRun
from narrowcast.report._curves import Curve, curve
from narrowcast.report._plots import MOST_POINTS, MOST_RUNS, NAMES, Plot, label, run_name
from narrowcast.report._rows import site_name

_FEWEST_POINTS = 150
_POINTS_TOGETHER = 60_000
_MOST_SITES = 12
_WIDE_RANGE = 20.0
_MOST_SENTENCES = 4

_Point = tuple[float, float]


def loss_plots(runs: Sequence[TimedRun]) -> tuple[list[Plot], int]:
    """Two figures for each call site: losses, and what differs; and how many sites have none."""
    sites = list(dict.fromkeys(loss["site"] for run in runs for loss in run.capture.of("loss")))
    shown = runs[:MOST_RUNS]
    lines = max(1, len(shown) * min(len(sites), _MOST_SITES))
    most = max(_FEWEST_POINTS, min(MOST_POINTS, _POINTS_TOGETHER // lines))
    plots: list[Plot] = []
    for place, site in enumerate(sites[:_MOST_SITES]):
        plots.append(_loss_plot(place, site, shown, most))
        difference = _difference_plot(place, site, shown, most)
        plots += [] if difference is None else [difference]
    return plots, max(0, len(sites) - _MOST_SITES)


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
        for key, name in NAMES.items()
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
    common = {"type": "scatter", "mode": "lines", "legendgroup": run.format, "name": NAMES[run.format]}
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


def _difference_plot(place: int, site: str, runs: Sequence[TimedRun], most: int) -> Plot | None:
    """Mixed minus FP32 from one seed, and FP32 from other seeds minus FP32 from the first; None: no pair."""
    fp32, mixed = (_first_of_each_seed(site, runs, key) for key in NAMES)
    pairs = [(f"seed {seed}, mixed - FP32", fp32[seed], mixed[seed]) for seed in fp32 if seed in mixed]
    if not pairs:
        return None
    base = next(iter(fp32))
    others = [(f"FP32, seed {seed} - {base}", fp32[base], fp32[seed]) for seed in fp32 if seed != base]
    traces = [
        _difference_trace(key, name, text, curve(*_difference(under, over), most), first=number == 0)
        for key, name, lines in (
            ("fp32", "what another seed changes in FP32", others),
            ("mixed", "what mixed precision changes", pairs),
        )
        for number, (text, under, over) in enumerate(lines)
    ]
    said = "Losses of mixed runs minus those of FP32 runs from the same seed, backward by backward."
    against = (
        "Against them, FP32 from another seed minus FP32 from the first: what luck alone does."
        if others
        else "No other seed was run, so there is nothing to hold them against."
    )
    return Plot(
        name=f"plot-difference-{place}",
        title=f"What differs at {site_name(site)}",
        said=(said, against),
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "backward pass"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "difference of losses"}, "exponentformat": "power", "zeroline": True},
            "height": 300,
        },
    )


def _first_of_each_seed(site: str, runs: Sequence[TimedRun], key: str) -> dict[int, list[_Point]]:
    """The losses of a format's first run from each seed, with the backwards that they came from."""
    found: dict[int, list[_Point]] = {}
    for run in runs:
        if run.format == key and run.seed not in found:
            losses = [(x["backward"], x["value"]) for x in run.capture.of("loss") if x["site"] == site]
            found |= {run.seed: losses} if losses else {}
    return found


def _difference(under: Sequence[_Point], over: Sequence[_Point]) -> tuple[list[float], list[float]]:
    both = list(zip(under, over, strict=False))  # one may have been cut short
    return [at for (at, _), _ in both], [b - a for (_, a), (_, b) in both]


def _difference_trace(key: str, name: str, text: str, drawn: Curve, *, first: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines" if len(drawn.x) > 2 else "lines+markers",
        "name": name,
        "legendgroup": key,
        "showlegend": first,
        "x": drawn.x,
        "y": drawn.y,
        "line": {"color": f"--{key}", "width": 1.5, "dash": "solid" if key == "fp32" else "4px,2px"},
        "opacity": 0.6 if key == "fp32" else 1,
        "text": label(text),
        "hovertemplate": "%{text}<br>backward %{x}: %{y:.3g}<extra></extra>",
    }

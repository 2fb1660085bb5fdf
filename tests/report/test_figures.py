"""Figures: series in few points that keep their extremes, round ticks, and paths in the right place."""

import math
import random
import re

import made_captures
import pytest

from narrowcast.observe.capture import read_comparison
from narrowcast.report._figures import (
    Axis,
    curve,
    histogram,
    loss_figures,
    scale_figure,
    svg_path,
    time_figure,
)


def runs_of(folder):
    return read_comparison(folder).runs


def with_losses(events, values):
    left = iter(values)
    return [event | {"value": next(left)} if event["event"] == "loss" else event for event in events]


def points_of(path):
    """The corners of a path that is made of M and L alone, in shares of the box from its lower left."""
    found = re.findall(r"[ML]([\d.]+) ([\d.]+)", path)
    return [(float(x) / 1000, 1 - float(y) / 1000) for x, y in found]


@pytest.mark.parametrize("total", [0, 1, 2, 3, 199, 200, 900, 901, 100_000])
def test_extremes_stay_and_points_are_few(total):
    draw = random.Random(total)
    y = [draw.gauss(0, 1) for _ in range(total)]
    drawn = curve(range(total), y, 900)
    assert len(drawn.points) <= 900
    places, values = [at for at, _ in drawn.points], [value for _, value in drawn.points]
    assert places == sorted(places)
    assert drawn.gaps == []
    if total:
        assert (max(values), min(values)) == (max(y), min(y))
    if total <= 900:
        assert drawn.points == list(enumerate(y))
    assert len(drawn.trend) == (100 if total >= 200 else 0)


def test_a_gap_breaks_the_line_wherever_it_is():
    y = [1.0] * 90_000
    y[12_345] = math.nan
    y[50_000:] = [math.inf] * 40_000
    drawn = curve(range(90_000), y, 900)
    assert (len(drawn.gaps), drawn.gaps[0]) == (40_001, 12_345)
    assert (12_345, None) in drawn.points
    assert all(value is None for at, value in drawn.points if at >= 50_000)
    assert all(math.isfinite(value) for _, value in drawn.trend)


def test_the_trend_is_the_mean_of_each_hundredth():
    drawn = curve(range(1000), [float(n % 10) for n in range(1000)])
    assert [value for _, value in drawn.trend] == [4.5] * 100
    assert [at for at, _ in drawn.trend][:2] == [4.5, 14.5]
    huge = curve(range(1000), [1e100, 1e308] * 500)
    assert [value for _, value in huge.trend] == [pytest.approx(1e100)] * 100


@pytest.mark.parametrize(
    ("values", "base", "labels"),
    [
        ([0, 300], None, ["0", "50", "100", "150", "200", "250", "300"]),
        ([0, 1], None, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([-3e-7, 5e-7], None, ["-2e-07", "0", "2e-07", "4e-07"]),
        ([2.0**10, 2.0**15], 2, ["2¹⁰", "2¹¹", "2¹²", "2¹³", "2¹⁴", "2¹⁵"]),
        ([1e-7, 1e2], 10, ["10⁻⁷", "10⁻⁵", "0.001", "0.1", "10"]),
        ([6, 14], 10, ["6", "8", "10", "12"]),
        ([7.0, 7.0], None, ["6.5", "7.0", "7.5"]),
        ([], None, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_are_round(values, base, labels):
    axis = Axis(values, base=base, margin=0)
    assert [text for text, _ in axis.ticks()] == labels
    assert all(0 <= at <= 100 for _, at in axis.ticks())


@pytest.mark.parametrize("base", [None, 2, 10])
@pytest.mark.parametrize(
    "values", [[5e-324, 5e-324], [-1e100, 1e100], [0.0], [1e-310, 1.0], [1e16, 1e16 + 2], [-0.0, 5e-324]]
)
def test_an_axis_of_any_values_has_finite_places(values, base):
    axis = Axis(values, base=base)
    assert all(0 <= axis.at(value) <= 1 for value in values)
    assert all(math.isfinite(at) for _, at in axis.ticks())


def test_paths_break_at_gaps_and_show_lone_points():
    x, y = Axis([0, 10], margin=0), Axis([0, 1], margin=0)
    points = [(0, 0.0), (5, 0.5), (6, None), (10, 1.0)]
    assert svg_path(points, x, y) == "M0.0 1000.0h0L500.0 500.0M1000.0 0.0h0"
    assert svg_path(points[:2], x, y, stepped=True) == "M0.0 1000.0h0H500.0V500.0"


@pytest.mark.parametrize("series", [[1.0], [1.0] * 9, [0.01, 10.0] * 50, [1e-11] * 3, [1.0, math.nan, -1.0]])
def test_bins_hold_what_can_be_drawn(series):
    edges, (shares,), outside = histogram([series])
    assert all(math.isfinite(value) for value in [*edges, *shares])
    drawn = sum(shares) / 100 * len(series)
    assert drawn + outside == pytest.approx(len(series))
    assert histogram([[], [0.0, -1.0, math.nan, math.inf, 1e200, 5e-324]]) is None


def test_losses_are_drawn_where_they_are(tmp_path):
    runs = made_captures.both(range(1), made_captures.training, steps=3)
    runs = {name: with_losses(events, [3.0, 1.0, 2.0]) for name, events in runs.items()}
    (loss, difference), more = loss_figures(runs_of(made_captures.comparison(tmp_path, runs)))
    assert (loss.name, difference.name, more) == ("plot-loss-0", "plot-difference-0", 0)
    assert loss.facts["counts"] == [("FP32", 1), ("mixed", 1)]
    ticks = {float(text): at / 100 for text, at in loss.y_ticks}
    assert {1.0, 2.0, 3.0} <= set(ticks)
    for mark in loss.marks:
        at, up = zip(*points_of(mark.path), strict=True)
        assert at == pytest.approx([1 / 3, 2 / 3, 1], abs=1e-3)
        assert up == pytest.approx([ticks[3.0], ticks[1.0], ticks[2.0]], abs=1e-3)


def test_the_format_stands_against_the_seed(tmp_path):
    values = {"fp32-0": [1.0, 2.0, 3.0], "mixed-0": [1.5, "nan"], "fp32-7": [2.0] * 3, "mixed-9": [0, 0, 0]}
    runs = {}
    for name, losses in values.items():
        format_, _, seed = name.partition("-")
        events = made_captures.training(int(seed), mixed=format_ == "mixed", steps=len(losses))
        runs[name] = with_losses(events, losses)
    figures, _ = loss_figures(runs_of(made_captures.comparison(tmp_path, runs)))
    difference = figures[1]
    ticks = {float(text): at / 100 for text, at in difference.y_ticks}
    found = {mark.title: [up for _, up in points_of(mark.path)] for mark in difference.marks}
    assert found == {
        "FP32, seed 7 - 0": pytest.approx([ticks[1.0], ticks[0.0], ticks[-1.0]], abs=1e-3),
        "seed 0, mixed - FP32": pytest.approx([ticks[0.5]], abs=1e-3),
    }


def test_scales_have_powers_of_two_and_skipped_steps(tmp_path):
    figure = scale_figure(runs_of(made_captures.fp16(tmp_path)))
    assert [text for text, _ in figure.y_ticks] == ["2¹⁰", "2¹¹", "2¹²", "2¹³", "2¹⁴", "2¹⁵"]
    dots = [mark for mark in figure.marks if mark.style == "fail dots"]
    assert len(points_of(dots[0].path)) == 9


def test_times_have_a_median_for_each_format(tmp_path):
    runs = runs_of(made_captures.comparison(tmp_path, made_captures.both(range(2), made_captures.training)))
    times = [[0.010, 0.012, 0.014], [0.005, 0.006, 0.007], [0.011] * 3, [1e12, 0.006]]
    figure = time_figure(runs, times, "steps")
    assert figure.facts["medians"] == [("FP32", "11.00 ms", 6), ("mixed", "6.00 ms", 4)]
    assert [mark.style for mark in figure.marks] == ["fp32 area", "mixed area"]
    assert time_figure(runs, [[]] * 4, "steps") is None

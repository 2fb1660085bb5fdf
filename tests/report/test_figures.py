"""Figures: curves in few points, round ticks, and paths in the right place."""

import math
import random
import re

import made_captures
import pytest

from narrowcast.capture import read_comparison
from narrowcast.report._figures import Axis, gradient_figure, loss_figures, speedup_figure, svg_path, thinned


def with_losses(events, values):
    left = iter(values)
    return [event | {"value": next(left)} if event["event"] == "loss" else event for event in events]


def points_of(path):
    """The corners of a path that is made of M and L alone, in shares of the box from its lower left."""
    found = re.findall(r"[ML]([\d.]+) ([\d.]+)", path)
    return [(float(x) / 1000, 1 - float(y) / 1000) for x, y in found]


@pytest.mark.parametrize("total", [0, 1, 300, 301, 100_000])
def test_a_curve_has_few_points_with_the_mean_of_the_whole(total):
    draw = random.Random(total)
    losses = [(place, draw.gauss(0, 1)) for place in range(total)]
    points = thinned(losses)
    assert len(points) <= 300
    if total <= 300:
        assert points == losses
    if total == 100_000:
        values = [value for _, value in losses]
        stretch = math.ceil(total / 300)
        assert points[1] == (
            pytest.approx(1.5 * stretch - 0.5),
            pytest.approx(math.fsum(values[stretch : 2 * stretch]) / stretch),
        )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_breaks_its_curve(value):
    losses = [(place, 1.0) for place in range(900)]
    losses[500] = (500, value)
    assert [place for place, point in enumerate(thinned(losses)) if point[1] is None] == [500 // 3]


@pytest.mark.parametrize(
    ("values", "log", "labels"),
    [
        ([0, 300], False, ["0", "50", "100", "150", "200", "250", "300"]),
        ([0, 1], False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([-3e-7, 5e-7], False, ["-2e-07", "0", "2e-07", "4e-07"]),
        ([1e-7, 1e2], True, ["1e-07", "1e-05", "0.001", "0.1", "10"]),
        ([6, 14], True, ["6", "8", "10", "12"]),
        ([7.0, 7.0], False, ["6.5", "7.0", "7.5"]),
        ([2.3026, 2.3027], False, ["2.3026", "2.30262", "2.30264", "2.30266", "2.30268", "2.3027"]),
        ([1e6, 1.0002e6], False, ["1e+06", "1.00005e+06", "1.0001e+06", "1.00015e+06", "1.0002e+06"]),
        ([0.0], False, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        ([], False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_are_round(values, log, labels):
    ticks = Axis(values, log=log, margin=0).ticks()
    assert [text for text, _ in ticks] == labels
    assert all(0 <= at <= 100 for _, at in ticks)


def test_paths_break_at_gaps_and_show_lone_points():
    x, y = Axis([0, 10], margin=0), Axis([0, 1], margin=0)
    points = [(0, 0.0), (5, 0.5), (6, None), (10, 1.0)]
    assert svg_path(points, x, y) == "M0.0 1000.0h0L500.0 500.0M1000.0 0.0h0"


def test_losses_are_drawn_where_they_are(tmp_path):
    runs = made_captures.both(range(1), made_captures.training, steps=3)
    runs = {name: with_losses(events, [3.0, 1.0, 2.0]) for name, events in runs.items()}
    (loss,), more = loss_figures(read_comparison(made_captures.comparison(tmp_path, runs)).runs)
    assert (loss.name, more) == ("plot-loss-0", 0)
    assert loss.facts["runs_by_format"] == [("FP32", 1), ("mixed", 1)]
    ticks = {float(text): at / 100 for text, at in loss.y_ticks}
    assert {1.0, 2.0, 3.0} <= set(ticks)
    for mark in loss.marks:
        at, up = zip(*points_of(mark.path), strict=True)
        assert at == pytest.approx([1 / 3, 2 / 3, 1], abs=1e-3)
        assert up == pytest.approx([ticks[3.0], ticks[1.0], ticks[2.0]], abs=1e-3)


@pytest.mark.parametrize(("asked", "limit"), [(None, 1.0), (1.5, 1.5)])
def test_a_speedup_is_drawn_beside_what_it_has_to_reach(asked, limit):
    sides = {"fp32": {"step_time_s_median": 0.02}, "mixed": {"step_time_s_median": 0.01}, "kind": "training"}
    found = sides | {"speedup": 2.0, "speedup_interval": [1.0, 3.0], "cpu_used_by_others": 0.1}
    figure = speedup_figure(found, asked)
    assert figure.facts["medians"] == [("FP32", "20.00 ms"), ("mixed", "10.00 ms")]
    ticks = {float(text): at / 100 for text, at in figure.x_ticks}
    limit_mark, interval, speedup = figure.marks
    assert [at for at, _ in points_of(interval.path)] == pytest.approx([ticks[1.0], ticks[3.0]], abs=1e-3)
    assert points_of(speedup.path)[0][0] == pytest.approx(ticks[2.0], abs=1e-3)
    assert points_of(limit_mark.path)[0][0] == pytest.approx(ticks[limit], abs=1e-3)
    assert speedup_figure(found | {"speedup": None, "speedup_interval": None}, asked) is None


@pytest.mark.parametrize("errors", [["nan", 2.0], [2.0, "nan"]])
def test_the_worst_error_is_nan_wherever_it_stands(errors):
    parameters = [
        {"name": "w", "shape": [2], "judged": True, "lost": True, "error_over_noise": error}
        for error in errors
    ]
    certificate = {"error_over_noise": "nan", "verdict": "fail", "parameters": parameters}
    assert math.isnan(gradient_figure(certificate).facts["worst"])

"""Long series drawn in few points: nothing that a person looks for is lost."""

import math
import random

import pytest

from narrowcast.report._curves import curve, drawable, histogram


@pytest.mark.parametrize("total", [0, 1, 2, 3, 199, 200, 2000, 2001, 100_000])
def test_the_extremes_stay_and_the_points_are_few(total):
    draw = random.Random(total)
    y = [draw.gauss(0, 1) for _ in range(total)]
    drawn = curve(range(total), y, 2000)
    assert len(drawn.x) == len(drawn.y) <= 2000
    assert drawn.x == sorted(drawn.x)
    assert (drawn.total, drawn.gaps, drawn.first_gap) == (total, 0, None)
    if total:
        # Six digits are kept.
        assert max(drawn.y) == pytest.approx(max(y), rel=1e-5)
        assert min(drawn.y) == pytest.approx(min(y), rel=1e-5)
    if total <= 2000:
        assert drawn.x == list(range(total))
    assert len(drawn.trend_y) == (100 if total >= 200 else 0)


def test_a_gap_breaks_the_line_wherever_it_is():
    y = [1.0] * 90_000
    y[12_345] = math.nan
    y[50_000:] = [math.inf] * 40_000
    drawn = curve(range(90_000), y, 2000)
    assert (drawn.gaps, drawn.first_gap) == (40_001, 12_345)
    assert drawn.y[drawn.x.index(12_345)] is None
    assert all(value is None for at, value in zip(drawn.x, drawn.y, strict=True) if at >= 50_000)
    assert drawn.gaps_x[0] == 12_345
    assert len(drawn.gaps_x) <= 500
    assert all(math.isfinite(value) for value in drawn.trend_y)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((value, True) for value in (0.0, -0.0, 5e-324, 1e100)),
        *((value, False) for value in (1e101, 1e308, math.nan, math.inf, -math.inf)),
    ],
)
def test_what_can_be_drawn(value, shown):
    assert drawable(value) is shown


def test_the_trend_is_the_mean_of_each_hundredth_and_does_not_overflow():
    drawn = curve(range(1000), [float(n % 10) for n in range(1000)], 2000)
    assert drawn.trend_y == [4.5] * 100
    assert drawn.trend_x[:2] == [4.5, 14.5]
    huge = curve(range(1000), [1e100, 1e308] * 500, 2000)
    assert huge.trend_y == [1e100] * 100


def test_bins_hold_all_but_the_far_ends_and_are_shares_of_each_series():
    draw = random.Random(0)
    series = [[draw.uniform(1, 2) for _ in range(1000)], [draw.uniform(2, 3) for _ in range(500)]]
    found = histogram(series, bins=20)
    assert len(found.edges) == 21
    assert not found.logarithmic
    assert 0 < found.outside <= 0.03 * 1500 + 2
    inside = [sum(shares) / 100 * len(values) for shares, values in zip(found.shares, series, strict=True)]
    assert sum(inside) + found.outside == pytest.approx(1500, abs=0.1)


@pytest.mark.parametrize(
    ("series", "logarithmic"),
    [([[1.0]], False), ([[1.0] * 9], False), ([[0.01, 10.0] * 50], True), ([[1e-11] * 3], False)],
)
def test_odd_series_have_bins_too(series, logarithmic):
    found = histogram(series)
    assert found.logarithmic is logarithmic
    assert all(math.isfinite(value) for value in [*found.edges, *found.shares[0]])


@pytest.mark.parametrize("series", [[], [[]], [[0.0, -1.0]], [[math.nan, math.inf, 1e200]], [[5e-324]]])
def test_nothing_to_show_is_nothing(series):
    assert histogram(series) is None

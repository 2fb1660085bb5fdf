"""Medians of times and speedups with their intervals, beside exact counting."""

import functools
import itertools
import math
import statistics
from fractions import Fraction
from random import Random

import pytest
from scipy import stats

from narrowcast.observe.capture import Capture, Spread, median_of_runs
from narrowcast.observe.capture._speed import blocks_of, speedup_of_pairs

FEWEST = 6  # times for which the range covers the median with 95 %: 1 - 2 / 2**6 = 0.969, and 0.938 for five


def places(count):
    """Which of ``count`` ordered times bound the interval of their median."""
    low, high = median_of_runs([range(count)]).interval_s
    return int(low), int(high)


@functools.cache
def tails(count):
    """Of how many of the 2**count ways to lie below or above a median at most n times are below it."""
    return list(itertools.accumulate(math.comb(count, n) for n in range(count)))


def coverage(count, low, high):
    """Exact probability that the median lies between these two ordered times, of any continuous law.

    It does where more than ``low`` and at most ``high`` times are below it: a binomial count.
    """
    ways = tails(count)
    return Fraction(ways[high] - ways[low], 2**count)


def test_the_interval_of_a_median_covers_95_percent_barely():
    """By counting, for every number of steps up to 600 and some beyond: one place further in on both sides is
    the narrowest that covers, or already too narrow."""
    for count in [*range(FEWEST, 601), 997, 2000]:
        low, high = places(count)
        assert low == count - 1 - high, "it is symmetric"
        assert coverage(count, low, high) >= Fraction(95, 100), count
        if high - low > 4:
            assert coverage(count, low + 2, high - 2) < Fraction(95, 100), count


def test_an_interval_covers_those_of_all_runs():
    """A machine that was busy during one of two runs widens it."""
    assert median_of_runs([]) is median_of_runs([[], []]) is None
    quick, slow = [1.0] * 50, [3.0] * 50
    assert median_of_runs([quick, slow, quick]) == Spread(median_s=1.0, interval_s=(1.0, 3.0))
    assert median_of_runs([[], [2.0, 1.0], []]) == Spread(median_s=1.5, interval_s=(1.0, 2.0))


def pair_of_runs(random, first, ratio, *, steps, busy, slows):
    """Blocks of FP32 and of mixed precision, which take turns, AB BA, on a machine that others use too.

    Others slow both by a factor that wanders for seconds, and each step now and then by much. A process has a
    speed of its own, and the machine slows down by ``slows`` a second.
    """
    speeds = {side: math.exp(random.gauss(0, 0.01)) for side in ("fp32", "mixed")}
    speeds["fp32"] *= ratio
    blocks, order = {"fp32": [], "mixed": []}, [first, *({"fp32", "mixed"} - {first})]
    now = wander = 0.0
    for _ in range(steps // 5):
        for side in order:
            blocks[side].append([])
            for _ in range(5):
                wander = 0.98 * wander + random.gauss(0, busy * 0.2)
                spike = random.paretovariate(2.5) if random.random() < busy else 1.0
                step_s = 0.02 * speeds[side] * spike * math.exp(wander + slows * now + random.gauss(0, 0.01))
                blocks[side][-1].append(step_s)
                now += step_s
        order.reverse()
    return blocks["fp32"], blocks["mixed"]


@pytest.mark.parametrize("ratio", [1.0, 1.3])
@pytest.mark.parametrize(("busy", "widest"), [(0.0, 0.05), (0.3, 0.15)])
def test_intervals_of_speedups_hold_the_true_one(ratio, busy, widest):
    """In 36 of 40 comparisons, as an interval of 95 % does with near certainty, and none is too wide."""
    random = Random(f"{ratio} {busy}")
    setup, found = {"busy": busy, "slows": 0.05}, []
    for _ in range(40):  # the second pair is short
        sides = ("fp32", 200), ("mixed", 50)
        pairs = [pair_of_runs(random, first, ratio, steps=steps, **setup) for first, steps in sides]
        found.append(speedup_of_pairs(pairs))
    assert sum(low <= ratio <= high for _, low, high in found) >= 36
    assert statistics.median((high / low - 1) / 2 for _, low, high in found) <= widest


def test_a_few_blocks_give_no_speedup():
    assert speedup_of_pairs([([[0.1]] * 3, [[0.1]] * 3)]) is None
    middle, low, high = speedup_of_pairs([([[0.2]] * 4, [[0.1]] * 4)])
    assert middle == pytest.approx(2.0)
    # Nothing is known but the spread of processes: Student's t, 97.5 %, for 3 degrees of freedom.
    assert math.log(high / low) == pytest.approx(2 * stats.t.ppf(0.975, 3) * 0.015, rel=1e-3)


def test_a_pair_that_is_not_well_known_counts_for_little():
    quiet, busy = ([[0.1]] * 8, [[0.1]] * 8), ([[0.1], [0.2]] * 4, [[0.1]] * 8)
    assert speedup_of_pairs([quiet, quiet])[0] == pytest.approx(1.0)
    assert 1 < speedup_of_pairs([quiet, busy])[0] < 1.01
    assert speedup_of_pairs([quiet, ([[0.2]] * 8, [[0.1]] * 8)])[0] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(("waited_s", "kept"), [(0.0, [1.0, 1.0, 1.0]), (2.0, [5.0, 1.0, 1.0, 3.0])])
def test_the_first_step_after_a_pause_finds_cold_caches(waited_s, kept):
    """It is left out, but for a GPU, which ends all steps of a block in the wait after them."""
    steps = [{"event": "step", "optimizer": 0, "interval_s": s} for s in (5.0, 1.0, 1.0, 1.0)]
    capture = Capture(events=(*steps, {"event": "pause", "waited_s": waited_s}) * 3)
    assert blocks_of(capture, "training") == [kept] * 2

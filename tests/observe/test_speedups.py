"""Medians of times and speedups with their intervals, beside exact counting."""

import functools
import itertools
import math
import statistics
from fractions import Fraction
from random import Random

import pytest
from scipy import stats

from narrowcast.capture import (
    Capture,
    Spread,
    median_of_runs,
    speedup_of,
    times_of_runs,
    times_s,
    took_turns,
    used_by_others,
    why_no_speedup,
    worth_it,
)
from narrowcast.capture._speed import blocks_of
from narrowcast.capture._statistics import speedup_of_pairs

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
@pytest.mark.parametrize("pairs", [1, 4, 8])
@pytest.mark.parametrize(("busy", "widest"), [(0.0, 0.05), (0.3, 0.1)])
def test_intervals_of_speedups_hold_the_true_one(ratio, pairs, busy, widest):
    """In 36 of 40 comparisons, as an interval of 95 % does with near certainty, and none is too wide."""
    random = Random(f"{ratio} {busy} {pairs}")
    setup, found = {"busy": busy, "slows": 0.05}, []
    for _ in range(40):  # later pairs are short
        order = [("fp32", 200), *[("mixed", 50), ("fp32", 50)] * 4][:pairs]
        made = [pair_of_runs(random, first, ratio, steps=steps, **setup) for first, steps in order]
        found.append(speedup_of_pairs(made))
    assert sum(low <= ratio <= high for _, low, high in found) >= 36
    if pairs >= 4:
        assert statistics.median((high / low - 1) / 2 for _, low, high in found) <= widest


def equal_runs(random, blocks, load):
    """Blocks of a script against itself, AB BA, on a machine whose load is one of these kinds.

    ``own``: each process changes its speed after about eight blocks, as where it is moved to another core.
    """
    sides, order = {"a": [], "b": []}, ["a", "b"]
    own = {side: random.gauss(0, 0.03 if load == "own" else 0.01) for side in sides}
    until = dict.fromkeys(sides, 0.0)
    now_s = wander = burst_s = slower = 0.0
    for block in range(blocks):
        for side in order:
            if load == "own" and block >= until[side]:
                own[side] = random.gauss(0, 0.03)
                until[side] = block + random.expovariate(1 / 8)
            wander = 0.99 * wander + random.gauss(0, 0.05)
            if burst_s <= 0 and random.random() < 0.05:
                burst_s, slower = random.expovariate(0.5), random.uniform(0.2, 1.0)
            log_s = own[side] + random.gauss(0, 0.01)
            log_s += {"drift": 0.05 * now_s, "wander": wander, "bursts": slower * (burst_s > 0)}.get(
                load, 0.0
            )
            block_s = 0.1 * math.exp(log_s)
            now_s, burst_s = now_s + block_s, burst_s - block_s
            sides[side].append([block_s])
        order.reverse()
    return sides["a"], sides["b"]


@pytest.mark.parametrize("load", ["idle", "drift", "wander", "bursts", "own"])
@pytest.mark.parametrize("blocks", [(27,), (27, *[10] * 3), (27, *[3] * 7)])
def test_a_script_against_itself_is_seldom_faster(load, blocks):
    """1.0 is in at least 90 % of the intervals of 95 %, also where the speeds of processes change."""
    random = Random(f"{load} {blocks}")
    found = [speedup_of_pairs([equal_runs(random, count, load) for count in blocks]) for _ in range(200)]
    assert sum(low <= 1 <= high for _, low, high in found) >= 180


def test_a_process_whose_speed_is_its_own_is_seen_by_others():
    """Where equal processes differ by 30 %, as where memory is placed otherwise, one pair shows nothing."""
    random = Random(7)

    def pair():
        speeds = random.gauss(0, 0.2), random.gauss(0, 0.2)
        return tuple([[0.1 * math.exp(speed + random.gauss(0, 0.01))] for _ in range(10)] for speed in speeds)

    found = [speedup_of_pairs([pair() for _ in range(6)]) for _ in range(200)]
    assert sum(low <= 1 <= high for _, low, high in found) >= 180


def test_one_run_that_is_slow_does_not_widen_the_interval_of_many():
    even, slow = ([[0.1]] * 8, [[0.1]] * 8), ([[0.18]] * 8, [[0.1]] * 8)
    middle, _low, high = speedup_of_pairs([even] * 7 + [slow])
    assert middle == pytest.approx(1.0)
    assert high < 1.02
    assert speedup_of_pairs([even] * 3 + [slow])[2] > 1.5
    logs = [0.0, 0.01, 0.02, 0.03, 0.05, 0.06, 0.09]
    middle, _, high = speedup_of_pairs([([[math.exp(log)]] * 4, [[1.0]] * 4) for log in logs])
    trimmed = stats.trim_mean(logs, 1 / 7)
    spread = statistics.stdev([0.01, *logs[1:6], 0.06]) * 7 / 5
    assert math.log(middle) == pytest.approx(trimmed)
    assert math.log(high / middle) == pytest.approx(stats.t.ppf(0.975, 4) * spread / math.sqrt(7), rel=1e-3)


def test_thirds_that_differ_widen_the_interval_of_one_pair():
    """The interval reaches as far as the last third is off, though the spread of processes is narrower."""
    even = [[0.1]] * 30
    moved = [[0.1 * math.exp(0.5 * (block >= 20))] for block in range(30)]
    middle, low, high = speedup_of_pairs([(moved, even)])
    assert 0.5 < math.log(high / middle) < 0.6  # 0.19 by the spread alone
    assert worth_it((middle, low, high), None, 0.0) == "cannot tell"


def test_no_speedup_is_told_while_other_programs_use_the_cpus():
    """A CPU's steps wait for threads that have no CPU; what a GPU does goes on."""
    computed_on = {
        device: Capture(events=({"event": "start"}, {"event": "device", "device_type": device}))
        for device in ("cpu", "cuda")
    }
    busy = used_by_others([0.0, 0.9, 1.0], [computed_on["cpu"]])
    assert busy == 0.9
    assert used_by_others([0.9], [computed_on["cpu"], computed_on["cuda"]]) == 0.0
    assert used_by_others([], [computed_on["cpu"]]) == 0.0
    for speedup in (2.0, 1.9, 2.1), (0.5, 0.4, 0.6):
        assert worth_it(speedup, None, busy) == worth_it(speedup, 1.5, busy) == "cannot tell"
        assert worth_it(speedup, None, 0.25) == ("yes" if speedup[0] > 1 else "no")


def run_of(step_s, *, blocks=0):
    """The capture of a run of ten steps, without turns, or of ``blocks`` of one step each."""
    steps = [{"event": "step", "optimizer": 0, "interval_s": step_s}]
    pause = {"event": "pause", "waited_s": 0.0}
    return Capture(events=tuple([*steps, pause] * (blocks + 1) if blocks else steps * 10))


def one_after_the_other(*ratios):
    return [run_of(ratio) for ratio in ratios], [run_of(1.0)] * len(ratios)


def test_one_or_two_pairs_without_turns_give_no_speedup():
    """However far apart: a machine that was busy during one run looks the same."""
    for ratios, pairs in ((4.0,), "one pair"), ((4.0, 4.1), "2 pairs"):
        sides = one_after_the_other(*ratios)
        assert speedup_of(*sides, "training") is None
        assert pairs in why_no_speedup(*sides, "training")
        assert "give --time-limit 0 to time more of them" in why_no_speedup(*sides, "training")
    assert why_no_speedup([run_of(1.0)], [], "training") == "a time is missing"


def test_a_pair_that_took_few_turns_tells_only_of_more_than_four_times():
    """As where a CPU emulates bf16: the mixed run is ended in its first block after the warm-up."""
    for ratio in 0.05, 12.0:
        estimate = speedup_of([run_of(ratio, blocks=1)], [run_of(1.0, blocks=1)], "training")
        assert estimate == pytest.approx((ratio, ratio / 4, ratio * 4))
    for ratio in 0.3, 3.9:
        assert speedup_of([run_of(ratio, blocks=1)], [run_of(1.0, blocks=1)], "training") is None


def test_the_spread_of_three_pairs_without_turns_is_their_interval():
    ratios = 1.1, 1.3, 1.15
    middle, low, high = speedup_of(*one_after_the_other(*ratios), "training")
    logs = [math.log(ratio) for ratio in ratios]
    assert math.log(middle) == pytest.approx(statistics.fmean(logs))
    interval = stats.t.interval(0.95, 2, statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(3))
    assert [math.log(low), math.log(high)] == pytest.approx(interval, rel=1e-3)
    # Equal pairs may be so by chance.
    _, low, high = speedup_of(*one_after_the_other(1.2, 1.2, 1.2), "training")
    assert math.log(high / low) == pytest.approx(2 * stats.t.ppf(0.975, 2) * 0.015 / math.sqrt(3), rel=1e-3)


def test_equal_runs_one_after_the_other_are_seldom_faster():
    """In three pairs, AB BA AB, on a machine that slows down and wanders."""
    random = Random(3)
    holds = 0
    for _ in range(200):
        drift = random.gauss(0, 0.1)
        times = [math.exp(drift * place + random.gauss(0, 0.1)) for place in range(6)]
        before, after = (times[0], times[3], times[4]), (times[1], times[2], times[5])
        sides = [[run_of(step_s) for step_s in side] for side in (before, after)]
        _, low, high = speedup_of(*sides, "training")
        holds += low <= 1 <= high
    assert holds >= 180


def test_runs_that_took_turns_count_and_the_others_do_not():
    sides = [run_of(2.0), run_of(2.0, blocks=4)], [run_of(4.0), run_of(1.0, blocks=4)]
    assert took_turns(*sides, "training")
    assert speedup_of(*sides, "training")[0] == pytest.approx(2.0)
    assert not took_turns([run_of(2.0)], [run_of(1.0, blocks=4)], "training")


def test_the_optimizer_with_the_most_steps_is_timed():
    """And not a search for the learning rate before it."""
    pause = {"event": "pause", "waited_s": 0.0}
    search = [{"event": "step", "optimizer": 0, "interval_s": 9.0}, pause] * 5
    training = [{"event": "step", "optimizer": 1, "interval_s": 1.0}, pause] * 20
    capture = Capture(events=(*search, *training))
    assert set(times_s(capture, "training")) == {1.0}
    assert {step_s for block in blocks_of(capture, "training") for step_s in block} == {1.0}
    # A short run of the same script may end early in the training: the first run says which one counts.
    short = Capture(events=(*search, *training[:4]))
    assert set(times_of_runs([capture, short], "training")[1]) == {1.0}
    assert set(times_s(short, "training")) == {9.0}
    speedup = speedup_of([capture, short, short], [capture, short, short], "training")
    assert speedup[0] == pytest.approx(1.0)
    # Two that alternate: either lasts an iteration, and the first one counts.
    both = [{"event": "step", "optimizer": number, "interval_s": 2.0 + number} for number in (0, 1)]
    assert set(times_s(Capture(events=tuple(both * 10)), "training")) == {2.0}


def test_a_few_blocks_give_no_speedup():
    """But those of three pairs do."""
    few = ([[0.2]] * 3, [[0.1]] * 3)
    assert speedup_of_pairs([few]) is speedup_of_pairs([few, few]) is None
    assert speedup_of_pairs([few] * 3)[0] == pytest.approx(2.0)
    middle, low, high = speedup_of_pairs([([[0.2]] * 4, [[0.1]] * 4)])
    assert middle == pytest.approx(2.0)
    # Nothing is known but the spread of processes, as if from three of them.
    assert math.log(high / low) == pytest.approx(2 * stats.t.ppf(0.975, 2) * 0.045, rel=1e-3)


@pytest.mark.parametrize(("waited_s", "kept"), [(0.0, [1.0, 1.0, 1.0]), (2.0, [2.5] * 4)])
def test_the_first_step_after_a_pause_finds_cold_caches(waited_s, kept):
    """It is left out, but for a GPU, which ends all steps of a block in the wait after them: 10 s of four."""
    steps = [{"event": "step", "optimizer": 0, "interval_s": s} for s in (5.0, 1.0, 1.0, 1.0)]
    capture = Capture(events=(*steps, {"event": "pause", "waited_s": waited_s}) * 3)
    assert blocks_of(capture, "training") == [kept] * 2


def test_steps_of_a_gpu_last_as_long_as_the_gpu_takes():
    """In FP32 nothing makes the host wait, which launches a step in 2 ms and waits 288 ms after six.

    In mixed precision each step reads a flag of the step before. The GPU takes 50 ms a step in FP32.
    """

    def run_of(first_s, others_s, waited_s, tail=()):
        intervals = [first_s, *[others_s] * 5]
        block = [{"event": "step", "optimizer": 0, "interval_s": step_s} for step_s in intervals]
        after = [{"event": "step", "optimizer": 0, "interval_s": step_s} for step_s in tail]
        return Capture(events=(*[*block, {"event": "pause", "waited_s": waited_s}] * 12, *after))

    fp32, mixed = run_of(0.002, 0.002, 0.288, tail=[0.002] * 40), run_of(0.002, 0.006, 0.004)
    assert times_s(fp32, "training") == pytest.approx([0.05] * 65), "72 steps, without the warm-up"
    assert speedup_of([fp32], [mixed], "training")[0] == pytest.approx(50 / 6)
    # A run that went on alone after its first pause has most of its steps behind it.
    alone = Capture(events=(*fp32.events[:7], *fp32.events[-40:]))
    assert len(times_s(alone, "training")) == 42, "of 46, without the warm-up"
    # Calls are timed by the GPU itself.
    calls = Capture(
        events=({"event": "forward", "duration_s": 0.05}, {"event": "pause", "waited_s": 1.0}) * 12
    )
    assert set(times_s(calls, "inference")) == {0.05}
    assert blocks_of(calls, "inference") == [[0.05]] * 10


def test_the_calls_of_the_slowest_module_are_timed_in_both_formats():
    """A detector and ten calls of its head; in mixed precision the head is the slower one."""

    def run_of(detector_s, head_s):
        detector = {"event": "forward", "duration_s": detector_s, "module": 0}
        head = {"event": "forward", "duration_s": head_s, "module": 1}
        # Loaded at the first call, and never called again.
        loads = {"event": "forward", "duration_s": 9.0, "module": 2}
        return Capture(events=(loads, *[detector, *[head] * 10, {"event": "pause", "waited_s": 0.0}] * 12))

    fp32, mixed = run_of(0.1, 0.0002), run_of(0.002, 0.0004)
    assert set(times_s(fp32, "inference")) == {0.1}
    assert set(times_of_runs([mixed], "inference", like=[fp32])[0]) == {0.002}
    assert set(times_s(mixed, "inference")) == {0.0004}
    assert speedup_of([fp32], [mixed], "inference")[0] == pytest.approx(50)

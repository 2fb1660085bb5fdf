"""Medians and means of plain numbers with their 95 % intervals: of times, speedups, errors of gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FEWEST_PAIRS = 3
"""Pairs of runs; fewer do not show how far equal runs differ."""

# Fewest blocks in a pair where there are only one or two pairs.
_FEWEST_BLOCKS = 4
# If runs took fewer turns, a speedup is told only if it is beyond this factor, as where a CPU emulates a
# format. The interval reaches as far either way. They differ by less, even if the clock halves meanwhile.
_MOST_BY_CHANCE = 4.0
# Standard deviation of the log speedup of equal runs. For twelve scripts against themselves on two cores of a
# virtual machine it was 0.013 to 0.05, for one 0.17.
_USUAL_SPREAD = 0.045  # assumed where there are only one or two pairs
_LEAST_SPREAD = 0.015  # assumed where three pairs or more differ less
# From this many pairs on, the largest and the smallest ratio are trimmed.
_ENOUGH_TO_TRIM = 7
_NORMAL_975 = 1.959964
# Student's t, 97.5 %, for 2 to 12 degrees of freedom.
_STUDENT_975 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)

Blocks = Sequence[Sequence[float]]
"""The times of one run, one list for each block; pauses separate the blocks."""


class Estimate(NamedTuple):
    """A number with the ends of its 95 % interval; NaN: not known."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median and an interval around it, both in seconds."""

    median_s: float
    interval_s: tuple[float, float]


def student_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for ``freedom`` degrees of freedom, 2 or more."""
    if freedom - 2 < len(_STUDENT_975):
        return _STUDENT_975[freedom - 2]
    # Cornish and Fisher's expansion about the normal quantile: Abramowitz and Stegun, 26.7.5.
    z, n = _NORMAL_975, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


# ---- medians of times


def median_of_runs(runs: Sequence[Sequence[float]]) -> Spread | None:
    """Compute the median over all runs, and an interval that covers each run's own.

    A run's own interval contains its median with 95 % confidence, from the order of its times alone; with
    ten times or fewer it is their whole range, which with fewer than six is less certain. It assumes
    independent steps, which is wrong on a machine that is busy for a while; so the interval returned reaches
    from the lowest to the highest of the runs' intervals. ``runs`` are the times of each, warm-up left out.
    """
    all_times: list[float] = []
    lows: list[float] = []
    highs: list[float] = []
    for times in runs:
        if times:
            low, high = _interval_of_median(sorted(times))
            lows.append(low)
            highs.append(high)
            all_times.extend(times)
    if not all_times:
        return None
    return Spread(median_s=statistics.median(all_times), interval_s=(min(lows), max(highs)))


def _interval_of_median(ordered: Sequence[float]) -> tuple[float, float]:
    # The number of times below the median is binomial, which is approximated by a normal distribution. The
    # ranks, from 1, are floor(n/2 - reach) and ceil(n/2 + reach) + 1; the indices are one less.
    count = len(ordered)
    reach = _NORMAL_975 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach) - 1)
    high = min(count - 1, math.ceil(count / 2 + reach))
    return ordered[low], ordered[high]


# ---- speedups, averaged as logarithms


def speedup_of_ratios(log_ratios: Sequence[float]) -> Estimate:
    """Return the speedup of three pairs or more, with Student's interval of their spread.

    Now and then a whole run is slow, as where both threads share a core. So from seven pairs on the mean
    leaves out the largest and the smallest ratio, and the spread counts each as equal to its neighbor (a
    trimmed mean with a winsorized spread: Yuen, 1974).
    """
    ordered = sorted(log_ratios)
    count = len(ordered)
    cut = 1 if count >= _ENOUGH_TO_TRIM else 0
    trimmed = ordered[cut : count - cut]
    winsorized = [trimmed[0]] * cut + trimmed + [trimmed[-1]] * cut
    spread = max(statistics.stdev(winsorized), _LEAST_SPREAD) * count / len(trimmed)
    reach = student_975(len(trimmed) - 1) * spread / math.sqrt(count)
    return _speedup(statistics.fmean(trimmed), reach)


def speedup_of_pairs(pairs: Sequence[tuple[Blocks, Blocks]]) -> Estimate | None:
    """Compute the speedup and its interval from the blocks of pairs of runs, FP32 and mixed; None: too few.

    Both sides of a block do the same steps, one right after the other, so a busy machine slows both alike.
    The logarithm of the ratio of their medians is averaged over blocks, the outer fifths left out, and then
    over pairs.

    Each process has a speed of its own (addresses, pages, placement of threads), which blocks cannot show. So
    the interval is Student's, of the spread of the pairs. One or two pairs show no spread of their own, so
    they are given that of equal runs on a quiet machine, with 2 degrees of freedom. On a busy machine a
    process changes its speed as it goes on, so the interval also allows for how far the thirds of a pair
    differ.

    With three pairs or more, one block of each pair is enough; with fewer, four are needed. A pair without
    any block that both runs have whole must not be passed, since it counts as one of the pairs.
    """
    are_few = len(pairs) < FEWEST_PAIRS
    fewest_blocks = _FEWEST_BLOCKS if are_few else 1
    ratios: list[float] = []
    ranges: list[float] = []
    for fp32, mixed in pairs:
        of_blocks = log_ratios_of_blocks(fp32, mixed)
        if len(of_blocks) < fewest_blocks:
            continue
        ratios.append(_trimmed_mean(of_blocks))
        if are_few:
            ranges.append(_range_of_thirds(of_blocks))
    if not ratios:
        return None
    if not are_few:
        return speedup_of_ratios(ratios)
    reach = student_975(2) * _USUAL_SPREAD / math.sqrt(len(ratios))
    reach = math.hypot(reach, statistics.fmean(ranges))
    return _speedup(statistics.fmean(ratios), reach)


def speedup_beyond_chance(log_ratios: Sequence[float]) -> Estimate | None:
    """Return the speedup of one or two pairs that took a few turns; None: chance may explain it."""
    if not log_ratios:
        return None
    mean = statistics.fmean(log_ratios)
    reach = math.log(_MOST_BY_CHANCE)
    return _speedup(mean, reach) if abs(mean) > reach else None


def _speedup(log_ratio: float, reach: float) -> Estimate:
    return Estimate(math.exp(log_ratio), math.exp(log_ratio - reach), math.exp(log_ratio + reach))


def log_ratios_of_blocks(fp32: Blocks, mixed: Blocks) -> list[float]:
    """Return the logarithm of the speedup by the medians of each block that both runs have whole."""
    ratios = []
    for fp32_times, mixed_times in zip(fp32, mixed, strict=False):
        ratio = log_ratio(fp32_times, mixed_times)
        if len(fp32_times) == len(mixed_times) and ratio is not None:
            ratios.append(ratio)
    return ratios


def log_ratio(fp32_times: Sequence[float], mixed_times: Sequence[float]) -> float | None:
    """Return the logarithm of the speedup by the medians; None: one side has no times, or a time is 0."""
    if not fp32_times or not mixed_times or min(*fp32_times, *mixed_times) <= 0:
        return None
    return math.log(statistics.median(fp32_times) / statistics.median(mixed_times))


def _trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the outer fifths."""
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _range_of_thirds(values: Sequence[float]) -> float:
    """Return how far apart the means of the first, the middle and the last third of ``values`` are."""
    first, second = len(values) // 3, 2 * len(values) // 3
    thirds = (values[:first], values[first:second], values[second:])
    means = list(map(statistics.fmean, thirds))
    return max(means) - min(means)

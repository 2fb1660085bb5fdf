"""Times of steps and calls, and the speedup of pairs of runs with its interval."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.observe.capture._files import Capture

LEAST_GAIN = 1.05
"""A speedup that is certainly smaller is not worth it."""
FEWEST_PAIRS = 3
"""Of runs; fewer do not show how far equal runs differ."""

# Of a run's steps, the first that are left out: caches fill, memory is claimed, kernels are chosen.
_WARM_UP_SHARE = 0.1
_FEWEST_WITH_WARM_UP = 3
# Of the only pair of runs, or of each of two.
_FEWEST_BLOCKS = 4
# By how much pairs of equal runs differ: on a quiet machine, where few pairs were timed, and at least. On two
# cores of a virtual machine, of twelve scripts against themselves it was 0.013 to 0.05, and of one 0.17.
_ENOUGH_TO_TRIM = 7
_USUAL_SPREAD, _LEAST_SPREAD = 0.045, 0.015
_NORMAL_975 = 1.959964
# Student's t, 97.5 %, for 2 to 12 degrees of freedom.
_STUDENT_975 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median and an interval around it, both in seconds."""

    median_s: float
    interval_s: tuple[float, float]


def kind_of(captures: Sequence[Capture]) -> str | None:
    """``"training"`` where a run went backward, ``"inference"`` where modules were only called."""
    if any(one.of("loss") or one.of("step") or one.totals()["backwards"] for one in captures):
        return "training"
    return "inference" if any(one.of("forward") for one in captures) else None


def _without_warm_up(times_s: Sequence[float]) -> list[float]:
    """Leave out the first tenth of ``times_s``, at least one; of one or two all stay."""
    fewest = 1 if len(times_s) >= _FEWEST_WITH_WARM_UP else 0
    return list(times_s[max(fewest, int(len(times_s) * _WARM_UP_SHARE)) :])


def pace_of(captures: Sequence[Capture]) -> int | None:
    """Return the number of the optimizer whose steps are timed in runs of one script; None: no step.

    It is the one with the most steps in the first of them, which is whole: a short run may end in a search
    for the learning rate.
    """
    for capture in captures:
        counts = Counter[int](step["optimizer"] for step in capture.of("step"))
        if counts:
            return max(sorted(counts), key=counts.__getitem__)
    return None


def times_of_runs(captures: Sequence[Capture], kind: str | None) -> list[list[float]]:
    """Return ``times_s`` of each of several runs of one script, the first of which is whole."""
    pace = pace_of(captures)
    return [times_s(capture, kind, pace) for capture in captures]


def times_s(capture: Capture, kind: str | None, pace: int | None = None) -> list[float]:
    """Durations of steps, or for the kind ``"inference"`` of outermost forward calls, warm-up left out.

    Only steps of the optimizer ``pace`` count, by default those of the one with the most: in a GAN, whose two
    optimizers alternate, each of them lasts a whole iteration, and no iteration counts twice.
    """
    if kind == "inference":
        return _without_warm_up([forward["duration_s"] for forward in capture.of("forward")])
    if pace is None:
        pace = pace_of([capture])
    intervals = [step["interval_s"] for step in capture.of("step") if step["optimizer"] == pace]
    return _without_warm_up([interval for interval in intervals if interval is not None])


def speedup_of(
    fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None
) -> tuple[float, float, float] | None:
    """Return the speedup of steps or calls, and the ends of its 95 % interval; None: ``why_no_speedup``.

    Uses the pairs whose runs took turns, and if none did the medians of at least ``FEWEST_PAIRS`` pairs.
    """
    pairs = _pairs_in_turns(fp32, mixed, kind)
    in_turns = speedup_of_pairs(pairs) if pairs else None
    if in_turns is not None:
        return in_turns
    ratios = _ratios_of_medians(fp32, mixed, kind)
    return _interval(ratios) if len(ratios) >= FEWEST_PAIRS else None


def why_no_speedup(fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None) -> str:
    """Say why ``speedup_of`` is None."""
    pairs = len(_ratios_of_medians(fp32, mixed, kind))
    if pairs == 0:
        return "a time is missing"
    timed = "one pair" if pairs == 1 else f"{pairs} pairs"
    return (
        f"steps took too few turns, and {timed} of runs do not show how far equal runs differ; "
        "--time-limit 0 times more"
    )


def took_turns(fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None) -> bool:
    """Return whether the runs of a pair took turns."""
    return bool(_pairs_in_turns(fp32, mixed, kind))


Blocks = Sequence[Sequence[float]]


def _pairs_in_turns(
    fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None
) -> list[tuple[Blocks, Blocks]]:
    """Return the blocks of both runs of each pair whose runs took turns."""
    pace = pace_of(fp32)
    pairs: list[tuple[Blocks, Blocks]] = []
    for before, after in zip(fp32, mixed, strict=False):  # the last one may have begun only
        blocks = (blocks_of(before, kind, pace), blocks_of(after, kind, pace))
        if _ratios_of_blocks(*blocks):
            pairs.append(blocks)
    return pairs


def _ratios_of_blocks(fp32: Blocks, mixed: Blocks) -> list[float]:
    """Return the logarithm of the speedup by the medians of each block that both runs have whole."""
    ratios = []
    for before, after in zip(fp32, mixed, strict=False):
        if before and len(before) == len(after) and min(*before, *after) > 0:
            ratios.append(math.log(statistics.median(before) / statistics.median(after)))
    return ratios


def _ratios_of_medians(fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None) -> list[float]:
    """Return the logarithm of the speedup by the medians of each pair of runs that has both."""
    ratios = []
    both = zip(times_of_runs(fp32, kind), times_of_runs(mixed, kind), strict=False)
    for times, mixed_times in both:
        if times and mixed_times and min(*times, *mixed_times) > 0:
            ratios.append(math.log(statistics.median(times) / statistics.median(mixed_times)))
    return ratios


def _interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the speedup and the ends of its interval: Student's, of the spread of three or more pairs.

    Now and then a whole run is slow, as where both threads share a core. So from seven pairs on the largest
    and the smallest ratio count as if they were equal to their neighbors (Yuen, 1974).
    """
    ordered = sorted(ratios)
    count = len(ordered)
    cut = 1 if count >= _ENOUGH_TO_TRIM else 0
    kept = ordered[cut : count - cut]
    moved = [kept[0]] * cut + kept + [kept[-1]] * cut
    middle = statistics.fmean(kept)
    spread = max(statistics.stdev(moved), _LEAST_SPREAD) * count / len(kept)
    reach = student_975(len(kept) - 1) * spread / math.sqrt(count)
    return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def worth_it(speedup: Sequence[float], asked: float | None) -> str:
    """Return ``"yes"``, ``"no"`` or ``"cannot tell"`` for a speedup and the ends of its interval.

    If no speedup was asked for, any that is certain is worth it, and one that is certainly below
    ``LEAST_GAIN`` is not.
    """
    _, low, high = speedup
    if low > 1 if asked is None else low >= asked:
        return "yes"
    return "no" if high < (LEAST_GAIN if asked is None else asked) else "cannot tell"


def median_of_runs(runs: Sequence[Sequence[float]]) -> Spread | None:
    """Compute the median over all runs, and an interval that covers each run's own.

    A run's own interval contains its median with 95 % confidence, from the order of its times alone; with
    fewer than six times it is their whole range, which is less certain. It assumes independent steps, which
    is wrong on a machine that is busy for a while; so the interval returned reaches from the lowest to the
    highest of the runs' intervals. ``runs`` are the times of each, warm-up left out.
    """
    kept = [sorted(times) for times in runs if times]
    if not kept:
        return None
    intervals = [_interval_of_median(times) for times in kept]
    return Spread(
        median_s=statistics.median([time for times in kept for time in times]),
        interval_s=(min(low for low, _ in intervals), max(high for _, high in intervals)),
    )


def _interval_of_median(ordered: Sequence[float]) -> tuple[float, float]:
    count = len(ordered)
    reach = _NORMAL_975 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach) - 1)
    high = min(count - 1, math.ceil(count / 2 + reach))
    return ordered[low], ordered[high]


def blocks_of(capture: Capture, kind: str | None, pace: int | None = None) -> list[list[float]]:
    """Durations as of ``times_s``, in the blocks between two pauses of the run, the first tenth left out.

    Of three steps or more the first is left out: it finds caches that the other process filled. Not where
    a block ended with a wait for the device, since that has the rest of all its steps.
    """
    if pace is None:
        pace = pace_of([capture])
    blocks: list[list[float]] = []
    current: list[float] = []
    for event in capture.events:
        if event["event"] == "pause":
            if current:
                current[-1] += event["waited_s"]  # what a device still had to do
            cold = len(current) > 2 and not event["waited_s"]
            blocks.append(current[cold:])
            current = []
        elif kind == "inference" and event["event"] == "forward":
            current.append(event["duration_s"])
        elif event["event"] == "step" and event["optimizer"] == pace and event["interval_s"] is not None:
            current.append(event["interval_s"])
    return blocks[1 + int(len(blocks) * _WARM_UP_SHARE) :]


def speedup_of_pairs(pairs: Sequence[tuple[Blocks, Blocks]]) -> tuple[float, float, float] | None:
    """Compute the speedup and its interval from the blocks of pairs of runs, FP32 and mixed; None: too few.

    Both sides of a block do the same steps, one right after the other, so a busy machine slows both alike.
    The logarithm of the ratio of their medians is averaged over blocks, the outer fifths left out, and then
    over pairs.

    Each process has a speed of its own (addresses, pages, placement of threads), which blocks cannot show. So
    the interval is Student's, of the spread of the pairs. One or two pairs have the spread of equal runs on a
    quiet machine, as if it was known from two more of them; and since on a busy one a process changes its
    speed as it goes on, their intervals also allow for how far the thirds of a pair differ.
    """
    ratios, moves = [], []
    fewest_blocks = 1 if len(pairs) >= FEWEST_PAIRS else _FEWEST_BLOCKS
    for fp32, mixed in pairs:
        of_blocks = _ratios_of_blocks(fp32, mixed)
        if len(of_blocks) < fewest_blocks:
            continue
        ratios.append(_trimmed(of_blocks))
        moves.append(_range_of_thirds(of_blocks) if fewest_blocks > 1 else 0.0)
    if not ratios:
        return None
    if len(ratios) >= FEWEST_PAIRS:
        return _interval(ratios)
    middle = statistics.fmean(ratios)
    reach = student_975(2) * _USUAL_SPREAD / math.sqrt(len(ratios))
    reach = math.hypot(reach, statistics.fmean(moves))
    return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def _trimmed(values: Sequence[float]) -> float:
    """Return the mean without the outer fifths."""
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _range_of_thirds(values: Sequence[float]) -> float:
    """Return how far apart the means of the first, the middle and the last third of ``values`` are."""
    first, second = len(values) // 3, 2 * len(values) // 3
    means = [statistics.fmean(part) for part in (values[:first], values[first:second], values[second:])]
    return max(means) - min(means)


def student_975(freedom: int) -> float:
    """Student's t, 97.5 %, for 2 degrees of freedom or more."""
    if freedom - 2 < len(_STUDENT_975):
        return _STUDENT_975[freedom - 2]
    # Cornish and Fisher's expansion about the normal quantile: Abramowitz and Stegun, 26.7.5.
    z, n = _NORMAL_975, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3

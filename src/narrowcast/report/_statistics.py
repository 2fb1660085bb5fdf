"""Medians of times with an interval, what a loss may differ by, and reasons to doubt a comparison."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.observe.capture import Capture, TimedRun

WARM_UP_SHARE = 0.1
"""Of a run's steps, the first that are left out: caches fill, memory is claimed, kernels are chosen."""

_FEWEST_WITH_WARM_UP = 3
_LAST_SHARE = 0.1
_TOO_UNEVEN = 4.0
_MANY_SKIPPED = 0.1
_MORE_CALLS = 1.2
_FEWEST_LOSSES = 10
_MANY_TIMES = 10.0
_FEWEST_BLOCKS = 4
_PRIOR_PAIRS = 3
_PROCESS_SPREAD = 0.015
_NORMAL_975 = 1.959964
# Student's t, 97.5 %, for 2 to 12 degrees of freedom.
_STUDENT_975 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median and an interval around it, both in seconds."""

    median_s: float
    interval_s: tuple[float, float]


def without_warm_up(times_s: Sequence[float]) -> list[float]:
    """Leave out the first tenth of ``times_s``, at least one; of one or two all stay."""
    fewest = 1 if len(times_s) >= _FEWEST_WITH_WARM_UP else 0
    return list(times_s[max(fewest, int(len(times_s) * WARM_UP_SHARE)) :])


def times_s(capture: Capture, kind: str | None) -> list[float]:
    """Durations of steps, or for the kind ``"inference"`` of outermost forward calls, warm-up left out.

    Only steps of the optimizer that stepped first count: in a GAN, whose two optimizers alternate, each of
    them lasts a whole iteration, and no iteration counts twice.
    """
    if kind == "inference":
        return without_warm_up([forward["duration_s"] for forward in capture.of("forward")])
    intervals = [step["interval_s"] for step in capture.of("step") if step["optimizer"] == 0]
    return without_warm_up([interval for interval in intervals if interval is not None])


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


def blocks_of(capture: Capture, kind: str | None) -> list[list[float]]:
    """Durations as of ``times_s``, in the blocks between two pauses of the run, the first tenth left out.

    Of three steps or more the first is left out: it finds caches that the other process filled. Not where
    a block ended with a wait for the device, since that has the rest of all its steps.
    """
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
        elif event["event"] == "step" and event["optimizer"] == 0 and event["interval_s"] is not None:
            current.append(event["interval_s"])
    return blocks[1 + int(len(blocks) * WARM_UP_SHARE) :]


def speedup_of_pairs(
    pairs: Sequence[tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]],
) -> tuple[float, float, float] | None:
    """Compute the speedup and its interval from the blocks of pairs of runs, FP32 and mixed; None: too few.

    Both sides of a block do the same steps, one right after the other, so a busy machine slows both alike.
    The logarithm of their ratio is averaged over blocks, the outer fifths left out, and then over pairs.

    Each process has a speed of its own (addresses, placement of threads), which blocks cannot show and two
    pairs hardly can. So the variance between pairs is estimated as if ``_PRIOR_PAIRS`` more of them had been
    seen that differed by ``_PROCESS_SPREAD``. Student's t gives the interval.
    """
    found = []
    for fp32, mixed in pairs:
        sums = [(sum(a), sum(b)) for a, b in zip(fp32, mixed, strict=False) if len(a) == len(b)]
        ratios = [math.log(a / b) for a, b in sums if a > 0 and b > 0]
        if len(ratios) >= _FEWEST_BLOCKS:
            found.append(_trimmed(ratios))
    if not found:
        return None
    middle = statistics.fmean(estimate for estimate, _ in found)
    within = statistics.fmean(variance for _, variance in found)
    between = sum((estimate - middle) ** 2 for estimate, _ in found)
    freedom = _PRIOR_PAIRS + len(found) - 1
    variance = (_PRIOR_PAIRS * (_PROCESS_SPREAD**2 + within) + between) / freedom
    reach = _student_975(freedom) * math.sqrt(variance / len(found))
    return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def _trimmed(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean without the outer fifths, and its variance (Yuen), for few as much larger as t is.

    What lasts longer than a block makes neighbors alike, by the correlation ``alike``; then fewer count.
    """
    count, cut, middle = len(values), len(values) // 5, statistics.fmean(values)
    kept = sorted(values)[cut : count - cut]
    moved = [kept[0]] * cut + kept + [kept[-1]] * cut
    variance = statistics.variance(moved) * count / len(kept) ** 2
    squares = sum((value - middle) ** 2 for value in values) or 1.0
    products = sum((a - middle) * (b - middle) for a, b in itertools.pairwise(values))
    alike = min(max(products / squares + 1 / count, 0.0), 0.9)  # an estimate is 1 / count too low
    wider = _student_975(len(kept) - 1) / _NORMAL_975
    return statistics.fmean(kept), variance * (1 + alike) / (1 - alike) * wider**2


def final_loss(losses: Sequence[float]) -> float:
    """Mean of the last tenth, at least one value: a single minibatch is too noisy."""
    return mean(losses[-max(1, int(len(losses) * _LAST_SHARE)) :])


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of infinities of both signs, infinity where a float cannot hold the sum."""
    try:
        return statistics.fmean(values)
    except (ValueError, OverflowError):
        return sum(values) / len(values)


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """Whether the losses of mixed runs differ from FP32's by more than seeds do.

    Attributes:
        verdict: ``"pass"``, ``"fail"`` or ``"cannot tell"``.
        reason: a clause for the table.
        difference: mean over seeds of mixed minus FP32, both from the same seed; None: no pair.
        seed_spread: sample standard deviation of FP32's losses over seeds; None: fewer than three seeds.
        times_fp32: mixed over FP32, if more than ten for each seed and there are fewer than three: the
            comparison then cannot pass; else None.
    """

    verdict: str
    reason: str
    difference: float | None = None
    seed_spread: float | None = None
    times_fp32: float | None = None


def judge_losses(pairs: Sequence[tuple[float, float]]) -> LossVerdict:
    """Judge final losses of one call site, a pair (FP32, mixed) for each seed.

    They pass if the mean difference is at most the spread between seeds, or if mixed is lower. They fail if
    mixed is higher by more than that and the paired differences leave no doubt (Student's t, 97.5 %). Fewer
    than three seeds are not enough to tell, nor are losses that are not finite in FP32 itself.
    """
    differences = [mixed - fp32 for fp32, mixed in pairs]
    if not pairs or any(not math.isfinite(fp32) for fp32, _ in pairs):
        seen = "the loss is not finite in FP32 itself" if pairs else "no loss was seen in both formats"
        return LossVerdict("cannot tell", seen)
    if not all(math.isfinite(mixed) for _, mixed in pairs):
        return LossVerdict("fail", "the loss is finite in FP32 and not in mixed precision")
    difference = mean(differences)
    if not math.isfinite(difference):
        return LossVerdict("cannot tell", "the losses are too large to subtract")
    if len(pairs) < 3:
        seeds = f"{len(pairs)} seed{'s' * (len(pairs) != 1)}"
        reason = f"{seeds} cannot show what other seeds change: use --repeats 3 or more"
        times = min(mixed / fp32 if fp32 > 0 else 0.0 for fp32, mixed in pairs)
        if times <= _MANY_TIMES:
            return LossVerdict("cannot tell", reason, difference)
        return LossVerdict("cannot tell", f"{times:.4g} times FP32's, but {reason}", difference, None, times)
    spread = _deviation([fp32 for fp32, _ in pairs])
    return LossVerdict(*_against_spread(differences, difference, spread), difference, spread)


def far_apart(fp32: Sequence[Sequence[float]], mixed: Sequence[Sequence[float]]) -> str | None:
    """Return a reason if FP32 learns and mixed precision does not, for which one seed is enough; else None.

    Given the losses of each run. Runs of both formats see the same batches, so a difference is no minibatch
    noise. What it may be is the chance that other seeds show; so it has to be more than half of the range of
    all losses that FP32 had, which the loss went through as it fell, and a tenth of the loss, which rounding
    does not reach. Every mixed run has to end so far above every FP32 run.
    """
    values = [loss for losses in fp32 for loss in losses]
    fewest = min(min(map(len, runs), default=0) for runs in (fp32, mixed))
    if fewest < _FEWEST_LOSSES or not all(map(math.isfinite, values)):
        return None
    tenths = [losses[: max(1, int(len(losses) * _LAST_SHARE))] for losses in fp32]
    first, last, other = min(map(mean, tenths)), max(map(final_loss, fp32)), min(map(final_loss, mixed))
    if last >= first or other - last <= max((max(values) - min(values)) / 2, abs(last) / 10):
        return None
    return f"far apart: in FP32 it fell from {first:.3g} to {last:.3g}, and here it ended at {other:.3g}"


def _against_spread(differences: Sequence[float], difference: float, spread: float) -> tuple[str, str]:
    """Return the verdict and its reason."""
    seeds = f"the spread between {len(differences)} seeds"
    if difference == spread == 0.0:
        return "pass", f"the same to the last digit for all {len(differences)} seeds"
    if abs(difference) <= spread:
        return "pass", f"the difference is {abs(difference) / spread:.2f} of {seeds}"
    if spread == 0.0:
        return "cannot tell", "seeds change nothing in this script, so there is no spread"
    if difference < 0:
        return "pass", f"lower than FP32's by {-difference / spread:.1f} times {seeds}"
    error = _deviation(differences) / math.sqrt(len(differences))
    reason = f"higher than FP32's by {difference / spread:.1f} times {seeds}"
    if difference > _student_975(len(differences) - 1) * error:
        return "fail", reason
    return "cannot tell", f"{reason}, and the pairs differ too much: use more --repeats"


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; infinity where a float cannot hold it."""
    try:
        return statistics.stdev(values)
    except OverflowError:
        return math.inf


def _student_975(freedom: int) -> float:
    """Student's t, 97.5 %, for 2 degrees of freedom or more."""
    if freedom - 2 < len(_STUDENT_975):
        return _STUDENT_975[freedom - 2]
    # Cornish and Fisher's expansion about the normal quantile: Abramowitz and Stegun, 26.7.5.
    z, n = _NORMAL_975, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def doubts(fp32: Sequence[TimedRun], mixed: Sequence[TimedRun], kind: str | None) -> list[str]:
    """List reasons to doubt a comparison, each a line for its notes."""
    runs = [*fp32, *mixed]
    found = [
        f"{run.name} left a capture without its end, as after os._exit: its last events may be missing"
        for run in runs
        if run.capture.end is None
    ]
    tried = sorted({len(run.capture.of("step")) for run in runs if not run.cut})
    if len(tried) > 1:
        found.append(
            f"the runs took different numbers of steps ({tried[0]} to {tried[-1]}), so they did not do the "
            "same work: does the script resume from what it saved, or stop when it is good enough?"
        )
    spread = max((_unevenness(run, kind) for run in runs), default=1.0)
    if spread > _TOO_UNEVEN:
        found.append(
            f"times varied {spread:.0f}-fold within a run (10th to 90th percentile): the machine was busy "
            "or the steps differ, so do not trust the ratio of their medians"
        )
    return [*found, *many_skipped(mixed), *_other_calls(fp32, mixed), *_not_repeatable(fp32)]


def _unevenness(run: TimedRun, kind: str | None) -> float:
    ordered = sorted(times_s(run.capture, kind))
    if len(ordered) < 10:
        return 1.0
    tenth = len(ordered) // 10
    return ordered[-1 - tenth] / max(ordered[tenth], 1e-9)


def many_skipped(runs: Sequence[TimedRun]) -> list[str]:
    """Skipped steps are quicker than others, and train nothing."""
    totals = [run.capture.totals() for run in runs]
    skipped = sum(total["skipped_steps"] for total in totals)
    tried = skipped + sum(total["steps"] for total in totals)
    if skipped <= _MANY_SKIPPED * tried:
        return []
    return [
        f"{skipped} of the {tried} steps in mixed precision were skipped, as their gradients overflowed: "
        "they trained nothing and took less time, so neither losses nor times are those of the same work"
    ]


def calls_per_step(runs: Sequence[TimedRun]) -> float | None:
    """Calls of all modules in the runs, by the steps of all optimizers, skipped ones included."""
    totals = [total for run in runs if (total := run.capture.totals()).get("module_calls")]
    steps = sum(total["steps"] + total["skipped_steps"] for total in totals)
    return sum(total["module_calls"] for total in totals) / steps if steps else None


def _other_calls(fp32: Sequence[TimedRun], mixed: Sequence[TimedRun]) -> list[str]:
    """Adaptive solvers go on until an error is small, which rounding may keep it from for long."""
    before, after = calls_per_step(fp32), calls_per_step(mixed)
    if not before or not after or max(before, after) <= _MORE_CALLS * min(before, after):
        return []
    formats = dict.fromkeys(device["format"] for run in mixed for device in run.capture.of("device"))
    return [
        f"{before:.0f} calls of modules a step in FP32, {after:.0f} in {', '.join(formats)}: a loop of the "
        "script goes by the numbers, as an adaptive solver or a line search does. A rule that keeps its "
        'function in fp32 (compute = "fp32"), or a looser tolerance, gives it fewer'
    ]


def _not_repeatable(runs: Sequence[TimedRun]) -> list[str]:
    """FP32 runs of one seed that differ: differences between the formats contain that difference too."""
    by_seed: dict[int, list[list[float]]] = defaultdict(list)
    for run in runs:
        by_seed[run.seed].append([loss["value"] for loss in run.capture.of("loss")])
    cut = any(run.cut for run in runs)
    for same in by_seed.values():
        fewest = min(map(len, same)) if cut else None
        if any(str(other[:fewest]) != str(same[0][:fewest]) for other in same[1:]):
            return [
                "two FP32 runs with the same seed had different losses: the script draws random numbers "
                "that no seed fixes, or runs operations that do not repeat; part of each difference is that"
            ]
    return []

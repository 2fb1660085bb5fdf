"""What a loss may differ by, and reasons to doubt a comparison."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.observe.capture import Capture, TimedRun, student_975, times_s

_LAST_SHARE = 0.1
_TOO_UNEVEN = 4.0
_MANY_SKIPPED = 0.1
_MORE_CALLS = 1.2
_FEWEST_LOSSES = 10
_MANY_TIMES = 10.0


def final_loss(losses: Sequence[float]) -> float:
    """Mean of the last tenth, at least one value: a single minibatch is too noisy."""
    return mean(losses[-max(1, int(len(losses) * _LAST_SHARE)) :])


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of infinities of both signs, infinity where a float cannot hold the sum."""
    try:
        return statistics.fmean(values)
    except (ValueError, OverflowError):
        return sum(values) / len(values)


def steps_by_site(captures: Sequence[Capture]) -> Counter[str]:
    """Count the optimizer steps of each call site of ``backward``, in the run in which it has the most.

    A step counts for each call site with a loss since the step before. Where no optimizer steps, as updates
    are made by hand, each loss counts.
    """
    found = Counter[str]()
    for capture in captures:
        steps, losses, since_step = Counter[str](), Counter[str](), set[str]()
        for event in capture.events:
            if event["event"] == "loss":
                losses[event["site"]] += 1
                since_step.add(event["site"])
            elif event["event"] == "step":
                steps.update(since_step)
                since_step.clear()
        of_run = steps or losses
        for site in losses:
            found[site] = max(found[site], of_run[site])
    return found


def judged_sites(captures: Sequence[Capture]) -> list[str]:
    """List the call sites whose losses are judged, that with the most steps first.

    The others that are judged take turns with it, as those of a generator and a discriminator do. A site
    whose losses all come before or after it is of another phase: a learning-rate finder, or a pretraining.
    """
    steps = steps_by_site(captures)
    if not steps:
        return []
    most = max(steps, key=steps.__getitem__)
    judged = {most: None}
    for capture in captures:
        losses = capture.of("loss")
        of_most = [loss["backward"] for loss in losses if loss["site"] == most]
        if not of_most:
            continue
        for loss in losses:
            # The second loss of the last step comes after the last one of the first.
            between = of_most[0] <= loss["backward"] <= of_most[-1]
            if between or steps[loss["site"]] == steps[most]:
                judged[loss["site"]] = None
    return list(judged)


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
    if difference > student_975(len(differences) - 1) * error:
        return "fail", reason
    return "cannot tell", f"{reason}, and the pairs differ too much: use more --repeats"


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; infinity where a float cannot hold it."""
    try:
        return statistics.stdev(values)
    except OverflowError:
        return math.inf


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

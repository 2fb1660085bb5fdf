"""How far losses may differ, and reasons to doubt a comparison. Statistics of times are in ``capture``."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from narrowcast.capture import Capture, TimedRun, student_975
from narrowcast.report._text import plural

# A final loss is the mean of this share of a run's losses, the last ones.
_LAST_SHARE = 0.1
_ENOUGH_SEEDS = 3
# One seed alone can show that losses are far apart, if each run has at least this many losses.
_FEWEST_LOSSES = 10
# With one or two seeds the answer is "cannot tell" if each final loss is more than this many times FP32's.
_MANY_TIMES = 10.0
# Rounding changes a final loss by less than this share of itself, where the loss is not near zero.
_ROUNDING_CHANGES = 0.1
# The formats did not do the same work if more than this share of the steps was skipped, or if one of them
# called modules more than this many times as often as the other.
_MANY_SKIPPED = 0.1
_MORE_CALLS = 1.2

NOT_FINITE = "the loss is not finite in FP32 itself"
"""The reason where FP32's training gives nothing to compare with."""

SAME_FOR_ALL_SEEDS = "seeds change nothing in this script"
"""Part of the reason where other seeds give the same losses."""

# Losses of one run by call site; and final losses by call site and seed.
Losses = dict[str, list[float]]
FinalLosses = dict[str, dict[int, float]]


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, also of losses that are not finite."""
    if all(map(math.isfinite, values)):
        return statistics.fmean(values)
    # fmean raises where inf and -inf meet. A sum that is inf or NaN is its own mean.
    return sum(values)


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean of the last tenth, since one minibatch is noisy; of fewer than 20, the last loss."""
    return mean(losses[-_tenth_of(losses) :])


def _tenth_of(losses: Sequence[float]) -> int:
    return max(1, int(len(losses) * _LAST_SHARE))


def losses_of(runs: Sequence[TimedRun]) -> dict[str, Losses]:
    """Return losses by run and call site.

    A run that was ended early is left out, if another run of its format and seed was not, or went on for
    longer. If one has to be used, the losses of all runs are cut to the shortest run, at each call site.
    """
    whole = {(run.format, run.seed) for run in runs if not run.cut}
    used = [run for run in runs if not run.cut]
    longest: dict[tuple[str, int], TimedRun] = {}
    for run in runs:
        key = (run.format, run.seed)
        if key in whole:
            continue
        if key not in longest or _count_of_losses(run) > _count_of_losses(longest[key]):
            longest[key] = run
    used += longest.values()

    by_run = {run.name: losses_by_site(run.capture) for run in used}
    if longest:
        _end_together(by_run.values())
    return by_run


def _count_of_losses(run: TimedRun) -> int:
    return len(run.capture.of("loss"))


def losses_by_site(capture: Capture) -> Losses:
    by_site: Losses = defaultdict(list)
    for loss in capture.of("loss"):
        by_site[loss["site"]].append(loss["value"])
    return by_site


def _end_together(runs: Iterable[Losses]) -> None:
    """Cut the losses of each call site to the length of the shortest run that has any."""
    fewest: dict[str, int] = {}
    for losses in runs:
        for site, values in losses.items():
            fewest[site] = min(len(values), fewest.get(site, len(values)))
    for losses in runs:
        for site, values in losses.items():
            del values[fewest[site] :]


def final_losses(runs: Iterable[TimedRun], losses: Mapping[str, Losses], side: str) -> FinalLosses:
    """Return final losses of one format by call site and seed; runs of one seed count once, by their mean."""
    of_runs: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.format != side or run.name not in losses:
            continue
        for site, values in losses[run.name].items():
            of_runs[site][run.seed].append(final_loss(values))
    found: FinalLosses = {}
    for site, by_seed in of_runs.items():
        found[site] = {seed: mean(values) for seed, values in by_seed.items()}
    return found


# ---- which losses are judged


def steps_by_site(captures: Iterable[Capture]) -> Counter[str]:
    """Count the optimizer steps of each call site of ``backward``, in the run in which it has the most.

    A step counts for each call site with a loss since the step before. Where no optimizer steps, as updates
    are made by hand, each loss counts.
    """
    most = Counter[str]()
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
            most[site] = max(most[site], of_run[site])
    return most


def judged_sites(captures: Sequence[Capture]) -> list[str]:
    """List the call sites whose losses are judged, that with the most steps first.

    The others that are judged take turns with it, as those of a generator and a discriminator do. A site
    whose losses all come before or after it is of another phase: a learning-rate finder, or a pretraining.
    """
    steps = steps_by_site(captures)
    if not steps:
        return []
    main_site = max(steps, key=steps.__getitem__)
    judged = {main_site: None}
    for capture in captures:
        losses = capture.of("loss")
        of_main = [loss["backward"] for loss in losses if loss["site"] == main_site]
        if not of_main:
            continue
        for loss in losses:
            between = of_main[0] <= loss["backward"] <= of_main[-1]
            # In a run of one step no loss can lie between two of the main site's. A site with as many steps
            # as the main one takes turns with it too.
            if between or steps[loss["site"]] == steps[main_site]:
                judged[loss["site"]] = None
    return list(judged)


# ---- the verdict on losses


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """Whether the losses of mixed runs differ from FP32's by more than seeds do.

    Attributes:
        verdict: ``"pass"``, ``"fail"``, ``"cannot tell"``, or ``"not judged"``, as of one seed.
        reason: a clause for the table.
        difference: mean over seeds of mixed minus FP32, both from the same seed; None: no pair.
        seed_spread: sample standard deviation of FP32's losses over seeds; None: fewer than three seeds, or
            seeds that change nothing.
        times_fp32: the smallest ratio of mixed to FP32 over the seeds, if it is above ten and is the reason
            of a "cannot tell", with fewer than three seeds; else None.
    """

    verdict: str
    reason: str
    difference: float | None = None
    seed_spread: float | None = None
    times_fp32: float | None = None


def judge_losses(pairs: Sequence[tuple[float, float]]) -> LossVerdict:
    """Judge final losses of one call site, a pair (FP32, mixed) for each seed.

    - pass: the mean difference is at most the spread between seeds, or mixed is lower by more.
    - fail: mixed is higher by more, and the paired differences leave no doubt (Student's t, 97.5 %), or each
      of mixed's losses is above FP32's 97.5 % prediction limit and a tenth above FP32's mean, but not each
      more than ten times FP32's; or only mixed's losses are not finite.
    - not judged: fewer than three seeds, with finite losses; or no pair. Seeds that change nothing count as
      one, if the formats differ.
    - cannot tell: all other cases. Of these are FP32 losses that are not finite, and one or two seeds with
      which mixed's losses are many times FP32's.
    """
    if not pairs:
        return LossVerdict("not judged", "no loss was seen in both formats")
    fp32_losses, mixed_losses = zip(*pairs, strict=True)
    if not all(map(math.isfinite, fp32_losses)):
        return LossVerdict("cannot tell", NOT_FINITE)
    if not all(map(math.isfinite, mixed_losses)):
        return LossVerdict("fail", "the loss is finite in FP32 and not in mixed precision")

    differences = [mixed - fp32 for fp32, mixed in pairs]
    difference = mean(differences)
    seeds = plural(len(pairs), "seed")
    if len(pairs) < _ENOUGH_SEEDS:
        why = f"{seeds} cannot show what other seeds change: use --repeats 3 or more"
        return _judge_few_seeds(pairs, difference, why)
    spread = statistics.stdev(fp32_losses)
    # Differences of both signs may have a mean of zero.
    if spread == 0.0 and any(differences):
        why = f"{seeds} cannot show it, since {SAME_FOR_ALL_SEEDS}"
        return _judge_few_seeds(pairs, difference, why)
    verdict, reason = _against_spread(pairs, differences, spread)
    return LossVerdict(verdict, reason, difference, spread)


def _judge_few_seeds(pairs: Sequence[tuple[float, float]], difference: float, reason: str) -> LossVerdict:
    """Judge losses that have no spread to compare with, for ``reason``."""
    times = None
    # A ratio means nothing where FP32's loss is zero or below.
    if all(fp32 > 0 for fp32, _ in pairs):
        times = _times_fp32(pairs)
    if times is None or times <= _MANY_TIMES:
        return LossVerdict("not judged", reason, difference)
    reason = f"{times:.4g} times FP32's, but {reason}"
    return LossVerdict("cannot tell", reason, difference, times_fp32=times)


def _against_spread(
    pairs: Sequence[tuple[float, float]], differences: Sequence[float], spread: float
) -> tuple[str, str]:
    """Return the verdict and its reason, given the pairs (FP32, mixed) and their differences."""
    count = len(pairs)
    difference = mean(differences)
    seeds = f"the spread between {count} seeds"
    if not any(differences):
        return "pass", f"the same to the last digit for all {count} seeds"
    if abs(difference) <= spread:
        return "pass", f"the difference is {abs(difference) / spread:.2f} of {seeds}"
    if difference < 0:
        return "pass", f"lower than FP32's by {-difference / spread:.1f} times {seeds}"

    reason = f"higher than FP32's by {difference / spread:.1f} times {seeds}"
    if _pairs_leave_no_doubt(differences):
        verdict = "fail"
    elif _each_is_beyond(pairs):
        verdict = "fail"
        reason += ", and every mixed loss is above what another seed of FP32 would give"
    else:
        verdict = "cannot tell"
        reason += ", and the pairs differ too much: use more --repeats"
    return verdict, reason


def _pairs_leave_no_doubt(differences: Sequence[float]) -> bool:
    """Return whether the mean of the paired differences is above 0 by Student's t, 97.5 %."""
    standard_error = statistics.stdev(differences) / math.sqrt(len(differences))
    return mean(differences) > student_975(len(differences) - 1) * standard_error


def _each_is_beyond(pairs: Sequence[tuple[float, float]]) -> bool:
    """Return whether each mixed loss is above where one more seed of FP32 would end.

    Where mixed precision is bad, its losses often differ much from seed to seed. Then the paired differences
    leave a doubt, although no seed of FP32 ends as high.
    """
    fp32_losses = [fp32 for fp32, _ in pairs]
    mixed_losses = [mixed for _, mixed in pairs]
    # A loss that may be negative has no scale to compare with. One many times FP32's may have reached what
    # rounding allows, where FP32's goes on to zero.
    if min(fp32_losses) <= 0 or _times_fp32(pairs) > _MANY_TIMES:
        return False
    average = mean(fp32_losses)
    spread_of_one_more = statistics.stdev(fp32_losses) * math.sqrt(1 + 1 / len(pairs))
    prediction_limit = average + student_975(len(pairs) - 1) * spread_of_one_more
    rounding_limit = (1 + _ROUNDING_CHANGES) * average
    return min(mixed_losses) > max(prediction_limit, rounding_limit)


def _times_fp32(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the smallest ratio of mixed to FP32; FP32's losses are above 0."""
    return min(mixed / fp32 for fp32, mixed in pairs)


def far_apart(fp32: Sequence[Sequence[float]], mixed: Sequence[Sequence[float]]) -> str | None:
    """Return a reason if FP32 learns and mixed precision does not; else None. One seed is enough to show it.

    Every mixed run has to end above every FP32 run by more than half of the range that FP32's losses had, and
    by more than a tenth of FP32's final loss.

    Args:
        fp32, mixed: the losses of each run.
    """
    # Both formats see the same batches, so minibatch noise does not explain a difference. Two other things
    # may: another seed, which changes a final loss by less than half of what FP32 learns, and rounding. Hence
    # two limits.
    if not fp32 or not mixed or min(map(len, [*fp32, *mixed])) < _FEWEST_LOSSES:
        return None
    fp32_losses = list(chain.from_iterable(fp32))
    if not all(map(math.isfinite, fp32_losses)):
        return None
    fp32_began = min(mean(losses[: _tenth_of(losses)]) for losses in fp32)
    fp32_ended = max(map(final_loss, fp32))
    mixed_ended = min(map(final_loss, mixed))
    learned = max(fp32_losses) - min(fp32_losses)
    has_learned = fp32_ended < fp32_began
    if not has_learned or mixed_ended - fp32_ended <= max(learned / 2, _ROUNDING_CHANGES * abs(fp32_ended)):
        return None
    fell = f"in FP32 it fell from {fp32_began:.3g} to {fp32_ended:.3g}"
    return f"far apart: {fell}, and here it ended at {mixed_ended:.3g}"


# ---- doubts


def doubts(fp32: Sequence[TimedRun], mixed: Sequence[TimedRun]) -> list[str]:
    """List reasons to doubt a comparison, each a line for its notes."""
    runs = [*fp32, *mixed]
    notes = []
    for run in runs:
        if run.capture.end is None:
            notes.append(
                f"{run.name} left a capture without its end, as after os._exit: its last events may be "
                "missing"
            )
    notes += _other_work(runs)
    notes += many_skipped(mixed)
    notes += _other_calls(fp32, mixed)
    notes += _not_repeatable(fp32)
    return notes


def _other_work(runs: Iterable[TimedRun]) -> list[str]:
    """Say where runs took different numbers of steps; those that were ended early do not count."""
    steps = {len(run.capture.of("step")) for run in runs if not run.cut}
    if len(steps) < 2:
        return []
    return [
        f"the runs took different numbers of steps ({min(steps)} to {max(steps)}), so they did not do the "
        "same work: does the script resume from what it saved, or stop when it is good enough?"
    ]


def many_skipped(runs: Iterable[TimedRun]) -> list[str]:
    """Say where many steps were skipped: these are quicker than others, and train nothing."""
    taken = skipped = 0
    for run in runs:
        totals = run.capture.totals()
        taken += totals["steps"]
        skipped += totals["skipped_steps"]
    if skipped <= _MANY_SKIPPED * (taken + skipped):
        return []
    return [
        f"{skipped} of the {taken + skipped} steps in mixed precision were skipped, as their gradients "
        "overflowed: they trained nothing and took less time, so neither losses nor times are those of the "
        "same work"
    ]


def calls_per_step(runs: Iterable[TimedRun]) -> float | None:
    """Return the calls of all modules in the runs, by the steps of all optimizers, skipped ones included."""
    calls = steps = 0
    for run in runs:
        totals = run.capture.totals()
        if totals.get("module_calls"):
            calls += totals["module_calls"]
            steps += _steps(run)
    return calls / steps if steps else None


def _steps(run: TimedRun) -> int:
    """Return the steps of all optimizers in a run, skipped ones included."""
    totals = run.capture.totals()
    return int(totals["steps"] + totals["skipped_steps"])


def _other_calls(fp32: Sequence[TimedRun], mixed: Sequence[TimedRun]) -> list[str]:
    """Say where rounding makes a loop of the script longer or shorter, such as that of a solver."""
    # A run that was ended early may lack calls that others made later, as in an evaluation.
    pairs = [pair for pair in zip(fp32, mixed, strict=False) if _steps(pair[0]) == _steps(pair[1])]
    fp32_calls = calls_per_step(fp32_run for fp32_run, _ in pairs)
    mixed_calls = calls_per_step(mixed_run for _, mixed_run in pairs)
    if not fp32_calls or not mixed_calls:
        return []
    if max(fp32_calls, mixed_calls) <= _MORE_CALLS * min(fp32_calls, mixed_calls):
        return []
    formats = formats_of(run.capture for run in mixed)
    return [
        f"{fp32_calls:.0f} calls of modules a step in FP32, {mixed_calls:.0f} in {formats}: a loop "
        "of the script goes by the numbers, as an adaptive solver or a line search does. A rule that keeps "
        'its function in fp32 (compute = "fp32"), or a looser tolerance, brings both together'
    ]


def formats_of(captures: Iterable[Capture]) -> str:
    """List the formats that runs computed in."""
    formats: dict[str, None] = {}
    for capture in captures:
        for device in capture.of("device"):
            formats[device["format"]] = None
    return ", ".join(formats)


def _not_repeatable(fp32: Sequence[TimedRun]) -> list[str]:
    """Say where FP32 runs of one seed differ: that difference is part of each difference of the formats."""
    losses_by_seed: dict[int, list[list[float]]] = defaultdict(list)
    was_cut = False
    for run in fp32:
        losses_by_seed[run.seed].append([loss["value"] for loss in run.capture.of("loss")])
        was_cut = was_cut or run.cut
    for same_seed in losses_by_seed.values():
        # Runs that were ended early are compared as far as the shortest went.
        length = None
        if was_cut:
            length = min(map(len, same_seed))
        # As text, so that NaN equals NaN.
        if len({str(losses[:length]) for losses in same_seed}) > 1:
            return [
                "two FP32 runs with the same seed had different losses: the script draws random numbers "
                "that no seed fixes, or runs operations that do not repeat; part of each difference is that"
            ]
    return []

"""Reasons not to believe a comparison, from the captures of its runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from narrowcast.observe.capture import TimedRun
from narrowcast.report._statistics import forward_times_s, step_times_s

_TOO_UNEVEN = 4.0
_MANY_SKIPPED = 0.1


def doubts(fp32: Sequence[TimedRun], mixed: Sequence[TimedRun], kind: str | None) -> list[str]:
    """Each a line for a person; none where there is nothing to doubt."""
    runs = [*fp32, *mixed]
    found = [
        f"{run.name} left a capture without its end, as after os._exit: what it did last may be missing"
        for run in runs
        if run.capture.end is None
    ]
    tried = sorted({len(run.capture.of("step")) for run in runs})
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
    return [*found, *_many_skipped(mixed), *_not_repeatable(fp32)]


def _unevenness(run: TimedRun, kind: str | None) -> float:
    inference = kind == "inference"
    capture = run.capture
    times = forward_times_s(capture.of("forward")) if inference else step_times_s(capture.of("step"))
    ordered = sorted(times)
    if len(ordered) < 10:
        return 1.0
    tenth = len(ordered) // 10
    return ordered[-1 - tenth] / max(ordered[tenth], 1e-9)


def _many_skipped(runs: Sequence[TimedRun]) -> list[str]:
    """A skipped step is quicker than one that is taken, and trains nothing."""
    totals = [run.capture.totals() for run in runs]
    skipped = sum(total["skipped_steps"] for total in totals)
    tried = skipped + sum(total["steps"] for total in totals)
    if skipped <= _MANY_SKIPPED * tried:
        return []
    return [
        f"{skipped} of the {tried} steps in mixed precision were skipped, as their gradients overflowed: "
        "they trained nothing and took less time, so neither losses nor times are those of the same work"
    ]


def _not_repeatable(runs: Sequence[TimedRun]) -> list[str]:
    """Two FP32 runs of one seed that do not agree: then their difference bounds what can be told."""
    by_seed: dict[int, list[list[float]]] = defaultdict(list)
    for run in runs:
        by_seed[run.seed].append([loss["value"] for loss in run.capture.of("loss")])
    for same in by_seed.values():
        if any(str(other) != str(same[0]) for other in same[1:]):
            return [
                "two FP32 runs with the same seed had different losses: the script draws random numbers "
                "that no seed fixes, or runs operations that do not repeat; part of each difference is that"
            ]
    return []

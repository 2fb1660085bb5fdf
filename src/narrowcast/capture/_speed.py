"""Times of steps and calls in captures, and the speedup of pairs of runs with its interval."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from narrowcast.capture._files import Capture
from narrowcast.capture._statistics import (
    FEWEST_PAIRS,
    Blocks,
    Estimate,
    log_ratio,
    log_ratios_of_blocks,
    speedup_beyond_chance,
    speedup_of_pairs,
    speedup_of_ratios,
)

LEAST_GAIN = 1.05
"""A speedup that is certainly smaller, and not certainly above 1, is not worth it."""

# Where other programs use more of the CPUs, the speedup of a script there is not that of a quiet machine: at
# each operator all threads wait for the one that has no CPU, and bf16 runs more and shorter operators.
_MOST_BY_OTHERS = 0.25

# Of a run's steps, the first that are left out: caches fill, memory is claimed, kernels are chosen.
_WARM_UP_SHARE = 0.1
_FEWEST_WITH_WARM_UP = 3


def kind_of(captures: Sequence[Capture]) -> str | None:
    """Return ``"training"`` if a run went backward, ``"inference"`` if it only called modules, else None."""
    for capture in captures:
        if capture.of("loss") or capture.of("step") or capture.totals()["backwards"]:
            return "training"
    for capture in captures:
        if capture.of("forward"):
            return "inference"
    return None


def timed_optimizer(captures: Sequence[Capture]) -> int | None:
    """Return the number of the optimizer whose steps are timed in all runs of a script; None: no steps.

    It is the one with the most steps in the first run that has any. That run has to be whole: a shorter one
    may end in a search for the learning rate, in which another optimizer steps.
    """
    for capture in captures:
        counts = Counter[int](step["optimizer"] for step in capture.of("step"))
        if counts:
            # Sorted, so that of several with the most steps it is the one that stepped first.
            return max(sorted(counts), key=counts.__getitem__)
    return None


def timed_module(captures: Sequence[Capture]) -> int | None:
    """Return the number of the module whose calls are timed in all runs of a script; None: no calls.

    It is the one whose calls take the longest, all together, in the first run that has any. The first call of
    each is left out, which may load kernels, unless no module was called twice.
    """
    for capture in captures:
        first_s: dict[int, float] = {}
        later_s = Counter[int]()
        for forward in capture.of("forward"):
            module = forward.get("module", 0)
            if module in first_s:
                later_s[module] += forward["duration_s"]
            else:
                first_s[module] = forward["duration_s"]
        if first_s:
            return max(sorted(first_s), key=lambda module: (later_s[module], first_s[module]))
    return None


def _timed(captures: Sequence[Capture], kind: str | None) -> int | None:
    """Return the number of what is timed: an optimizer, or a module of a script that only computes."""
    return timed_module(captures) if kind == "inference" else timed_optimizer(captures)


# ---- times


def times_of_runs(
    captures: Sequence[Capture], kind: str | None, *, like: Sequence[Capture] | None = None
) -> list[list[float]]:
    """Return ``times_s`` of each of several runs of one script, the first of which is whole.

    What is timed is the same as in the runs ``like``, by default these: both formats are timed by FP32's.
    """
    number = _timed(captures if like is None else like, kind)
    return [times_s(capture, kind, number) for capture in captures]


def times_s(capture: Capture, kind: str | None, number: int | None = None) -> list[float]:
    """Return durations of steps, or for ``"inference"`` of outermost forward calls, without warm-up.

    Only steps of the optimizer with this number count, by default of the one with the most. In a GAN two
    optimizers alternate, and from one step of either to its next is a whole iteration: counting both would
    count each iteration twice. Of calls, only those of one module count, by default of the one that takes the
    longest: a median over several modules would be that of the one that is called most.
    """
    blocks = _blocks(capture, kind, number)
    # Steps after the last pause end in no wait that would show the time of the device. But where a run soon
    # went on alone, most steps are there, so many that the host was held up by the device.
    steps_after = len(blocks[-1].times)
    are_few = 2 * steps_after < sum(len(block.times) for block in blocks)
    if kind != "inference" and are_few and any(block.waited_s for block in blocks):
        del blocks[-1]
    times: list[float] = []
    for block in blocks:
        times += block.times
    return _without_warm_up(times)


def _without_warm_up(times: Sequence[float]) -> list[float]:
    """Leave out the first tenth, and at least the first; one or two times all stay."""
    if len(times) < _FEWEST_WITH_WARM_UP:
        return list(times)
    return list(times[max(1, int(len(times) * _WARM_UP_SHARE)) :])


class _Block(NamedTuple):
    """Durations of the steps or calls between two pauses, and how long the run waited for the device then."""

    times: list[float]
    waited_s: float


def _blocks(capture: Capture, kind: str | None, number: int | None) -> list[_Block]:
    """Return each block of steps or calls; the last one goes on to the end of the run, and may be empty."""
    if number is None:
        number = _timed([capture], kind)
    blocks: list[_Block] = []
    times: list[float] = []
    for event in capture.events:
        if event["event"] == "pause":
            waited_s = event["waited_s"]
            # The device itself times calls, but no steps: what the host measures from step to step may only
            # be how long it took to launch them. The block as a whole has the time of the device.
            if waited_s and times and kind != "inference":
                mean_s = (sum(times) + waited_s) / len(times)
                times = [mean_s] * len(times)
            blocks.append(_Block(times, waited_s))
            times = []
        elif kind == "inference" and event["event"] == "forward" and event.get("module", 0) == number:
            times.append(event["duration_s"])
        # The first step of an optimizer has no step before it, and so no interval.
        elif event["event"] == "step" and event["optimizer"] == number and event["interval_s"] is not None:
            times.append(event["interval_s"])
    return [*blocks, _Block(times, 0.0)]


def blocks_of(capture: Capture, kind: str | None, number: int | None = None) -> list[list[float]]:
    """Return durations as in ``times_s``, in a list for each block; a block ends where the run pauses.

    As warm-up the first block is left out, and after it a tenth of all blocks; and of a block of three steps
    or more the first step, unless the block ended with a wait for the device. Steps after the last pause
    belong to no block and are left out.
    """
    blocks: list[list[float]] = []
    for block in _blocks(capture, kind, number)[:-1]:
        times = block.times
        # On a CPU the first step is slow, since the other process has filled the caches.
        if len(times) > 2 and not block.waited_s:
            times = times[1:]
        blocks.append(times)
    return blocks[1 + int(len(blocks) * _WARM_UP_SHARE) :]


# ---- speedups


def speedup_of(fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None) -> Estimate | None:
    """Return the speedup of steps or calls, and the ends of its 95 % interval; None: ``why_no_speedup``.

    Uses the pairs whose runs took turns. If none did, or they took too few turns, it uses the medians of at
    least ``FEWEST_PAIRS`` pairs. With fewer, a speedup or slowdown of more than four times is told all the
    same if each pair took a turn: a machine that was busy for a while slowed both of its runs then.
    """
    pairs = _pairs_in_turns(fp32, mixed, kind)
    if pairs:
        in_turns = speedup_of_pairs(pairs)
        if in_turns is not None:
            return in_turns
    ratios = _ratios_of_medians(fp32, mixed, kind)
    if len(ratios) >= FEWEST_PAIRS:
        return speedup_of_ratios(ratios)
    if not all(capture.of("pause") for capture in (*fp32, *mixed)):
        return None
    return speedup_beyond_chance(ratios)


def why_no_speedup(fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None) -> str:
    """Say why ``speedup_of`` is None."""
    pairs = len(_ratios_of_medians(fp32, mixed, kind))
    if pairs == 0:
        return _why_no_times(fp32, kind)
    timed = "one pair" if pairs == 1 else f"{pairs} pairs"
    return (
        f"steps took too few turns, and {timed} of runs cannot show how far equal runs differ; "
        "give --time-limit 0 to time more of them"
    )


def _why_no_times(fp32: Sequence[Capture], kind: str | None) -> str:
    """Say why there is no time of a step in both formats."""
    if kind == "training" and fp32 and not any(times_of_runs(fp32, kind)):
        if any(capture.of("step") for capture in fp32):
            return "it takes two steps of one optimizer to time one"
        return "no torch.optim.Optimizer stepped, and no other steps are timed"
    return "a time is missing"


def took_turns(fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None) -> bool:
    """Return whether the speedup is that of runs which took turns."""
    pairs = _pairs_in_turns(fp32, mixed, kind)
    return bool(pairs) and speedup_of_pairs(pairs) is not None


def _pairs_in_turns(
    fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None
) -> list[tuple[Blocks, Blocks]]:
    """Return the blocks of both runs of each pair whose runs took turns."""
    number = _timed(fp32, kind)
    pairs: list[tuple[Blocks, Blocks]] = []
    for fp32_run, mixed_run in zip(fp32, mixed, strict=False):  # the last pair may lack a run
        blocks = (blocks_of(fp32_run, kind, number), blocks_of(mixed_run, kind, number))
        if log_ratios_of_blocks(*blocks):
            pairs.append(blocks)
    return pairs


def _ratios_of_medians(fp32: Sequence[Capture], mixed: Sequence[Capture], kind: str | None) -> list[float]:
    """Return the logarithm of the speedup by the medians of each pair of runs that has both.

    Medians are those of whole runs, so a machine that is busy for a while may slow only one of a pair. For
    this reason ``speedup_of`` asks for ``FEWEST_PAIRS`` of them.
    """
    ratios = []
    pairs = zip(times_of_runs(fp32, kind), times_of_runs(mixed, kind, like=fp32), strict=False)
    for fp32_times, mixed_times in pairs:
        ratio = log_ratio(fp32_times, mixed_times)
        if ratio is not None:
            ratios.append(ratio)
    return ratios


def used_by_others(shares: Sequence[float], captures: Sequence[Capture]) -> float:
    """Return which share of the CPUs other programs used while runs were timed; 0 where it does not matter.

    Args:
        shares: what they used, each time that was measured.
        captures: of the timed runs; a device other than the CPU goes on when the CPU is taken away.
    """
    for capture in captures:
        if any(device["device_type"] != "cpu" for device in capture.of("device")):
            return 0.0
    return statistics.median(shares) if shares else 0.0


def is_busy(by_others: float) -> bool:
    """Return whether other programs used too much of the CPUs to tell a speedup, by ``used_by_others``."""
    return by_others > _MOST_BY_OTHERS


def worth_it(speedup: Sequence[float], asked: float | None, by_others: float) -> str:
    """Return ``"yes"``, ``"no"`` or ``"cannot tell"`` for a speedup and the ends of its interval.

    If a speedup was ``asked`` for, it is "yes" where the whole interval is at least that, and "no" where the
    whole interval is below it. Otherwise it is "yes" where the whole interval is above 1, and else "no" where
    the whole interval is below ``LEAST_GAIN``. ``by_others``: what ``used_by_others`` returned.
    """
    if is_busy(by_others):
        return "cannot tell"

    _, low, high = speedup
    if asked is None:
        is_gain = low > 1
        is_loss = high < LEAST_GAIN
    else:
        is_gain = low >= asked
        is_loss = high < asked
    if is_gain:
        return "yes"
    if is_loss:
        return "no"
    return "cannot tell"  # the interval allows both answers

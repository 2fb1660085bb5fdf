"""Timing sides by turns."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch


def interleaved(
    a: Callable[[], None],
    b: Callable[[], None],
    *,
    rounds: int,
    around_b: Callable[[], AbstractContextManager[object]] = nullcontext,
    before: Callable[[], None] = lambda: None,
    warm_up: int = 2,
) -> tuple[float, float, float]:
    """Median seconds of ``a``, of ``b``, and the median of b/a over ``rounds`` pairs, order alternating.

    ``around_b`` makes what ``b`` runs in, entered and left outside of the timing; ``before`` is called before
    each side, outside of it too.
    """
    around = {"b": around_b}
    pairs = _rounds({"a": a, "b": b}, rounds, warm_up, before, around)
    ratio = statistics.median(pair["b"] / pair["a"] for pair in pairs)
    return (*(statistics.median(pair[side] for pair in pairs) for side in ("a", "b")), ratio)


def interleaved_all(
    sides: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    before: Callable[[], None] = lambda: None,
    warm_up: int = 2,
) -> dict[str, float]:
    """Median seconds of each side, in an order that alternates."""
    times = _rounds(sides, rounds, warm_up, before, {})
    return {side: statistics.median(one[side] for one in times) for side in sides}


def _rounds(
    sides: Mapping[str, Callable[[], None]],
    rounds: int,
    warm_up: int,
    before: Callable[[], None],
    around: Mapping[str, Callable[[], AbstractContextManager[object]]],
) -> list[dict[str, float]]:
    found = []
    for number in range(warm_up + rounds):
        times = {}
        for side in list(sides) if number % 2 else reversed(list(sides)):
            with around.get(side, nullcontext)():
                before()
                times[side] = seconds(sides[side])
        if number >= warm_up:
            found.append(times)
    return found


def seconds(work: Callable[[], None]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started

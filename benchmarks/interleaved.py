"""Timing two sides by turns."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def interleaved(
    a: Callable[[], None],
    b: Callable[[], None],
    *,
    rounds: int,
    around_b: Callable[[], AbstractContextManager[object]] = nullcontext,
    warm_up: int = 2,
) -> tuple[float, float, float]:
    """Median seconds of ``a``, of ``b``, and the median of b/a over ``rounds`` pairs, order alternating.

    ``around_b`` makes what ``b`` runs in, entered and left outside of the timing.
    """
    pairs = []
    for number in range(warm_up + rounds):
        times = {}
        for side in ("a", "b") if number % 2 else ("b", "a"):
            with around_b() if side == "b" else nullcontext():
                times[side] = seconds(a if side == "a" else b)
        if number >= warm_up:
            pairs.append((times["a"], times["b"]))
    firsts, seconds_ = zip(*pairs, strict=True)
    ratio = statistics.median(second / first for first, second in pairs)
    return statistics.median(firsts), statistics.median(seconds_), ratio


def seconds(work: Callable[[], None]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started

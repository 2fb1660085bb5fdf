"""Time several sides in one run: in each round every side once, in an order that alternates."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

# On CUDA, one entry for each call of `interleaved` or `interleaved_all`: what each side did on the device in
# one more round. `drain` takes them.
_on_device: list[dict[str, dict[str, float]]] = []


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
    if torch.cuda.is_available():
        _on_device.append(
            {side: _measured_on_device(sides[side], before, around.get(side)) for side in sides}
        )
    return found


def drain() -> list[dict[str, dict[str, float]]]:
    """Return what was measured on the device since the last `drain`: an entry for each call that timed."""
    found = _on_device.copy()
    _on_device.clear()
    return found


def _measured_on_device(
    work: Callable[[], None],
    before: Callable[[], None],
    around: Callable[[], AbstractContextManager[object]] | None,
) -> dict[str, float]:
    """Return the seconds in which kernels ran, and the bytes by which the allocator's peak rose."""
    with (around or nullcontext)():
        before()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        risen = torch.cuda.max_memory_allocated() - start
    kernels = [
        event.self_device_time_total
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return {"kernels_s": sum(kernels) / 1e6, "peak_rise_bytes": risen}


def seconds(work: Callable[[], None]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started

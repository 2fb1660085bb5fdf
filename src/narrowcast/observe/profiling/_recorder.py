"""torch's profiler as one recording of this thread, and times on the host or a GPU.

``nc.observe.profile`` reads the memory of CPU tensors from such a recording, ``narrowcast doctor`` the ops of
training steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from narrowcast.errors import UnsupportedError
from narrowcast.observe._torch_internals import profiler_is_on, without_markers_on_stderr

MARK = "narrowcast: mark"


def stamp(device_type: str) -> Any:
    """Return the time now; on CUDA an event of the current stream."""
    if device_type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(earlier: Any, later: Any) -> float:
    """Return the seconds between two stamps; waits until a GPU has reached ``later``."""
    if isinstance(earlier, float):
        return float(later) - earlier
    later.synchronize()
    return float(earlier.elapsed_time(later)) / 1e3


class Recorder:
    """Records what this thread does, and the threads in which autograd runs backward for it.

    Args:
        shapes: record shapes and dtypes of operands, and kernels on GPUs.
        memory: record what the CPU's allocator hands out.
    """

    def __init__(self, *, shapes: bool = False, memory: bool = False) -> None:
        self._shapes, self._memory = shapes, memory
        self._profile: Any = None
        self._marks = 0

    def start(self) -> None:
        """Begin with a mark.

        Raises:
            UnsupportedError: a profiler runs in this thread already.
        """
        activities = [ProfilerActivity.CPU]
        if self._shapes and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        if profiler_is_on():
            raise UnsupportedError("a profiler runs in this thread already: switch that one off")
        recording = profile(activities=activities, record_shapes=self._shapes, profile_memory=self._memory)
        with without_markers_on_stderr():
            recording.__enter__()  # type: ignore[no-untyped-call]
        self._profile, self._marks = recording, 0
        self.mark()

    def mark(self) -> None:
        """Put an event named ``MARK`` into the record."""
        self._marks += 1
        with record_function(MARK):
            pass

    def stop(self) -> tuple[list[Any], Any]:
        """Return the outermost events of every thread, and the results of torch's profiler.

        Raises:
            UnsupportedError: another profiler ran in this thread meanwhile, and took part of the record away.
        """
        recording, self._profile = self._profile, None
        recording.__exit__(None, None, None)
        results = recording.profiler.kineto_results if recording.profiler else None
        tree = [] if results is None else results.experimental_event_tree()
        if sum(event.name == MARK for event in every_event(tree)) != self._marks:
            raise UnsupportedError("another profiler ran in this thread meanwhile: switch that one off")
        return tree, results


def every_event(tops: Any) -> Iterator[Any]:
    """Yield the events of a tree, in no order."""
    waiting = list(tops)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event

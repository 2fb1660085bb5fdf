"""``nc.observe.profile``: how long a block of code takes, and how much memory its tensors take at most.

The memory of CPU tensors is read from a recording of torch's profiler, as are the ops of training steps for
``narrowcast doctor``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Self

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from narrowcast.capture import bytes_text
from narrowcast.errors import DeviceError, OrderError, SettingError, UnsupportedError
from narrowcast.observe._torch_internals import profiler_is_on, without_markers_on_stderr

MARK = "narrowcast: mark"
CLOSURE = "narrowcast: closure"
# One block at a time: torch has one profiler in a thread, and CUDA's allocator one peak in the process.
_measuring_memory = threading.Lock()


def profile(
    device: str | torch.device | None = None, *, memory: bool = True
) -> AbstractContextManager[Profile]:
    """Measure a block: wall-clock seconds, and the most bytes that tensors took at once::

        with nc.observe.profile() as profile:
            train()
        print(profile)  # 0.532 s, peak 12 MiB (cpu)
        profile.duration_s, profile.peak_bytes  # of this block; call it again for another

    On CUDA the block waits for the device at both ends, and memory is the peak of torch's allocator, whose
    record is reset: ``torch.cuda.max_memory_allocated`` then counts from the start of the block. On a CPU
    memory is what torch's allocator hands out in this thread, temporaries inside kernels included; torch's
    profiler records it, which slows each operator down by some microseconds: to compare times, use
    ``memory=False``. One block at a time measures memory; blocks with ``memory=False`` may be nested. If a
    block ends by an exception, it has the numbers up to there.

    Args:
        device: whose time and memory; None: CUDA if there is one, else the CPU.
        memory: False measures time alone.

    Raises:
        DeviceError: a device that is neither a CPU nor CUDA, or that this machine does not have.
        OrderError: on entering, if another block measures memory.
        SettingError: ``memory`` is not a bool.
        UnsupportedError: on entering, if memory is measured on a CPU and a profiler runs in this thread.
    """
    if not isinstance(memory, bool):
        raise SettingError(f"expected memory to be True or False, got {memory!r}")
    return _measured(_device_to_measure(device), memory=memory)


def _device_to_measure(asked: str | torch.device | None) -> torch.device:
    """Return the device, with its number on CUDA."""
    if not asked:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise DeviceError(f"expected a device, got {asked!r}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f'expected "cpu" or "cuda" to profile, got "{device}"')
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise DeviceError(f'expected one of the {count} CUDA devices of this machine, got "{device}"')
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def _measured(device: torch.device, *, memory: bool) -> Iterator[Profile]:
    meter: LiveTensorBytes | _CudaMemory | None = None
    with ExitStack() as stack:
        if memory:
            if not _measuring_memory.acquire(blocking=False):
                raise OrderError("another profile measures memory: leave its block, or use memory=False")
            stack.callback(_measuring_memory.release)
            meter = _CudaMemory(device) if device.type == "cuda" else LiveTensorBytes()
            stack.enter_context(meter)
        profiled = Profile(device, meter)
        _wait(device)
        started_s = time.perf_counter()
        try:
            yield profiled
            _wait(device)  # not after an error, which may keep the device from synchronizing
        finally:
            profiled._duration_s = time.perf_counter() - started_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Profile:
    """Time and memory of one block, measured by ``profile``, which has an example."""

    def __init__(self, device: torch.device, memory: LiveTensorBytes | _CudaMemory | None) -> None:
        self.device = device
        self._memory = memory
        self._duration_s: float | None = None

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the block to its end, work of the device included.

        Raises:
            OrderError: the block has not ended.
        """
        if self._duration_s is None:
            raise OrderError('the block has not ended: read it after "with nc.observe.profile() as profile:"')
        return self._duration_s

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that tensors took at once; None without ``memory``.

        CUDA: everything that torch's allocator had handed out, also before the block. CPU: what was allocated
        in the block, exact.

        Raises:
            OrderError: the block has not ended.
            UnsupportedError: on a CPU, another profiler ran in this thread meanwhile, or the block ended in
                another thread than it began in.
        """
        _ = self.duration_s  # raises if the block has not ended
        if self._memory is None:
            return None
        return self._memory.peak_bytes

    @property
    def added_bytes(self) -> int | None:
        """The peak above what was there at the start; None without ``memory``.

        It has the same meaning on every device.
        """
        _ = self.duration_s
        if self._memory is None:
            return None
        return self._memory.added_bytes

    def __str__(self) -> str:
        if self._duration_s is None:
            return f"not ended ({self.device})"
        text = f"{self.duration_s:.4g} s"
        peak, added = self.peak_bytes, self.added_bytes
        if peak is not None and added is not None:
            text += f", peak {bytes_text(peak)}"
            if added != peak:
                text += f", {bytes_text(added)} of it added"
        return f"{text} ({self.device})"


class _CudaMemory:
    """The peak of CUDA's allocator within the block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = self.added_bytes = 0

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before_bytes = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self.added_bytes = self.peak_bytes - self._before_bytes


class LiveTensorBytes:
    """The most memory that CPU tensors take at once within the block, in ``peak_bytes``.

    Counts each allocation of torch's CPU allocator in this thread, and in the threads in which autograd runs
    backward for it, until it is freed. Not counted: memory from before the block, of other devices or
    threads, or that torch did not allocate (numpy, mapped files, scratch of oneDNN and BLAS).

    The sum of the storages of tensors would miss temporaries inside kernels, more of them in bf16 than in
    fp32: in examples/quantized_sine.py, three steps at 512 by 512 pixels, the allocator hands out 2071 MiB in
    fp32 and 1423 MiB in bf16, and storages hold 2054 and 1031.

    torch's profiler keeps every event: measure a few training steps, not a day.

    Raises:
        UnsupportedError: on entering, if a profiler runs in this thread; on reading, if one ran meanwhile, or
            if it was left or read in another thread.
    """

    # ``open`` is the block that records in a thread, or None.
    _thread = threading.local()

    def __enter__(self) -> Self:
        outer = getattr(self._thread, "open", None)
        if outer is not None:
            # ``narrowcast compare`` may record around a script that profiles itself. End its recording, which
            # then has no valid peak, so that the script gets its own.
            outer.__exit__()
            outer._problem = UnsupportedError("another profile ran in this thread meanwhile")
        self._peak = 0
        self._ended = False
        self._problem: UnsupportedError | None = None
        self._recorder = Recorder(memory=True)
        self._recorder.start()
        self._thread.open = self
        return self

    def __exit__(self, *_: object) -> None:
        if self._ended:
            return
        if getattr(self._thread, "open", None) is not self:
            # This is not the thread that records, and the recording of another thread cannot be ended here.
            self._problem = UnsupportedError(
                "the block was left, or its peak read, in another thread than it was entered in: do all of "
                "it in one thread"
            )
            return
        self._ended = True
        self._thread.open = None
        self._recorder.mark()
        try:
            tree, _ = self._recorder.stop()
        except UnsupportedError as error:
            self._problem = error
            return
        allocations = [event for event in every_event(tree) if event.tag.name == "Allocation"]
        allocations.sort(key=lambda event: event.start_time_ns)
        alive: dict[int, int] = {}  # bytes of each allocation that is not freed, by its address
        total = 0
        for event in allocations:
            allocation = event.typed[1]  # its size is negative if the memory is freed
            if allocation.device.type != "cpu":
                continue
            total -= alive.pop(allocation.ptr, 0)  # 0: allocated before the block
            if allocation.alloc_size > 0:
                alive[allocation.ptr] = allocation.alloc_size
                total += allocation.alloc_size
            self._peak = max(self._peak, total)

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once. Reading it inside the block ends the recording there."""
        self.__exit__()
        if self._problem is not None:
            raise self._problem
        return self._peak

    # Nothing from before the block counts, so the whole peak was added in it.
    added_bytes = peak_bytes


# ---- recordings of torch's profiler


def stamp(device_type: str) -> Any:
    """Return the time now; on CUDA an event of the current stream, on other accelerators after a sync."""
    if device_type != "cuda":
        if device_type != "cpu" and torch.accelerator.is_available():
            torch.accelerator.synchronize()
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

    With ``memory`` it records what the CPU's allocator hands out, else shapes and dtypes of operands, and
    kernels on GPUs. To record steps, start it, mark each end of a step, and stop it between steps::

        recorder = Recorder()
        recorder.start()
        for _ in range(3):
            step()
            recorder.mark()
        print(summarize(*recorder.stop()))
    """

    def __init__(self, *, memory: bool = False) -> None:
        self._memory = memory
        self._profile: Any = None
        self._marks = 0

    def start(self) -> None:
        """Begin with a mark.

        Raises:
            UnsupportedError: a profiler runs in this thread already.
        """
        activities = [ProfilerActivity.CPU]
        if not self._memory and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        if profiler_is_on():
            raise UnsupportedError("a profiler runs in this thread already: switch that one off")
        recording = torch.profiler.profile(
            activities=activities,
            record_shapes=not self._memory,
            profile_memory=self._memory,
            acc_events=True,  # otherwise torch 2.11 warns about further cycles
        )
        with without_markers_on_stderr():
            recording.__enter__()  # type: ignore[no-untyped-call]
        self._profile, self._marks = recording, 0
        self.mark()

    def mark(self) -> None:
        """Put an event named ``MARK`` into the record."""
        self._marks += 1
        with record_function(MARK):
            pass

    def closure(self) -> AbstractContextManager[Any]:
        """Return a context for a closure that an optimizer's step calls: its work is not the optimizer's."""
        return record_function(CLOSURE)

    def stop(self) -> tuple[list[Any], Any]:
        """Return the outermost events of every thread, and the results of torch's profiler.

        Raises:
            UnsupportedError: another profiler ran in this thread meanwhile, and took part of the record away.
        """
        recording, self._profile = self._profile, None
        with suppress(RuntimeError):  # torch 2.11, if another profiler has stopped this one
            recording.__exit__(None, None, None)
        results: Any = None
        tree: list[Any] = []
        if recording.profiler and recording.profiler.kineto_results is not None:
            results = recording.profiler.kineto_results
            tree = results.experimental_event_tree()
        marks = [event for event in every_event(tree) if event.name == MARK]
        if len(marks) != self._marks:
            raise UnsupportedError("another profiler ran in this thread meanwhile: switch that one off")
        return tree, results


def every_event(tops: Any) -> Iterator[Any]:
    """Yield every event of some trees, in no particular order."""
    waiting = list(tops)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event

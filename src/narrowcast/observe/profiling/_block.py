"""``nc.observe.profile``: how long a block of code takes, and how much memory its tensors take at most."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Any, Self

import torch

from narrowcast.errors import DeviceError, OrderError, SettingError, UnsupportedError
from narrowcast.observe.explanation import bytes_text
from narrowcast.observe.profiling._recorder import Recorder, every_event


def profile(device: str | torch.device | None = None, *, memory: bool = True) -> Profile:
    """Measure a block: wall-clock seconds, and the most bytes that tensors took at once::

        with nc.observe.profile() as profile:
            train()
        print(profile)  # 0.532 s, peak 12 MiB (cpu)
        profile.duration_s, profile.peak_bytes

    On CUDA the block waits for the device at both ends, and memory is the peak of torch's allocator, whose
    record is reset: ``torch.cuda.max_memory_allocated`` then counts from the start of the block. On a CPU
    memory is what torch's allocator hands out in this thread, temporaries inside kernels included; torch's
    profiler records it, which slows each operator down by some microseconds: to compare times, use
    ``memory=False``. Blocks may be nested. If a block ends by an exception, it has the numbers up to there.

    Args:
        device: whose time and memory; None: CUDA if there is one, else the CPU.
        memory: False measures time alone.

    Raises:
        DeviceError: a device that is neither a CPU nor CUDA, or that this machine does not have.
        SettingError: ``memory`` is not a bool.
    """
    if not isinstance(memory, bool):
        raise SettingError(f"expected memory to be True or False, got {memory!r}")
    try:
        given = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise DeviceError(f"expected a device, got {device!r}: {str(error).splitlines()[0]}") from None
    if given.type not in ("cpu", "cuda"):
        raise DeviceError(f'expected "cpu" or "cuda" to profile, got "{given}"')
    if given.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (given.index or 0) >= count:
            raise DeviceError(f'expected one of the {count} CUDA devices of this machine, got "{given}"')
        given = torch.device("cuda", torch.cuda.current_device() if given.index is None else given.index)
    return Profile(given, memory=memory)


class Profile:
    """Time and memory of one block, measured by ``profile``, which has an example."""

    def __init__(self, device: torch.device, *, memory: bool) -> None:
        self.device = device
        self._memory: LiveTensorBytes | _CudaMemory | None = None
        if memory:
            self._memory = _CudaMemory(device) if device.type == "cuda" else LiveTensorBytes()
        self._started_s: float | None = None
        self._duration_s: float | None = None

    def __enter__(self) -> Self:
        if self._started_s is not None:
            raise OrderError("this profile is open already: leave its block before it is entered again")
        self._duration_s = None
        if self._memory is not None:
            self._memory.__enter__()
        self._wait()
        self._started_s = time.perf_counter()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the device may fail to synchronize; the first error is the one to raise.
        with contextlib.suppress(RuntimeError) if exc is not None else contextlib.nullcontext():
            self._wait()
        assert self._started_s is not None
        self._duration_s, self._started_s = time.perf_counter() - self._started_s, None
        if self._memory is not None:
            self._memory.__exit__(None, None, None)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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
            UnsupportedError: on a CPU, another profiler ran in this thread meanwhile.
        """
        _ = self.duration_s
        return None if self._memory is None else self._memory.peak_bytes

    @property
    def added_bytes(self) -> int | None:
        """The peak above what was there at the start; the same on every device. None without ``memory``."""
        _ = self.duration_s
        return None if self._memory is None else self._memory.added_bytes

    def __str__(self) -> str:
        if self._duration_s is None:
            return f"not ended ({self.device})"
        text = f"{self.duration_s:.4g} s"
        peak, added = self.peak_bytes, self.added_bytes
        if peak is not None and added is not None:
            text += f", peak {bytes_text(peak)}"
            text += f", {bytes_text(added)} of it added" if added != peak else ""
        return f"{text} ({self.device})"


class _CudaMemory:
    """The peak of CUDA's allocator. Open blocks share its one record, so each reset updates all of them."""

    _open: list[_CudaMemory] = []  # noqa: RUF012 - of the process, as the allocator's record is
    _lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = self._before_bytes = 0

    @property
    def added_bytes(self) -> int:
        return self.peak_bytes - self._before_bytes

    def __enter__(self) -> Self:
        with self._lock:
            self._update_open()
            torch.cuda.reset_peak_memory_stats(self._device)
            self.peak_bytes = self._before_bytes = torch.cuda.memory_allocated(self._device)
            self._open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._update_open()
            self._open.remove(self)

    def _update_open(self) -> None:
        peak = torch.cuda.max_memory_allocated(self._device)
        for block in self._open:
            if block._device == self._device:
                block.peak_bytes = max(block.peak_bytes, peak)


class LiveTensorBytes:
    """The most memory that CPU tensors take at once within the block, in ``peak_bytes``.

    Counts each block of memory that torch's CPU allocator hands out in this thread, and in the threads in
    which autograd runs backward for it, until it is freed. The sum of the storages of tensors would miss
    temporaries inside kernels, more of them in bf16 than in fp32: in examples/quantized_sine.py, three steps
    at 512 by 512 pixels, the allocator hands out 2071 MiB in fp32 and 1423 MiB in bf16, storages hold 2054
    and 1031. Not counted: memory from before the block, of other devices or threads, or that torch did not
    allocate (numpy, mapped files, scratch of oneDNN and BLAS).

    torch's profiler records all open blocks of a thread at once and keeps every event: measure a few training
    steps, not a day.

    Raises:
        UnsupportedError: on entering, if a profiler runs in this thread; on reading, if one ran meanwhile.
    """

    def __enter__(self) -> Self:
        self._alive: dict[int, int] = {}
        self._total = self._peak = 0
        self._problem: UnsupportedError | None = None
        _pause()
        _thread.open.append(self)
        try:
            _resume()
        except BaseException:
            _thread.open.remove(self)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self in _thread.open:
            _pause()
            _thread.open.remove(self)
            _resume()

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once. Reading it inside the block ends the recording there."""
        self.__exit__()
        if self._problem is not None:
            raise self._problem
        return self._peak

    added_bytes = peak_bytes

    def _follow(self, changes: list[tuple[int, int, int]]) -> None:
        for _, address, size in changes:
            before = self._alive.pop(address, 0)  # 0: allocated before the block
            if size > 0:
                self._alive[address] = size
            self._total += max(size, 0) - before
            self._peak = max(self._peak, self._total)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open: list[LiveTensorBytes] = []
        self.recorder: Recorder | None = None


_thread = _Thread()


def _resume() -> None:
    """Record, if a block is open in this thread."""
    if _thread.open:
        recorder = Recorder(memory=True)
        recorder.start()
        _thread.recorder = recorder


def _pause() -> None:
    """Stop the recording and hand it to all open blocks."""
    recorder, _thread.recorder = _thread.recorder, None
    if recorder is None:
        return
    recorder.mark()
    try:
        changes = _allocations(recorder.stop()[0])
    except UnsupportedError as error:
        for block in _thread.open:
            block._problem = error
    else:
        for block in _thread.open:
            block._follow(changes)


def _allocations(tree: list[Any]) -> list[tuple[int, int, int]]:
    """Return time, address and size (negative if it is freed) of each block on the CPU, in order of time."""
    found = []
    for event in every_event(tree):
        if event.tag.name == "Allocation" and event.typed[1].device.type == "cpu":
            block = event.typed[1]
            found.append((event.start_time_ns, block.ptr, block.alloc_size))
    return sorted(found, key=lambda change: change[0])

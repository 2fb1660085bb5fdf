"""``nc.observe.profile``: how long a block of code takes, and how much memory its tensors take at most."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Any, Self

import torch

from narrowcast.errors import DeviceError, OrderError, SettingError
from narrowcast.observe.explanation._text import size_text
from narrowcast.observe.profiling._live_tensors import LiveTensorBytes


class Profile:
    """Time and memory of one block; made by ``profile``. Numbers are there once the block has ended."""

    def __init__(self, device: torch.device, *, memory: bool) -> None:
        self.device = device
        self._memory: _CpuMemory | _CudaMemory | None = None
        if memory:
            self._memory = _CudaMemory(device) if device.type == "cuda" else _CpuMemory()
        self._started_s: float | None = None
        self._duration_s: float | None = None

    def __enter__(self) -> Self:
        if self._started_s is not None:
            raise OrderError("this profile is open already: leave its block before it is entered again")
        self._duration_s = None
        if self._memory is not None:
            self._memory.begin()
        self._wait()
        self._started_s = time.perf_counter()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error a device may refuse to be waited for; the error itself is what counts then.
        with contextlib.suppress(RuntimeError) if exc is not None else contextlib.nullcontext():
            self._wait()
        assert self._started_s is not None
        self._duration_s, self._started_s = time.perf_counter() - self._started_s, None
        if self._memory is not None:
            self._memory.end()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def duration_s(self) -> float:
        """Seconds from the block's begin to its end, the device's work included.

        Raises:
            OrderError: the block has not ended.
        """
        if self._duration_s is None:
            raise OrderError('the block has not ended: read it after "with nc.observe.profile() as profile:"')
        return self._duration_s

    @property
    def peak_bytes(self) -> int | None:
        """The most that tensors took at once; None without ``memory``.

        CUDA: everything that torch's allocator had handed out, what was there before included. CPU: what was
        allocated in the block, exact.

        Raises:
            OrderError: the block has not ended.
            UnsupportedError: on a CPU, another profiler ran in this thread meanwhile.
        """
        _ = self.duration_s
        return None if self._memory is None else self._memory.peak_bytes

    @property
    def added_bytes(self) -> int | None:
        """The peak above what was there as the block began: means the same on every device; None as above."""
        _ = self.duration_s
        return None if self._memory is None else self._memory.added_bytes

    def as_json(self) -> dict[str, Any]:
        """``device``, ``duration_s``, ``peak_bytes`` and ``added_bytes``."""
        return {
            "device": str(self.device),
            "duration_s": self.duration_s,
            "peak_bytes": self.peak_bytes,
            "added_bytes": self.added_bytes,
        }

    def __str__(self) -> str:
        if self._duration_s is None:
            return f"not ended ({self.device})"
        text = f"{self.duration_s:.4g} s"
        peak, added = self.peak_bytes, self.added_bytes
        if peak is not None and added is not None:
            text += f", peak {size_text(peak)}"
            text += f", {size_text(added)} of it added" if added != peak else ""
        return f"{text} ({self.device})"

    def __repr__(self) -> str:
        return f"Profile({self})"


def profile(device: str | torch.device | None = None, *, memory: bool = True) -> Profile:
    """Measure a block: wall-clock seconds, and the most bytes that tensors took at once::

        with nc.observe.profile() as profile:
            train()
        print(profile)  # 0.532 s, peak 12 MiB (cpu)
        profile.duration_s, profile.peak_bytes

    On CUDA the device is waited for at both ends, so that its work counts, and memory is the peak of torch's
    allocator, whose record is reset: ``torch.cuda.max_memory_allocated`` counts from the block's begin
    afterwards. On a CPU memory is that of ``LiveTensorBytes``: every block of memory that torch's allocator
    hands out in this thread, temporaries inside kernels included. It comes from torch's profiler, which slows
    each operator down by some microseconds: to compare times, use ``memory=False``, and measure memory in a
    run of its own. Blocks may be nested (reading an inner one's record then takes time of the outer one); one
    that ends by an exception has the numbers up to it.

    Args:
        device: whose time and memory; None: CUDA where there is one, else the CPU.
        memory: False measures time alone.

    Raises:
        DeviceError: a device that is neither a CPU nor CUDA, or that this machine lacks.
        SettingError: ``memory`` is no bool.
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


class _CpuMemory:
    """What CPU tensors take."""

    def begin(self) -> None:
        self._tensors = LiveTensorBytes().__enter__()

    def end(self) -> None:
        self._tensors.end()

    @property
    def peak_bytes(self) -> int:
        return self._tensors.peak_bytes

    added_bytes = peak_bytes


class _CudaMemory:
    """What CUDA's allocator has handed out, whose one record of a peak all blocks that are open share."""

    _open: list[_CudaMemory] = []  # noqa: RUF012 - of the process, as the allocator's record is
    _lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = self._before_bytes = 0

    @property
    def added_bytes(self) -> int:
        return self.peak_bytes - self._before_bytes

    def begin(self) -> None:
        with self._lock:
            self._tell()
            torch.cuda.reset_peak_memory_stats(self._device)
            self.peak_bytes = self._before_bytes = torch.cuda.memory_allocated(self._device)
            self._open.append(self)

    def end(self) -> None:
        with self._lock:
            self._tell()
            self._open.remove(self)

    def _tell(self) -> None:
        peak = torch.cuda.max_memory_allocated(self._device)
        for block in self._open:
            if block._device == self._device:
                block.peak_bytes = max(block.peak_bytes, peak)

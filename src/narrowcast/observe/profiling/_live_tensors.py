"""How much memory CPU tensors take: at most, and in the end, from torch's own record of its allocator.

What counts is what the allocator of CPU tensors handed out, kernels' temporary tensors included, as in
``torch.cuda.max_memory_allocated``. Adding up the storages of the tensors that operations return misses those
temporaries, and more of them in bf16 than in fp32. Measured on the network of examples/quantized_sine.py,
three steps at 512 by 512 pixels with 256 channels: allocator 2071 MiB in fp32 and 1423 MiB in bf16, storages
2054 and 1031. The resident memory of the process rose by 2162 and 1252: a block is counted whole, and a
kernel need not touch all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd.profiler import profile

from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.observe._torch_internals import without_markers_on_stderr

# Bytes that are allocated last of all, so that a record without them is known to have been cut short.
_MARK_BYTES = 12_289


class LiveTensorBytes:
    """Within it what CPU tensors take is recorded; afterwards it says how much, in bytes::

        with LiveTensorBytes() as tensors:
            train()
        print(tensors.peak_bytes)

    Counted is each block of memory that torch's CPU allocator hands out in this thread, and in those in which
    autograd goes backward for it, from then until it is freed: outputs, saved activations, gradients, state
    of optimizers, and temporary tensors inside kernels. Not counted: what was there before; memory of CUDA
    and other devices, and meta tensors, which take none; memory that torch did not allocate (of numpy, of a
    mapped file, shared with workers of a DataLoader, scratch of oneDNN and BLAS); what other threads do.

    Blocks may be nested. torch's profiler does the recording, once for all of a thread that are open, and
    keeps every event: for a few training steps, not for a day. Another profiler in this thread takes the
    record away, which is noticed.

    Raises:
        OrderError: when read before anything was recorded, or entered while it is open.
        UnsupportedError: on leaving or reading, where another profiler ran meanwhile.
    """

    def __init__(self) -> None:
        self._thread: _Thread | None = None
        self._sums: tuple[int, int] | None = None
        self._is_cut_short = False

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise OrderError("this recording is open already: leave its block before it is entered again")
        self._sums, self._is_cut_short = None, False
        self._alive: dict[int, int] = {}
        self._total = self._peak = 0
        thread = _thread()
        thread.pause()
        thread.open.append(self)
        self._thread = thread
        try:
            thread.go_on()
        except BaseException:
            thread.open.remove(self)
            self._thread = None
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once. Read inside the block, it ends the recording there."""
        return self._stop()[0]

    @property
    def live_bytes(self) -> int:
        """What was alive in the end; ends the recording as ``peak_bytes`` does."""
        return self._stop()[1]

    def end(self) -> None:
        """End the recording, as leaving the block does; what is wrong with it is said on reading."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.pause()
            thread.open.remove(self)
            thread.go_on()
            self._sums = self._peak, self._total

    def _stop(self) -> tuple[int, int]:
        self.end()
        if self._is_cut_short:
            raise UnsupportedError(
                "the memory of CPU tensors is recorded by torch's profiler, and another profiler ran in this "
                "thread meanwhile: switch that one off"
            )
        if self._sums is None:
            raise OrderError('nothing was recorded yet: write "with LiveTensorBytes() as tensors:" first')
        return self._sums

    def follow(self, changes: Sequence[tuple[int, int, int]] | None) -> None:
        """A part of the recording, in order of time; None where it was cut short."""
        if changes is None:
            self._is_cut_short = True
            return
        for _, address, size in changes:
            before = self._alive.pop(address, 0)  # freed and there is none: it was there before the block
            if size > 0:
                self._alive[address] = size
            self._total += max(size, 0) - before
            self._peak = max(self._peak, self._total)


class _Thread:
    """The recordings that are open in one thread, innermost last, and the one profiler that serves them."""

    def __init__(self) -> None:
        self.open: list[LiveTensorBytes] = []
        self._recording: profile | None = None

    def go_on(self) -> None:
        """Record, if any is open."""
        if self.open:
            recording = profile(use_cpu=True, profile_memory=True)
            with without_markers_on_stderr():
                recording.__enter__()  # type: ignore[no-untyped-call]
            self._recording = recording

    def pause(self) -> None:
        """Stop the profiler, and tell what it has seen to all that are open."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        torch.empty(_MARK_BYTES, dtype=torch.uint8, device="cpu")
        recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        results = recording.kineto_results
        changes = _until_the_mark(() if results is None else results.experimental_event_tree())
        for block in self.open:
            block.follow(changes)


_here = threading.local()


def _thread() -> _Thread:
    if not hasattr(_here, "thread"):
        _here.thread = _Thread()
    thread: _Thread = _here.thread
    return thread


def _until_the_mark(tops: Iterable[Any]) -> list[tuple[int, int, int]] | None:
    """Blocks that were allocated or freed, in order; None where the record was cut short before its mark."""
    changes = sorted(_allocations(tops), key=lambda change: change[0])
    marks = [position for position, (_, _, size) in enumerate(changes) if size == _MARK_BYTES]
    return changes[: marks[-1]] if marks else None


def _allocations(tops: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Time, address and size in bytes (negative where it is freed) of each block on the CPU."""
    waiting = list(tops)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag.name == "Allocation":
            block = event.typed[1]
            if block.device.type == "cpu":
                yield event.start_time_ns, block.ptr, block.alloc_size

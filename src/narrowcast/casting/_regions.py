"""The autocast state of torch, entered and left: what was there before is kept on a stack of the thread.

torch keeps casts of weights in one cache for the whole process, whose key is the weight alone. Two rules keep a
cast of one format out of a region of another. Inside a thread, the cache is dropped whenever the format in
force changes. Between threads, a region may use the cache only while no other thread has a region that uses it
for another format; otherwise it runs with the cache off, casts its weights at each use, and is right.
A region in float32 neither reads nor writes the cache, since only casts of fp32 weights are kept there.
"""

from __future__ import annotations

import os
import threading

import torch

from narrowcast.casting import _guards
from narrowcast.errors import RegionError


class _Frame:
    """One entered region, and the state that leaving it brings back."""

    __slots__ = (
        "audible",
        "cache_before",
        "caching",
        "device",
        "dtype",
        "dtype_before",
        "enabled_before",
        "owner",
        "thread",
    )  # fmt: skip

    def __init__(
        self, owner: object, thread: list[_Frame], device: str, dtype: torch.dtype, *, audible: bool
    ) -> None:
        self.owner = owner
        self.thread = thread
        self.device = device
        self.dtype = dtype
        self.audible = audible
        self.caching = False
        self.enabled_before = torch.is_autocast_enabled(device)
        self.dtype_before = torch.get_autocast_dtype(device)
        self.cache_before = torch.is_autocast_cache_enabled()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_here = _Thread()
_lock = threading.Lock()
_caching: set[_Frame] = set()  # of all threads
_format_of_casts: torch.dtype | None = None  # that the process's cache may hold
_audible_regions = 0  # of all threads


def enter(
    owner: object,
    device: str,
    dtype: torch.dtype,
    enabled: bool,
    cache_enabled: bool,
    *,
    audible: bool = True,
) -> None:
    """Open a region in this thread; ``leave(owner)`` closes it.

    ``audible``: a backward inside it is worth a warning. Not so where a backward pass itself opens the region.
    """
    global _audible_regions
    frames = _here.frames
    frame = _Frame(owner, frames, device, dtype, audible=audible and enabled)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    with _lock:
        if (
            frame.enabled_before and frame.cache_before
        ):  # also a region of torch's own, which is not on our stack
            _hold_casts_of(frame.dtype_before)
        if enabled and cache_enabled and dtype != torch.float32:
            cache_enabled = frame.caching = _may_cache(frame)
            if frame.caching:
                _caching.add(frame)
                _hold_casts_of(dtype)
        if frame.audible:
            _audible_regions += 1
            if _audible_regions == 1:
                _guards.install()
    torch.set_autocast_cache_enabled(cache_enabled)
    frames.append(frame)


def leave(owner: object) -> None:
    """Close the region that ``owner`` opened last in this thread.

    Raises:
        RegionError: it is not the innermost one, or ``owner`` opened none here. The state is right afterwards.
    """
    frames = _here.frames
    if frames and frames[-1].owner is owner:
        _restore(frames.pop())
        return
    for index in range(len(frames) - 1, -1, -1):
        if frames[index].owner is owner:
            break
    else:
        raise RegionError(
            "expected a region that this thread entered, got one that it did not enter or has left already; "
            "leave a region in the thread that entered it, as a with statement does"
        )
    frame = frames.pop(index)
    _hand_up(frame, frames[index:])
    raise RegionError(
        f"expected the innermost region to be left first, got the {frame.device} region in {frame.dtype} with "
        f"{len(frames) - index} still open inside it; a generator or coroutine that stops inside a region does "
        f"this: open the region around each step of it"
    )


def _hand_up(frame: _Frame, above: list[_Frame]) -> None:
    """Take a frame from below others: they bring back what it would have brought back."""
    above[0].cache_before = frame.cache_before
    for other in above:
        if other.device == frame.device:
            other.enabled_before, other.dtype_before = frame.enabled_before, frame.dtype_before
            break
    else:
        torch.set_autocast_enabled(frame.device, frame.enabled_before)
        torch.set_autocast_dtype(frame.device, frame.dtype_before)
    torch.autocast_decrement_nesting()
    with _lock:
        _forget(frame)
        _drop()


def _restore(frame: _Frame) -> None:
    torch.set_autocast_enabled(frame.device, frame.enabled_before)
    torch.set_autocast_dtype(frame.device, frame.dtype_before)
    torch.set_autocast_cache_enabled(frame.cache_before)
    depth = torch.autocast_decrement_nesting()
    with _lock:
        if frame.caching or frame.audible:
            _forget(frame)
        if depth == 0:
            _drop()
        elif frame.enabled_before and frame.cache_before:
            _hold_casts_of(frame.dtype_before)


def _forget(frame: _Frame) -> None:
    global _audible_regions
    _caching.discard(frame)
    if frame.audible:
        _audible_regions -= 1
        if _audible_regions == 0:
            _guards.remove()


def _may_cache(frame: _Frame) -> bool:
    for other in _caching:  # noqa: SIM110 (a generator would cost as much as the rest of the region)
        if other.thread is not frame.thread and other.dtype != frame.dtype:
            return False
    return True


def _hold_casts_of(dtype: torch.dtype) -> None:
    global _format_of_casts
    if dtype == _format_of_casts or dtype == torch.float32:
        return
    if _format_of_casts is not None:
        torch.clear_autocast_cache()
    _format_of_casts = dtype


def _drop() -> None:
    global _format_of_casts
    torch.clear_autocast_cache()
    _format_of_casts = None


def open_here() -> bool:
    """Whether this thread is in an audible region whose casts are in force now."""
    return any(frame.audible and torch.is_autocast_enabled(frame.device) for frame in _here.frames)


def _after_fork() -> None:
    """The child has one thread, and the lock may have been held by another."""
    global _lock, _audible_regions
    _lock = threading.Lock()
    for frame in list(_caching):
        if frame.thread is not _here.frames:
            _caching.discard(frame)
    _audible_regions = sum(frame.audible for frame in _here.frames)


os.register_at_fork(after_in_child=_after_fork)
_guards.tell_whether_inside(open_here)

"""The autocast state of torch, entered and left: what was there before is kept on a stack of the thread.

torch keeps casts of weights in one cache for the whole process, whose key is the weight alone. Two rules keep
a cast of one format out of a region of another. Inside a thread, the cache is dropped whenever the format in
force changes. Between threads, a region may use the cache only while no other thread has a region that uses
it for another format; otherwise it runs with the cache off, casts its weights at each use, and is right.
A region in float32 neither reads nor writes the cache, since only casts of fp32 weights are kept there.
Regions that torch.autocast itself opened in other threads are not seen.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

from narrowcast.casting import _guards, _weight_casts
from narrowcast.casting._places import move_to, place_on
from narrowcast.casting._torch_internals import unseen_by_the_compiler
from narrowcast.errors import OrderError
from narrowcast.policy import Scope


class _Frame:
    """One entered region, and the state that leaving it brings back."""

    __slots__ = (
        "audible", "cache_before", "caching", "caller", "device", "dtype", "dtype_before", "enabled_before",
        "moved", "owner", "place", "place_before", "thread", "travels",
    )  # fmt: skip

    def __init__(
        self,
        owner: object,
        thread: list[_Frame],
        device: str,
        dtype: torch.dtype,
        audible: bool,
        travels: bool,
        caller: int | None,
        place: Scope | None,
    ) -> None:
        self.owner = owner
        self.thread = thread
        self.device = device
        self.dtype = dtype
        self.audible = audible
        self.travels = travels
        self.caller = caller
        self.caching = False
        self.moved = False
        self.enabled_before = torch.is_autocast_enabled(device)
        self.dtype_before = torch.get_autocast_dtype(device)
        self.cache_before = torch.is_autocast_cache_enabled()
        self.place_before = place_on(device)
        self.place = place


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


class _Process:
    """What the regions of all threads share; read and written with the lock held."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.caching: set[_Frame] = set()
        self.format_of_casts: torch.dtype | None = None
        self.regions = 0
        self.audible_regions = 0
        self.travelling_regions = 0
        # Set by the file that knows of checkpointing, which this one cannot import.
        self.install_binding: Callable[[], object] = bool
        self.remove_binding: Callable[[], object] = bool
        self.afterwards: Callable[[], object] | None = None

    def open(self, frame: _Frame, *, cache: bool) -> None:
        with self.lock:
            self.regions += 1
            if frame.enabled_before and frame.cache_before:  # perhaps by torch.autocast, which has no frame
                self.hold_casts_of(frame.dtype_before)
            if cache and self.may_cache(frame):
                frame.caching = True
                self.caching.add(frame)
                self.hold_casts_of(frame.dtype)
            if frame.audible:
                self.audible_regions += 1
                if self.audible_regions == 1:
                    _guards.install()
            if frame.travels:
                self.travelling_regions += 1
                if self.travelling_regions == 1:
                    self.install_binding()

    def close(self, frame: _Frame, *, drop: bool) -> None:
        with self.lock:
            if frame.caching:
                self.caching.discard(frame)
            if frame.audible:
                self.audible_regions -= 1
                if self.audible_regions == 0:
                    _guards.remove()
            if frame.travels:
                self.travelling_regions -= 1
                if self.travelling_regions == 0:
                    self.remove_binding()
            if drop:
                torch.clear_autocast_cache()
                self.format_of_casts = None
            elif frame.enabled_before and frame.cache_before:
                self.hold_casts_of(frame.dtype_before)
            self.regions -= 1
        if self.afterwards is not None:
            self.catch_up()

    def catch_up(self) -> None:
        """Do what waits for the end of every region, if that has come."""
        if self.regions == 0:
            work, self.afterwards = self.afterwards, None
            if work is not None:
                work()

    def may_cache(self, frame: _Frame) -> bool:
        for other in self.caching:
            if other.dtype != frame.dtype and other.thread is not frame.thread:
                return False
        return True

    def hold_casts_of(self, dtype: torch.dtype) -> None:
        if dtype in (self.format_of_casts, torch.float32):
            return
        torch.clear_autocast_cache()  # without a known format too: torch.autocast may have filled it
        self.format_of_casts = dtype

    def after_fork(self) -> None:
        """The child has this thread alone, and the lock may have been held by another."""
        self.lock = threading.Lock()
        self.caching = {frame for frame in self.caching if frame.thread is _here.frames}
        self.regions = len(_here.frames)
        self.audible_regions = sum(frame.audible for frame in _here.frames)
        self.travelling_regions = sum(frame.travels for frame in _here.frames)


_here = _Thread()
_process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.after_fork)


@unseen_by_the_compiler
def enter(
    owner: object,
    device: str,
    dtype: torch.dtype,
    enabled: bool,
    cache_enabled: bool,
    *,
    audible: bool,
    place: Scope | None,
    caller: int | None = None,
) -> None:
    """Open a region in this thread; ``leave(owner)`` closes it.

    ``audible``: a backward inside it is worth a warning. Not where a backward pass itself opens the region.
    ``place``: which rules are in force inside.
    ``caller``: the ``id`` of the frame with which the region ends, where nobody may be there to leave it.
    """
    frames = _here.frames
    if frames and frames[-1].caller is not None:
        close_abandoned()
    travels = place is not None or (enabled and dtype == torch.float32)
    frame = _Frame(owner, frames, device, dtype, audible and enabled, travels, caller, place)
    torch.set_autocast_enabled(device, enabled)
    if dtype is not frame.dtype_before:  # each setting is a twentieth of the time of a region
        torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    wants_cache = enabled and cache_enabled and dtype != torch.float32
    _process.open(frame, cache=wants_cache)
    caches = frame.caching if wants_cache else cache_enabled
    if caches is not frame.cache_before:
        torch.set_autocast_cache_enabled(caches)
    if place is not frame.place_before:
        move_to(place, device)
        frame.moved = True
    frames.append(frame)


@contextmanager
def traced_region(
    device: str, dtype: torch.dtype, enabled: bool, place_state: Sequence[tuple[str, torch.dtype]] = ()
) -> Iterator[None]:
    """A region in code that Dynamo traces; ``place_state`` is the place in it, as ``state_of`` gives it.

    Dynamo follows ``torch.autocast``, inside checkpoints and custom functions too, but neither locks nor
    stacks of a thread. ``torch.autocast`` would disable a region in float32 on a CPU, so one of another
    format is opened, in which the format is then set to float32. The cache of weight casts is off: no cast of
    another region can be met in it.
    """
    half = torch.float16 if dtype == torch.float32 else dtype
    with torch.autocast(device, half, enabled, False):
        if dtype != half:
            torch.set_autocast_dtype(device, dtype)
        if not place_state:
            yield
            return
        first, last = place_state[0], place_state[-1]
        with torch.autocast(*first, enabled=False), torch.autocast(*last, enabled=False):
            yield


@unseen_by_the_compiler
def leave(owner: object) -> None:
    """Close the region that ``owner`` opened last in this thread.

    Raises:
        OrderError: it is not the innermost one, or ``owner`` opened none here. The state is right after it.
    """
    frames = _here.frames
    if frames and frames[-1].caller is not None and frames[-1].owner is not owner:
        close_abandoned()
    if frames and frames[-1].owner is owner:
        _bring_back(frames.pop())
        return
    owned = [index for index, frame in enumerate(frames) if frame.owner is owner]
    if not owned:
        raise OrderError(
            "expected a region that this thread entered, got one that it did not enter or has left already; "
            "leave a region in the thread that entered it, as a with statement does"
        )
    frame, above = frames.pop(owned[-1]), frames[owned[-1] :]
    _take_from_below(frame, above)
    raise OrderError(
        f"expected the innermost region to be left first, got the {frame.device} region in {frame.dtype} "
        f"with {len(above)} still open inside it; a generator or a coroutine that stops inside a region does "
        f"this: open the region around each of its steps"
    )


def _bring_back(frame: _Frame) -> None:
    torch.set_autocast_enabled(frame.device, frame.enabled_before)
    torch.set_autocast_dtype(frame.device, frame.dtype_before)
    torch.set_autocast_cache_enabled(frame.cache_before)
    if frame.moved:
        move_to(frame.place_before, frame.device)
    outermost = torch.autocast_decrement_nesting() == 0
    if outermost:
        _weight_casts.forget_here()
    _process.close(frame, drop=outermost)


def frames_here() -> list[_Frame]:
    """The open regions of this thread, outermost first."""
    return list(_here.frames)


def give_up(frames: list[_Frame]) -> None:
    """Forget regions that were left open by a thread that has ended, and its state with it."""
    for frame in reversed(frames):
        _process.close(frame, drop=True)


def close_abandoned() -> None:
    """Close the innermost regions of this thread whose callers have ended without leaving them.

    PyTorch calls the hooks of a module after an ``Exception``, but not after a ``KeyboardInterrupt``.
    """
    frames = _here.frames
    while frames and frames[-1].caller is not None and not is_running(frames[-1].caller):
        _bring_back(frames.pop())


def is_running(caller: int) -> bool:
    """Whether this thread is in the call of a function whose frame has that ``id``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame) != caller:
        frame = frame.f_back
    return frame is not None


def _take_from_below(frame: _Frame, above: list[_Frame]) -> None:
    """Close a region under others, which are to bring back later what it would have brought back."""
    above[0].cache_before = frame.cache_before
    heirs = [other for other in above if other.device == frame.device]
    if heirs:
        heirs[0].enabled_before, heirs[0].dtype_before = frame.enabled_before, frame.dtype_before
        heirs[0].place_before = frame.place_before
        heirs[0].moved |= frame.moved
    else:
        move_to(frame.place_before, frame.device)
        torch.set_autocast_enabled(frame.device, frame.enabled_before)
        torch.set_autocast_dtype(frame.device, frame.dtype_before)
    torch.autocast_decrement_nesting()
    _weight_casts.forget_here()
    _process.close(frame, drop=True)


def owners() -> list[object]:
    """Who opened the regions of this thread, outermost first."""
    return [frame.owner for frame in _here.frames]


def devices_on() -> set[str]:
    """The device types on which a region of ours is open in this thread."""
    return {frame.device for frame in _here.frames}


def needs_to_travel() -> bool:
    """Whether this thread is in a region that PyTorch alone would not bring back."""
    return any(frame.travels for frame in _here.frames)


def ask_to_bind(*, install: Callable[[], object], remove: Callable[[], object]) -> None:
    """Hand over what is called as the first region that travels opens, and as the last one closes."""
    _process.install_binding, _process.remove_binding = install, remove


def once_none_is_open(work: Callable[[], object]) -> None:
    """Call ``work`` now, or as the last region that is open in any thread closes.

    Without the lock: garbage may be collected, and call this, while this thread holds it.
    """
    _process.afterwards = work
    _process.catch_up()


def is_open_here() -> bool:
    """Whether this thread is in an audible region."""
    return any(frame.audible for frame in _here.frames)


def is_on_here() -> bool:
    """Whether casting is on, too."""
    return any(frame.audible and torch.is_autocast_enabled(frame.device) for frame in _here.frames)


def is_in_region() -> bool:
    """Whether this thread is in a region of ours, audible or not."""
    return bool(_here.frames)


_weight_casts.ask(is_in_region=is_in_region)
_guards.ask(is_open_here=is_open_here, is_on_here=is_on_here)

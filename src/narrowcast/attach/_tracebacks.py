"""Tracebacks of a script's errors, as a plain run shows them: without the frames that are ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import narrowcast
from narrowcast.errors import NarrowcastError

_OUR_FOLDER = str(Path(narrowcast.__file__).parent) + os.sep


def without_our_frames(show: Callable[..., Any], starts: CodeType) -> Callable[..., Any]:
    """An ``excepthook`` that shows what ``show`` would, from the script's own first line on.

    Args:
        show: the hook that was in force.
        starts: the code of ours that started the script: its frame and those before it are left out.
    """

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        trim(error, starts)
        return show(kind, error, error.__traceback__)

    return excepthook


def trim_threads_errors() -> None:
    """Leave our frames out of what Python shows of an error that ends a thread, from now on."""
    show = threading.excepthook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        # The first frame is that of threading itself, so what ``args`` holds is trimmed with it.
        if args.exc_value is not None:
            trim(args.exc_value)
        show(args)

    threading.excepthook = excepthook


def trim(error: BaseException, starts: CodeType | None = None) -> None:
    """Take our frames out of the traceback of ``error``, and of all that it is chained to."""
    for one in _chained(error):
        frames = list(_frames(one.__traceback__))
        begun = next((n for n, t in enumerate(frames) if t.tb_frame.f_code is starts), -1)
        frames = frames[begun + 1 :]
        if not _is_our_bug(one, frames):
            frames = [t for t in frames if not _is_ours(t)]
        for this, following in pairwise([*frames, None]):
            this.tb_next = following  # type: ignore[union-attr]
        one.__traceback__ = frames[0] if frames else None


def _is_our_bug(error: BaseException, frames: list[TracebackType]) -> bool:
    """Raised by our own code and not on purpose: whoever reports it needs our frames.

    A TypeError may be a call with the wrong arguments, which Python raises where the call is passed on.
    """
    on_purpose = isinstance(error, NarrowcastError | TypeError) or not isinstance(error, Exception)
    return bool(frames) and _is_ours(frames[-1]) and not on_purpose


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OUR_FOLDER)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _chained(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or any(one is known for known in found):
            continue
        found.append(one)
        waiting += [one.__cause__, one.__context__]
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else []
    return found

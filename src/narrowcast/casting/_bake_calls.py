"""The calls of a model that are under way, in all threads.

An interrupt from the keyboard ends a call without its hooks. So a call is known by its frame: one that has
ended can be cleared, one that runs cannot.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

_CALL = torch.nn.Module._call_impl.__code__.co_name


class Calls:
    """The frames of the calls under way."""

    def __init__(self) -> None:
        self._frames: set[FrameType] = set()

    def begin(self, frame: FrameType) -> None:
        self._frames.add(frame)

    def end(self, frame: FrameType) -> None:
        self._frames.discard(frame)

    def are_over(self) -> bool:
        """Whether none is under way."""
        if self._frames:
            self._frames = {frame for frame in self._frames if not has_ended(frame)}
        return not self._frames


def calling_frame() -> FrameType:
    """The frame of the module's call that the hook on the stack is called from."""
    nearest = sys._getframe(1)
    frame: FrameType | None = nearest
    while frame is not None and frame.f_code.co_name != _CALL:
        frame = frame.f_back
    return nearest if frame is None else frame


def has_ended(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True

"""What a run leaves behind: the capture file, written as it happens and read back without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.observe._capture import Capture, CaptureWriter, read_capture, start_event
from narrowcast.observe._comparison import COMPARISON, RUN, ComparisonCapture, TimedRun, read_comparison
from narrowcast.observe._folder import discard_captures, make_run_folder
from narrowcast.observe._schema import SCHEMA

if TYPE_CHECKING:
    from narrowcast.observe._live_tensors import LiveTensorBytes

__all__ = [
    "COMPARISON",
    "RUN",
    "SCHEMA",
    "Capture",
    "CaptureWriter",
    "ComparisonCapture",
    "LiveTensorBytes",
    "TimedRun",
    "discard_captures",
    "make_run_folder",
    "read_capture",
    "read_comparison",
    "start_event",
]


def __getattr__(name: str) -> object:
    if name != "LiveTensorBytes":  # the one name that needs torch, which reading a capture does not
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from narrowcast.observe._live_tensors import LiveTensorBytes

    return LiveTensorBytes

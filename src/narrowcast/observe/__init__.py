"""What a run leaves behind: the capture file, written as it happens and read back without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from narrowcast.observe._capture import Capture, CaptureWriter, read_capture, start_event
from narrowcast.observe._comparison import COMPARISON, RUN, ComparisonCapture, TimedRun, read_comparison
from narrowcast.observe._folder import discard_captures, make_run_folder
from narrowcast.observe._schema import SCHEMA

if TYPE_CHECKING:
    from narrowcast.observe._host_reads import HostReads, as_sites
    from narrowcast.observe._live_tensors import LiveTensorBytes
    from narrowcast.observe._profile import StepProfiler, summarize

__all__ = [
    "COMPARISON",
    "RUN",
    "SCHEMA",
    "Capture",
    "CaptureWriter",
    "ComparisonCapture",
    "HostReads",
    "LiveTensorBytes",
    "StepProfiler",
    "TimedRun",
    "as_sites",
    "discard_captures",
    "make_run_folder",
    "read_capture",
    "read_comparison",
    "start_event",
    "summarize",
]


# Names that need torch, which reading a capture does not.
_WITH_TORCH = {
    "HostReads": "_host_reads",
    "LiveTensorBytes": "_live_tensors",
    "StepProfiler": "_profile",
    "as_sites": "_host_reads",
    "summarize": "_profile",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)

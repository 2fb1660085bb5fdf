"""Captures of runs: the files that a run leaves, written as it goes and read back without torch."""

from narrowcast.observe.capture._events import SCHEMA
from narrowcast.observe.capture._files import (
    COMPARISON,
    EXPLANATION,
    RUN,
    Capture,
    CaptureWriter,
    ComparisonCapture,
    TimedRun,
    discard_captures,
    json_ready,
    make_run_folder,
    read_capture,
    read_comparison,
    start_event,
)

__all__ = [
    "COMPARISON",
    "EXPLANATION",
    "RUN",
    "SCHEMA",
    "Capture",
    "CaptureWriter",
    "ComparisonCapture",
    "TimedRun",
    "discard_captures",
    "json_ready",
    "make_run_folder",
    "read_capture",
    "read_comparison",
    "start_event",
]

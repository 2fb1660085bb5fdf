"""Captures of runs: the files that a run leaves, written as it goes and read back without torch."""

from narrowcast.observe.capture._events import (
    OUTPUT_LIMIT,
    PARAMETER_LIMIT,
    SCHEMA,
    TOTAL_FAILS,
    TOTAL_LIMIT,
    parameter_error,
    parameter_limit,
)
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
    "OUTPUT_LIMIT",
    "PARAMETER_LIMIT",
    "RUN",
    "SCHEMA",
    "TOTAL_FAILS",
    "TOTAL_LIMIT",
    "Capture",
    "CaptureWriter",
    "ComparisonCapture",
    "TimedRun",
    "discard_captures",
    "json_ready",
    "make_run_folder",
    "parameter_error",
    "parameter_limit",
    "read_capture",
    "read_comparison",
    "start_event",
]

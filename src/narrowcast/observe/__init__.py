"""What a run leaves behind: the capture file, written as it happens and read back without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from narrowcast.observe._capture import Capture, CaptureWriter, json_ready, read_capture, start_event
from narrowcast.observe._comparison import COMPARISON, RUN, ComparisonCapture, TimedRun, read_comparison
from narrowcast.observe._folder import discard_captures, make_run_folder
from narrowcast.observe._op_trace_file import EXPLANATION, explained, read_explanation
from narrowcast.observe._op_trace_rows import Group, OpRow, grouped, has_several_models, place_name, rules_of
from narrowcast.observe._op_trace_text import (
    count_text,
    explained_lines,
    odd_shapes_in_words,
    percent,
    round_trips_in_words,
    size_text,
    wrapped,
)
from narrowcast.observe._schema import SCHEMA

if TYPE_CHECKING:
    from narrowcast.observe._block_profile import Profile, profile
    from narrowcast.observe._device_time import seconds_between, stamp
    from narrowcast.observe._exponent_histogram import CastCounts, ExponentHistogram
    from narrowcast.observe._host_reads import HostReads, as_sites
    from narrowcast.observe._live_tensors import LiveTensorBytes
    from narrowcast.observe._op_trace import OpTrace
    from narrowcast.observe._op_trace_events import together, trace_events
    from narrowcast.observe._op_trace_rules import near_module
    from narrowcast.observe._profile import StepProfiler, summarize
    from narrowcast.observe._step_trace import StepTrace, trace_step
    from narrowcast.observe._step_trace_stages import Stage

__all__ = [
    "COMPARISON",
    "EXPLANATION",
    "RUN",
    "SCHEMA",
    "Capture",
    "CaptureWriter",
    "CastCounts",
    "ComparisonCapture",
    "ExponentHistogram",
    "Group",
    "HostReads",
    "LiveTensorBytes",
    "OpRow",
    "OpTrace",
    "Profile",
    "Stage",
    "StepProfiler",
    "StepTrace",
    "TimedRun",
    "as_sites",
    "count_text",
    "discard_captures",
    "explained",
    "explained_lines",
    "grouped",
    "has_several_models",
    "json_ready",
    "make_run_folder",
    "near_module",
    "odd_shapes_in_words",
    "percent",
    "place_name",
    "profile",
    "read_capture",
    "read_comparison",
    "read_explanation",
    "round_trips_in_words",
    "rules_of",
    "seconds_between",
    "size_text",
    "stamp",
    "start_event",
    "summarize",
    "together",
    "trace_events",
    "trace_step",
    "wrapped",
]


# Names that need torch, which reading a capture does not.
_WITH_TORCH = {
    "CastCounts": "_exponent_histogram",
    "ExponentHistogram": "_exponent_histogram",
    "HostReads": "_host_reads",
    "LiveTensorBytes": "_live_tensors",
    "OpTrace": "_op_trace",
    "Profile": "_block_profile",
    "near_module": "_op_trace_rules",
    "Stage": "_step_trace_stages",
    "StepProfiler": "_profile",
    "StepTrace": "_step_trace",
    "as_sites": "_host_reads",
    "profile": "_block_profile",
    "seconds_between": "_device_time",
    "stamp": "_device_time",
    "summarize": "_profile",
    "together": "_op_trace_events",
    "trace_events": "_op_trace_events",
    "trace_step": "_step_trace",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)

"""What a run leaves behind: the capture file, written as it happens and read back without torch."""

from narrowcast.observe._capture import Capture, CaptureWriter, read_capture, start_event
from narrowcast.observe._comparison import COMPARISON, RUN, ComparisonCapture, TimedRun, read_comparison
from narrowcast.observe._folder import discard_captures, make_run_folder
from narrowcast.observe._schema import SCHEMA

__all__ = [
    "COMPARISON",
    "RUN",
    "SCHEMA",
    "Capture",
    "CaptureWriter",
    "ComparisonCapture",
    "TimedRun",
    "discard_captures",
    "make_run_folder",
    "read_capture",
    "read_comparison",
    "start_event",
]

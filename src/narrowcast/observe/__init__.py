"""What a run leaves behind: the capture file, written as it happens and read back without torch."""

from narrowcast.observe._capture import SCHEMA, Capture, CaptureWriter, read_capture, start_event
from narrowcast.observe._folder import discard_captures, make_run_folder

__all__ = [
    "SCHEMA",
    "Capture",
    "CaptureWriter",
    "discard_captures",
    "make_run_folder",
    "read_capture",
    "start_event",
]

"""Time and memory: of a block of code, and of the parts of a training step."""

from narrowcast.observe.profiling._block import (
    LiveTensorBytes,
    Profile,
    Recorder,
    profile,
    seconds_between,
    stamp,
)
from narrowcast.observe.profiling._host_reads import HostReads
from narrowcast.observe.profiling._steps import (
    is_product,
    same_size,
    summarize,
)

__all__ = [
    "HostReads",
    "LiveTensorBytes",
    "Profile",
    "Recorder",
    "is_product",
    "profile",
    "same_size",
    "seconds_between",
    "stamp",
    "summarize",
]

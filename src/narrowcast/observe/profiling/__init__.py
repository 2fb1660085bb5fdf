"""Time and memory: of a block of code, and of the parts of a training step."""

from narrowcast.observe.profiling._block import Profile, profile
from narrowcast.observe.profiling._device_time import seconds_between, stamp
from narrowcast.observe.profiling._host_reads import HostReads, as_sites
from narrowcast.observe.profiling._live_tensors import LiveTensorBytes
from narrowcast.observe.profiling._steps import StepProfiler, summarize

__all__ = [
    "HostReads",
    "LiveTensorBytes",
    "Profile",
    "StepProfiler",
    "as_sites",
    "profile",
    "seconds_between",
    "stamp",
    "summarize",
]

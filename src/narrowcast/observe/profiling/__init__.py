"""Time and memory: of a block of code, and of the parts of a training step."""

from narrowcast.observe.profiling._block import LiveTensorBytes, Profile, profile
from narrowcast.observe.profiling._host_reads import HostReads, Reads, read_rows
from narrowcast.observe.profiling._products import is_product, product_size, same_size
from narrowcast.observe.profiling._steps import StepProfiler, seconds_between, stamp, summarize

__all__ = [
    "HostReads",
    "LiveTensorBytes",
    "Profile",
    "Reads",
    "StepProfiler",
    "is_product",
    "product_size",
    "profile",
    "read_rows",
    "same_size",
    "seconds_between",
    "stamp",
    "summarize",
]

"""What this machine is, and which formats it computes fast. Nothing is probed at import."""

from narrowcast.machine._environment import (
    UNREADABLE,
    Choice,
    arithmetic_settings,
    check_device,
    first_line,
    known_device_types,
    read_each,
    require_torch,
    versions,
)
from narrowcast.machine._examination import best_format, examine, measure_auto, slow_formats
from narrowcast.machine._facts import memory_bytes
from narrowcast.machine._rates import Budget

__all__ = [
    "UNREADABLE",
    "Budget",
    "Choice",
    "arithmetic_settings",
    "best_format",
    "check_device",
    "examine",
    "first_line",
    "known_device_types",
    "measure_auto",
    "memory_bytes",
    "read_each",
    "require_torch",
    "slow_formats",
    "versions",
]

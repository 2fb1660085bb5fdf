"""What this machine is, and which formats it computes fast. Nothing is probed at import."""

from narrowcast.machine._auto import best_format, measure_auto
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
from narrowcast.machine._examination import examine
from narrowcast.machine._facts import cpu_share_in_use, memory_bytes
from narrowcast.machine._rates import Budget
from narrowcast.machine._slow_formats import slow_formats

__all__ = [
    "UNREADABLE",
    "Budget",
    "Choice",
    "arithmetic_settings",
    "best_format",
    "check_device",
    "cpu_share_in_use",
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

"""What this machine is, and which formats it computes fast. Nothing is probed at import."""

from narrowcast.machine._environment import (
    Choice,
    arithmetic_settings,
    best_format,
    check_device,
    is_native,
    known_device_types,
    require_torch,
    slow_format_warning,
    versions,
)
from narrowcast.machine._examination import examine
from narrowcast.machine._rates import Budget

__all__ = [
    "Budget",
    "Choice",
    "arithmetic_settings",
    "best_format",
    "check_device",
    "examine",
    "is_native",
    "known_device_types",
    "require_torch",
    "slow_format_warning",
    "versions",
]

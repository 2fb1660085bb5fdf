"""What this machine is, and which formats it computes fast. Nothing is probed at import."""

from narrowcast.machine._choice import Choice, best_format, is_native, slow_format_warning
from narrowcast.machine._environment import (
    arithmetic_settings,
    check_device,
    known_device_types,
    require_torch,
    versions,
)
from narrowcast.machine._examination import Examination, examine
from narrowcast.machine._facts import gather_facts
from narrowcast.machine._mismatches import mismatches
from narrowcast.machine._rates import Budget

__all__ = [
    "Budget",
    "Choice",
    "Examination",
    "arithmetic_settings",
    "best_format",
    "check_device",
    "examine",
    "gather_facts",
    "is_native",
    "known_device_types",
    "mismatches",
    "require_torch",
    "slow_format_warning",
    "versions",
]

"""What this machine is, and which formats it computes fast. Nothing is probed at import."""

from narrowcast.machine._devices import check_device, known_device_types
from narrowcast.machine._instructions import Choice, best_format, is_native, slow_format_warning
from narrowcast.machine._settings import arithmetic_settings
from narrowcast.machine._versions import require_torch, versions

__all__ = [
    "Choice",
    "arithmetic_settings",
    "best_format",
    "check_device",
    "is_native",
    "known_device_types",
    "require_torch",
    "slow_format_warning",
    "versions",
]

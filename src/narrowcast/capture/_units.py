"""Sizes in bytes, as text for messages and pages."""

from __future__ import annotations

_LARGER_UNITS = ("KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """Format a number of bytes: ``7 B``, ``1.2 MiB``, ``32 MiB``."""
    value, unit = float(count), "B"
    for larger in _LARGER_UNITS:
        # As it is printed: 1023.5 KiB would be printed as 1024 KiB, so it is 1.0 MiB.
        if value < 1023.5:
            break
        value, unit = value / 1024, larger
    # Likewise: 9.95 would be printed as 10.0.
    if unit != "B" and value < 9.95:
        return f"{value:.1f} {unit}"
    return f"{value:.0f} {unit}"

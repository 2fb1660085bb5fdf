"""Sizes as text, for people."""

from __future__ import annotations

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def bytes_text(count: float) -> str:
    """Format bytes in two digits or more: ``1.2 MiB``."""
    for factor, unit in _UNITS:
        if count >= factor:
            value = count / factor
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"

"""Mistakes in hand-written mixed precision, found with their lines and mended where that is sure."""

from __future__ import annotations

from narrowcast.migrate._changes import Changes
from narrowcast.migrate._settings import Settings
from narrowcast.migrate._source import Source


def mistakes(source: Source, settings: Settings) -> Changes:
    """What is wrong in ``source``, which says ``torch.amp`` or narrowcast."""
    return Changes()

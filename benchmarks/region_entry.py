"""Entering and leaving a region: nc.autocast against torch.autocast."""

from collections.abc import Iterator

import torch

from interleaved import interleaved
from narrowcast.casting import autocast

ENTRIES = 5000


def region_entry(device: str) -> Iterator[dict[str, object]]:
    """nc.autocast over torch.autocast, an empty region made and entered each time."""

    def theirs() -> None:
        for _ in range(ENTRIES):
            with torch.autocast(device, torch.bfloat16):
                pass

    def ours() -> None:
        for _ in range(ENTRIES):
            with autocast(device, torch.bfloat16):
                pass

    a, b, ratio = interleaved(theirs, ours, rounds=15)
    yield {
        "case": "an empty region",
        "a": f"torch {a / ENTRIES * 1e6:.2f} us",
        "b": f"narrowcast {b / ENTRIES * 1e6:.2f} us",
        "ratio": ratio,
        "limit": None,
    }

"""How long work takes on a device, read without waiting for it where it is done."""

from __future__ import annotations

import time
from typing import Any

import torch


def stamp(device_type: str) -> Any:
    """Now; on CUDA an event of the current stream, which tells later when its work had come so far."""
    if device_type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(earlier: Any, later: Any) -> float:
    """Seconds between two stamps of one device; waits until a GPU's work has come to ``later``."""
    if isinstance(earlier, float):
        return float(later) - earlier
    later.synchronize()
    return float(earlier.elapsed_time(later)) / 1e3

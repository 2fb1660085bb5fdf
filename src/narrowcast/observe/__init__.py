"""See what a training step does: its numbers stage by stage, exponents, time, memory, and captures of runs.

``trace_step`` records weights and gradients of one step, ``ExponentHistogram`` shows what a cast would lose,
``profile`` measures a block, and ``read_capture`` and ``read_comparison`` read what ``narrowcast run`` and
``narrowcast compare`` left. Reading a capture does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from narrowcast.capture import Capture, ComparisonCapture, read_capture, read_comparison

if TYPE_CHECKING:
    from narrowcast.observe._exponent_histogram import CastCounts, ExponentHistogram
    from narrowcast.observe._step_trace import StepTrace, trace_step
    from narrowcast.observe.profiling import Profile, profile

__all__ = [
    "Capture",
    "CastCounts",
    "ComparisonCapture",
    "ExponentHistogram",
    "Profile",
    "StepTrace",
    "profile",
    "read_capture",
    "read_comparison",
    "trace_step",
]

_WITH_TORCH = {
    "CastCounts": "_exponent_histogram",
    "ExponentHistogram": "_exponent_histogram",
    "Profile": "profiling",
    "StepTrace": "_step_trace",
    "profile": "profiling",
    "trace_step": "_step_trace",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)

"""Private names of torch that this room uses; a test fails when one moves."""

from __future__ import annotations

from torch._C._autograd import _profiler_enabled


def profiler_is_on() -> bool:
    """Whether a profiler records what this thread does."""
    return bool(_profiler_enabled())

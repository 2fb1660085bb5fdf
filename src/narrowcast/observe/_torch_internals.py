"""Private names of torch that this package uses; a test fails when one changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._C._autograd import _profiler_enabled

NO_GRAPH_TASK = -1
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that this thread is in, or ``NO_GRAPH_TASK``; torch has no public name for it."""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/engine.cpp

at_the_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Inside a backward pass: call this when it has ended, and after what was asked for earlier."""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_engine.cpp


_LOG_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def without_markers_on_stderr() -> Iterator[None]:
    """Around the start of a profiler: torch 2.13's writes two lines to stderr each time it runs, else.

    The library below it reads the environment as it first starts; 6 is above each of its levels. A level of
    the user's own is left to them.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "6"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


def profiler_is_on() -> bool:
    """Whether a profiler records what this thread does."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp
    return bool(_profiler_enabled())

"""Private names of torch that this package uses. If one changes, the tests of the code that uses it fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

NO_GRAPH_TASK = -1
# No public name distinguishes a backward pass from the forward:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/engine.cpp
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that this thread is in, or ``NO_GRAPH_TASK``."""

# DistributedDataParallel and FSDP use it as well:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_engine.cpp
at_the_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Inside a backward pass: call a function when the pass has ended, after those that were queued earlier."""

_LOG_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def without_markers_on_stderr() -> Iterator[None]:
    """Keep the profiler of torch 2.13 from writing two lines to stderr each time that it starts.

    Kineto (libkineto/src/init.cpp) reads its log level from the environment when it first starts; 6 is above
    each of its levels. A level that the user has set stays.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "6"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp
profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler records this thread."""

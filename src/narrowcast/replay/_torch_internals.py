"""Private names of torch that this package uses; ``tests/replay`` fails when one moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NO_GRAPH_TASK = -1

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that this thread works for; NO_GRAPH_TASK outside of one."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the node of the graph whose backward runs in this thread; None outside of one."""

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_anomaly_mode.h
TRACEBACK = "traceback_"
"""Key in the metadata of a node under which anomaly mode keeps the stack that made the node, as lines."""


def sequence_number(node: Any) -> int:
    """Return the number of a node; each thread numbers the nodes that it makes, in their order."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/function.h
    return int(node._sequence_nr())


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set how often a tensor counts as written to.

    Autograd compares this number with the one at which it saved the tensor: if they differ, backward raises.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

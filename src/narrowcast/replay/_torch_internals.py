"""Private names of torch that this package uses; ``tests/replay`` fails when one moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NO_GRAPH_TASK = -1

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that this thread works for; NO_GRAPH_TASK outside of one."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of the graph whose backward runs in this thread; None outside of one."""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp


def sequence_number(node: Any) -> int:
    """Return the number of a node of a graph, in the order in which its thread made them."""
    return int(node._sequence_nr())


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/function.h

TRACEBACK = "traceback_"
"""Where, in the metadata of a node, anomaly mode keeps the lines of the stack on which it was made."""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_anomaly_mode.h


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set how often a tensor counts as written to: a backward pass asks whether what it saved was."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp

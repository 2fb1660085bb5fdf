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

TRACEBACK = "traceback_"
"""Where, in the metadata of a node, anomaly mode keeps the lines of the stack on which it was made."""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_anomaly_mode.h

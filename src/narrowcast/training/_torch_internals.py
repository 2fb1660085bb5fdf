"""Private names of torch that this package uses; tests/training has a test for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.gradients import leaf_of

_SOONEST = 2**64 - 1
"""The sequence number of leaves. Of the nodes that are ready, autograd runs the one with the largest."""
_CAST = "ToCopyBackward0"
"""The name of autograd's node for a cast."""


def run_casts_of_leaves_soon(nodes: Iterable[Any]) -> None:
    """Let the backward of each cast of a leaf among ``nodes`` run as soon as its gradient is ready.

    Autograd has no public way to give a node priority. It compares sequence numbers in
    ``CompareNodeTaskTime``:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/engine.cpp
    """
    for node in nodes:
        if node.name() == _CAST and len(node.next_functions) == 1:
            below, _ = node.next_functions[0]
            if below is not None and leaf_of(below) is not None and hasattr(node, "_set_sequence_nr"):
                node._set_sequence_nr(_SOONEST)


def buffers_of(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the modules' own buffers. Called at each step: ``module.buffers()`` takes ten times as long."""
    return [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]


def metadata_classes() -> list[Any]:
    """Return the classes that the metadata of ``torch.distributed.checkpoint`` consists of.

    A checkpoint's metadata is unpickled with these classes only. torch's own
    ``FileSystemReader.read_metadata`` allows any class, so that a file could run code:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/filesystem.py
    """
    from torch.distributed.checkpoint import filesystem, metadata

    classes = []
    for value in vars(metadata).values():
        if getattr(value, "__module__", "") == metadata.__name__:
            classes.append(value)
    return [*classes, filesystem._StorageInfo]

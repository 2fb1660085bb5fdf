"""Private names of torch that this package uses; tests/training has a test for each."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import IO, Any

import torch

from narrowcast.gradients import leaf_of

_SOONEST = 2**64 - 1
"""Of the nodes that are ready, autograd runs the one with the largest number; leaves have this number."""
_CAST = "ToCopyBackward0"


def run_casts_of_leaves_soon(nodes: Iterable[Any]) -> None:
    """Let the backward of each cast of a leaf among ``nodes`` run as soon as its gradient is ready.

    Autograd has no public priority of nodes (``CompareNodeTaskTime``):
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/engine.cpp
    """
    for node in nodes:
        if node.name() == _CAST and len(node.next_functions) == 1:
            below, _ = node.next_functions[0]
            if below is not None and leaf_of(below) is not None and hasattr(node, "_set_sequence_nr"):
                node._set_sequence_nr(_SOONEST)


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/metadata.py
_METADATA_NAMES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype) or (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would run {module}.{name} when it is read")


def read_metadata_of_tensors(file: IO[bytes]) -> Any:
    """Read the metadata that ``torch.distributed.checkpoint`` pickles, without running other code.

    torch's ``FileSystemReader.read_metadata`` unpickles without restrictions:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/filesystem.py

    Raises:
        pickle.UnpicklingError: it names anything else.
    """
    return _MetadataUnpickler(file).load()

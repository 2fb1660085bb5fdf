"""The names of torch without a promise of stability that this room uses; tests/training checks each one."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import IO, Any

import torch

from narrowcast.gradients import leaf_of

_SOONEST = 2**64 - 1
"""The engine runs the node with the largest number of those that are ready; leaves have this one."""
_CAST = "ToCopyBackward0"


def run_casts_of_leaves_soon(nodes: Iterable[Any]) -> None:
    """Let each cast of a leaf among graph nodes go backward as soon as its gradient is there.

    Where the node cannot be told (torch before ``_set_sequence_nr``) nothing changes but the order.
    """
    for node in nodes:
        if node.name() == _CAST and len(node.next_functions) == 1:
            below, _ = node.next_functions[0]
            if below is not None and leaf_of(below) is not None and hasattr(node, "_set_sequence_nr"):
                node._set_sequence_nr(_SOONEST)


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
    """What ``torch.distributed.checkpoint`` pickles of its tensors, and nothing that runs other code.

    Raises:
        pickle.UnpicklingError: something else is in it.

    Source: https://docs.python.org/3/library/pickle.html#restricting-globals
    """
    return _MetadataUnpickler(file).load()

"""Private names of torch that this package uses; tests/machine has a test for them."""

from __future__ import annotations

from typing import Any

import torch

# Functions of torch.cpu, by the names that ``torch.cpu.get_capabilities`` uses.
_PROBES = {
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx_bf16": "_is_amx_tile_supported",
    "amx_fp16": "_is_amx_fp16_supported",
}


def capabilities_before_2_12() -> dict[str, bool]:
    """Return part of what ``torch.cpu.get_capabilities`` returns; torch 2.11 does not have that function.

    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/cpu/__init__.py
    """
    return {name: bool(getattr(torch.cpu, probe)()) for name, probe in _PROBES.items()}


def default_store() -> Any:
    """Return the key-value store that every rank of the default process group sees.

    There is no public way to it: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/distributed_c10d.py
    """
    return torch.distributed.distributed_c10d._get_default_store()

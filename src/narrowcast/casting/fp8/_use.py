"""What fp8 layers and their conversion share, without torchao."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Fp8Use:
    """Shared by the layers that one ``apply_fp8`` converted, and by their copies.

    Attributes:
        removed: the layers compute as ``torch.nn.Linear`` again.
    """

    removed: bool = False

    def __deepcopy__(self, _memo: object) -> Fp8Use:
        return self


def has_fp8(device: torch.device) -> bool:
    """Return whether ``device`` has instructions for the fp8 formats that CPUs emulate: CUDA 8.9 and newer.

    GPUs of AMD do not count: MI300 has the fnuz formats, whose largest number and NaN differ
    (``torchao.float8.config``).
    Source: the requirements of ``torch._scaled_mm``, aten/src/ATen/native/cuda/ScaledBlas.cpp.
    """
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)

"""Copies of small tensors from one device to another."""

from __future__ import annotations

import torch


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``, without a host sync if that is an accelerator.

    A copy to an accelerator need not wait, because the accelerator's queue keeps copies and kernels in order.
    A copy to the CPU waits: otherwise the host could read the copy before it is written.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")

"""Copies of small tensors from one device to another."""

from __future__ import annotations

import torch


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``: without a host sync on an accelerator, whose queue keeps the order.

    A CPU has no such queue. It would read the copy before the accelerator has written it, so it waits.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")

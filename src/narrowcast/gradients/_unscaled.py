"""Gradients of one optimizer made true in place, for those who keep a loss scale of their own."""

from __future__ import annotations

import torch

from narrowcast.gradients import _look
from narrowcast.gradients._held import held_gradients


def unscale_by(optimizer: torch.optim.Optimizer, scale: float) -> torch.Tensor:
    """Divide every gradient of ``optimizer`` by ``scale``, in place, and find whether all are finite.

    Gradients of any format and device, dense or sparse, fp16 too, whose small values are flushed as they
    are divided; DTensors, of which every rank gets the same answer. With a scale of 1 nothing is written.
    The division is a product with the float32 nearest to ``1 / scale``, as torch's: exact for powers of two.

    Args:
        optimizer: its ``param_groups`` say which gradients.
        scale: a positive, finite float32.

    Returns:
        0-dim, float32, on the device of the first gradient, or the CPU where there is none; above 0 where a
        gradient was NaN or infinite, or became infinite. Waits for nothing on a GPU.
    """
    held = held_gradients(optimizer, allow_fp16=True)
    device = held.values[0].device if held.values else torch.device("cpu")
    factor = torch.full((), scale, dtype=torch.float32, device=device)
    scaling = _look.Scaling(factor, scale < 1.0, process_group=None, sharded=False)
    look = _look.measure if scale == 1.0 else _look.unscale
    return look(held, scaling).found_inf

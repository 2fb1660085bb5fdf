"""Weights moved to a neighbouring number: what that changes in a gradient is FP32's own rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SEED = 0


def perturb_last_bit(weights: Sequence[torch.Tensor]) -> None:
    """Move each finite, nonzero value to the next one above or below it, at random, in place.

    The draws come from a generator of their own, so that nobody else's numbers change. Integers stay.

    Args:
        weights: detached tensors of any shape and device; one that is there twice is moved once.
    """
    generator = torch.Generator().manual_seed(_SEED)
    for weight in {id(w): w for w in weights}.values():
        if not weight.is_floating_point():
            continue
        up = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.bool).to(weight.device)
        far = torch.full_like(weight, torch.inf)
        moved = torch.nextafter(weight, torch.where(up, far, -far))
        weight.copy_(torch.where(torch.isfinite(weight) & (weight != 0), moved, weight))

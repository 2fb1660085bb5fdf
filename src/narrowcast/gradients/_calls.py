"""The call of an optimizer's own step."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.gradients import _torch_internals
from narrowcast.gradients._look import Look


def call_step(
    optimizer: torch.optim.Optimizer,
    look: Look,
    found: torch.Tensor,
    skipped: bool | None,
    args: Any,
    kwargs: Any,
) -> Any:
    """The optimizer's own step; one that skips and divides by itself is told by what."""
    theirs: Any = optimizer
    users = getattr(optimizer, "grad_scale", None)
    tells = look.divisor is not None or users is not None or skipped is None
    tells |= not _torch_internals.is_torchs_own(optimizer)
    if not (tells and _torch_internals.takes_grad_scale(optimizer)):
        return optimizer.step(*args, **kwargs)
    if look.divisor is None:
        theirs.grad_scale = users
    else:
        theirs.grad_scale = look.divisor if users is None else look.divisor * users
    theirs.found_inf = found
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del theirs.grad_scale, theirs.found_inf

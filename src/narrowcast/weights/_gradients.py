"""Move gradients between low parameters and the float32 ones that an optimizer has in their place.

The latter are the *working* parameters (``Pair``). Scalers are kept from stepping before the move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.gradients import ASKED_BY_SCALERS
from narrowcast.weights._torch_internals import add_all, is_dtensor, is_held_elsewhere, local
from narrowcast.weights._update_methods import Pair


def require_dense(pairs: Sequence[Pair]) -> None:
    for pair in pairs:
        gradient = pair.low.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise UnsupportedError(
                f"the gradient of a held parameter of shape {tuple(pair.low.shape)} is {gradient.layout}, "
                "and held weights take dense gradients only: build its nn.Embedding with sparse=False, or "
                "leave this parameter in float32"
            )


def take(pairs: Sequence[Pair], *, restores: bool, reuses_memory: bool) -> None:
    """Add each low gradient to the working gradient, in float32, and remove it from the low parameter.

    With ``restores`` the low gradient is noted, so that ``restore_low`` can put it back after the step, as
    torch leaves gradients there too. With ``reuses_memory`` float32 gradients on the CPU keep their memory
    from step to step.
    """
    require_dense(pairs)
    working_gradients = []
    low_gradients = []
    for pair in pairs:
        gradient = pair.low.grad
        if gradient is None:
            # With ``restores`` keep what is noted: an earlier step took it and raised before ``restore_low``.
            # So it is put back at the end of this step.
            if not restores:
                pair.low_grad = None
            continue
        if pair.working.grad is None:
            pair.working.grad = _in_float32(gradient.detach(), pair, reuses_memory=reuses_memory)
            pair.low_grad = gradient if restores else None
        else:
            # A sum of several gradients is not put back: the low parameter has had only the last one.
            working_gradients.append(local(pair.working.grad))
            low_gradients.append(local(gradient.detach()))
            pair.low_grad = None
        pair.low.grad = None
    add_all(working_gradients, low_gradients)


def _in_float32(gradient: torch.Tensor, pair: Pair, *, reuses_memory: bool) -> torch.Tensor:
    """Return a float32 copy, in the memory of the last step's if nothing else uses that.

    Allocating large memory on a CPU takes ten times as long as filling it.
    """
    fits_memory = gradient.device.type == "cpu" and gradient.is_contiguous() and not is_dtensor(gradient)
    if not (reuses_memory and fits_memory):
        return gradient.to(torch.float32, copy=True)

    memory = pair.gradient_memory
    if memory is None or is_held_elsewhere(memory):
        copy = gradient.to(torch.float32, copy=True)
        pair.gradient_memory = copy.untyped_storage()
        return copy
    copy = torch.empty(0, dtype=torch.float32, device="cpu")
    return copy.set_(memory, 0, gradient.shape, gradient.stride()).copy_(gradient)


def restore_low(pairs: Sequence[Pair]) -> None:
    """Put back on each low parameter the gradient that the step took from it, and drop its float32 copy."""
    for pair in pairs:
        if pair.low_grad is not None:
            pair.working.grad = None
            if pair.low.grad is None:
                pair.low.grad = pair.low_grad
            pair.low_grad = None


def clear(pairs: Sequence[Pair], *, set_to_none: bool) -> None:
    """Zero or drop the low gradients, as ``Optimizer.zero_grad`` does."""
    for pair in pairs:
        pair.low_grad = None
        gradient = pair.low.grad
        if gradient is None:
            continue
        if set_to_none:
            pair.low.grad = None
        elif gradient.grad_fn is not None:
            gradient.detach_().zero_()
        else:
            gradient.requires_grad_(False).zero_()


def move_back(pairs: Sequence[Pair]) -> None:
    """Put every gradient back on its low parameter, rounded to nearest."""
    restore_low(pairs)
    for pair in pairs:
        pair.gradient_memory = None
        if pair.working.grad is None:
            continue
        gradient = pair.working.grad.to(pair.low.dtype)
        pair.working.grad = None
        if pair.low.grad is not None:
            gradient = pair.low.grad + gradient
        pair.low.grad = gradient


class ScalerGuard:
    """The value of ``ASKED_BY_SCALERS`` on a held optimizer: the attribute that a scaler's step reads first.

    Its truth is that of the optimizer's own value; asking raises while low parameters hold gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pairs: Sequence[Pair]) -> None:
        self._name = type(optimizer).__name__
        self._own_value = getattr(optimizer, ASKED_BY_SCALERS, False)
        self._pairs = pairs

    def __bool__(self) -> bool:
        if any(pair.low.grad is not None for pair in self._pairs):
            raise OrderError(
                f"low parameters of this {self._name} still hold gradients, which a GradScaler would neither "
                "unscale nor check: after backward, before unscale_ and step, call take_gradients() of what "
                "narrowcast.weights.hold returned"
            )
        return bool(self._own_value)

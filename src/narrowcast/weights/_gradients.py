"""Gradients on their way from low parameters to the float32 parameters of the optimizer, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowcast.errors import UnsupportedError
from narrowcast.weights._keepers import Pair
from narrowcast.weights._torch_internals import add_all, is_dtensor, is_held_elsewhere, local


def require_dense(pairs: Sequence[Pair]) -> None:
    for pair in pairs:
        gradient = pair.low.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise UnsupportedError(
                f"the gradient of a held parameter of shape {tuple(pair.low.shape)} is {gradient.layout}, "
                "and held weights take dense gradients only: build its nn.Embedding with sparse=False, or "
                "leave this parameter in float32"
            )


def take(pairs: Sequence[Pair], *, lend: bool, reuse: bool = False) -> None:
    """Add each low gradient to the working one, in float32, and take it away from the low parameter.

    With ``lend`` a low gradient that is all there is will be given back after the step, so that a script
    finds it where torch leaves it. With ``reuse`` memory on the CPU serves one step after the other.
    """
    require_dense(pairs)
    sums, terms = [], []
    for pair in pairs:
        gradient = pair.low.grad
        if gradient is None:
            if not lend:
                pair.lent = None
            continue
        if pair.working.grad is None:
            pair.working.grad = _widened(gradient.detach(), pair, reuse=reuse)
            pair.lent = gradient if lend else None
        else:
            sums.append(local(pair.working.grad))
            terms.append(local(gradient.detach()))
            pair.lent = None
        pair.low.grad = None
    add_all(sums, terms)


def _widened(gradient: torch.Tensor, pair: Pair, *, reuse: bool) -> torch.Tensor:
    """A float32 copy; with ``reuse`` in the memory of the one before, where nobody holds that any more."""
    if not reuse or gradient.device.type != "cpu" or is_dtensor(gradient) or not gradient.is_contiguous():
        return gradient.to(torch.float32, copy=True)
    memory = pair.memory
    # What was shared another process may still read.
    if memory is None or memory.is_shared() or is_held_elsewhere(memory):
        wide = gradient.to(torch.float32, copy=True)
        pair.memory = wide.untyped_storage()
        return wide
    wide = torch.empty(0, dtype=torch.float32, device="cpu")
    return wide.set_(memory, 0, gradient.shape, gradient.stride()).copy_(gradient)


def give_back(pairs: Sequence[Pair]) -> None:
    """Undo ``take`` where the gradient was lent."""
    for pair in pairs:
        if pair.lent is not None:
            pair.working.grad = None
            if pair.low.grad is None:
                pair.low.grad = pair.lent
            pair.lent = None


def spend(pairs: Sequence[Pair]) -> None:
    """After a step: what was lent goes back, what was taken is used up."""
    give_back(pairs)
    for pair in pairs:
        pair.working.grad = None


def clear(pairs: Sequence[Pair], *, set_to_none: bool) -> None:
    """Forget the low gradients, as ``Optimizer.zero_grad`` does."""
    for pair in pairs:
        pair.lent = None
        gradient = pair.low.grad
        if gradient is None:
            continue
        if set_to_none:
            pair.low.grad = None
        elif gradient.grad_fn is not None:
            gradient.detach_().zero_()
        else:
            gradient.requires_grad_(False).zero_()


def untake(pairs: Sequence[Pair]) -> None:
    """Put every gradient back on its low parameter for good, rounded to nearest where it was taken."""
    give_back(pairs)
    for pair in pairs:
        pair.memory = None
        if pair.working.grad is not None:
            low_gradient = pair.working.grad.to(pair.low.dtype)
            pair.low.grad = low_gradient if pair.low.grad is None else pair.low.grad + low_gradient
            pair.working.grad = None

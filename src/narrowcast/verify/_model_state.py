"""State of a model and of random generators, saved and restored bit for bit."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from narrowcast.training import random_states, set_random_states


def put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write ``value`` if it differs, hidden from autograd, since a backward may still need the numbers.

    torch refuses to write to a tensor made by ``expand``, which no op in place can have changed either.
    """
    if not torch.equal(tensor.detach(), value):
        tensor.data.copy_(value)


def random_state() -> str:
    """Return a hash of the states of torch's, Python's and NumPy's global generators."""
    states = random_states()
    digest = hashlib.blake2b(repr((states["python"], states["numpy"])).encode(), digest_size=16)
    for state in (states["torch"], *states["devices"].values()):
        digest.update(bytes_of(state))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor in CPU memory, without NumPy, which torch runs without."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


@contextmanager
def as_before(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Restore gradients, buffers, modes and all random states after the block, however it ends.

    Yields a function that restores buffers and random states, for another pass from the same start: a forward
    may write to a buffer or replace it.
    """
    random = random_states()
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]

    def restore() -> None:
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                put_back(buffer, value)
        set_random_states(random)

    try:
        for parameter, _, _ in parameters:
            parameter.grad = None
        yield restore
    finally:
        for parameter, needs, gradient in parameters:
            parameter.requires_grad_(needs)
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        restore()

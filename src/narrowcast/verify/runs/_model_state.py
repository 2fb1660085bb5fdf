"""State of a model and of random generators, saved and restored bit for bit."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.attach import is_functorch_wrapped
from narrowcast.casting import tensors_inside
from narrowcast.errors import UnsupportedError
from narrowcast.training import random_states, set_random_states

# By bytes of an element: an integer of that size.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write ``value`` to ``tensor`` if a bit differs.

    Autograd does not see it: a backward pass that has saved the tensor would raise otherwise.
    """
    if tensor.layout != torch.strided or not _have_same_bits(tensor.detach(), value):
        tensor.data.copy_(value)


def _have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two strided tensors are equal to the bit; ``torch.equal`` takes -0.0 for 0.0."""
    if first.dtype != second.dtype or first.is_quantized:
        return False
    if first.is_complex():
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    integer = _INTEGER[first.element_size()]
    return torch.equal(first.resolve_neg().view(integer), second.resolve_neg().view(integer))


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without the repeats of ``expand``: a view that torch can write to."""
    if tensor.layout == torch.strided:
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dimension] > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def samples_in(batch: Any) -> int | None:
    """Return the size of dimension 0 if all tensors of a batch have the same one; else None.

    Tensors without dimensions are left out.
    """
    sizes = {tensor.shape[0] for tensor in tensors_inside(batch) if tensor.ndim}
    if len(sizes) != 1:
        return None
    return sizes.pop()


def random_fingerprint() -> str:
    """Return a hash of the states of torch's, Python's and NumPy's global generators."""
    states = random_states()
    digest = hashlib.blake2b(repr((states["python"], states["numpy"])).encode(), digest_size=16)
    for state in (states["torch"], *states["devices"].values()):
        digest.update(bytes_of(state))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor in CPU memory, without NumPy, which torch runs without."""
    if tensor.nbytes and not tensor.data_ptr():  # ctypes would return other memory's bytes
        raise UnsupportedError(f"expected a tensor with memory of its own, got a {type(tensor).__name__}")
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def fingerprint(value: Any, *, floating: bool = True) -> str:
    """Return a hash of the bits of every strided tensor in ``value``, with shapes and dtypes.

    Only shapes and dtypes are hashed of sparse and meta tensors, and inside ``torch.func``, where no bits can
    be read. Without ``floating`` only the shapes of floating tensors are hashed.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors_inside(value):
        if tensor.is_floating_point() and not floating:
            digest.update(f"{tuple(tensor.shape)}".encode())
            continue
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        # Conjugates and negations are flags until they are resolved, and strides are no part of the numbers.
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            if not is_functorch_wrapped(plain):
                digest.update(bytes_of(plain))
    return digest.hexdigest()


def some_values(value: Any, most: int = 256) -> list[list[float]]:
    """Return values of each floating tensor in ``value``, evenly spaced, at most ``most`` of each."""
    values: list[list[float]] = []
    for tensor in tensors_inside(value):
        if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.is_meta:
            continue
        plain = tensor.detach()
        if is_functorch_wrapped(plain):
            continue
        # Evenly spaced to the end, since the first elements may all be padding.
        spacing = max(1, math.ceil(plain.numel() / most))
        # To the CPU first, since not every device has float64.
        values.append(plain.flatten()[::spacing].cpu().double().tolist())
    return values


@contextmanager
def as_before(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Restore gradients, ``requires_grad``, buffers, modes and all random states, however the block ends.

    Yields a function that restores buffers and random states, for another pass from the same start: a forward
    may write to a buffer or replace it.
    """
    random = random_states()
    # From each module's own table, as a forward may replace a buffer by another tensor.
    buffers = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            value = None if buffer is None else each_once(buffer.data).clone()
            buffers.append((module, name, buffer, value))
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]

    def restore() -> None:
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                each_once(buffer.data).copy_(value)
        set_random_states(random)

    # The parameters have no gradients during the block, so that nothing is added to those of the user.
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

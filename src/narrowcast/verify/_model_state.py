"""State of a model and of random generators, saved and restored bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.training import random_states, set_random_states

_NARROW = (torch.bfloat16, torch.float16)


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without the repeats of ``expand``: a view that torch can write to."""
    if tensor.layout == torch.strided:
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dimension] > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor


class StartOfPass:
    """The buffers of a model and all random states: a forward may write to a buffer or replace it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._random_states = random_states()
        self._kept = [
            (module, name, buffer, None if buffer is None else each_once(buffer.data).clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for module, name, buffer, value in self._kept:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                each_once(buffer.data).copy_(value)
        set_random_states(self._random_states)


def differing_library(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the library whose random state differs between two results of ``random_states``, if any."""
    tensors = [[states["torch"], *states["devices"].values()] for states in (before, after)]
    if not all(torch.equal(a, b) for a, b in zip(*tensors, strict=False)):
        return "torch"
    return next((name for name in ("python", "numpy") if before[name] != after[name]), None)


@contextmanager
def as_before(model: torch.nn.Module) -> Iterator[StartOfPass]:
    """Restore gradients, buffers, modes and all random states after the block, however it ends."""
    start = StartOfPass(model)
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _, _ in parameters:
            parameter.grad = None
        yield start
    finally:
        for parameter, needs, gradient in parameters:
            parameter.requires_grad_(needs)
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        start.restore()


@contextmanager
def last_bit_moved(model: torch.nn.Module) -> Iterator[None]:
    """Change each weight that is not zero to the next number, up or down at random, within the block.

    In fp32 that is a relative change of 2**-24 to 2**-23. No random state of the process changes.
    """
    kept = [(place, place.clone()) for place in (each_once(p.data) for p in model.parameters())]
    generator = torch.Generator().manual_seed(0)
    try:
        for place, value in kept:
            if value.is_floating_point():
                up = (torch.rand(value.shape, generator=generator) < 0.5).to(value.device)
                infinity = torch.full_like(value, float("inf"))
                moved = torch.nextafter(value, torch.where(up, infinity, -infinity))
                place.copy_(torch.where(value == 0, value, moved))
        yield
    finally:
        for place, value in kept:
            place.copy_(value)


@contextmanager
def widened(model: torch.nn.Module) -> Iterator[None]:
    """Hold bf16 and fp16 parameters and buffers in fp32 within the block."""
    parameters = [(p, p.data) for p in model.parameters() if p.dtype in _NARROW]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in _NARROW
    ]
    try:
        for parameter, data in parameters:
            parameter.data = data.float()
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.float()
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer

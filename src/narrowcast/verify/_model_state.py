"""State of a model and of random generators, saved and restored bit for bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NARROW = (torch.bfloat16, torch.float16)


class RandomState:
    """The state of torch's generators on CPU and CUDA, Python's and NumPy's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state(legacy=False)

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def differs_from(self, other: RandomState) -> str | None:
        """Return the name of a library whose state differs; None if none does."""
        pairs = zip([self._torch, *self._cuda], [other._torch, *other._cuda], strict=False)
        if not all(torch.equal(mine, theirs) for mine, theirs in pairs):
            return "torch"
        if self._python != other._python:
            return "Python"
        return None if _plain(self._numpy) == _plain(other._numpy) else "numpy"


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without the repeats of ``expand``: a view that torch can write to."""
    if tensor.layout != torch.strided:
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


class Buffers:
    """The buffers of a model and their values: a forward may write to one or replace it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept = [
            (module, name, buffer, None if buffer is None else _each_once(buffer.data).clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for module, name, buffer, value in self._kept:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                _each_once(buffer.data).copy_(value)


@contextmanager
def as_before(model: torch.nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, modes and all random states after the block, however it ends."""
    buffers, random_state = Buffers(model), RandomState()
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _, _ in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, needs, gradient in parameters:
            parameter.requires_grad_(needs)
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        buffers.restore()
        random_state.restore()


@contextmanager
def last_bit_moved(model: torch.nn.Module) -> Iterator[None]:
    """Change each weight that is not zero to the next number, up or down at random, within the block.

    In fp32 that is a relative change of 2**-24 to 2**-23. No random state of the process changes.
    """
    places = [_each_once(parameter.data) for parameter in model.parameters()]
    kept = [(place, place.clone()) for place in places]
    generators: dict[torch.device, torch.Generator] = {}
    try:
        for place, value in kept:
            if not value.is_floating_point():
                continue
            device = value.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(0)
            up = torch.rand(value.shape, generator=generators[device], device=device) < 0.5
            infinity = torch.full_like(value, float("inf"))
            moved = torch.nextafter(value, torch.where(up, infinity, -infinity))
            place.copy_(torch.where(value == 0, value, moved))
        yield
    finally:
        for place, value in kept:
            place.copy_(value)


def is_held_narrow(model: torch.nn.Module) -> bool:
    """Return whether any parameter is in bf16 or fp16."""
    return any(parameter.dtype in _NARROW for parameter in model.parameters())


@contextmanager
def widened(model: torch.nn.Module) -> Iterator[None]:
    """Hold bf16 and fp16 parameters and buffers in fp32 within the block."""
    parameters = [(p, p.data) for p in model.parameters() if p.dtype in _NARROW]
    entries = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in _NARROW
    ]
    try:
        for parameter, data in parameters:
            parameter.data = data.float()
        for module, name, buffer in entries:
            module._buffers[name] = buffer.float()
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer in entries:
            module._buffers[name] = buffer

"""What a step trace watches: parameters by name, tensors in what a model takes, and whether one changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from narrowcast.errors import UnsupportedError
from narrowcast.weights import held_by


def parameters_by_name(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """The model's parameters, then what optimizers step on instead of them or besides."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    for number, optimizer in enumerate(optimizers):
        held = held_by(optimizer)
        for low, working in [] if held is None else held.parameters:
            if id(working) not in names:
                names[id(working)] = f"{names.get(id(low), 'a parameter')} (master)"
                named[names[id(working)]] = working
        for group, options in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(options["params"]):
                if id(parameter) not in names:
                    which = f"optimizer {number}, " if len(optimizers) > 1 else ""
                    names[id(parameter)] = f"{which}group {group}, parameter {index}"
                    named[names[id(parameter)]] = parameter
    return named


def check_can_be_read(name: str, parameter: torch.Tensor) -> None:
    why = None
    if hasattr(parameter, "full_tensor"):
        why = "is sharded over ranks: trace the model before it is sharded"
    elif torch.nn.parameter.is_lazy(parameter):
        why = "has no shape yet: call the model once first"
    elif parameter.device.type == "meta":
        why = "holds no numbers, being on meta: move the model to a device"
    if why:
        raise UnsupportedError(f"parameter {name} {why}")


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested lists, tuples and mappings, with a name of its place."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, name if len(value) == 1 else f"{name}.{index}")


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return dense(tensor.detach()).clone()


def is_same(gradient: torch.Tensor | None, copy: torch.Tensor | None) -> bool:
    """Whether every number is as in the copy, NaN included."""
    if gradient is None or copy is None:
        return gradient is None and copy is None
    now = dense(gradient.detach())
    same = (now == copy) | ((now != now) & (copy != copy))  # noqa: PLR0124 - only NaN differs from itself
    return now.shape == copy.shape and now.dtype == copy.dtype and bool(same.all())


def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Set an attribute of one object; what is returned puts back what was there."""
    before = vars(owner).get(name)
    setattr(owner, name, method)

    def restore() -> None:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return restore

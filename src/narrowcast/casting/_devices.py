"""The device types of a module's weights, found again after a move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from narrowcast.casting._tree import tensors_inside


class _Moves:
    """Counts how often weights of a module were moved or cast, by ``to``, ``cuda``, ``half`` and the like."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, below: Callable[..., Any]) -> Callable[..., Any]:
        def _apply(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return below(*args, **kwargs)

        return _apply


moves = _Moves()


def device_types(module: torch.nn.Module | None, args: Any, kwargs: Any) -> list[str]:
    """Return the device types of the weights of ``module``, or without any of its inputs.

    Without either, the one on which tensors are made by default.
    """
    found = weight_device_types(module) if module is not None else []
    if not found:
        found = list(dict.fromkeys(one.device.type for one in tensors_inside((args, kwargs))))
    if not found:
        found = [torch.get_default_device().type]
    return [device for device in found if device != "meta"]


def weight_device_types(module: torch.nn.Module) -> list[str]:
    """Return the device types of parameters and buffers of ``module``, each once."""
    return list(dict.fromkeys(weight.device.type for weight in _weights(module)))


def _weights(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        for weight in (*part._parameters.values(), *part._buffers.values()):
            if weight is not None:
                yield weight

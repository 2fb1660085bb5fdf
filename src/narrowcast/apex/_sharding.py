"""Parameters that ``fully_shard`` replaced after ``amp.initialize``, found again in the optimizer's place.

``fully_shard`` puts a DTensor in the place of each parameter. An optimizer that was made before knows nothing
of them, and would go on stepping parameters that nobody uses.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

Replaced = dict[torch.Tensor, torch.Tensor]


class Places:
    """Where in its models each parameter of an optimizer stands."""

    def __init__(self, models: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> None:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._models = [weakref.ref(model) for model in models]
        self._all = [
            (parameter, weakref.ref(module), name)
            for model in models
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in mine
        ]

    def replaced(self) -> Replaced:
        """By parameter the DTensor that stands in its place now; others are left out."""
        found: Replaced = {}
        for parameter, reference, name in self._all:
            module = reference()
            now = None if module is None else module._parameters.get(name)
            if now is not None and now is not parameter and is_sharded(now):
                found[parameter] = now
        return found

    def lost(self, found: Replaced) -> int:
        """How many parameters are in no model any more, and not in ``found``."""
        there = {id(parameter) for parameter in self.parameters()}
        gone = {id(parameter) for parameter, _, _ in self._all if parameter not in found}
        return len(gone - there)

    def parameters(self) -> list[torch.Tensor]:
        """Those of the models, whichever optimizer has them."""
        models = [model for reference in self._models if (model := reference()) is not None]
        return [parameter for model in models for parameter in model.parameters()]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "device_mesh")


def shared_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``value``, whole and the same on every rank, cut as the DTensor ``like`` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

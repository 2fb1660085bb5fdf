"""DDP inside a window: gradients are reduced once a step, with the last micro-batch."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Synchronisation:
    """The DDP modules of a model, and whether the micro-batch that runs now reduces their gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._without = ExitStack()
        self._open = False

    def begin(self, *, reduces: bool) -> None:
        """A micro-batch begins, with its forward pass; DDP decides there what its backward will do."""
        if not reduces and not self._open:
            self._open = True
            for module in self.ddp:
                self._without.enter_context(module.no_sync())
        elif reduces:
            self.end()

    def end(self) -> None:
        """The micro-batch has gone backward."""
        self._open = False
        self._without.close()

    @torch.no_grad()
    def reduce_now(self) -> None:
        """Average gradients that no backward has reduced, as the last micro-batch of a whole window does."""
        for module in self.ddp:
            group = module.process_group
            parameters = [p for p in module.module.parameters() if p.requires_grad]
            if not parameters:
                continue
            has = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device).float()
            dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
            for parameter, someone in zip(parameters, has.tolist(), strict=True):
                if someone:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.div_(dist.get_world_size(group))
                    dist.all_reduce(parameter.grad, group=group)

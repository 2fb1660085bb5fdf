"""DDP inside a window: gradients are reduced once a step, with the last micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_BUCKET_BYTES = 2**25  # what DDP itself reduces at once


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
            ignored = module.parameters_to_ignore
            parameters = [
                parameter
                for name, parameter in module.module.named_parameters()
                if parameter.requires_grad and name not in ignored
            ]
            if parameters:
                _average(parameters, module.process_group)


def _average(parameters: Sequence[torch.nn.Parameter], group: Any) -> None:
    """Ranks may have reached different parameters: what one has, all take part in."""
    kinds = torch.tensor([_kind(parameter.grad) for parameter in parameters], device=parameters[0].device)
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group=group)
    dense: list[torch.Tensor] = []
    for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
        if parameter.grad is None and kind:
            layout = torch.strided if kind == 1 else torch.sparse_coo
            parameter.grad = torch.zeros_like(parameter, layout=layout)
        if kind == 1:
            assert parameter.grad is not None
            dense.append(parameter.grad)
        elif kind == 2:
            assert parameter.grad is not None
            parameter.grad.div_(dist.get_world_size(group))
            dist.all_reduce(parameter.grad, group=group)
    for bucket in _buckets(dense):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        for gradient, mean in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _kind(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else 2 if gradient.is_sparse else 1


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one device and dtype, up to so many bytes; alike on every rank."""
    bucket: list[torch.Tensor] = []
    filled_bytes = 0
    for gradient in gradients:
        first = bucket[0] if bucket else gradient
        if (gradient.device, gradient.dtype) != (first.device, first.dtype) or filled_bytes > _BUCKET_BYTES:
            yield bucket
            bucket, filled_bytes = [], 0
        bucket.append(gradient)
        filled_bytes += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket

"""DDP inside a window: gradients are reduced once a step, with the last micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_BUCKET_BYTES = 2**25  # what DDP itself reduces at once
_NONE, _DENSE = 0, 1


class Synchronisation:
    """The DDP modules of a model, and whether the micro-batch that runs now reduces their gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._without = ExitStack()
        self._open = False
        # In its first backward pass a static graph is learnt, which fails where nothing is reduced. Reducing
        # once more than needed changes nothing: the mean of means over the same ranks is the mean.
        self._learns = any(module.static_graph for module in self.ddp)

    def begin(self, *, reduces: bool) -> None:
        """A micro-batch begins, with its forward pass; DDP decides there what its backward will do."""
        if reduces or self._learns:
            self.end()
        elif not self._open:
            self._open = True
            for module in self.ddp:
                self._without.enter_context(module.no_sync())

    def went_backward(self) -> None:
        """The micro-batch is over."""
        self._learns = False
        self.end()

    def end(self) -> None:
        """What runs from now on reduces."""
        self._open = False
        self._without.close()

    def mean_of_ranks(self, count: float) -> float:
        """A number of each rank, averaged."""
        group = self.ddp[0].process_group
        total = torch.tensor(count, device=next(self.ddp[0].parameters()).device)
        dist.all_reduce(total, group=group)
        return float(total) / dist.get_world_size(group)

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
        if kind == _NONE:
            continue
        if parameter.grad is None:
            parameter.grad = _zeros(parameter, kind)
        if kind == _DENSE:
            dense.append(parameter.grad)
        else:
            parameter.grad.div_(dist.get_world_size(group))
            dist.all_reduce(parameter.grad, group=group)
    for bucket in _buckets(dense):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        for gradient, mean in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _kind(gradient: torch.Tensor | None) -> int:
    """None, dense, or above that by as many dimensions as are sparse."""
    if gradient is None:
        return _NONE
    return _DENSE + (gradient.sparse_dim() if gradient.is_sparse else 0)


def _zeros(parameter: torch.Tensor, kind: int) -> torch.Tensor:
    if kind == _DENSE:
        return torch.zeros_like(parameter)
    sparse = kind - _DENSE
    indices = torch.empty((sparse, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[sparse:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)


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

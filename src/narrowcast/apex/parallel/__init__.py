"""The data parallelism and the synchronized batch norm of apex, as torch's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowcast.errors import SettingError, UnsupportedError

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

_BYTES_OF_FLOAT32 = 4
# So large that the whole model is one bucket, which is reduced when backward has ended.
_ONE_BUCKET_MIB = 2**20
# torch 2.13 renamed broadcast_buffers, and warns of the old name.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """``apex.parallel.DistributedDataParallel``: torch's, on any backend, with the arguments of apex's.

    Parameters and buffers are broadcast from rank 0 at construction, and buffers never again. Wrap after
    ``amp.initialize``. With the defaults, torch divides gradients by the number of ranks before it adds them;
    apex added first. The results are equal if that number is a power of two and nothing overflows or is
    subnormal.

    Args:
        module: the model, on one device.
        message_size: the most float32 elements in a bucket.
        delay_allreduce: reduce everything when backward has ended, and accept parameters without gradients,
            which torch looks for in every graph (it warns once if there was none).
        shared_param: must be None, as in apex.
        allreduce_trigger_params, num_allreduce_streams, prof: have no effect on the result, and none here.
        retain_allreduce_buffers: must be False.
        allreduce_always_fp32: add float16 and bfloat16 gradients in float32.
        allreduce_communicators: must be None.
        gradient_average: divide by the number of ranks; False: leave the sum.
        gradient_predivide_factor: divide by it before the sum, and by the number of ranks over it after.

    Raises:
        SettingError: an option that must be otherwise, or is out of range.

    Source: apex ``parallel/distributed.py``; https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Iterable[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        prof: bool = False,
    ) -> None:
        _refuse_options(shared_param, allreduce_communicators, retain_allreduce_buffers)
        if message_size < 1:
            raise SettingError(f"message_size must be at least 1 element, got {message_size!r}")
        if not 0 < gradient_predivide_factor < math.inf:
            raise SettingError(
                f"gradient_predivide_factor must be above 0 and finite, got {gradient_predivide_factor!r}"
            )
        buffers_apart: Any = {_SYNC_BUFFERS: False}
        super().__init__(
            module,
            **buffers_apart,
            bucket_cap_mb=_ONE_BUCKET_MIB if delay_allreduce else _mib(message_size),
            find_unused_parameters=delay_allreduce,
        )
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            ranks = self.process_group.size()
            divide_after = ranks / gradient_predivide_factor if gradient_average else 1.0
            how = (allreduce_always_fp32, gradient_predivide_factor, divide_after)
            # torch compares the annotations of a hook with its own classes, and ours are strings.
            self.register_comm_hook(how, lambda how, bucket: _reduce(bucket, *how))

    def disable_allreduce(self) -> None:
        """Leave each rank's gradients as they are from the next forward pass on, as inside ``no_sync``."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce the gradients of the next backward pass, with those accumulated before, again."""
        self.require_backward_grad_sync = True


def _refuse_options(shared: Any, communicators: Any, retain_buffers: bool) -> None:
    if shared is not None:
        raise SettingError(
            "shared_param is no option of apex's DistributedDataParallel any more: parameters may be shared; "
            "to send gradients only when backward has ended, use delay_allreduce=True"
        )
    if communicators is not None:
        raise SettingError(
            "allreduce_communicators are apex's own pairs of process groups and streams, which torch's "
            "DistributedDataParallel does not take: leave them out, or use "
            "torch.nn.parallel.DistributedDataParallel(module, process_group=...)"
        )
    if retain_buffers:
        raise SettingError(
            "retain_allreduce_buffers=True returns apex's flat buffers of gradients, which torch does not "
            "have: leave it at False and read the gradients from the parameters"
        )


def _mib(elements: int) -> int:
    return max(1, elements * _BYTES_OF_FLOAT32 // 2**20)


def _reduce(
    bucket: Any, in_float32: bool, divide_before: float, divide_after: float
) -> torch.futures.Future[torch.Tensor]:
    gradients: torch.Tensor = bucket.buffer()
    values = gradients.float() if in_float32 else gradients
    if divide_before != 1.0:
        values = values / divide_before
    work = dist.all_reduce(values, async_op=True)
    assert work is not None

    def divided(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises what went wrong
        return gradients.copy_(values / divide_after if divide_after != 1.0 else values)

    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(divided)
    return reduced


class Reducer:
    """``apex.parallel.Reducer``: averages over the ranks when ``reduce`` is called.

    Args:
        module_or_grads_list: a model, whose parameters are broadcast from rank 0 now and whose gradients
            ``reduce`` averages in place; or a list of tensors to average.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[torch.Tensor]) -> None:
        if isinstance(module_or_grads_list, nn.Module):
            self.module: nn.Module | None = module_or_grads_list
            self.grads: list[torch.Tensor] = []
            for parameter in self.module.parameters():
                dist.broadcast(parameter.detach(), 0)
        else:
            self.module, self.grads = None, list(module_or_grads_list)

    def reduce(self) -> None:
        """Average in place. Every rank must call it, with gradients for the same parameters."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad.detach() for p in self.module.parameters() if p.grad is not None]
        ranks = dist.get_world_size()
        for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
            assert work is not None
            work.wait()
        for grad in grads:
            grad.div_(ranks)


class SyncBatchNorm(nn.SyncBatchNorm):
    """``apex.parallel.SyncBatchNorm``: torch's, with statistics over the batches of all ranks.

    It works on CUDA and similar devices. On a CPU torch's raises in training in a process group.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in ``torch.nn.SyncBatchNorm``.
        process_group: ranks that synchronize; None: all.
        channel_last: must be False: torch's takes channels from the second dimension.
        fuse_relu: must be False: add a ``torch.nn.ReLU``.

    Raises:
        UnsupportedError: ``channel_last`` or ``fuse_relu``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        _check_layout(channel_last)
        if fuse_relu:
            raise UnsupportedError(
                "fuse_relu=True adds a ReLU to apex's SyncBatchNorm, and torch's has none: leave it out "
                "and call torch.nn.ReLU() on the output"
            )
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)


def _check_layout(channel_last: bool) -> None:
    if channel_last:
        raise UnsupportedError(
            "channel_last=True takes the last dimension for the channels, and torch's SyncBatchNorm the "
            "second: leave it out and give tensors of shape (N, C, ...), in "
            "memory_format=torch.channels_last where that is faster"
        )


def convert_syncbn_model(
    module: nn.Module, process_group: Any | None = None, channel_last: bool = False
) -> nn.Module:
    """``apex.parallel.convert_syncbn_model``: use torch's SyncBatchNorm for every batch norm.

    Values, running statistics and the training mode stay. In a process group without a device that can
    synchronize, torch would raise at the first batch; this raises at once.

    Returns:
        ``module`` itself, or its replacement if it is a batch norm.

    Raises:
        UnsupportedError: ``channel_last``; a process group on a machine that has only CPUs.
    """
    _check_layout(channel_last)
    if dist.is_available() and dist.is_initialized() and not torch.accelerator.is_available():
        raise UnsupportedError(
            "torch's SyncBatchNorm synchronizes on CUDA and devices like it, and this machine has none: "
            "leave out convert_syncbn_model here, and each rank normalizes by its own batches"
        )
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    converted: nn.Module = convert(module, process_group)
    return converted


def create_syncbn_process_group(group_size: int) -> Any | None:
    """``apex.parallel.create_syncbn_process_group``: return this rank's group of ``group_size`` ranks.

    Every rank must call it. 0 returns None, which means all ranks.

    Raises:
        SettingError: a size that does not divide the number of ranks.
    """
    if group_size == 0:
        return None
    ranks = dist.get_world_size()
    if group_size < 0 or ranks % group_size:
        raise SettingError(f"group_size must divide the {ranks} ranks, or be 0 for all, got {group_size!r}")
    mine = None
    for first in range(0, ranks, group_size):
        group = dist.new_group(list(range(first, first + group_size)))
        if first <= dist.get_rank() < first + group_size:
            mine = group
    return mine

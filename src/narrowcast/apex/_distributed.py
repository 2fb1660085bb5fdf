"""apex's data parallelism and synchronized batch norm, as torch's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowcast.errors import SettingError, UnsupportedError

_BYTES_OF_FLOAT32 = 4
# So large that the whole model is one bucket, whose turn comes when backward has ended.
_ONE_BUCKET_MIB = 2**20
# torch 2.13 calls broadcast_buffers so, and warns of the name that it had before.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """``apex.parallel.DistributedDataParallel``: torch's, on any backend, told what apex's was told.

    Parameters and buffers are broadcast from rank 0 at construction, and buffers never again. Wrap after
    ``amp.initialize``. With the defaults gradients are divided by the number of ranks before they are added,
    torch's order; apex added first. They come out equal where that number is a power of two and nothing
    overflows or is subnormal.

    Args:
        module: the model, on one device.
        message_size: elements after which a bucket is sent: a bucket here holds at most as many float32.
        delay_allreduce: send everything when backward has ended, and take parameters without gradients,
            which torch looks for in every graph (it warns once where there was none).
        shared_param: must be None, as in apex.
        allreduce_trigger_params, num_allreduce_streams, prof: without effect: they say when and how apex
            sends, not what.
        retain_allreduce_buffers: must be False.
        allreduce_always_fp32: add float16 and bfloat16 gradients in float32.
        allreduce_communicators: must be None.
        gradient_average: divide by the number of ranks; False: leave the sum.
        gradient_predivide_factor: divide by it before the sum, and by so much less behind it.

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
        _check_options(message_size, shared_param, allreduce_communicators, gradient_predivide_factor)
        if retain_allreduce_buffers:
            raise SettingError(
                "retain_allreduce_buffers=True hands out apex's flat buffers of gradients, which torch does "
                "not have: leave it at False and read the gradients from the parameters"
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
            reduction = _Reduction(
                in_float32=allreduce_always_fp32,
                divide_before=gradient_predivide_factor,
                divide_after=ranks / gradient_predivide_factor if gradient_average else 1.0,
            )
            # torch compares the annotations of a hook with its own classes, and these are text.
            self.register_comm_hook(reduction, lambda how, bucket: _reduce(how, bucket))  # noqa: PLW0108

    def disable_allreduce(self) -> None:
        """Keep each rank's own gradients from the next forward pass on, as inside ``no_sync``."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Add what was kept, and the gradients of the next backward pass, over the ranks again."""
        self.require_backward_grad_sync = True


def _check_options(message_size: int, shared: Any, communicators: Any, predivide: float) -> None:
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
    if message_size < 1:
        raise SettingError(f"message_size must be at least 1 element, got {message_size!r}")
    if not 0 < predivide < math.inf:
        raise SettingError(f"gradient_predivide_factor must be above 0 and finite, got {predivide!r}")


def _mib(elements: int) -> int:
    return max(1, elements * _BYTES_OF_FLOAT32 // 2**20)


class _Reduction:
    """How a bucket of gradients is added over the ranks."""

    def __init__(self, *, in_float32: bool, divide_before: float, divide_after: float) -> None:
        self.in_float32, self.divide_before, self.divide_after = in_float32, divide_before, divide_after


def _reduce(how: _Reduction, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    gradients: torch.Tensor = bucket.buffer()
    values = gradients.float() if how.in_float32 else gradients
    if how.divide_before != 1.0:
        values = values / how.divide_before
    work = dist.all_reduce(values, async_op=True)
    assert work is not None

    def divided(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # what went wrong comes out here
        return gradients.copy_(values / how.divide_after if how.divide_after != 1.0 else values)

    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(divided)
    return reduced


class Reducer:
    """``apex.parallel.Reducer``: averages over the ranks when it is told to.

    Args:
        module_or_grads_list: a model, whose parameters are broadcast from rank 0 now and whose gradients
            ``reduce`` averages, in place; or a list of tensors that it averages.
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
        """Average, in place; every rank calls it, with gradients for the same parameters."""
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
    """``apex.parallel.SyncBatchNorm``: torch's, whose statistics are those of all ranks' batches together.

    Ranks synchronize on CUDA and devices like it; on a CPU torch's raises in training once processes are
    grouped.

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
                "fuse_relu=True puts a ReLU behind apex's SyncBatchNorm, and torch's has none: leave it out "
                "and call torch.nn.ReLU() on what comes out"
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
    """``apex.parallel.convert_syncbn_model``: every batch norm in ``module`` as torch's SyncBatchNorm.

    Values, running statistics and the training mode stay. Where processes are grouped and no device can
    synchronize, torch would raise at the first batch; this raises at once.

    Returns:
        ``module`` itself, or what replaces it where it is a batch norm.

    Raises:
        UnsupportedError: ``channel_last``; grouped processes on a machine with nothing but CPUs.
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
    """``apex.parallel.create_syncbn_process_group``: this rank's group of ``group_size`` neighbours.

    Every rank must call it. 0 gives None, which stands for all ranks.

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

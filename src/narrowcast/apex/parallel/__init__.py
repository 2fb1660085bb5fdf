"""The data parallelism and the synchronized batch norm of apex, as torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowcast.errors import SettingError, UnsupportedError

__all__ = [
    "DistributedDataParallel",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

# torch 2.13 renamed broadcast_buffers, and warns about the old name.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)


SyncBatchNorm = nn.SyncBatchNorm
"""``apex.parallel.SyncBatchNorm``: torch's own. In a process group it raises when it trains on a CPU."""


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """``apex.parallel.DistributedDataParallel``: torch's, on any backend, with the arguments of apex's.

    Parameters and buffers are broadcast from rank 0 at construction, and buffers never again. Wrap after
    ``amp.initialize``. torch divides gradients by the number of ranks before it adds them; apex added first.
    The results are equal if that number is a power of two and nothing overflows or is subnormal.

    Args:
        module: the model, on one device.
        message_size: how many float32 elements one bucket of gradients holds, rounded down to whole MiB.
        delay_allreduce: reduce all gradients at the end of backward, and accept parameters without gradients.
            torch then searches every graph for such parameters, and warns once if it finds none.

    ``allreduce_trigger_params``, ``num_allreduce_streams`` and ``prof`` have no effect: in apex they change
    when gradients are sent, but not their values. All other arguments after ``delay_allreduce`` raise
    ``SettingError`` unless they have their defaults. Source: apex ``parallel/distributed.py``.
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
        if message_size < 1:
            raise SettingError(f"message_size must be at least 1 element, got {message_size!r}")
        # Whether each argument asks for something that torch does not do.
        differs = {
            "shared_param": shared_param is not None,
            "retain_allreduce_buffers": retain_allreduce_buffers,
            "allreduce_communicators": allreduce_communicators is not None,
            "allreduce_always_fp32": allreduce_always_fp32,
            "gradient_average": not gradient_average,
            "gradient_predivide_factor": gradient_predivide_factor != 1.0,
        }
        refused = [name for name in differs if differs[name]]
        if refused:
            raise SettingError(
                f"{', '.join(refused)} of apex's DistributedDataParallel cannot be changed here: leave it "
                "out, or use torch.nn.parallel.DistributedDataParallel(module), with register_comm_hook for "
                "another way to add gradients"
            )
        bucket_mb = max(1, 4 * message_size // 2**20)  # a float32 element has 4 bytes
        if delay_allreduce:
            bucket_mb = 2**20  # holds any model, so that its one bucket is reduced at the end of backward
        # apex leaves buffers alone after the first broadcast.
        no_sync_of_buffers: Any = {_SYNC_BUFFERS: False}
        super().__init__(
            module, **no_sync_of_buffers, bucket_cap_mb=bucket_mb, find_unused_parameters=delay_allreduce
        )

    def disable_allreduce(self) -> None:
        """Stop reducing gradients, from the next forward pass on, as inside ``no_sync``."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again, with those accumulated meanwhile, from the next forward pass on."""
        self.require_backward_grad_sync = True


def convert_syncbn_model(
    module: nn.Module, process_group: Any | None = None, channel_last: bool = False
) -> nn.Module:
    """``apex.parallel.convert_syncbn_model``: use torch's SyncBatchNorm for every batch norm.

    Values, running statistics and the training mode stay. Raises ``UnsupportedError`` for ``channel_last``,
    and in a process group on a machine that has only CPUs, where torch would raise at the first batch.
    """
    if channel_last:
        raise UnsupportedError(
            "channel_last=True takes the last dimension for the channels, and torch's SyncBatchNorm the "
            "second: leave it out and give tensors of shape (N, C, ...), in "
            "memory_format=torch.channels_last where that is faster"
        )
    # Without a process group, torch's SyncBatchNorm is a plain batch norm, and runs on a CPU too.
    if dist.is_available() and dist.is_initialized() and not torch.accelerator.is_available():
        raise UnsupportedError(
            "torch's SyncBatchNorm synchronizes on CUDA and devices like it, and this machine has none: "
            "leave out convert_syncbn_model here, and each rank normalizes by its own batches"
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
    return converted


def create_syncbn_process_group(group_size: int) -> Any | None:
    """``apex.parallel.create_syncbn_process_group``: return this rank's group of ``group_size`` ranks.

    Every rank must call it. 0 returns None, which means all ranks.
    """
    if group_size == 0:
        return None
    mine: Any = dist.new_subgroups(group_size)[0]  # type: ignore[no-untyped-call]
    return mine

"""What is kept over the micro-batches of a step: weight casts, norm statistics, and DDP's reduction."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from narrowcast.casting import drop_casts
from narrowcast.errors import OrderError, SettingError, UnsupportedError, near_names
from narrowcast.gradients import StepResult, nodes_below
from narrowcast.training._torch_internals import run_casts_of_leaves_soon
from narrowcast.weights import is_batch_or_instance_norm

RESTORE = ("norms", "all", "none")


class WeightCasts:
    """Keeps the weight casts of one thread over the micro-batches of a step.

    torch drops weight casts when the outermost region of a thread ends, so each micro-batch would cast every
    weight again. One level of autocast nesting, held from the first region to the step, keeps them.

    A kept cast is a graph node that is older than the rest of the next micro-batch's graph, and autograd runs
    old nodes last: the low-precision gradient of every weight, and DDP's reduction, would wait for the end of
    the backward pass. These nodes are told to run early.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        # A cast would keep the whole weight, which fully_shard gathers and frees layer by layer.
        self._sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
        self._thread: int | None = None  # that keeps casts now
        self._versions = 0
        self._new = False

    def keep(self) -> None:
        """Keep casts beyond the regions of this thread from now on; drop those of changed weights.

        A write through ``.data`` changes no version and is not seen. Casts of sharded weights are not kept.
        """
        if self._sharded:
            return
        versions = sum(parameter._version for parameter in self._parameters)
        if self._thread is None:
            self._thread = threading.get_ident()
            torch.autocast_increment_nesting()
            self._leave = weakref.finalize(self, _leave, self._thread)
            self._new = True
        elif versions != self._versions:
            self.forget()
        self._check_thread()
        self._versions = versions

    def before_backward(self, loss: torch.Tensor) -> None:
        """Let the backward of casts that this loss has made, and that later ones share, run early."""
        if self._thread is not None and self._new and loss.grad_fn is not None:
            run_casts_of_leaves_soon(nodes_below([loss.grad_fn]))
            self._new = False

    def drop(self) -> None:
        """Drop every cast, and keep no new ones."""
        if self._thread is not None:
            self._check_thread()
            self._leave()
            self._thread = None

    def forget(self) -> None:
        """Drop every cast, and keep new ones."""
        drop_casts()
        self._new = True

    def _check_thread(self) -> None:
        if self._thread != threading.get_ident():
            raise OrderError(
                "expected every micro-batch of a step in one thread, got a second one: the weight casts are "
                "kept in the first; finish the step there, or use accumulate=1"
            )


def _leave(thread: int) -> None:
    if threading.get_ident() == thread:  # the count of another thread is out of reach
        torch.autocast_decrement_nesting()
    drop_casts()


class Statistics:
    """Buffers as they were at the start of an accumulation, in case its step is skipped.

    A batch norm that saw an overflow keeps running_mean = inf although the step is skipped. ``torch.where``
    on the overflow flag restores the old values without waiting for the device.
    """

    def __init__(self, model: torch.nn.Module, restore: str) -> None:
        if restore not in RESTORE:
            raise SettingError(f"unknown restore={restore!r}. {near_names(str(restore), RESTORE)}")
        self._model = model
        self._restore = restore
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def remember(self) -> None:
        """Copy the current values, unless those of the accumulation's start are kept already."""
        if self._kept is None and self._restore != "none" and torch.is_grad_enabled():
            with torch.no_grad():
                self._kept = [(buffer, buffer.detach().clone()) for buffer in self._buffers()]

    def _buffers(self) -> Iterator[torch.Tensor]:
        for module in self._model.modules():
            if self._restore == "all" or is_batch_or_instance_norm(module):
                yield from module.buffers(recurse=False)

    @torch.no_grad()
    def end(self, result: StepResult) -> None:
        """Forget the values, and restore them first if the step was skipped."""
        kept, self._kept = self._kept or (), None
        skipped = result.skipped_on_device()
        if skipped is False:
            return
        for buffer, before in kept:
            if isinstance(skipped, torch.Tensor):
                buffer.copy_(torch.where(skipped.to(buffer.device, non_blocking=True), before, buffer))
            else:
                buffer.copy_(before)

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore the values and keep them: the accumulation begins again."""
        for buffer, before in self._kept or ():
            buffer.copy_(before)

    def forget(self) -> None:
        self._kept = None


class Synchronization:
    """Has DDP reduce gradients once a step, with the last micro-batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._no_sync = ExitStack()
        self._open = False
        # DDP learns a static graph in its first backward pass, which fails without a reduction. An extra
        # reduction changes nothing: the mean of means over the same ranks is the mean.
        self._learns = any(module.static_graph for module in self.ddp)

    def begin(self, *, reduces: bool) -> None:
        """Start a micro-batch; DDP decides in the forward pass what its backward pass will do."""
        if reduces or self._learns:
            self.end()
        elif not self._open:
            self._open = True
            for module in self.ddp:
                self._no_sync.enter_context(module.no_sync())

    def after_backward(self) -> None:
        self._learns = False
        self.end()

    def end(self) -> None:
        """Let DDP reduce from now on."""
        self._open = False
        self._no_sync.close()

    def mean_of_ranks(self, count: float) -> float:
        """Average a number over the ranks."""
        group = self.ddp[0].process_group
        total = torch.tensor(count, device=next(self.ddp[0].parameters()).device)
        dist.all_reduce(total, group=group)
        return float(total) / dist.get_world_size(group)

    @torch.no_grad()
    def reduce_now(self) -> None:
        """Average the gradients that no backward pass has reduced."""
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
    """Average gradients over the ranks, which may have reached different parameters.

    Raises:
        UnsupportedError: a gradient is sparse.
    """
    kinds = [0 if one.grad is None else 1 + one.grad.is_sparse for one in parameters]
    kind = torch.tensor(kinds, device=parameters[0].device)
    dist.all_reduce(kind, dist.ReduceOp.MAX, group=group)
    if int(kind.max()) > 1:
        raise UnsupportedError(
            "sparse gradients of an unfinished accumulation cannot be reduced under "
            "DistributedDataParallel: use dense gradients (sparse=False), or finish every accumulation"
        )
    works = []
    for parameter, reached in zip(parameters, kind.tolist(), strict=True):
        if reached:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(dist.get_world_size(group))
            works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for work in works:
        work.wait()

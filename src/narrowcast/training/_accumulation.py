"""What a Stepper keeps over the micro-batches of a step: weight casts, and DDP without reductions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from narrowcast.casting import drop_casts
from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.gradients import nodes_below
from narrowcast.training._torch_internals import run_casts_of_leaves_soon
from narrowcast.weights import version_of


class WeightCasts:
    """Keeps the weight casts of one thread over the micro-batches of a step.

    torch drops weight casts when the outermost region of a thread ends, so each micro-batch would cast every
    weight again. One level of autocast nesting, held from the first region to the step, keeps them.

    Autograd runs old nodes last, and a kept cast is older than the next micro-batch's graph. All low
    gradients of weights would stay in memory until the end of the backward pass, and DDP would reduce only
    then. So these nodes are given a priority to run early.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        # A kept cast would hold the whole weight, which fully_shard gathers and frees layer by layer.
        self._sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
        self._keeping_thread: int | None = None
        self._version_sum = 0
        self._has_new_casts = False

    def keep(self) -> None:
        """Keep casts beyond the regions of this thread from now on; drop those of changed weights.

        A write through ``.data`` changes no version and is not seen. If a weight is sharded, no casts are
        kept.
        """
        if self._sharded:
            return
        version_sum = sum(map(version_of, self._parameters))  # versions only grow: one sum tells all
        if self._keeping_thread is None:
            self._keeping_thread = threading.get_ident()
            # Undone by ``drop``, or when the Stepper is deleted in the middle of an accumulation.
            torch.autocast_increment_nesting()
            self._leave = weakref.finalize(self, _leave, self._keeping_thread)
            self._has_new_casts = True
        elif version_sum != self._version_sum:
            self.forget()
        self._check_thread()
        self._version_sum = version_sum

    def before_backward(self, loss: torch.Tensor) -> None:
        """Let the backward of new casts in the graph of ``loss`` run early.

        The casts of earlier micro-batches have this priority already.
        """
        if self._keeping_thread is not None and self._has_new_casts and loss.grad_fn is not None:
            run_casts_of_leaves_soon(nodes_below([loss.grad_fn]))
            self._has_new_casts = False

    def drop(self) -> None:
        """Drop every cast, and keep no new ones."""
        if self._keeping_thread is not None:
            self._check_thread()
            self._leave()
            drop_casts()
            self._keeping_thread = None

    def forget(self) -> None:
        """Drop every cast, and keep new ones."""
        drop_casts()
        self._has_new_casts = True

    def _check_thread(self) -> None:
        if self._keeping_thread != threading.get_ident():
            raise OrderError(
                "expected every micro-batch of a step in one thread, got a second one: the weight casts are "
                "kept in the first; finish the step there, or use accumulate=1"
            )


def _leave(thread: int) -> None:
    # The garbage collector may call this in another thread, which cannot lower the nesting of the first.
    if threading.get_ident() == thread:
        nesting = torch.autocast_decrement_nesting()
        if nesting != 0:
            return  # an open region or another Stepper may be using casts
    drop_casts()


class Synchronization:
    """Has DDP reduce gradients once a step, with the last micro-batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._no_sync = ExitStack()
        self._in_no_sync = False
        # DDP learns a static graph in its first backward pass, which fails without a reduction. So the first
        # micro-batch is reduced at once, and again with the last one. That changes nothing: its gradients are
        # equal on all ranks by then, and their mean is the same.
        self._learns_graph = any(module.static_graph for module in self.ddp)

    def begin(self, *, reduces: bool) -> None:
        """Start a micro-batch; DDP decides in the forward pass what its backward pass will do."""
        if not self.ddp:
            return
        if reduces or self._learns_graph:
            self.end()
        elif not self._in_no_sync:
            self._in_no_sync = True
            for module in self.ddp:
                self._no_sync.enter_context(module.no_sync())

    def after_backward(self) -> None:
        self._learns_graph = False
        self.end()

    def end(self) -> None:
        """Let DDP reduce from now on."""
        if self._in_no_sync:
            self._in_no_sync = False
            self._no_sync.close()

    def on_all_ranks(
        self, is_true: bool, parameters: Sequence[torch.Tensor], process_group: Any | None
    ) -> bool:
        """Return whether ``is_true`` on every rank that skips a step together with this one.

        Args:
            is_true: what is known on this rank.
            parameters: those of the step; DTensors have process groups.
            process_group: that of the scaler.
        """
        process_groups = [module.process_group for module in self.ddp]
        if process_group is not None:
            process_groups.append(process_group)
        for parameter in parameters:
            if hasattr(parameter, "device_mesh"):
                process_groups += parameter.device_mesh.get_all_groups()
        on_all = torch.tensor(float(is_true), device=parameters[0].device)
        # Each group once, in an order that is the same on every rank.
        for group in dict.fromkeys(process_groups):
            dist.all_reduce(on_all, dist.ReduceOp.MIN, group=group)
        return bool(on_all)

    @torch.no_grad()
    def reduce_now(self, count: float) -> float:
        """Average ``count`` over the ranks and return it; unless it is 0, average the gradients too.

        DDP has not reduced them yet.
        """
        process_group = self.ddp[0].process_group
        device = next(self.ddp[0].parameters()).device
        total = torch.tensor(count, device=device)
        dist.all_reduce(total, group=process_group)
        if total:
            for module in self.ddp:
                parameters = _reduced_parameters(module)
                if parameters:
                    _average(parameters, module.process_group)
        return float(total) / dist.get_world_size(process_group)


def _reduced_parameters(module: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients DDP averages, in an order that is the same on every rank."""
    parameters = []
    for name, parameter in module.module.named_parameters():
        if parameter.requires_grad and name not in module.parameters_to_ignore:
            parameters.append(parameter)
    return parameters


# The kind of a rank's gradient. The maximum over the ranks says what to do with it.
_NO_GRADIENT = 0
_DENSE = 1
_SPARSE = 2


def _average(parameters: Sequence[torch.nn.Parameter], process_group: Any) -> None:
    """Average gradients over the ranks, which may have reached different parameters.

    Raises:
        UnsupportedError: a gradient is sparse.
    """
    kinds = []
    for parameter in parameters:
        if parameter.grad is None:
            kinds.append(_NO_GRADIENT)
        elif parameter.grad.is_sparse:
            kinds.append(_SPARSE)
        else:
            kinds.append(_DENSE)
    kinds_of_all = torch.tensor(kinds, device=parameters[0].device)
    dist.all_reduce(kinds_of_all, dist.ReduceOp.MAX, group=process_group)
    kinds = kinds_of_all.tolist()
    if _SPARSE in kinds:
        raise UnsupportedError(
            "sparse gradients of an unfinished accumulation cannot be reduced under "
            "DistributedDataParallel: use dense gradients (sparse=False), or finish every accumulation"
        )

    works = []
    for parameter, kind in zip(parameters, kinds, strict=True):
        if kind == _NO_GRADIENT:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(dist.get_world_size(process_group))
        works.append(dist.all_reduce(parameter.grad, group=process_group, async_op=True))
    for work in works:
        work.wait()

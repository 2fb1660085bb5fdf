"""Casts of weights kept over the micro-batches of one step.

torch drops the casts of weights when the outermost region of a thread is left, so each micro-batch would cast
every weight again. Inside a window of accumulation the weights stay as they are: one level of nesting, held
from the first region to the step, keeps the casts.

A cast that is kept is a graph node that is older than the rest of the next micro-batch's graph, and autograd
runs old nodes last: every weight's gradient in the low format would wait, in memory, for the end of the
backward pass, and DDP with it. So these nodes are told to run soon.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch

from narrowcast.casting import drop_casts
from narrowcast.errors import OrderError
from narrowcast.gradients import nodes_below
from narrowcast.training._torch_internals import run_casts_of_leaves_soon


class KeptCasts:
    """Holds the casts of one thread while a window is open, and drops them where a weight was written."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        # Of a sharded weight it would keep the whole, which fully_shard gathers and frees layer by layer.
        self._sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
        self._holder: _Nesting | None = None
        self._versions = 0
        self._new = False

    def keep(self) -> None:
        """From now on casts outlive the regions of this thread; those of changed weights are dropped.

        A write through ``.data`` changes no version and is not seen. Nothing is kept of sharded weights.
        """
        if self._sharded:
            return
        versions = sum(parameter._version for parameter in self._parameters)
        if self._holder is None:
            self._holder = _Nesting()
            self._new = True
        elif versions != self._versions:
            self.forget()
        self._holder.check_thread()
        self._versions = versions

    def before_backward(self, losses: Iterable[torch.Tensor]) -> None:
        """Tell the casts that these losses have made, and that the next ones will share, to run soon."""
        if self._holder is not None and self._new:
            roots = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
            run_casts_of_leaves_soon(nodes_below(roots))
            self._new = False

    def drop(self) -> None:
        """End keeping, and forget every cast."""
        if self._holder is not None:
            self._holder.check_thread()
            self._holder.release()
            self._holder = None

    def forget(self) -> None:
        """Forget every cast, and go on keeping new ones."""
        drop_casts()
        self._new = True


class _Nesting:
    """One level of nesting of this thread; given back at the latest when this object dies."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        torch.autocast_increment_nesting()
        self.release = weakref.finalize(self, _give_back, self._thread)

    def check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise OrderError(
                "expected every micro-batch of a step in one thread, got a second one: the casts of weights "
                "are kept in the first; finish the step there, or use accumulate=1"
            )


def _give_back(thread: int) -> None:
    if threading.get_ident() == thread:  # another thread's count cannot be reached
        torch.autocast_decrement_nesting()
    drop_casts()

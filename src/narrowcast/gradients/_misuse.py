"""Warn once of a training loop that misuses a scaler, with the line to write instead.

Nothing of torch is patched, and most steps cost nothing: ``StepsByHand`` watches until the first ``update``,
and ``SchedulersAfterSkips`` compares learning rates only in the two steps after a skip.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from narrowcast.gradients._optimizer_gradients import parameters_of
from narrowcast.gradients._steps import closure_of
from narrowcast.gradients._torch_internals import OptState, has_scheduler, leaf_of, nodes_below

# How the names of modules begin that are not the script's.
_INSIDE = ("narrowcast.", "torch.")


def warn_at_script(message: str) -> None:
    """Warn at the line of the script that called into this package, perhaps through torch."""
    level = 2  # the caller of this function
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level)


def leaves_below(roots: Iterable[Any]) -> set[int]:
    """Return the ids of the leaves whose gradients backward from ``roots`` would accumulate."""
    leaves = map(leaf_of, nodes_below(roots))
    return {id(leaf) for leaf in leaves if leaf is not None}


class StepsByHand:
    """Warns of an ``optimizer.step()`` that leaves the scaler out, from the first ``scale`` to ``update``.

    It registers a hook that torch calls before the step of every optimizer. The hook is removed after the
    first iteration, so that later steps cost nothing.

    Args:
        scaled: the first loss that was scaled.
        stage_of: a weak reference to the method that returns the stage of an optimizer that steps now, or
            None if a scaler steps it.
    """

    def __init__(self, scaled: Any, stage_of: weakref.WeakMethod[Any]) -> None:
        self._root = getattr(scaled, "grad_fn", None)
        self._remove: Callable[[], Any] | None = None
        if self._root is None:
            return

        # torch holds the hook for the whole process. So the hook has only weak references to this object and
        # to the scaler, or it would keep them alive.
        weak_self = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            # The first of the arguments is the optimizer.
            if closure_of(args[1:], kwargs) is not None:
                return  # the closure computes the gradients inside the step
            watch, read_stage = weak_self(), stage_of()
            if watch is not None and watch._root is not None and read_stage is not None:
                watch._warn_if_misused(optimizer, read_stage(optimizer))

        handle = register_optimizer_step_pre_hook(before_step)
        self._remove = weakref.finalize(self, handle.remove)

    def _warn_if_misused(self, optimizer: torch.optim.Optimizer, stage: OptState | None) -> None:
        """Warn if ``optimizer`` steps by hand after ``scaler.step``, or on gradients of a scaled loss."""
        # A step after ``unscale_`` is right if the script itself checks the gradients.
        if stage is None or stage is OptState.UNSCALED:
            return
        name = type(optimizer).__name__

        # Both warnings set ``_root`` to None, which ends the watch. The hook stays until ``end``: torch is
        # iterating over its hooks now, and would raise if one were removed.

        # The second step would move the weights once more.
        if stage is OptState.STEPPED:
            self._root = None
            warn_at_script(
                f"{name}.step was called by hand after scaler.step(optimizer), which steps it: leave "
                "optimizer.step() out"
            )
            return

        # Optimizers of other models, whose losses the scaler does not scale, may step by themselves.
        leaves = leaves_below([self._root])
        if any(p.grad is not None and id(p) in leaves for p in parameters_of(optimizer)):
            self._root = None
            warn_at_script(
                f"{name}.step was called by hand on gradients of a loss that the GradScaler scaled: write "
                "scaler.step(optimizer), which unscales and checks them, and scaler.update() after it"
            )

    def end(self) -> None:
        """Stop watching, and remove the hook; later calls do nothing."""
        self._root = None
        if self._remove is not None:
            self._remove()  # a finalizer acts only when it is first called


class SchedulersAfterSkips:
    """Warns once of a learning-rate scheduler that moves on although the optimizer's step was skipped.

    It compares the learning rates of a skipped step with those of the two steps after it. If they moved
    twice, the scheduler moves at each step, and not only at the end of an epoch.

    Attributes:
        advice: the end of the warning, which says what to write instead.
    """

    def __init__(self) -> None:
        # By id of an optimizer that had a skip: its rates at the last step, and whether they have moved once
        # since the skip.
        self._rates: dict[int, tuple[list[float], bool]] = {}
        self._warned = False
        self.advice = (
            "write result = scaler.step(optimizer), and after scaler.update() if not result.skipped: "
            "scheduler.step()"
        )

    def __bool__(self) -> bool:
        """Return whether the next step of some optimizer is to be compared."""
        return bool(self._rates)

    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the learning rates of a step that was skipped."""
        if not self._warned and id(optimizer) not in self._rates and has_scheduler(optimizer):
            rates = _rates_of(optimizer)
            if rates:
                self._rates[id(optimizer)] = (rates, False)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the learning rates with those of the optimizer's last step."""
        known = self._rates.pop(id(optimizer), None)
        if known is None:
            return
        rates_before, has_moved = known
        rates = _rates_of(optimizer)
        if rates == rates_before:
            return
        # If they moved for the first time, an epoch may have ended: compare once more at the next step.
        if not has_moved:
            self._rates[id(optimizer)] = (rates, True)
            return

        self._warned = True
        self._rates.clear()
        warn_at_script(
            f"a scheduler changed the learning rate of {type(optimizer).__name__} after a step that was "
            f"skipped, and is ahead of the optimizer now: {self.advice}"
        )


def _rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rates that are floats; to compare tensors may need a host sync."""
    rates = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, float):
            rates.append(rate)
    return rates

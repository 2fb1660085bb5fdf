"""Warn once of a loop that misuses a scaler, with the line to write instead.

Nothing of torch is patched. ``StepsByHand`` watches until the first ``update``, and ``SchedulersAfterSkips``
compares learning rates only in the two steps after a skip.
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

_INSIDE = ("narrowcast.", "torch.")


def warn_at_script(message: str) -> None:
    """Warn at the first line outside of this package and torch: frames of both may lie between."""
    level = 2
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

    torch calls a hook before the step of every optimizer. It is removed after the first iteration, so that
    later steps cost nothing.

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

        # The hook is torch's for the whole process: it keeps neither this object nor the scaler alive.
        watching = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            # A closure computes the gradients inside the step. (The first of the arguments is the optimizer.)
            if closure_of(args[1:], kwargs) is None:
                watch, read_stage = watching(), stage_of()
                if watch is not None and watch._root is not None and read_stage is not None:
                    watch._warn_if_misused(optimizer, read_stage(optimizer))

        handle = register_optimizer_step_pre_hook(before_step)
        self._remove = weakref.finalize(self, handle.remove)

    def _warn_if_misused(self, optimizer: torch.optim.Optimizer, stage: OptState | None) -> None:
        """Warn if ``optimizer`` steps by hand after ``scaler.step``, or on gradients of a scaled loss."""
        if stage is None or stage is OptState.UNSCALED:
            return  # an unscaled step is right if the script checks gradients itself
        name = type(optimizer).__name__

        # Both branches set ``_root`` to None, which ends the watch. The hook stays until ``end``: torch is
        # iterating over its hooks, and would raise if one were removed.

        # The gradients are unscaled, and the weights move twice.
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
        """Watch no longer."""
        self._root = None
        if self._remove is not None:
            self._remove()  # a finalizer, so only the first call removes the hook


class SchedulersAfterSkips:
    """Warns once of a learning-rate scheduler that moves on although the optimizer's step was skipped.

    It compares the learning rates of a skipped step with those of the two steps after it. If they moved
    twice, the scheduler moves at each step, and not at the end of an epoch.
    """

    def __init__(self) -> None:
        # By id of the optimizer: its rates at the last step, and whether they have moved once since the skip.
        self._rates: dict[int, tuple[list[float], bool]] = {}
        self._warned = False
        self.advice = (
            "write result = scaler.step(optimizer), and after scaler.update() if not result.skipped: "
            "scheduler.step()"
        )

    def __bool__(self) -> bool:
        return bool(self._rates)

    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the learning rates of a step that was skipped."""
        if not self._warned and id(optimizer) not in self._rates and has_scheduler(optimizer):
            rates = _rates_of(optimizer)
            if rates:
                self._rates[id(optimizer)] = (rates, False)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the learning rates with those of the step before."""
        known = self._rates.pop(id(optimizer), None)
        if known is None:
            return
        rates_before, has_moved = known
        rates = _rates_of(optimizer)
        if rates == rates_before:
            return
        # Moved once: perhaps an epoch ended.
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
    """Return the learning rates that are numbers; comparing tensors may need a host sync."""
    rates = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, float):
            rates.append(rate)
    return rates

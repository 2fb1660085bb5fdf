"""A wrong order of calls, refused with the right one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.errors import OrderError, SettingError
from narrowcast.training._lane import Lane


def device_of(outputs: Any) -> torch.device:
    while not isinstance(outputs, torch.Tensor):
        outputs = next(iter(outputs.values() if isinstance(outputs, Mapping) else outputs))
    return outputs.device


def check_loss(loss: Any, lane: Lane) -> None:
    losses = list(loss.values()) if isinstance(loss, Mapping) else [loss]
    if lane.needs_closure:
        raise OrderError(
            f"{type(lane.optimizers[0]).__name__} asks for the loss again and again: give step a function, "
            "as stepper.step(lambda: criterion(model(x), y))"
        )
    for one in losses:
        if not isinstance(one, torch.Tensor):
            raise SettingError(f"expected a loss, a dict of losses or a function, got {type(one).__name__}")
        if one.numel() != 1:
            raise SettingError(f"expected a loss of one element, got shape {tuple(one.shape)}: take its mean")
        if not one.requires_grad:
            raise OrderError(
                "expected a loss with a graph, got one that needs no gradient: compute it outside "
                "torch.no_grad(), from parameters with requires_grad=True, and give it to step undetached"
            )


_LANES_OF: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[weakref.ref[Any], weakref.ref[Lane]]]]
_LANES_OF = weakref.WeakKeyDictionary()


def own(optimizer: torch.optim.Optimizer, stepper: Any, lane: Lane) -> None:
    """From now on the optimizer steps only within its steppers', as long as there is one."""
    if optimizer not in _LANES_OF:
        _LANES_OF[optimizer] = []
        optimizer.register_step_pre_hook(_refuse_by_hand)
    _LANES_OF[optimizer].append((weakref.ref(stepper), weakref.ref(lane)))


def _refuse_by_hand(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    owners = [
        lane
        for stepper, reference in _LANES_OF.get(optimizer, ())
        if stepper() is not None and (lane := reference()) is not None
    ]
    if not owners or any(lane.stepping for lane in owners):
        return
    # At a rate of 0 torch.distributed.checkpoint makes the state that it is about to load.
    filled = any(lane.filled for lane in owners)
    if filled or any(group.get("lr") != 0 for group in optimizer.param_groups):
        raise OrderError(
            f"{type(optimizer).__name__}.step was called by hand: its gradients belong to a Stepper and may "
            "be scaled or half a window. Call result = stepper.step(loss), which steps; to step by hand, let "
            "go of the Stepper first (del stepper)"
        )

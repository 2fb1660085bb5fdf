"""A wrong order of calls, refused with the right one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
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


def only_within(stepper: weakref.ref[Any], lane: weakref.ref[Lane]) -> Callable[..., None]:
    """A hook that refuses an optimizer's step outside its ``stepper``'s, as long as there is one."""

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        owner = lane()
        if stepper() is None or owner is None or owner.stepping:
            return
        # At a rate of 0 torch.distributed.checkpoint makes the state that it is about to load.
        if owner.filled or any(group.get("lr") != 0 for group in optimizer.param_groups):
            raise OrderError(
                f"{type(optimizer).__name__}.step was called by hand: its gradients belong to a Stepper and "
                "may be scaled or half a window. Call result = stepper.step(loss), which steps"
            )

    return refuse

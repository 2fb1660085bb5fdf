"""A wrong order of calls, refused with the right one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.errors import OrderError, SettingError
from narrowcast.gradients import GradScaler
from narrowcast.training._lane import Lane


def device_of(outputs: Any) -> torch.device:
    while not isinstance(outputs, torch.Tensor):
        outputs = next(iter(outputs.values() if isinstance(outputs, Mapping) else outputs))
    return outputs.device


def times(outputs: Any, factor: torch.Tensor) -> Any:
    """A tensor or several, times ``factor``; narrow ones in fp32."""
    if not isinstance(outputs, torch.Tensor):
        return [times(output, factor) for output in outputs]
    narrow = outputs.dtype in (torch.float16, torch.bfloat16)
    return (outputs.float() if narrow else outputs) * factor


def let_go(lanes: list[Lane]) -> None:
    """A Stepper is gone: gradients of a window that is not full are scaled, and nobody would know."""
    for lane in lanes:
        lane.listening.remove()
        if lane.filled:
            lane.zero()


def check_state(state: Any, lanes: Mapping[str | None, Lane]) -> Mapping[str, Any]:
    """The lanes of a saved state, if they are of a Stepper like this one."""
    names = {"" if name is None else name for name in lanes}
    saved = state.get("lanes") if isinstance(state, Mapping) else None
    if isinstance(saved, Mapping) and set(saved) == names:
        return saved
    of = f"the optimizers {', '.join(sorted(names))}" if names != {""} else "one optimizer without a name"
    if isinstance(saved, Mapping):
        came = f"one with {', '.join(repr(name) for name in sorted(saved))}"
    else:
        came = (
            f"the keys {', '.join(map(str, state)) or 'none'}" if isinstance(state, Mapping) else repr(state)
        )
    raise SettingError(
        f"expected what stepper.state_dict() gave for {of}, got {came}; a loop's own states are loaded by "
        "their owners: optimizer.load_state_dict, stepper.scaler.load_state_dict"
    )


def check_loss(loss: Any, lane: Lane) -> None:
    losses = list(loss.values()) if isinstance(loss, Mapping) else [loss]
    if lane.needs_closure:
        raise OrderError(
            f"{type(lane.optimizers[0]).__name__} asks for the loss again and again: give step a function, "
            "as stepper.step(lambda: criterion(model(x), y))"
        )
    if not losses:
        raise SettingError("expected at least one loss in the dict, got {}")
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


_STEPPER_OF: weakref.WeakKeyDictionary[GradScaler, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def claim(scaler: GradScaler, stepper: Any) -> None:
    """Refuse a scaler that another Stepper or another optimizer of this one moves schedulers by."""
    other = _STEPPER_OF.get(scaler)
    if other is not None and other() is not None:
        raise SettingError(
            "this GradScaler is another Stepper's, or another named optimizer's: make one for each, or let "
            "go of the other Stepper first (del stepper)"
        )
    _STEPPER_OF[scaler] = weakref.ref(stepper)


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
            "go of the Stepper first (del stepper), which throws an open window away"
        )

"""Loss scales as the states that torch, apex, Megatron and DeepSpeed load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from narrowcast.errors import ScaleError, near_names
from narrowcast.scaling._dynamic import Dynamic
from narrowcast.scaling._fixed import LossScale, Off, Static
from narrowcast.scaling._range import LARGEST_SCALE, SMALLEST_SCALE, to_float32
from narrowcast.scaling._states import APEX, MEGATRON, TORCH

# With a hysteresis of 1 no overflow is forgiven, and rules differ only in how they count good steps.
_ALIKE_AT_ONE = (("torch", "apex", "megatron"), ("deepspeed", "deepspeed_consecutive"))
_DEEPSPEED_CLASSES = ("DynamicLossScaler", "FP16_Optimizer")


def to_torch(loss_scale: LossScale) -> dict[str, float | int]:
    """What ``torch.amp.GradScaler.load_state_dict`` loads; empty for ``Off()``.

    Load an empty one into a scaler made with ``enabled=False`` only; torch refuses it elsewhere.

    Raises:
        ScaleError: for what torch cannot hold: a fixed or predicted scale, hysteresis, DeepSpeed's counting,
            and limits other than 2**-126 and 2**127.
    """
    if isinstance(loss_scale, Off):
        return {}
    ours = _moving(TORCH, loss_scale)
    _same(TORCH, ours, hysteresis=1)
    _moves_by(TORCH, ours, "torch")
    _same(TORCH, ours, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
    return {
        "scale": ours.scale,
        "growth_factor": ours.growth_factor,
        "backoff_factor": ours.backoff_factor,
        "growth_interval": ours.growth_interval,
        "_growth_tracker": ours.good_steps,
    }


def to_apex(
    loss_scales: Sequence[LossScale],
    *,
    dynamic: bool = True,
    min_scale: float = SMALLEST_SCALE,
    max_scale: float = 2.0**24,
) -> dict[str, dict[str, float | int]]:
    """What ``apex.amp.load_state_dict`` loads, one entry a loss.

    Args:
        loss_scales: one for each loss.
        dynamic: whether ``amp.initialize`` is given ``loss_scale="dynamic"`` there; where False, each value
            must be ``Static``.
        min_scale: its ``min_loss_scale``; 2**-126 for None.
        max_scale: its ``max_loss_scale``.

    Raises:
        ScaleError: for what apex cannot hold: a predicted scale, hysteresis, DeepSpeed's counting, factors
            other than 2 and 0.5, an interval other than 2000, and limits other than those named.
    """
    state: dict[str, dict[str, float | int]] = {}
    for index, loss_scale in enumerate(loss_scales):
        good_steps = 0
        if dynamic:
            ours = _moving(APEX, loss_scale)
            _same(APEX, ours, hysteresis=1)
            _moves_by(APEX, ours, "apex")
            _same(APEX, ours, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
            _same(APEX, ours, unsaved=True, min_scale=min_scale, max_scale=max_scale)
            good_steps = ours.good_steps
        elif not isinstance(loss_scale, Static):
            raise ScaleError(f"{APEX} with dynamic=False holds Static scales only, got {loss_scale!r}")
        state[f"loss_scaler{index}"] = {"loss_scale": loss_scale.scale, "unskipped": good_steps}
    return state


def to_megatron(
    loss_scale: LossScale,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
) -> dict[str, float | int]:
    """What Megatron's ``DynamicGradScaler`` loads; make a tensor of ``scale`` first, one element, float32.

    The settings are those that Megatron will run with. It saves none of them, so each must be that of
    ``loss_scale``.

    Raises:
        ScaleError: for what Megatron cannot hold: a scale that is off, fixed or predicted, another rule, a
            ``max_scale`` other than 2**127, and a setting other than the one it will run with.
    """
    ours = _moving(MEGATRON, loss_scale)
    _same(MEGATRON, ours, unsaved=True, hysteresis=hysteresis)
    _moves_by(MEGATRON, ours, "megatron")
    _same(MEGATRON, ours, max_scale=LARGEST_SCALE)
    _same(
        MEGATRON,
        ours,
        unsaved=True,
        growth_factor=to_float32(growth_factor),
        backoff_factor=to_float32(backoff_factor),
        growth_interval=growth_interval,
        min_scale=to_float32(min_scale),
    )
    return {
        "scale": ours.scale,
        "growth_tracker": ours.good_steps,
        "hysteresis_tracker": _left(ours),
    }


def to_deepspeed(
    loss_scale: LossScale,
    *,
    into: Literal["DynamicLossScaler", "FP16_Optimizer"] = "DynamicLossScaler",
    min_scale: float = 1.0,
) -> dict[str, float | int | bool]:
    """The attributes of a ``DynamicLossScaler``, or the entries of ``FP16_Optimizer.state_dict()``.

    DeepSpeed's ``cur_iter`` counts from the last overflow, or the last growth, here.

    Args:
        loss_scale: what to convert.
        into: the class that takes it. ZeRO optimizers have a ``DynamicLossScaler``
            (``vars(optimizer.loss_scaler).update(...)``).
        min_scale: the ``min_loss_scale`` of the configuration, which ``FP16_Optimizer`` does not save.

    Raises:
        ScaleError: for what it cannot hold: a scale that is off or predicted, another rule, a ``max_scale``
            other than 2**127, factors that are not each other's inverse; ``FP16_Optimizer`` has no hysteresis
            and only it can hold a fixed scale.
    """
    if into not in _DEEPSPEED_CLASSES:
        raise ScaleError(f"unknown class {into!r}. {near_names(str(into), _DEEPSPEED_CLASSES)}")
    target = f"DeepSpeed's {into}"
    optimizer = into == "FP16_Optimizer"
    if optimizer and isinstance(loss_scale, Static):
        return {"dynamic_loss_scale": False, "cur_scale": loss_scale.scale, "cur_iter": 0}
    ours = _moving(target, loss_scale)
    if optimizer:
        _same(target, ours, hysteresis=1)
    _moves_by(target, ours, "deepspeed", "deepspeed_consecutive")
    _same(target, ours, backoff_factor=1.0 / ours.growth_factor, max_scale=LARGEST_SCALE)
    state = {
        "cur_scale": ours.scale,
        "cur_iter": ours.good_steps,
        "last_overflow_iter": -1,
        "scale_factor": ours.growth_factor,
        "scale_window": ours.growth_interval,
    }
    if optimizer:
        _same(target, ours, unsaved=True, min_scale=min_scale)
        return {"dynamic_loss_scale": True, **state}
    return {
        **state,
        "min_scale": ours.min_scale,
        "delayed_shift": ours.hysteresis,
        # DeepSpeed backs off at 1 and would count on below it for ever.
        "cur_hysteresis": max(_left(ours), 1),
        "consecutive_hysteresis": ours.rule == "deepspeed_consecutive",
    }


def _moving(target: str, loss_scale: LossScale) -> Dynamic:
    if not isinstance(loss_scale, Dynamic):
        raise ScaleError(f"{target} cannot hold {loss_scale!r}: expected a Dynamic scale")
    return loss_scale


def _moves_by(target: str, ours: Dynamic, *rules: str) -> None:
    alike = next(family for family in _ALIKE_AT_ONE if rules[0] in family)
    if ours.rule not in (alike if ours.hysteresis == 1 else rules):
        raise ScaleError(f"{target} cannot hold rule={ours.rule!r}: it moves by {rules[0]!r}")


def _same(target: str, ours: Dynamic, *, unsaved: bool = False, **theirs: float) -> None:
    """Refuses fields of ``ours`` that ``target`` has otherwise: always, or in this run where ``unsaved``."""
    for field, expected in theirs.items():
        value = getattr(ours, field)
        if value == expected:
            continue
        if unsaved:
            raise ScaleError(
                f"{target} saves no {field} and would run with {_shown(expected)}, not {_shown(value)}: pass "
                f"{field}={_shown(value)} here and set it there"
            )
        raise ScaleError(f"{target} cannot hold {field}={_shown(value)}, only {_shown(expected)}")


def _shown(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    return f"2.0**{exponent - 1}" if mantissa == 0.5 and abs(exponent) > 16 else repr(value)


def _left(ours: Dynamic) -> int:
    assert ours.hysteresis_left is not None
    return ours.hysteresis_left

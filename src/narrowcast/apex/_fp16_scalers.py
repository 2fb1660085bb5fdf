"""``apex.fp16_utils``'s loss scalers: objects around values of ``narrowcast.scaling``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from narrowcast.gradients import nonfinite_flags
from narrowcast.scaling import Dynamic, Static

_LOWEST = 1.0


class LossScaler:
    """A scale that stays.

    In apex ``has_overflow`` of this class said False whatever the gradients were, so that infinities reached
    the weights; here it looks.

    Args:
        scale: what the loss is multiplied by.

    Raises:
        ScaleError: a ``scale`` that cannot scale a loss.
    """

    value: Static | Dynamic

    def __init__(self, scale: float = 1) -> None:
        self.value = Static(scale=scale)

    @property
    def cur_scale(self) -> float:
        """The scale now; may be set."""
        return self.value.scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self.value = replace(self.value, scale=float(scale))

    @property
    def loss_scale(self) -> float:
        """The scale now."""
        return self.value.scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient of these parameters holds a NaN or an infinity; waits for the device."""
        gradients = [parameter.grad for parameter in params if parameter.grad is not None]
        return any(nonfinite_flags(gradients).read())

    def update_scale(self, overflow: bool) -> None:
        """Nothing."""

    def scale_gradient(
        self, module: torch.nn.Module, grad_in: Iterable[torch.Tensor], grad_out: object
    ) -> tuple[torch.Tensor, ...]:
        """A backward hook: each gradient of the inputs times the scale."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """``loss`` times the scale, backward."""
        scaled: Any = loss * self.loss_scale
        scaled.backward(retain_graph=retain_graph)

    def __getstate__(self) -> dict[str, Any]:
        # apex's attributes, so that each reads what the other pickled.
        return {"cur_scale": self.cur_scale}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.value = Static(scale=float(state["cur_scale"]))


class DynamicLossScaler(LossScaler):
    """A scale that is divided by a factor at an overflow, not below 1, and multiplied after so many without.

    Args:
        init_scale: where it starts.
        scale_factor: the factor.
        scale_window: updates in a row without overflow until it grows.

    Raises:
        ScaleError: a setting out of range.

    Source: apex ``fp16_utils/loss_scaler.py``; the rule is ``scaling.Dynamic``'s ``"apex"``.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        self.value = _dynamic(init_scale, scale_factor, scale_window)
        self.cur_iter = 0
        self.last_overflow_iter = -1

    @property
    def scale_factor(self) -> float:
        """What the scale is multiplied and divided by."""
        return self._dynamic.growth_factor

    @property
    def scale_window(self) -> int:
        """Updates in a row without overflow until the scale grows."""
        return self._dynamic.growth_interval

    def update_scale(self, overflow: bool) -> None:
        """Move the scale by one update."""
        self.value = self._dynamic.after_step(overflow=overflow)
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    @property
    def _dynamic(self) -> Dynamic:
        assert isinstance(self.value, Dynamic)
        return self.value

    def __getstate__(self) -> dict[str, Any]:
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.cur_iter, self.last_overflow_iter = state["cur_iter"], state["last_overflow_iter"]
        window = state["scale_window"]
        good_steps = (self.cur_iter - self.last_overflow_iter - 1) % window
        scale = float(state["cur_scale"])
        self.value = replace(_dynamic(scale, state["scale_factor"], window), good_steps=good_steps)


def _dynamic(scale: float, factor: float, window: int) -> Dynamic:
    return Dynamic(
        rule="apex",
        scale=float(scale),
        growth_factor=factor,
        backoff_factor=1 / factor if factor else 0.0,
        growth_interval=window,
        min_scale=min(_LOWEST, float(scale)),
    )

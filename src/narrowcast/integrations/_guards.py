"""What the integrations watch until the first step is over: steps and gradients that go round them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from narrowcast.casting import stacklevel_outside
from narrowcast.errors import OrderError
from narrowcast.gradients import parameters_of
from narrowcast.integrations._first_step import HOSTS


class StepsOfHost:
    """Refuses steps that go round the integration, until the first one of each model has gone through it.

    Such a step would use scaled gradients, unchecked. torch calls a hook before the step of every optimizer;
    it is there only as long as a model waits for its first step.

    Args:
        advice: what to write instead.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._is_stepping = False
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # Optimizers that have none of the weights.
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._remove_hook: weakref.finalize[Any, Any] | None = None

    def __enter__(self) -> None:
        """Let steps through: the integration makes them."""
        self._is_stepping = True

    def __exit__(self, *_: object) -> None:
        self._is_stepping = False

    def __reduce__(self) -> Any:
        return (StepsOfHost, (self._advice,))  # a copy watches nothing

    def watch(self, model: torch.nn.Module) -> None:
        self._models.add(model)
        self._others.clear()
        if self._remove_hook is None or not self._remove_hook.alive:
            # The hook is torch's for the whole process, and does not keep this object alive.
            reference = weakref.ref(self)

            def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
                steps = reference()
                if steps is not None and not steps._is_stepping:
                    steps._look_at(optimizer)

            self._remove_hook = weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def _look_at(self, optimizer: Optimizer) -> None:
        if optimizer in self._others:
            return
        weights = {id(parameter) for model in self._models for parameter in model.parameters()}
        if not any(id(parameter) in weights for parameter in parameters_of(optimizer)):
            self._others.add(optimizer)
            return
        raise OrderError(
            f"expected the host to step {type(optimizer).__name__}, which checks the gradients of the model "
            f"that has the policy, got a step by hand: {self._advice}"
        )

    def first_step_is_over(self, models: Iterable[torch.nn.Module]) -> None:
        for model in models:
            self._models.discard(model)
        if not self._models:
            self.end()

    def end(self) -> None:
        """Watch no longer."""
        self._models.clear()
        if self._remove_hook is not None:
            self._remove_hook()  # once, as a finalizer


class ChangedGradients:
    """Warns, in the first step of a model, of gradients that were changed while they had the loss scale.

    Args:
        advice: how gradients are clipped in this host.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._models: list[torch.nn.Module] = []
        # id of a parameter -> its gradient, and the version of that, after the latest backward pass.
        self._left: dict[int, tuple[int, int]] = {}

    def __reduce__(self) -> Any:
        return (ChangedGradients, (self._advice,))  # a copy watches nothing

    def watch(self, model: torch.nn.Module) -> None:
        self._models.append(model)

    def after_backward(self) -> None:
        """Remember how the backward pass left the gradients."""
        for model in self._models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    self._left[id(parameter)] = (id(parameter.grad), parameter.grad._version)

    def before_unscaling(self, optimizer: Optimizer, read_scale: Callable[[], float]) -> None:
        """Warn if the gradients of ``optimizer`` are not as the latest backward pass left them."""
        if not self._left:
            return
        for parameter in parameters_of(optimizer):
            left = self._left.get(id(parameter))
            gradient = parameter.grad
            if left is None or gradient is None:
                continue
            if left != (id(gradient), gradient._version):
                warnings.warn(
                    f"gradients of {type(optimizer).__name__} were changed while they had the loss scale of "
                    f"{read_scale():g}: torch.nn.utils.clip_grad_norm_ clips these to nearly nothing. "
                    f"{self._advice} (To divide them is right.)",
                    stacklevel=stacklevel_outside(HOSTS),
                )
                self.end()
                return

    def first_step_is_over(self, models: Iterable[torch.nn.Module]) -> None:
        over = list(models)
        self._models = [model for model in self._models if model not in over]
        for model in over:
            for parameter in model.parameters():
                self._left.pop(id(parameter), None)

    def end(self) -> None:
        """Watch no longer."""
        self._models.clear()
        self._left.clear()

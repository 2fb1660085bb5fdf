"""Until the first step is over, notice steps and gradients that bypass the integration."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from narrowcast.casting import stacklevel_outside
from narrowcast.errors import OrderError
from narrowcast.gradients import parameters_of, some_scaler_steps
from narrowcast.integrations._first_step import HOSTS


class StepsOfHost:
    """Notices steps that bypass the integration, until the first step of each model has gone through it.

    With a loss scale such a step would use scaled gradients, and raises. Without one its gradients are not
    checked, which a warning says. While a model waits for its first step, a hook is called before each step
    of every optimizer; afterwards the hook is removed.

    Args:
        advice: what to write instead.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._raises = False
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # Optimizers that are not looked at again: they have none of the weights, or a warning named them.
        self._ignored: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._remove_hook: weakref.finalize[Any, Any] | None = None

    def __reduce__(self) -> Any:
        return (StepsOfHost, (self._advice,))  # a copy watches nothing

    @property
    def is_on(self) -> bool:
        """Whether a model waits for its first step."""
        return self._remove_hook is not None and self._remove_hook.alive

    def watch(self, model: torch.nn.Module, *, scales_losses: bool) -> None:
        self._raises = scales_losses
        self._models.add(model)
        self._ignored.clear()
        if not self.is_on:
            # The hook is called for every optimizer of the process. It must not keep this object alive.
            reference = weakref.ref(self)

            def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
                steps_of_host = reference()
                # A step that a scaler makes goes through an integration, this one or that of another host.
                if steps_of_host is not None and not some_scaler_steps():
                    steps_of_host._refuse_or_warn(optimizer)

            self._remove_hook = weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def _refuse_or_warn(self, optimizer: Optimizer) -> None:
        """Raise or warn if ``optimizer``, which is stepped by hand, has weights of a model."""
        if optimizer in self._ignored:
            return
        weights: set[int] = set()
        for model in self._models:
            weights.update(map(id, model.parameters()))
        if not any(id(parameter) in weights for parameter in parameters_of(optimizer)):
            self._ignored.add(optimizer)
            return
        name = type(optimizer).__name__
        if self._raises:
            raise OrderError(
                f"expected the host to step {name}, which unscales the gradients of the model that has the "
                f"policy, got a step by hand: {self._advice}"
            )
        self._ignored.add(optimizer)
        warnings.warn(
            f"{name} was stepped by hand on a model that has the policy, so neither its gradients nor the "
            f"formats of the first step are checked: {self._advice}",
            stacklevel=stacklevel_outside(HOSTS),
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
            self._remove_hook()  # a finalizer, of which only the first call has an effect


class ChangedGradients:
    """Watches, in the first step, that gradients come from the host's backward pass and stay as it left them.

    Args:
        how_to_backward: what to write for the backward pass in this host, which scales the loss.
        how_to_clip: what to write to clip.
    """

    def __init__(self, how_to_backward: str, how_to_clip: str) -> None:
        self._how_to_backward = how_to_backward
        self._how_to_clip = how_to_clip
        self._is_on = False
        # Model -> id of a parameter -> id and version of its gradient after the latest backward pass.
        self._left: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, tuple[int, int]]] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> Any:
        return (ChangedGradients, (self._how_to_backward, self._how_to_clip))  # a copy watches nothing

    def watch(self, model: torch.nn.Module) -> None:
        self._is_on = True
        self._left[model] = {}

    def after_backward(self) -> None:
        """Remember how the backward pass left the gradients."""
        if not self._is_on:
            return
        for model, left in self._left.items():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    left[id(parameter)] = (id(parameter.grad), parameter.grad._version)

    def before_unscaling(self, optimizer: Optimizer, read_scale: Callable[[], float]) -> None:
        """Warn if the gradients of ``optimizer`` are not as the host's latest backward pass left them.

        Raises:
            OrderError: a model has gradients, and none of them comes from a backward pass of the host.
        """
        if not self._is_on:
            return
        name = type(optimizer).__name__
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        for model, left in list(self._left.items()):
            trained = [p for p in model.parameters() if id(p) in own and p.grad is not None]
            if trained and not any(id(parameter) in left for parameter in trained):
                raise OrderError(
                    f"expected a backward pass by the host, which scales the loss, before the step of "
                    f"{name}: write {self._how_to_backward} in place of loss.backward()"
                )
            for parameter in trained:
                assert parameter.grad is not None
                if left.get(id(parameter)) == (id(parameter.grad), parameter.grad._version):
                    continue
                warnings.warn(
                    f"gradients of {name} were changed by other code than {self._how_to_backward} while they "
                    f"had the loss scale of {read_scale():g}. loss.backward() adds gradients without it, and "
                    "torch.nn.utils.clip_grad_norm_ clips those that have it to nearly nothing: write "
                    f"{self._how_to_clip}, which unscales first. (What does not depend on the scale is "
                    "right, as to divide, mask or average them.)",
                    stacklevel=stacklevel_outside(HOSTS),
                )
                self.end()
                return

    def end(self) -> None:
        """Watch no longer."""
        self._is_on = False
        self._left.clear()

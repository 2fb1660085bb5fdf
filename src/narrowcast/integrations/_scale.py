"""The loss scale of a host in which several optimizers may share it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from narrowcast.errors import OrderError
from narrowcast.gradients import GradScaler, parameters_of


class ScaleUpdates:
    """Moves the loss scale after steps, as late as possible: others may step on gradients of the same scale.

    Another optimizer may still accumulate when the scale moves, as that of a generator does when the
    discriminator has stepped. Its gradients then follow the scale, so that no sum has parts of two scales.

    Attributes:
        unscaled: the optimizers whose gradients are unscaled now, and that have not stepped on them.
        is_due: whether an optimizer stepped since the scale moved.
        models: those that the host trains.
    """

    def __init__(self) -> None:
        self.unscaled: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.is_due = False
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # Optimizer -> how many parameters it had, and the models' parameters that were not among them.
        self._others: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[torch.nn.Parameter]]] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> Any:
        return (ScaleUpdates, ())  # a copy knows no model

    def add(self, model: torch.nn.Module) -> None:
        """Watch the gradients of another model."""
        self.models.add(model)
        self._others.clear()

    def stepped(self, optimizer: Optimizer) -> None:
        """Note a step, also one that was skipped."""
        self.is_due = True
        self._stepped.add(optimizer)
        self.unscaled.discard(optimizer)

    def abandon(self, scaler: GradScaler | None) -> None:
        """Forget the iteration without moving the scale, as after an error."""
        self._forget()
        if scaler is not None:
            scaler.abandon()

    def before_backward(self, scaler: GradScaler, optimizers: Collection[Optimizer] | None = None) -> None:
        """Move the scale, if it is due, before a loss is scaled.

        Args:
            scaler: the scaler of the host.
            optimizers: those that the host has; None if it does not say.

        Raises:
            OrderError: an optimizer holds gradients that are unscaled, to which scaled ones would be added.
        """
        unscaled = [each for each in self.unscaled if optimizers is None or each in optimizers]
        holding = [each for each in unscaled if has_gradients(each)]
        if not self.is_due:
            # The loop unscaled and zeroed the gradients, and made no step, as for a norm that is not finite.
            if self.unscaled and not holding:
                self.abandon(scaler)
            return
        if holding and scaler.scales_losses:
            name = type(holding[0]).__name__
            self.abandon(scaler)
            raise OrderError(
                "expected gradients to be unscaled or clipped right before the step that uses them, got "
                f"those of {name} unscaled before another optimizer stepped, and another backward pass would "
                "add scaled ones to them: clip those of one optimizer, and step it"
            )
        self.update(scaler)

    def update(self, scaler: GradScaler) -> None:
        """Move the scale, if an optimizer stepped since the last time."""
        if not self.is_due:
            return
        pending = self._pending() if scaler.scales_losses else []
        if pending:
            before = scaler.factor()
            scaler.update()
            _follow(pending, before, scaler.factor())
        else:
            scaler.update()
        self._forget()

    def _forget(self) -> None:
        self.is_due = False
        self._stepped.clear()
        self.unscaled.clear()

    def _pending(self) -> list[torch.Tensor]:
        """Return the gradients that no optimizer has stepped on."""
        stepped = list(self._stepped)
        if not stepped:
            return []
        # Mostly one optimizer has stepped, and no other parameter has a gradient. The list of the other
        # parameters is cached, so that this case is fast.
        with_gradients = [p for p in self._others_of(stepped[0]) if p.grad is not None]
        if not with_gradients:
            return []
        used = set(map(id, parameters_of(*stepped[1:])))
        return [p.grad for p in with_gradients if id(p) not in used and p.grad is not None]

    def _others_of(self, optimizer: Optimizer) -> list[torch.nn.Parameter]:
        """Return the parameters of the models that ``optimizer`` does not have; found once."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._others.get(optimizer)
        if known is not None and known[0] == count:
            return known[1]
        # By id, so that parameters that models share come once.
        seen = set(map(id, parameters_of(optimizer)))
        others: list[torch.nn.Parameter] = []
        for model in self.models:
            for parameter in model.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    others.append(parameter)
        self._others[optimizer] = (count, others)
        return others


@torch.no_grad()
def _follow(gradients: list[torch.Tensor], before: float | torch.Tensor, after: float | torch.Tensor) -> None:
    """Multiply gradients by what the scale was multiplied by."""
    # A scale in a tensor is not read, since that would wait for the device.
    if not isinstance(before, torch.Tensor) and before == after:
        return
    ratio = torch.as_tensor(after) / before
    for gradient in gradients:
        gradient.mul_(ratio.to(gradient.device))


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer holds gradients that are not all zero."""
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
            if bool(values.any()):
                return True
    return False


def has_one_of(parameters: Iterable[torch.Tensor], optimizer: Optimizer) -> bool:
    """Return whether an optimizer has one of these parameters."""
    own = set(map(id, parameters_of(optimizer)))
    return any(id(parameter) in own for parameter in parameters)

"""Steps with a closure that may end half-way, and the count of skipped steps that a scaler tolerates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

Reference = Callable[[], torch.optim.Optimizer | None]


class SkipStep(BaseException):  # no ``except Exception`` of an optimizer stops it
    """Raise it inside a closure to leave the optimizer's step; ``loss`` is what the step then returns."""

    def __init__(self, loss: Any, nonfinite: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.nonfinite = nonfinite or []


def closure_of(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return the closure among the arguments of a ``step``, positional or keyword."""
    closure = kwargs.get("closure", args[0] if args else None)
    return closure if callable(closure) else None


def step_or_restore(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    args: Any,
    kwargs: Any,
    evaluate: Callable[[], Any],
) -> tuple[Any, SkipStep | None]:
    """Call ``step`` with ``evaluate`` in place of its closure; undo it if ``evaluate`` raises ``SkipStep``.

    Holds a copy of parameters and state meanwhile.

    Returns:
        What ``step`` returned, or the loss of a skipped step; and the ``SkipStep``, None if none was raised.
    """
    before = Snapshot(optimizer)
    args, kwargs = with_closure(args, kwargs, evaluate)
    try:
        return step(*args, **kwargs), None
    except SkipStep as skipped:
        before.restore()
        return skipped.loss, skipped


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the arguments of a ``step`` with another closure in place of theirs."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs


class Snapshot:
    """A copy of an optimizer's parameters, state and settings, to undo a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._values = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {key: _copied(value) for key, value in optimizer.state.items()}
        self._settings = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)


def _copied(value: Any) -> Any:
    """Copy tensors and the containers around them; share anything else, which may not be copyable."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def reference_to(optimizer: torch.optim.Optimizer) -> Reference:
    """Return a weak reference, or a strong one to an optimizer whose class has slots."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


class SkipsInARow:
    """Counts the skipped steps of each optimizer since its last step that was taken."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self._skips: dict[int, tuple[Reference, int, int]] = {}

    def took(self, optimizer: torch.optim.Optimizer) -> None:
        self._skips.pop(id(optimizer), None)

    def skipped(self, optimizer: torch.optim.Optimizer, number: int) -> int | None:
        """Count a skip of step ``number``; return the first skip in a row once ``patience`` is used up.

        Counting then starts again, because a caller may catch the error and lower a learning rate.
        """
        known, count, since = self._skips.get(id(optimizer), (None, 0, number))
        if known is None or known() is not optimizer:
            known, count, since = reference_to(optimizer), 0, number
        self._skips[id(optimizer)] = (known, count + 1, since)
        if self.patience is None or count + 1 < self.patience:
            return None
        del self._skips[id(optimizer)]
        return since


def collapse_message(
    optimizer: torch.optim.Optimizer, patience: int, since: int, names: str, scale: str, advice: str
) -> str:
    """Return the message of a ``ScaleCollapseError``; ``scale`` is empty where losses were not scaled."""
    did_not_help = f", and a loss scale of {scale} did not help" if scale else ""
    return (
        f"{patience} steps of {type(optimizer).__name__} in a row were skipped, since step {since}: the "
        f"gradients of {names} are not finite{did_not_help}. The values overflow in the forward pass, or the "
        f"loss itself is not finite: {advice}"
    )

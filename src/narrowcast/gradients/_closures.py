"""What a step that went wrong half-way needs to be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Snapshot:
    """Parameters, state and settings of an optimizer, copied; costs that much memory while it is held."""

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
    """Tensors and the containers around them copied; anything else shared, as it may not be copyable."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def closure_of(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """The closure among the arguments of a ``step``, by position or by keyword."""
    closure = kwargs.get("closure", args[0] if args else None)
    return closure if callable(closure) else None


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> tuple[Any, Any]:
    """The arguments of a ``step`` with another closure in the place of theirs."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs

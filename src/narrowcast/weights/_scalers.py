"""What a held optimizer answers a ``GradScaler``, which knows nothing of gradients of low parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrowcast.errors import NarrowcastError, OrderError
from narrowcast.gradients import ASKED_BY_SCALERS
from narrowcast.weights._keepers import Pair

Refusal = Callable[[], NarrowcastError]


def begin_answering(optimizer: torch.optim.Optimizer, pairs: Sequence[Pair]) -> None:
    """Refuse a scaler's step while low parameters have gradients: it would neither unscale nor check them."""
    setattr(optimizer, ASKED_BY_SCALERS, _Answer(optimizer, pairs))


def refuse_scalers(optimizer: torch.optim.Optimizer, refusal: Refusal) -> None:
    """Have every step of a scaler on this held optimizer raise what ``refusal`` makes, until ``remove``."""
    vars(optimizer)[ASKED_BY_SCALERS].refusal = refusal


def end_answering(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's own answer again."""
    found = vars(optimizer).get(ASKED_BY_SCALERS)
    if isinstance(found, _Answer):
        found.take_back(optimizer)


class _Answer:
    """Whether the optimizer takes a scale itself, asked for at each step by a scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer, pairs: Sequence[Pair]) -> None:
        self._name = type(optimizer).__name__
        self._own: dict[str, Any] = {k: v for k, v in vars(optimizer).items() if k == ASKED_BY_SCALERS}
        self._answer = getattr(optimizer, ASKED_BY_SCALERS, False)
        self._pairs = pairs
        self.refusal: Refusal | None = None

    def __bool__(self) -> bool:
        if self.refusal is not None:
            raise self.refusal()
        if any(pair.low.grad is not None for pair in self._pairs):
            raise OrderError(
                f"a GradScaler is to step this {self._name}, and gradients of its low parameters are still "
                "on them, where they are neither unscaled nor checked: call take_gradients() of what "
                "narrowcast.weights.hold returned after backward, before unscale_ and step"
            )
        return bool(self._answer)

    def take_back(self, optimizer: torch.optim.Optimizer) -> None:
        delattr(optimizer, ASKED_BY_SCALERS)
        vars(optimizer).update(self._own)

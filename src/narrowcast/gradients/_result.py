"""``StepResult``: what one step did, read from the device only when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class StepResult:
    """What became of one step of one optimizer.

    Nothing is read from the device before it is asked for; each answer is then a Python value and stays.

    Attributes:
        returned: what the optimizer's ``step`` returned; None where it was skipped. Of a closure that was
            not finite, its loss.
        complete: False where gradients were added up and no step was due yet (``Stepper(accumulate=...)``).
    """

    __slots__ = ("_found_inf", "_grad_norm", "_name", "_nonfinite", "_scale", "complete", "returned")

    def __init__(
        self,
        *,
        found_inf: torch.Tensor | bool,
        scale: torch.Tensor | float | dict[str, torch.Tensor],
        grad_norm: torch.Tensor | float | None = None,
        nonfinite: Callable[[], tuple[str, ...]] | tuple[str, ...] = (),
        returned: Any = None,
        complete: bool = True,
    ) -> None:
        self._found_inf = found_inf
        self._scale = scale
        self._grad_norm = grad_norm
        self._nonfinite = nonfinite
        self.returned = returned
        self.complete = complete

    @classmethod
    def joined(cls, results: Sequence[StepResult], *, grad_norm: torch.Tensor | None = None) -> StepResult:
        """One result for optimizers that stepped together: all were skipped or none."""
        first = results[0]
        return cls(
            found_inf=first._found_inf,
            scale=first._scale,
            grad_norm=grad_norm,
            nonfinite=lambda: tuple(name for result in results for name in result.nonfinite),
            returned=tuple(result.returned for result in results),
        )

    def skipped_on_device(self) -> torch.Tensor | bool:
        """``skipped`` without waiting: a 0-dim bool tensor where the host does not know yet."""
        return self._found_inf > 0 if isinstance(self._found_inf, torch.Tensor) else self._found_inf

    def learn(self, *, skipped: bool) -> None:
        """The flag has come by another way."""
        self._found_inf = skipped

    @property
    def skipped(self) -> bool:
        """Whether a gradient was NaN or infinite, so that no parameter and no state moved."""
        if isinstance(self._found_inf, torch.Tensor):
            self._found_inf = bool(self._found_inf.item())
        return self._found_inf

    @property
    def scale(self) -> float | dict[str, float]:
        """The loss scale that the gradients were made with; one for each name where scales are named."""
        if isinstance(self._scale, dict):
            return {name: float(scale) for name, scale in self._scale.items()}
        if isinstance(self._scale, torch.Tensor):
            self._scale = float(self._scale)
        return self._scale

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients together, unscaled, before they were clipped; None where nothing clipped.

        Infinite or NaN where a gradient is.
        """
        if isinstance(self._grad_norm, torch.Tensor):
            self._grad_norm = float(self._grad_norm)
        return self._grad_norm

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient held a NaN or an infinity; empty where none did.

        ``"group 0, parameter 3, shape (4, 5)"`` where the optimizer was not given names. All of them where
        torch's ``clip_grad_norm_`` has divided by a norm of NaN before a step on a GPU.
        """
        if callable(self._nonfinite):
            self._nonfinite = self._nonfinite() if self.skipped else ()
        return self._nonfinite

    def __repr__(self) -> str:
        norm = "" if self.grad_norm is None else f", grad_norm={self.grad_norm:.6g}"
        bad = f", nonfinite={self.nonfinite}" if self.skipped else ""
        waiting = "" if self.complete else ", complete=False"
        return f"StepResult(skipped={self.skipped}, scale={self.scale}{norm}{bad}{waiting})"

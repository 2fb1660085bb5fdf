"""What steps as one: optimizers, their scaler, their schedulers, and the window that is being filled."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from narrowcast.errors import OrderError, ScaleCollapseError, SettingError, UnsupportedError
from narrowcast.gradients import GradScaler, StepResult, needs_closure
from narrowcast.scaling import Off
from narrowcast.weights import HeldWeights, held_by

Loss = torch.Tensor | Mapping[str, torch.Tensor]


class Lane:
    """One or several optimizers that step together on the gradients of one window."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: GradScaler,
        schedulers: Sequence[Any],
        *,
        accumulate: int,
        max_norm: float | None,
        max_value: float | None,
    ) -> None:
        self.optimizers = list(optimizers)
        self.scaler = scaler
        self.schedulers = list(schedulers)
        self.accumulate = accumulate
        self.max_norm = max_norm
        self.max_value = max_value
        self.filled = 0
        self.stepping = False
        self._left: list[tuple[int, int]] = []
        self._moved_to: dict[int, int] = {}
        self.held: list[HeldWeights] = [h for o in self.optimizers if (h := held_by(o)) is not None]
        self.needs_closure = any(map(needs_closure, self.optimizers))
        if self.needs_closure and self.held:
            raise UnsupportedError(
                f"{type(self.optimizers[0]).__name__} asks for the loss again and again, which masters "
                "do not follow: use policy 'bf16' or 'fp16'"
            )
        for scheduler in self.schedulers:
            _check_scheduler(scheduler, self.optimizers)
        self._heard = 0
        self.listening = scaler.on_step(_weakly(self._move_schedulers))

    def _move_schedulers(self, _: StepResult) -> None:
        self._heard += 1
        if self._heard % len(self.optimizers):
            return  # the scaler tells of each of several optimizers that step together
        for index, scheduler in enumerate(self.schedulers):
            if self._moved_to.get(index, scheduler.last_epoch) != scheduler.last_epoch:
                warnings.warn(
                    f"{type(scheduler).__name__}.step was called by hand, and the Stepper moves it too: "
                    "leave the call out, or do not give the scheduler to the Stepper",
                    UserWarning,
                    stacklevel=2,
                )
            scheduler.step()
            self._moved_to[index] = scheduler.last_epoch

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch that comes next completes the window."""
        return self.filled + 1 >= self.accumulate

    @property
    def reduces(self) -> bool:
        """Whether DDP reduces the gradients of the micro-batch that comes next.

        Masters take every micro-batch's gradients over, to add them in fp32, so each must be reduced.
        """
        return self.is_last or bool(self.held)

    @property
    def defers(self) -> bool:
        """Whether DDP leaves the gradients of a window that is not full unreduced."""
        return self.accumulate > 1 and not self.held

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What gradients accumulate in: the model's own parameters, held or not."""
        low_of = {working: low for held in self.held for low, working in held.parameters}
        return [
            low_of.get(parameter, parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def backward(
        self,
        loss: Loss,
        *,
        inputs: Sequence[torch.Tensor] | None,
        reduce: Callable[[], None] | None = None,
    ) -> None:
        """Add the gradients of one micro-batch, scaled, and averaged over the window.

        Args:
            reduce: averages gradients that DDP has not seen over the ranks; None without DDP.
        """
        self._check_gradients()
        losses = dict(loss) if isinstance(loss, Mapping) else {None: loss}
        scaled_by_name = not isinstance(self.scaler.initial_loss_scale, Off)
        if scaled_by_name and self.held and isinstance(loss, Mapping):
            raise UnsupportedError(
                "losses by name are unscaled in the format of the weights, which policy 'O2' holds in a low "
                "one: add the losses, or use policy 'fp16'"
            )
        # DDP reduces in the first backward pass after a forward pass, and lets the others go by.
        by_hand = reduce is not None and len(losses) > 1
        for index, (name, one) in enumerate(losses.items()):
            scaled = self.scaler.scale(one, name=name if scaled_by_name else None)
            if self.accumulate > 1:
                scaled = scaled / self.accumulate
            again = index + 1 < len(losses)
            if by_hand:
                _accumulate(scaled, [p for p in self.parameters if p.requires_grad], retain_graph=again)
            else:
                torch.autograd.backward(scaled, inputs=inputs, retain_graph=again)
        if reduce is not None and by_hand and self.reduces:
            reduce()
        for held in self.held:
            held.take_gradients()
        alone = reduce is None and self.scaler.process_group is None
        if alone and not self._gradients():
            raise OrderError(
                f"no parameter of this {type(self.optimizers[0]).__name__} got a gradient from this loss: "
                "compute it from the model that the Stepper was given, with parameters that require gradients"
            )
        self.filled += 1
        self._left = _versions(self._gradients())

    def _gradients(self) -> list[torch.Tensor]:
        return [
            parameter.grad
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def _check_gradients(self) -> None:
        """Refuse to add to gradients that are not those of this window: they are scaled, others are not."""
        present = self._gradients()
        by_hand = [low.grad for held in self.held for low, _ in held.parameters if low.grad is not None]
        if by_hand or not self.filled:
            # Zeros are left by zero_grad(set_to_none=False); reading them is for this case alone.
            if any(bool(gradient.detach().any()) for gradient in by_hand or present):
                raise OrderError(
                    "there are gradients before the window's first backward pass: loss.backward() was "
                    "called by hand, which stepper.step(loss) does, or they were left from before: call "
                    "optimizer.zero_grad()"
                )
        elif _versions(present) != self._left:
            what = "changed" if present else "gone"
            raise OrderError(
                f"the gradients of the first {self.filled} micro-batches are {what}: zero_grad was called, "
                f"or something wrote to them, in the middle of a window of {self.accumulate}. Leave it out: "
                "Stepper zeroes them by itself, and clips them where max_norm or max_value is given"
            )

    def complete(self, filled: float | None = None) -> StepResult:
        """Clip, check and step on the window's gradients, and begin a new one.

        Args:
            filled: so many micro-batches they are the sum of, in the mean of ranks; None: as many as fit.
        """
        if filled is not None and filled < self.accumulate:
            self._average_over(filled)
        return self._within_step(self._step)

    def _within_step(self, step: Callable[[], StepResult]) -> StepResult:
        self.stepping = True
        try:
            result = step()
        except ScaleCollapseError:
            self.scaler.update()
            raise
        except BaseException:
            self.scaler.abandon()
            raise
        finally:
            self.stepping = False
        self.scaler.update()
        return result

    def _average_over(self, filled: float) -> None:
        with torch.no_grad():
            for gradient in self._gradients():
                gradient.mul_(self.accumulate / filled)

    def _step(self) -> StepResult:
        scaler = self.scaler
        if len(self.optimizers) == 1:
            (optimizer,) = self.optimizers
            if self.max_value is not None:
                scaler.clip_grad_value_(optimizer, self.max_value)
            elif self.max_norm is not None:
                scaler.clip_grad_norm_(optimizer, self.max_norm)
            return scaler.step(optimizer)
        norm = None
        for optimizer in self.optimizers:
            scaler.unscale_(optimizer)
            if self.max_value is not None:
                scaler.clip_grad_value_(optimizer, self.max_value)
        if self.max_norm is not None:
            parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
            if scaler.process_group is None:
                norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
            else:
                # The norm of each over all ranks; nothing is above infinity, so nothing is clipped.
                norms = [scaler.clip_grad_norm_(optimizer, math.inf) for optimizer in self.optimizers]
                norm = torch.linalg.vector_norm(torch.stack(norms))
                torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        return StepResult.joined(scaler.step_together(self.optimizers), grad_norm=norm)

    def step_with_closure(self, evaluate: Callable[[], Loss]) -> StepResult:
        """The step of an optimizer that asks for the loss again and again."""
        (optimizer,) = self.optimizers

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = evaluate()
            if not isinstance(loss, torch.Tensor):
                raise SettingError("an optimizer that asks for a closure takes one loss, got several by name")
            self.scaler.scale(loss).backward()
            if self.max_value is not None:
                self.scaler.clip_grad_value_(optimizer, self.max_value)
            elif self.max_norm is not None:
                self.scaler.clip_grad_norm_(optimizer, self.max_norm)
            return loss

        return self._within_step(lambda: self.scaler.step(optimizer, closure))

    def zero(self) -> None:
        """Throw the window's gradients away."""
        self.filled = 0
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        self.scaler.report_pending()  # the schedulers may still have to hear of the last step
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "masters": [held.state_dict() for held in self.held],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, here in (
            ("optimizers", self.optimizers),
            ("masters", self.held),
            ("schedulers", self.schedulers),
        ):
            if len(state.get(name, ())) != len(here):
                raise SettingError(
                    f"expected a state with {len(here)} {name}, as this Stepper has, got "
                    f"{len(state.get(name, ()))}: make it with the arguments of the one that was saved"
                )
        for mine, theirs in zip(self.optimizers, state["optimizers"], strict=True):
            _check_kind(mine, theirs)
            mine.load_state_dict(theirs)
        for held, theirs in zip(self.held, state["masters"], strict=True):
            held.load_state_dict(theirs)
        for scheduler, theirs in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(theirs)
        self._moved_to = {}
        self.scaler.load_state_dict(state["scaler"])


def _accumulate(loss: torch.Tensor, parameters: Sequence[torch.Tensor], *, retain_graph: bool) -> None:
    """A backward pass that DDP does not see."""
    gradients = torch.autograd.grad(loss, parameters, retain_graph=retain_graph, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad += gradient


def _versions(gradients: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Which tensors these are, and how often each was written to."""
    return [(id(gradient), gradient._version) for gradient in gradients]


def _weakly(method: Callable[[StepResult], None]) -> Callable[[StepResult], None]:
    """A listener that does not keep what it calls alive: the scaler may outlive the Stepper."""
    reference = weakref.WeakMethod(method)

    def listen(result: StepResult) -> None:
        call = reference()
        if call is not None:
            call(result)

    return listen


def _check_kind(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    for mine, theirs in zip(optimizer.param_groups, state.get("param_groups", ()), strict=False):
        missing = sorted(set(mine) - set(theirs) - {"params", "param_names"})
        if missing:
            raise SettingError(
                f"expected the state of {type(optimizer).__name__}, got that of another optimizer, without "
                f"{', '.join(missing)}"
            )


def _check_scheduler(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UnsupportedError(
            "ReduceLROnPlateau wants a metric, which Stepper has not: leave it out and call "
            "scheduler.step(metric) after each evaluation"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise SettingError(f"expected a learning-rate scheduler with a step method, got {scheduler!r}")
    if getattr(scheduler, "optimizer", optimizers[0]) not in optimizers:
        raise SettingError(
            f"this {type(scheduler).__name__} is of another optimizer: make it from the one that it moves"
        )


def check_settings(accumulate: int, max_norm: float | None, max_value: float | None) -> None:
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise SettingError(f"accumulate must be a whole number of at least 1, got {accumulate!r}")
    for name, value in (("max_norm", max_norm), ("max_value", max_value)):
        if value is not None and not (isinstance(value, int | float) and value > 0 and not math.isnan(value)):
            raise SettingError(f"{name} must be a number above 0, or None, got {value!r}")
    if max_norm is not None and max_value is not None:
        raise SettingError("expected max_norm or max_value, got both: clip by one of them")

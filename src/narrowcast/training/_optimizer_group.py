"""Optimizers that step together, with their scaler, their schedulers and the gradients accumulated so far."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from narrowcast.errors import OrderError, ScaleCollapseError, SettingError, UnsupportedError
from narrowcast.gradients import GradScaler, StepResult, needs_closure, parameters_of
from narrowcast.weights import HeldWeights, held_by


class OptimizerGroup:
    """One or several optimizers that step together, all or none, on the same accumulated gradients.

    Attributes:
        filled: how many micro-batches the gradients are the sum of.
        stepping: whether the Stepper is stepping them now; a step by hand is refused.
    """

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
        self._written: list[tuple[int, int]] = []
        self._last_epochs: dict[int, Any] = {}
        self.held: list[HeldWeights] = [h for o in self.optimizers if (h := held_by(o)) is not None]
        self.needs_closure = any(map(needs_closure, self.optimizers))
        if self.needs_closure and self.held:
            raise UnsupportedError(
                f"{type(self.optimizers[0]).__name__} evaluates the loss several times a step, which masters "
                "do not support: use policy 'bf16' or 'fp16'"
            )
        for scheduler in self.schedulers:
            _check_scheduler(scheduler, self.optimizers)
        self._results = 0

    def move_schedulers(self, _: StepResult) -> None:
        self._results += 1
        if self._results % len(self.optimizers):
            return  # the scaler reports each of several optimizers that step together
        for index, scheduler in enumerate(self.schedulers):
            # Schedulers without last_epoch, such as ChainedScheduler, cannot be checked.
            epoch = getattr(scheduler, "last_epoch", None)
            if self._last_epochs.get(index, epoch) != epoch:
                warnings.warn(
                    f"{type(scheduler).__name__}.step was called by hand, and the Stepper moves it too: "
                    "leave the call out, or do not give the scheduler to the Stepper",
                    UserWarning,
                    stacklevel=2,
                )
            scheduler.step()
            self._last_epochs[index] = getattr(scheduler, "last_epoch", None)

    @property
    def reduces(self) -> bool:
        """Whether DDP reduces the gradients of the next micro-batch: the last one, or with masters each.

        Masters take over the gradients of every micro-batch, to add them in fp32.
        """
        return self.filled + 1 >= self.accumulate or bool(self.held)

    @property
    def leaves_unreduced(self) -> bool:
        """Whether the gradients of an unfinished accumulation are not reduced by DDP."""
        return self.accumulate > 1 and not self.held

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The model's own parameters, in which gradients accumulate."""
        low_of: dict[torch.Tensor, torch.Tensor]
        low_of = {working: low for held in self.held for low, working in held.parameters}
        return [low_of.get(parameter, parameter) for parameter in parameters_of(*self.optimizers)]

    def _gradients(self) -> list[torch.Tensor]:
        """Return those that the optimizers use: of masters, or of the model's own parameters."""
        return [p.grad for p in parameters_of(*self.optimizers) if p.grad is not None]

    # ---- backward

    def backward(
        self,
        loss: torch.Tensor,
        *,
        inputs: Sequence[torch.Tensor] | None,
        one_rank: bool = True,
    ) -> None:
        """Add the gradients of one micro-batch, scaled, and divided by the number of micro-batches.

        Args:
            inputs: the only parameters that get gradients; None: all.
            one_rank: whether no other rank computes gradients of these parameters.
        """
        self._check_gradients()
        scaled = self.scaler.scale(loss)
        if self.accumulate > 1:
            scaled = scaled / self.accumulate
        torch.autograd.backward(scaled, inputs=inputs)
        for held in self.held:
            held.take_gradients()
        if one_rank and self.scaler.process_group is None and not self._gradients():
            raise OrderError(
                f"no parameter of this {type(self.optimizers[0]).__name__} got a gradient from this loss: "
                "compute it from the model that the Stepper was given, with parameters that require gradients"
            )
        self.filled += 1
        self._written = _versions(self._gradients())

    def _check_gradients(self) -> None:
        """Refuse to add to gradients of another origin: these are scaled, others are not."""
        present = self._gradients()
        by_hand = [low.grad for held in self.held for low, _ in held.parameters if low.grad is not None]
        if by_hand or not self.filled:
            # zero_grad(set_to_none=False) leaves zeros; values are read only in this case.
            if any(bool(gradient.detach().any()) for gradient in by_hand or present):
                raise OrderError(
                    "there are gradients before the first backward pass of the step: loss.backward() was "
                    "called by hand, which stepper.step(loss) does, or they are left over: call "
                    "optimizer.zero_grad()"
                )
        elif _versions(present) != self._written:
            what = "changed" if present else "gone"
            raise OrderError(
                f"the gradients of the first {self.filled} micro-batches are {what}: zero_grad was called, "
                f"or something wrote to them, during an accumulation of {self.accumulate}. Leave it "
                "out: Stepper zeroes them, and clips them if max_norm or max_value is given"
            )

    # ---- step

    def step(self, filled: float | None = None) -> StepResult:
        """Clip, check and step on the accumulated gradients.

        Args:
            filled: the number of micro-batches in them, averaged over the ranks; None: ``accumulate``.
        """
        if filled is not None and filled < self.accumulate:
            with torch.no_grad():
                for gradient in self._gradients():
                    gradient.mul_(self.accumulate / filled)
        return self._guarded(self._clip_and_step)

    def step_with_closure(self, evaluate: Callable[[], torch.Tensor]) -> StepResult:
        """Step an optimizer that evaluates the loss several times, such as LBFGS."""
        (optimizer,) = self.optimizers

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = evaluate()
            if not isinstance(loss, torch.Tensor):
                raise SettingError("an optimizer with a closure takes one loss, got several by name")
            self.scaler.scale(loss).backward()
            self._clip(optimizer)
            return loss

        return self._guarded(lambda: self.scaler.step(optimizer, closure))

    def _guarded(self, step: Callable[[], StepResult]) -> StepResult:
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

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        if self.max_value is not None:
            self.scaler.clip_grad_value_(optimizer, self.max_value)
        elif self.max_norm is not None:
            self.scaler.clip_grad_norm_(optimizer, self.max_norm)

    def _clip_and_step(self) -> StepResult:
        scaler = self.scaler
        if len(self.optimizers) == 1:
            self._clip(self.optimizers[0])
            return scaler.step(self.optimizers[0])
        norm = None
        for optimizer in self.optimizers:
            scaler.unscale_(optimizer)
            if self.max_value is not None:
                scaler.clip_grad_value_(optimizer, self.max_value)
        if self.max_norm is not None:
            parameters = parameters_of(*self.optimizers)
            if scaler.process_group is None:
                norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
            else:
                # The norm of each optimizer over all ranks; at infinity nothing is clipped.
                norms = [scaler.clip_grad_norm_(optimizer, math.inf) for optimizer in self.optimizers]
                norm = torch.linalg.vector_norm(torch.stack(norms))
                torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        return StepResult.joined(scaler.step_together(self.optimizers), grad_norm=norm)

    def zero(self) -> None:
        """Discard the accumulated gradients."""
        self.filled = 0
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def restart(self) -> None:
        """Discard gradients, and accept the schedulers where they are now."""
        self._last_epochs = {}
        self.zero()


def _versions(gradients: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Identify tensors and count the writes to them."""
    return [(id(gradient), gradient._version) for gradient in gradients]


def _check_scheduler(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UnsupportedError(
            "ReduceLROnPlateau needs a metric, which Stepper does not have: leave it out and call "
            "scheduler.step(metric) after each evaluation"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise SettingError(f"expected a learning-rate scheduler with a step method, got {scheduler!r}")
    if getattr(scheduler, "optimizer", optimizers[0]) not in optimizers:
        raise SettingError(
            f"this {type(scheduler).__name__} is of another optimizer: make it from the one that it moves"
        )


def check_loss(loss: Any, group: OptimizerGroup) -> None:
    """Refuse what no backward pass can start from."""
    if group.needs_closure:
        raise OrderError(
            f"{type(group.optimizers[0]).__name__} evaluates the loss several times a step: give step a "
            "function, as stepper.step(lambda: criterion(model(x), y))"
        )
    if not isinstance(loss, torch.Tensor):
        add = ": add several losses" if isinstance(loss, Mapping | Sequence) else ""
        raise SettingError(f"expected a loss or a function, got {type(loss).__name__}{add}")
    if loss.numel() != 1:
        raise SettingError(f"expected a loss of one element, got shape {tuple(loss.shape)}: take its mean")
    if not loss.requires_grad:
        raise OrderError(
            "expected a loss with a graph, got one that needs no gradient: compute it outside "
            "torch.no_grad(), from parameters with requires_grad=True, and give it to step undetached"
        )


# ---- one Stepper for each scaler, and no steps by hand

_GROUPS: weakref.WeakSet[OptimizerGroup] = weakref.WeakSet()
"""Those of every Stepper that exists."""


def claim(group: OptimizerGroup) -> list[RemovableHandle]:
    """Reserve the scaler of a group, watch its optimizers, and let its schedulers move.

    Returns:
        The handles of the hooks, for ``release``.

    Raises:
        SettingError: the scaler belongs to another group, of this Stepper or another.
    """
    if any(other.scaler is group.scaler for other in _GROUPS):
        raise SettingError(
            "this GradScaler is another Stepper's, or another named optimizer's: make one for each, or "
            "delete the other Stepper first (del stepper)"
        )
    _GROUPS.add(group)
    hooks = [optimizer.register_step_pre_hook(_refuse_by_hand) for optimizer in group.optimizers]
    return [*hooks, group.scaler.on_step(group.move_schedulers)]


def release(groups: list[OptimizerGroup], handles: list[RemovableHandle]) -> None:
    """A Stepper was deleted: discard its unfinished gradients, which are scaled."""
    for handle in handles:
        handle.remove()
    for group in groups:
        _GROUPS.discard(group)
        if group.filled:
            group.zero()


def _refuse_by_hand(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    owners = [group for group in _GROUPS if optimizer in group.optimizers]
    if any(group.stepping for group in owners):
        return
    # torch.distributed.checkpoint steps at a rate of 0 to create the state that it is about to load:
    # torch/distributed/checkpoint/state_dict.py, _init_optim_state
    filled = any(group.filled for group in owners)
    if filled or any(group.get("lr") != 0 for group in optimizer.param_groups):
        raise OrderError(
            f"{type(optimizer).__name__}.step was called by hand: its gradients belong to a Stepper and may "
            "be scaled or incomplete. Call result = stepper.step(loss), which steps; to step by hand, delete "
            "the Stepper first (del stepper), which discards an unfinished accumulation"
        )

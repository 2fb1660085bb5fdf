"""Optimizers that step together: their backward passes, their step, and checks against steps by hand."""

from __future__ import annotations

import functools
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from narrowcast.casting import stacklevel_outside
from narrowcast.errors import OrderError, ScaleCollapseError, SettingError, UnsupportedError
from narrowcast.gradients import (
    GradScaler,
    StepResult,
    needs_closure,
    nodes_below,
    parameters_of,
    steps_twice,
)
from narrowcast.weights import HeldWeights, held_by, version_of

# Called for every parameter at every step, where a Python function would take ten times as long.
_gradient_of = operator.attrgetter("grad")


@dataclass(frozen=True)
class Settings:
    """The settings of a Stepper that hold for each group; SettingError if one is outside its range."""

    accumulate: int
    max_norm: float | None
    max_value: float | None

    def __post_init__(self) -> None:
        is_whole = isinstance(self.accumulate, int) and not isinstance(self.accumulate, bool)
        if not is_whole or self.accumulate < 1:
            raise SettingError(f"accumulate must be a whole number of at least 1, got {self.accumulate!r}")
        for name, value in (("max_norm", self.max_norm), ("max_value", self.max_value)):
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise SettingError(f"{name} must be a number above 0, or None, got {value!r}")
        if self.max_norm is not None and self.max_value is not None:
            raise SettingError("expected max_norm or max_value, got both: clip by one of them")


@dataclass(eq=False, repr=False)
class OptimizerGroup:
    """One or several optimizers that step together, all or none, on the same accumulated gradients.

    Attributes:
        filled: how many micro-batches the gradients are summed over so far.
        stepping: whether the Stepper is stepping them now; a step by hand is refused.
    """

    optimizers: list[torch.optim.Optimizer]
    scaler: GradScaler
    schedulers: list[Any]
    settings: Settings
    filled: int = 0
    stepping: bool = False

    def __post_init__(self) -> None:
        self._versions_after_backward: list[tuple[int, int]] = []
        self._last_epochs: dict[int, Any] = {}
        # How many optimizers have reported that they stepped, in a joint step that is not over.
        self._optimizers_stepped = 0
        self._checked_graph = False
        self.accumulate = self.settings.accumulate
        self.held: list[HeldWeights] = []
        for optimizer in self.optimizers:
            held = held_by(optimizer)
            if held is not None:
                self.held.append(held)
        self.needs_closure = any(map(needs_closure, self.optimizers))
        if self.needs_closure and self.held:
            raise UnsupportedError(
                f"{type(self.optimizers[0]).__name__} evaluates the loss several times a step, which masters "
                "do not support: use policy 'bf16' or 'fp16'"
            )
        for scheduler in self.schedulers:
            _check_scheduler(scheduler, self.optimizers)

    def move_schedulers(self, _: StepResult) -> None:
        """Step the schedulers after the last optimizer of a joint step.

        The scaler calls this once for each optimizer that stepped.
        """
        self._optimizers_stepped += 1
        if self._optimizers_stepped < len(self.optimizers):
            return
        self._optimizers_stepped = 0
        for index, scheduler in enumerate(self.schedulers):
            # Schedulers without last_epoch, such as ChainedScheduler, cannot be checked.
            epoch = getattr(scheduler, "last_epoch", None)
            if self._last_epochs.get(index, epoch) != epoch:
                warnings.warn(
                    f"{type(scheduler).__name__}.step was called by hand, and the Stepper moves it too: "
                    "leave the call out, or do not give the scheduler to the Stepper",
                    UserWarning,
                    stacklevel=stacklevel_outside("narrowcast."),
                )
            scheduler.step()
            self._last_epochs[index] = getattr(scheduler, "last_epoch", None)

    @property
    def reduces(self) -> bool:
        """Whether DDP reduces the gradients of the next micro-batch.

        Without masters DDP reduces only the gradients of the last micro-batch, which hold the sum of all.
        Masters take over the gradients of every micro-batch, to add them in fp32, so DDP reduces each.
        """
        return self.filled + 1 >= self.accumulate or bool(self.held)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The model's own parameters, which get the gradients of a backward pass; not their masters."""
        # A master is the working parameter of a low one.
        low_by_working: dict[torch.Tensor, torch.Tensor] = {}
        for held in self.held:
            for low, working in held.parameters:
                low_by_working[working] = low
        return [low_by_working.get(parameter, parameter) for parameter in parameters_of(*self.optimizers)]

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the optimizers use: of masters, or of the model's own parameters."""
        gradients = map(_gradient_of, parameters_of(*self.optimizers))
        return [gradient for gradient in gradients if gradient is not None]

    # ---- backward

    def backward(
        self,
        loss: torch.Tensor,
        *,
        inputs: Sequence[torch.Tensor] | None,
        one_rank: bool = True,
    ) -> None:
        """Add the gradients of one micro-batch, scaled, and divided by the number of micro-batches.

        Only ``inputs`` get gradients, if given. ``one_rank``: DDP does not add the gradients of other ranks.
        """
        parameters = parameters_of(*self.optimizers)
        self._check_gradients(parameters)
        if inputs is not None and not self._checked_graph and loss.grad_fn is not None:
            _refuse_reentrant_checkpoints(loss)
            self._checked_graph = True
        scaled = self.scaler.scale(loss)
        if self.accumulate > 1:
            scaled = scaled / self.accumulate
        torch.autograd.backward(scaled, inputs=inputs)
        for held in self.held:
            held.take_gradients()

        # A loss that gives no gradients is an error, unless other ranks may have some: those of DDP, or those
        # of the scaler's process group. The check is cheap, since ``any`` stops at the first gradient.
        got_gradients = any(parameter.grad is not None for parameter in parameters)
        if one_rank and self.scaler.process_group is None and not got_gradients:
            raise OrderError(
                f"no parameter of this {type(self.optimizers[0]).__name__} got a gradient from this loss: "
                "compute it from the model that the Stepper was given, with parameters that require gradients"
            )
        self.filled += 1
        if self.filled < self.accumulate:
            self._versions_after_backward = _versions(self._gradients())

    def _check_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse to add to gradients that the Stepper did not make: its own are scaled, and those are not."""
        # The set compares no values of tensors, which hash by their identity.
        if not self.filled and not self.held and set(map(_gradient_of, parameters)) == {None}:
            return  # the usual case, so it comes first and is fast

        # Masters take over the gradients of low parameters after each backward pass of the Stepper, so those
        # that are there now come from a backward pass by hand.
        left_by_hand = []
        for held in self.held:
            for low, _ in held.parameters:
                if low.grad is not None:
                    left_by_hand.append(low.grad)
        _refuse_nonzero(left_by_hand)

        gradients = self._gradients()
        if not self.filled:
            # At the start of an accumulation there are none yet.
            _refuse_nonzero(gradients)
        elif _versions(gradients) != self._versions_after_backward:
            what = "changed" if gradients else "gone"
            raise OrderError(
                f"the gradients of the first {self.filled} micro-batches are {what}: zero_grad was called, "
                f"or something wrote to them, during an accumulation of {self.accumulate}. Leave it "
                "out: Stepper zeroes them, and clips them if max_norm or max_value is given"
            )

    # ---- step

    def step(self, mean_filled: float | None = None) -> StepResult:
        """Clip, check and step on the accumulated gradients.

        Args:
            mean_filled: how many micro-batches were accumulated, as the mean over the ranks; None:
                ``accumulate``.
        """
        # Each loss was divided by ``accumulate``: make the sum of fewer micro-batches their mean.
        if mean_filled is not None and mean_filled < self.accumulate:
            with torch.no_grad():
                for gradient in self._gradients():
                    gradient.mul_(self.accumulate / mean_filled)
        # A rank without micro-batches has scaled no loss since the last step, and its scaler would refuse
        # the gradients. They are those of other ranks, whose losses have the same scale.
        if not self.filled:
            device = parameters_of(*self.optimizers)[0].device
            self.scaler.scale(torch.zeros((), device=device))
        return self._guarded(self._clip_and_step)

    def step_with_closure(self, evaluate: Callable[[], torch.Tensor]) -> StepResult:
        """Step an optimizer that evaluates the loss several times, such as LBFGS and SAM."""
        (optimizer,) = self.optimizers

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = evaluate()
            if not isinstance(loss, torch.Tensor):
                raise SettingError("an optimizer with a closure takes one loss, got several by name")
            self.scaler.scale(loss).backward()
            self._clip(optimizer)
            return loss

        def step() -> StepResult:
            if steps_twice(optimizer):
                closure()  # SAM's first half-step uses the gradients that are already in ``.grad``
            return self.scaler.step(optimizer, closure)

        return self._guarded(step)

    def _guarded(self, step: Callable[[], StepResult]) -> StepResult:
        """Call ``step`` and move the scale; after an error, forget the step that was begun."""
        self.stepping = True
        try:
            result = step()
        except ScaleCollapseError:
            # The step was skipped, which lowers the scale. Only steps that were taken are counted, so the
            # joint step need not be restarted.
            self.scaler.update()
            raise
        except BaseException:
            # The step broke off: the scale stays, and some optimizers may be counted already.
            self.scaler.abandon()
            self._restart_joint_step()
            raise
        finally:
            self.stepping = False
        self.scaler.update()
        return result

    def _restart_joint_step(self) -> None:
        """Forget which optimizers stepped before an error, so that the next step counts from the first."""
        # Reports that are still on the way from a GPU would count for the next step: take them now.
        with suppress(Exception):
            self.scaler.report_pending()
        self._optimizers_stepped = 0

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.max_value is not None:
            self.scaler.clip_grad_value_(optimizer, self.settings.max_value)
        elif self.settings.max_norm is not None:
            self.scaler.clip_grad_norm_(optimizer, self.settings.max_norm)

    def _clip_and_step(self) -> StepResult:
        if len(self.optimizers) == 1:
            (optimizer,) = self.optimizers
            self._clip(optimizer)
            return self.scaler.step(optimizer)

        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            if self.settings.max_value is not None:
                self.scaler.clip_grad_value_(optimizer, self.settings.max_value)
        norm = None
        if self.settings.max_norm is not None:
            norm = self._clip_by_joint_norm(self.settings.max_norm)
        return StepResult.joined(self.scaler.step_together(self.optimizers), grad_norm=norm)

    def _clip_by_joint_norm(self, max_norm: float) -> torch.Tensor:
        """Clip unscaled gradients by the norm of those of all optimizers."""
        # With a max_norm of infinity the scaler only measures the norm, over all ranks. It also skips the
        # step if the norm itself is infinite: clipping by that norm would set all gradients to zero.
        norms = [self.scaler.clip_grad_norm_(optimizer, math.inf) for optimizer in self.optimizers]
        norm = functools.reduce(torch.hypot, norms)  # squares nothing that could overflow
        torch.nn.utils.clip_grads_with_norm_(parameters_of(*self.optimizers), max_norm, norm)
        return norm

    def zero(self) -> None:
        """Discard the accumulated gradients."""
        self.filled = 0
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def restart(self) -> None:
        """Discard gradients, and accept the schedulers where they are now."""
        self._last_epochs = {}
        self.zero()


def _refuse_nonzero(gradients: Sequence[torch.Tensor]) -> None:
    """Refuse gradients that no Stepper made; zeros are those of ``zero_grad(set_to_none=False)``."""
    if any(bool(gradient.detach().any()) for gradient in gradients):
        raise OrderError(
            "there are gradients that no stepper.step(loss) made: loss.backward() was called by "
            "hand, which stepper.step(loss) does, or they are left over: call optimizer.zero_grad()"
        )


def _versions(gradients: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Identify tensors and count the writes to them."""
    return list(zip(map(id, gradients), map(version_of, gradients), strict=True))


def _check_scheduler(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UnsupportedError(
            "ReduceLROnPlateau needs a metric, which Stepper does not have: leave it out and call "
            "scheduler.step(metric) after each evaluation"
        )
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise SettingError(f"expected a learning-rate scheduler with a step method, got {scheduler!r}")
    if getattr(scheduler, "optimizer", optimizers[0]) not in optimizers:
        raise SettingError(
            f"this {type(scheduler).__name__} is of another optimizer: make it from the one that it moves"
        )


def check_loss(loss: Any, group: OptimizerGroup | None = None) -> None:
    """Refuse what no backward pass can start from."""
    if group is not None and group.needs_closure:
        raise OrderError(
            f"{type(group.optimizers[0]).__name__} evaluates the loss several times a step: give step a "
            "function, as stepper.step(lambda: criterion(model(x), y))"
        )
    if isinstance(loss, Mapping | list | tuple):
        raise SettingError(f"expected a loss, got {type(loss).__name__}: add several losses")
    if not isinstance(loss, torch.Tensor):
        raise SettingError(f"expected a loss, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise SettingError(f"expected a loss of one element, got shape {tuple(loss.shape)}: take its mean")
    if not loss.requires_grad:
        raise OrderError(
            "expected a loss with a graph, got one that needs no gradient: compute it outside "
            "torch.no_grad(), from parameters with requires_grad=True, and do not detach it"
        )


def _refuse_reentrant_checkpoints(loss: torch.Tensor) -> None:
    """Refuse a graph that hides parameters from a backward pass with ``inputs``.

    torch raises only if the path to one of the ``inputs`` leads through the checkpoint. Otherwise it skips
    the checkpoint, and the parameters inside get no gradients.
    """
    for node in nodes_below([loss.grad_fn]):
        if node.name() == "CheckpointFunctionBackward":
            raise UnsupportedError(
                "an activation checkpoint with use_reentrant=True hides its parameters from named "
                "optimizers, each of which asks for its own gradients alone: pass use_reentrant=False"
            )


def is_fp32(loss: torch.Tensor, model: torch.nn.Module) -> bool:
    """Return whether ``loss`` was certainly computed from fp32 weights without a cast."""
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return False
    if loss.grad_fn is None:  # a parameter, which nothing computed
        return False
    for node in nodes_below([loss.grad_fn]):
        # A function written in Python, or compiled, may cast inside.
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        if node.name() == "ToCopyBackward0":
            return False
    return True


# ---- one Stepper for each scaler, and no steps by hand

_GROUPS: weakref.WeakSet[OptimizerGroup] = weakref.WeakSet()
"""The groups of all Steppers that exist."""


def claim(group: OptimizerGroup) -> list[RemovableHandle]:
    """Reserve the scaler of a group, watch its optimizers, and let its schedulers move; return the handles.

    Raises:
        SettingError: the scaler belongs to another group, of this Stepper or another.
    """
    if any(other.scaler is group.scaler for other in _GROUPS):
        raise SettingError(
            "this GradScaler is another Stepper's, or another named optimizer's: make one for each, or "
            "delete the other Stepper first (del stepper)"
        )
    _GROUPS.add(group)
    handles: list[RemovableHandle] = []
    for optimizer in group.optimizers:
        handles.append(optimizer.register_step_pre_hook(functools.partial(_refuse_by_hand, group)))
    if group.schedulers:
        handles.append(group.scaler.on_step(group.move_schedulers))
    return handles


def release(groups: list[OptimizerGroup], handles: list[RemovableHandle]) -> None:
    """Undo ``claim``, when a Stepper is deleted or making it fails; discard unfinished, scaled gradients."""
    for handle in handles:
        handle.remove()
    for group in groups:
        _GROUPS.discard(group)
        if group.filled:
            group.zero()


def _refuse_by_hand(group: OptimizerGroup, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if group.stepping:  # the usual case; ``group`` is one of the owners below, which take longer to find
        return
    # Two Steppers may have one optimizer, as in two phases of training.
    owners = [owner for owner in _GROUPS if optimizer in owner.optimizers]
    if any(owner.stepping for owner in owners):
        return

    # torch.distributed.checkpoint steps at a rate of 0 to create the state that it is about to load:
    # torch/distributed/checkpoint/state_dict.py, _init_optim_state
    at_rate_0 = all(param_group.get("lr") == 0 for param_group in optimizer.param_groups)
    if at_rate_0 and not any(owner.filled for owner in owners):
        return
    raise OrderError(
        f"{type(optimizer).__name__}.step was called by hand: its gradients belong to a Stepper and may "
        "be scaled or incomplete. Call result = stepper.step(loss), which steps; to step by hand, delete "
        "the Stepper first (del stepper), which discards an unfinished accumulation"
    )

"""narrowcast in Accelerate: one policy for the models of an ``Accelerator``, with narrowcast's scaler."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from narrowcast.casting import (
    Applied,
    PolicyRegion,
    applied_to,
    cast_floating,
    refuse_in_torchscript,
    refuse_missed_by_all,
)
from narrowcast.errors import OrderError, PolicyError, ScaleCollapseError, SettingError
from narrowcast.gradients import GradScaler, StepResult, parameters_of
from narrowcast.integrations._first_step import FirstStep
from narrowcast.integrations._guards import ChangedGradients, StepsOfHost
from narrowcast.integrations._hosts import require
from narrowcast.integrations._region import formats_on, host_policy, refuse_low_weights, scaler_for
from narrowcast.integrations._scale import ScaleUpdates, has_one_of
from narrowcast.integrations._skips import HostSkips, plain_call
from narrowcast.policy import Policy, resolve

require("accelerate", "1.10", "accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

_ENGINES = {
    DistributedType.DEEPSPEED: "the engine of DeepSpeed scales and steps by itself",
    DistributedType.MEGATRON_LM: "Megatron-LM scales and steps by itself",
    DistributedType.FSDP: "the plugin shards and casts by itself: shard by narrowcast.integrations.fsdp2",
}
_ADVICE = (
    "call another method than its forward inside 'with accelerator.autocast():', and let nothing else in or "
    "around the model cast: write rules into the policy instead"
)


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    policy: Policy | str = "auto",
    scaler: GradScaler | None = None,
    fp32_outputs: bool = True,
    explain_skips: bool = False,
) -> Any:
    """Prepare models, optimizers, data loaders and schedulers; the models compute by ``policy``.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> from narrowcast.integrations.accelerate import prepare
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = prepare(accelerator, model, optimizer, policy="bf16")
    >>> accelerator.backward(model(torch.ones(2, 4)).square().mean())
    >>> optimizer.step()
    >>> accelerator.optimizer_step_was_skipped
    False

    Everything else stays as Accelerate's documentation has it. Compute the loss in the model or outside. A
    step with a NaN or infinite gradient, of any micro-batch, is skipped, and the scheduler waits;
    ``optimizer.result`` is the step's ``nc.StepResult``. The statistics of batch norms move in a skipped step
    too. ``accelerator.autocast()`` opens the region of the policy. ``save_state`` and ``load_state`` keep the
    state of the scaler. What ``accelerator.prepare`` gets later follows the policy too.

    Args:
        accelerator: it has ``mixed_precision="no"``, and has prepared no optimizer yet.
        objects: what ``accelerator.prepare`` takes.
        policy: a preset, a ``Policy``, or the path of one.
        scaler: by default a dynamic loss scale in fp16, and in other formats only the check of gradients.
        fp32_outputs: cast fp16 and bf16 tensors in the outputs of models to fp32, as Accelerate does in mixed
            precision. False saves their memory.
        explain_skips: run a skipped step again, and log where its first infinity or NaN arose
            (docs/stepper.md).

    Returns:
        What ``accelerator.prepare(*objects)`` returns.

    Raises:
        SettingError: the accelerator has mixed precision, handlers for it, or a sharding engine; or
            ``scaler`` is no ``nc.GradScaler``.
        PolicyError: the policy does not exist or does not fit a model, or the weights of a model are in a low
            format; at the first step of an optimizer: a layer has computed in another format, or no model of
            the optimizer was prepared.
        OrderError: prepared twice, or after an optimizer; at a step: ``accelerator.scaler`` was replaced.
    """
    if not isinstance(accelerator, Accelerator):
        raise SettingError(
            f"expected an Accelerator first, got a {type(accelerator).__name__}: write "
            "prepare(accelerator, model, optimizer, policy=...)"
        )
    for value in objects:
        if isinstance(value, str | Policy):
            raise SettingError(
                f"expected objects to prepare, got {value!r} among them: write policy={value!r}"
            )
        is_sequence = isinstance(value, list | tuple)
        if is_sequence and any(isinstance(each, torch.nn.Module | torch.optim.Optimizer) for each in value):
            raise SettingError(
                f"expected objects to prepare one by one, got a {type(value).__name__}, in which Accelerate "
                "prepares nothing: write prepare(accelerator, *objects, policy=...)"
            )
    models = [value for value in objects if isinstance(value, torch.nn.Module)]
    if models:
        refuse_missed_by_all(host_policy(policy), models)
    Attachment(accelerator, policy, scaler, fp32_outputs=fp32_outputs, explain_skips=explain_skips)
    return accelerator.prepare(*objects)


class Attachment:
    """A policy on an ``Accelerator``: replaces what the accelerator does about precision by narrowcast's.

    Args:
        trains_one_model: each rule must select something in the model that is trained.

    The other arguments are those of ``prepare``.

    Attributes:
        scaler: the accelerator's from now on.
        region: of the policy, on the accelerator's device.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        policy: Policy | str,
        scaler: GradScaler | None,
        *,
        fp32_outputs: bool,
        explain_skips: bool,
        trains_one_model: bool = False,
    ) -> None:
        _refuse_other_precision(accelerator)
        self._accelerator = accelerator
        self._policy = host_policy(policy)
        self._fp32_outputs = fp32_outputs
        self._trains_one_model = trains_one_model
        device = accelerator.device.type
        self._formats = {device: resolve(self._policy, device)}
        self.region = PolicyRegion(self._policy, self._formats, warnings.warn, warns=True)
        on_scheduler = "pass the scheduler to prepare too, and step what it returns"
        self.scaler = scaler_for({}, self._formats, scaler, on_scheduler=on_scheduler)
        # The call of a prepared model opens the region itself.
        self._skips = HostSkips(self._policy, plain_call) if explain_skips else None

        self._first_steps: weakref.WeakKeyDictionary[torch.nn.Module, FirstStep] = weakref.WeakKeyDictionary()
        self._prepared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._names: dict[int, str] = {}
        self._updates = ScaleUpdates()
        # Whether ``accelerator.backward`` has scaled a loss at all.
        self._was_scaled = False
        # Whether Accelerate's own clipping is running.
        self._is_clipping = False
        self._steps_of_host = StepsOfHost(
            "pass the optimizer to prepare too, and step what it returns (or accelerator.prepare, later)"
        )
        self._changed = ChangedGradients("accelerator.backward(loss)", "accelerator.clip_grad_norm_")

        self._host_prepare_model: Callable[..., Any] = accelerator.prepare_model
        self._host_prepare_optimizer: Callable[..., Any] = accelerator.prepare_optimizer
        self._host_backward: Callable[..., Any] = accelerator.backward
        self._host_clip_grad_norm: Callable[..., Any] = accelerator.clip_grad_norm_
        self._host_clip_grad_value: Callable[..., Any] = accelerator.clip_grad_value_
        accelerator.scaler = self.scaler
        accelerator.prepare_model = self.prepare_model
        accelerator.prepare_optimizer = self.prepare_optimizer
        accelerator.backward = self.backward
        accelerator.unscale_gradients = self.unscale_gradients
        accelerator.clip_grad_norm_ = self.clip_grad_norm_
        accelerator.clip_grad_value_ = self.clip_grad_value_
        accelerator.autocast = self.autocast
        # An update that is due comes first: it is part of what is saved, and does not move what is loaded.
        accelerator.register_save_state_pre_hook(lambda *_: self.update())
        accelerator.register_load_state_pre_hook(lambda *_: self.update())

    # ---- in place of the methods of the accelerator

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        has_weights = next(model.parameters(), None) is not None
        is_new = has_weights and model not in self._prepared
        is_trained = not evaluation_mode and any(weight.requires_grad for weight in model.parameters())
        if is_trained:
            refuse_low_weights(model)
        if is_new:
            self._prepared.add(model)
            # It may have been prepared by another accelerator.
            if applied_to(model, self._policy) is None:
                how = "make another model: this one keeps the policy that it was prepared with"
                # Strict only if there is no other model that a rule could be for.
                strict = self._trains_one_model and is_trained
                refuse_in_torchscript(self._policy, model)
                Applied(model, self._policy, strict=strict, how_to_end=how)

        prepared = self._host_prepare_model(model, device_placement, evaluation_mode)
        if is_trained and model not in self._first_steps:
            # Accelerate has moved the model to its device.
            formats = formats_on(model, self._policy)
            self._first_steps[model] = FirstStep(model, self._policy, formats, advice=_ADVICE)
            self._steps_of_host.watch(model, scales_losses=self.scaler.scales_losses)
            if self.scaler.scales_losses:
                self._changed.watch(model)
            self._updates.add(model)
            if self._skips is not None:
                self._skips.watch(model)
            self._names |= {id(parameter): name for name, parameter in model.named_parameters()}
            self.scaler.name_parameters(self._names)
        if is_new and self._fp32_outputs:
            # After the hooks of the first step, which see what was computed.
            model.register_forward_hook(_in_fp32)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        prepared = self._host_prepare_optimizer(optimizer, device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = _Optimizer
            prepared.attachment = self
            prepared._uncounted = deque()
        if getattr(prepared, "attachment", self) is not self:
            raise OrderError(
                f"expected an optimizer of torch, got a {type(prepared.optimizer).__name__} that another "
                "Accelerator has prepared: make a new one"
            )
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._was_scaled = True
        if self._updates.is_due:
            self._changed.end()
        self._updates.before_backward(self.scaler, [each.optimizer for each in self._optimizers])
        self._host_backward(loss, **kwargs)
        self._changed.after_backward()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        if not self._accelerator.sync_gradients:
            if self.scaler.scales_losses:
                raise OrderError(
                    "expected gradients to be unscaled or clipped after the last micro-batch of a step, got "
                    'one before it: write "if accelerator.sync_gradients:" above the line'
                )
            return  # nothing to divide by; they are checked with the last micro-batch

        if optimizer is None:
            # Accelerate's clipping calls this without an optimizer. ``_clip`` has then unscaled already.
            optimizers = [] if self._is_clipping else [each.optimizer for each in self._optimizers]
        elif isinstance(optimizer, list | tuple):
            optimizers = [each.optimizer for each in optimizer]
        else:
            optimizers = [optimizer.optimizer]
        if optimizers:
            self._refuse_unscaled_loss()
        for each in optimizers:
            if each not in self._updates.unscaled:
                self._changed.before_unscaling(each, self.scaler.get_scale)
                self.scaler.unscale_(each)
                self._updates.unscaled.add(each)

    def clip_grad_norm_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return self._clip(self._host_clip_grad_norm, parameters, args, kwargs)

    def clip_grad_value_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return self._clip(self._host_clip_grad_value, parameters, args, kwargs)

    def _clip(self, clip: Callable[..., Any], parameters: Any, args: Any, kwargs: Any) -> Any:
        """Unscale the gradients of the optimizers that have ``parameters``, and clip these.

        Accelerate unscales those of all optimizers: one that still accumulates would then add scaled
        gradients to unscaled ones.
        """
        wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizers = self._optimizers
        if len(optimizers) > 1:
            optimizers = [each for each in optimizers if has_one_of(wanted, each)]
        self.unscale_gradients(optimizers)
        self._is_clipping = True
        try:
            return clip(wanted, *args, **kwargs)
        finally:
            self._is_clipping = False

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        if autocast_handler is not None and not autocast_handler.enabled:
            return torch.autocast(self._accelerator.device.type, enabled=False)
        return self.region

    # ---- steps

    def _refuse_unscaled_loss(self) -> None:
        if not self._was_scaled:
            raise OrderError(
                "expected accelerator.backward(loss), which scales the loss, before the optimizer's step: "
                "write it in place of loss.backward()"
            )

    def step(self, optimizer: _Optimizer, closure: Callable[[], Any] | None) -> StepResult:
        is_first = optimizer.result is None
        if closure is None:
            self._refuse_unscaled_loss()
            if optimizer.optimizer not in self._updates.unscaled:
                self._changed.before_unscaling(optimizer.optimizer, self.scaler.get_scale)
            if is_first:
                self._prove(optimizer)
        if self._accelerator.scaler is not self.scaler:
            raise OrderError(
                "expected accelerator.scaler to stay, got another one after prepare: give it to prepare as "
                "scaler=nc.GradScaler(...)"
            )

        arguments: list[Callable[[], Any]] = []
        if closure is not None:
            # If an update is due, make it now: otherwise ``backward``, which the closure calls, would make it
            # inside the step, where the scaler refuses it.
            self.update()
            arguments.append(self._checked_closure(optimizer, closure, is_first=is_first))

        try:
            result: StepResult = self.scaler.step(optimizer.optimizer, *arguments)
        except ScaleCollapseError:
            self._updates.stepped(optimizer.optimizer)
            raise
        except BaseException:
            # As out of memory, after which the caller may try again with smaller batches.
            self._updates.abandon(self.scaler)
            raise
        self._updates.stepped(optimizer.optimizer)
        optimizer.count(result)
        # Others may still have to step on gradients of this scale, which moves with the next backward pass.
        is_only = len(self._optimizers) == 1
        if is_only:
            self._changed.end()
            self.update()
        if self._skips is not None:
            self._skips.step_ended(result, self.scaler, self._formats, may_step_again=not is_only)
        return result

    def _checked_closure(
        self, optimizer: _Optimizer, closure: Callable[[], Any], *, is_first: bool
    ) -> Callable[[], Any]:
        """Return a closure that evaluates ``closure``, and in the first step proves the policy."""

        def evaluate() -> Any:
            # Each evaluation has gradients of its own, which are scaled.
            self._updates.unscaled.discard(optimizer.optimizer)
            loss = closure()
            if is_first:
                self._prove(optimizer)
            return loss

        return evaluate

    def update(self) -> None:
        """Move the scale, if a step was made since the last time."""
        self._updates.update(self.scaler)

    def _prove(self, optimizer: _Optimizer) -> None:
        """Raise unless the models whose weights this optimizer is about to change computed by the policy."""
        weights = set(map(id, parameters_of(optimizer.optimizer)))
        trained = []
        for model in self._first_steps:
            if any(id(parameter) in weights for parameter in model.parameters()):
                trained.append(model)
        if not trained:
            raise PolicyError(
                "expected an optimizer of a model that was prepared with the policy, got an "
                f"{type(optimizer.optimizer).__name__} of other parameters: prepare their model too, and "
                "train in one process for each device (DataParallel is not prepared)"
            )
        for model in trained:
            refuse_low_weights(model)
            self._first_steps[model].end()
        self._steps_of_host.first_step_is_over(trained)

    @property
    def _optimizers(self) -> list[_Optimizer]:
        # Accelerate has no public name for what it has prepared. The list is read each time, since
        # ``free_memory`` empties it.
        prepared: list[_Optimizer] = self._accelerator._optimizers
        return prepared


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer that Accelerate has prepared, and that an ``Attachment`` steps.

    Accelerate's own class counts a step as skipped if the optimizer was not called. Fused optimizers are
    called in any case, and skip on the device.
    """

    attachment: Attachment
    result: StepResult | None = None
    _skipped_steps = 0
    # Results that only a device knows yet.
    _uncounted: deque[StepResult]

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; waits for the device."""
        while self._uncounted:
            self._skipped_steps += self._uncounted.popleft().skipped
        return self._skipped_steps

    def count(self, result: StepResult) -> None:
        self._uncounted.append(result)
        while self._uncounted and self._uncounted[0].is_known:
            self._skipped_steps += self._uncounted.popleft().skipped

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self.result = self.attachment.step(self, closure)

    @property
    def step_was_skipped(self) -> bool:
        return self.result is not None and self.result.skipped


def _in_fp32(_model: torch.nn.Module, _inputs: Any, outputs: Any) -> Any:
    return cast_floating(outputs, torch.float32)


def _refuse_other_precision(accelerator: Accelerator) -> None:
    """Refuse an accelerator that would cast, scale or step by itself."""
    if accelerator.mixed_precision != "no":
        raise SettingError(
            'expected Accelerator(mixed_precision="no"), since the policy decides, got '
            f'"{accelerator.mixed_precision}": write "no" there, and in "accelerate config" or "accelerate '
            'launch --mixed_precision"'
        )
    for handler in (accelerator.scaler_handler, accelerator.autocast_handler):
        if handler is not None:
            raise SettingError(
                f"expected no {type(handler).__name__}, which would have no effect: give scaler= and policy= "
                "to narrowcast.integrations.accelerate.prepare"
            )
    if accelerator.distributed_type in _ENGINES:
        raise SettingError(
            f"expected one process for each device with a copy of the model, got "
            f"{accelerator.distributed_type.value}: {_ENGINES[accelerator.distributed_type]}"
        )
    if accelerator.scaler is not None:
        raise OrderError(
            "expected an Accelerator without a scaler, got one that was prepared already: prepare it once, "
            "and use accelerator.prepare for what comes later"
        )
    if accelerator._optimizers:
        raise OrderError(
            "expected an Accelerator that has prepared no optimizer, got one that has: replace "
            "accelerator.prepare by narrowcast.integrations.accelerate.prepare"
        )

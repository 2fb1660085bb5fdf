"""The precision plugins for Lightning and Fabric, without their base classes.

``lightning`` and ``pytorch_lightning`` each refuse a plugin that is built on the classes of the other. So the
plugins are written here once, and ``integrations.lightning`` and ``integrations.pytorch_lightning`` put them
on the base classes of either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from narrowcast.casting import ModelRegion, cast_floating, refuse_missed_by_all
from narrowcast.errors import OrderError, PolicyError, ScaleCollapseError, UnsupportedError
from narrowcast.gradients import GradScaler, StepResult, needs_closure, parameters_of
from narrowcast.integrations._first_step import FirstStep
from narrowcast.integrations._guards import ChangedGradients, StepsOfHost
from narrowcast.integrations._region import formats_on, host_policy, refuse_low_weights, region_of, scaler_for
from narrowcast.integrations._scale import ScaleUpdates
from narrowcast.integrations._skips import HostSkips
from narrowcast.policy import Policy, policy_name


def _nothing() -> None:
    pass


def _identity(value: Any) -> Any:
    return value


class Plugin:
    """What both plugins do: the region, the loss scale, and the step that is skipped.

    Attributes:
        policy: the policy in force.
        scaler: the scaler; None until a model was set up, if none was given.
        last_result: the result of the last step of any optimizer; None before the first one.
        skipped_steps: how many steps were skipped since the plugin was made.
    """

    # For messages: what to write in this host.
    _how_to_connect: str
    _advice: str
    _how_to_backward: str
    _how_to_clip: str
    _how_to_step: str
    _on_scheduler: str
    # Whether the region keeps the casts of weights; None is torch's default.
    _caches: bool | None = None

    def __init__(
        self, policy: Policy | str, *, scaler: GradScaler | None = None, explain_skips: bool = False
    ) -> None:
        self.policy = host_policy(policy)
        self.scaler: Any = scaler
        self._explain_skips = explain_skips
        self._skips: HostSkips | None = None
        self.last_result: StepResult | None = None
        self.skipped_steps = 0
        # The handle of the scaler's listener that counts skipped steps.
        self._counting: Any = None
        self._formats: dict[str, torch.dtype] = {}
        self._regions: list[ModelRegion] = []
        # Whether the host has set up a model at all.
        self._was_set_up = False
        # Models that the host set up and that have no region yet.
        self._new_models: list[torch.nn.Module] = []
        # Models to train that were not called in the region yet.
        self._unproven: list[torch.nn.Module] = []
        # Models to train whose first step is not over, each with the check of it.
        self._first_steps: list[tuple[torch.nn.Module, FirstStep]] = []
        # id of a parameter -> its name, of all models.
        self._names: dict[int, str] = {}
        # Whether the host trains, and does not only evaluate.
        self._trains = True
        self._updates = ScaleUpdates()
        # Whether the host has scaled a loss at all.
        self._was_scaled = False
        self._steps_of_host = StepsOfHost(self._how_to_step)
        self._changed = ChangedGradients(self._how_to_backward, self._how_to_clip)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({policy_name(self.policy)!r})"

    # ---- the region

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # The host moves it to its device after this call.
        self._new_models.append(module)
        return module

    def _set_up(self) -> None:
        """Make the region and the scaler for the models that the host set up since the last call."""
        if not self._new_models:
            if not self._was_set_up:
                raise OrderError(
                    f"expected a model that {self!r} was set up with, got none: {self._how_to_connect}"
                )
            return
        # A loss that is a module has no parameters.
        models = [model for model in self._new_models if next(model.parameters(), None) is not None]
        self._was_set_up = True
        self._new_models = []
        if not models:
            return
        refuse_missed_by_all(self.policy, [*self._updates.models, *models])
        for model in models:
            self._formats |= formats_on(model, self.policy)
            self._names |= {id(parameter): name for name, parameter in model.named_parameters()}
        self.scaler = scaler_for(self._names, self._formats, self.scaler, on_scheduler=self._on_scheduler)
        if self._counting is None:
            self._counting = self.scaler.on_skip(self._count_skip)
        for model in models:
            self._regions.append(region_of(model, self.policy, self._formats, caches=self._caches))
            self._updates.add(model)
            if any(parameter.requires_grad for parameter in model.parameters()):
                self._unproven.append(model)
                if self._trains:
                    self._steps_of_host.watch(model, scales_losses=self.scaler.scales_losses)
                    if self.scaler.scales_losses:
                        self._changed.watch(model)
        if self._explain_skips:
            self._watch(models)

    def _count_skip(self, _result: StepResult) -> None:
        self.skipped_steps += 1

    def _watch(self, models: list[torch.nn.Module]) -> None:
        """Record the calls of the models, so that a skipped step can be explained."""
        if self._skips is None:
            only_one = models[0] if len(models) == 1 else None
            self._skips = HostSkips(self.policy, self._call_again, only_one)
        for model in models:
            self._skips.watch(model)
            # A LightningModule calls the models in it, and is seldom called itself.
            for child in model.children():
                if next(child.parameters(), None) is not None:  # not a metric
                    self._skips.watch(child)

    def _call_again(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._regions[-1]:
            return module(*args, **kwargs)

    def forward_context(self) -> AbstractContextManager[None]:
        self._set_up()
        if self._unproven and torch.is_grad_enabled():
            # Checked here and not in ``_set_up``, since modules may have been replaced after that.
            for model in self._unproven:
                refuse_low_weights(model)
                first_step = FirstStep(model, self.policy, self._formats, advice=self._advice)
                self._first_steps.append((model, first_step))
            self._unproven.clear()
        if not self._regions:
            return nullcontext()
        # The last one covers the devices of all models; rules for modules hold in any region of the policy.
        return self._regions[-1]

    def _end_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the first step of the models that ``optimizer`` trains; others may not have been called yet."""
        if not self._unproven and not self._first_steps:
            return
        trained = set(map(id, parameters_of(optimizer)))
        for model in self._unproven:
            if _has_one_of(model, trained):
                raise PolicyError(
                    f"expected the first step to compute in the region of {self!r}, got one that did not: "
                    f"{self._advice}"
                )
        due: list[FirstStep] = []
        later: list[tuple[torch.nn.Module, FirstStep]] = []
        for model, first_step in self._first_steps:
            if _has_one_of(model, trained):
                due.append(first_step)
            else:
                later.append((model, first_step))
        self._first_steps = later
        for first_step in due:
            first_step.end()

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Turn the region off for a backward pass, which manual optimization runs inside it."""
        with ExitStack() as off:
            for device in self._formats:
                off.enter_context(torch.autocast(device, enabled=False))
            yield

    # ---- the step

    def _scale(self, loss: torch.Tensor) -> torch.Tensor:
        self._set_up()
        self._was_scaled = True
        # An optimizer has stepped: the first step, which alone is watched, is over.
        if self._updates.is_due:
            self._changed.end()
        self._updates.before_backward(self.scaler)
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def _update(self) -> None:
        """Move the scale, if an optimizer stepped since it was last moved."""
        self._updates.update(self.scaler)

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale and check the gradients, unless that was done since the last step."""
        self._set_up()
        if not self._was_scaled:
            raise OrderError(
                f"expected a backward pass by the host, which scales the loss, before the step of "
                f"{type(optimizer).__name__}: write {self._how_to_backward} in place of loss.backward()"
            )
        # Both checks may raise, so they come before anything is unscaled.
        if optimizer not in self._updates.unscaled:
            self._changed.before_unscaling(optimizer, self.scaler.get_scale)
        # Also after clipping, which has unscaled: a model may have been called since.
        self._end_first_step(optimizer)
        if optimizer not in self._updates.unscaled:
            self.scaler.unscale_(optimizer)
            self._updates.unscaled.add(optimizer)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        before_step: Callable[[], object],
        **kwargs: Any,
    ) -> Any:
        """Evaluate ``closure``, call ``before_step`` on unscaled gradients, and step if they are finite.

        Returns what the closure returned.
        """

        def evaluate() -> Any:
            loss = closure()
            self._unscale(optimizer)
            before_step()
            return loss

        def evaluate_again() -> Any:
            self._updates.unscaled.discard(optimizer)
            return evaluate()

        self._set_up()
        try:
            if needs_closure(optimizer):
                # If an update is due, make it now: otherwise the closure's backward pass would make it inside
                # the step, where the scaler refuses it.
                self._update()
                # The scaler restores the optimizer from a copy if the gradients of an evaluation are not
                # finite.
                result = self.scaler.step(optimizer, closure=evaluate_again, **kwargs)
                returned = result.returned
            else:
                returned = evaluate()
                result = self.scaler.step(optimizer, **kwargs)
        except ScaleCollapseError:
            # The gradients were checked, so the scale moves, as after any skipped step.
            self._updates.stepped(optimizer)
            raise
        except BaseException:
            # As out of memory, after which the host may try again with smaller batches.
            self._updates.abandon(self.scaler)
            raise
        self._updates.stepped(optimizer)
        if self._steps_of_host.is_on:
            trained = set(map(id, parameters_of(optimizer)))
            over = [model for model in self._updates.models if _has_one_of(model, trained)]
            self._steps_of_host.first_step_is_over(over)
        self.last_result = result
        if self._skips is not None:
            self._skips.step_ended(result, self.scaler, self._formats, may_step_again=True)
        return returned

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        if self.scaler is None:
            self._set_up()
        self._update()
        state: dict[str, Any] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is None:
            self._set_up()
        self._update()  # an update that is due would otherwise move the loaded scale
        self.scaler.load_state_dict(state_dict)

    def teardown(self) -> None:
        if self._updates.is_due:
            self._update()
        elif self._regions:  # without one, this plugin has not used its scaler
            # An error may have ended training during a step.
            self._updates.abandon(self.scaler)
        self._updates = ScaleUpdates()
        self._steps_of_host.end()
        self._changed.end()
        if self._counting is not None:
            self._counting.remove()
            self._counting = None
        for _, first_step in self._first_steps:
            first_step.remove()
        self._first_steps.clear()
        if self._skips is not None:
            self._skips.remove()
            self._skips = None
        for region in self._regions:
            region.remove()
        self._regions.clear()
        self._new_models.clear()
        self._unproven.clear()
        self._names.clear()
        self._was_set_up = False


class TrainerPlugin(Plugin):
    """The plugin of ``Trainer``, to be put in front of its ``Precision``."""

    _how_to_connect = "give it to Trainer(plugins=[...]) before trainer.fit"
    _advice = "delete torch.autocast, .half() and .bfloat16() from the LightningModule and its callbacks"
    _how_to_backward = "self.manual_backward(loss)"
    _how_to_clip = "self.clip_gradients(...)"
    _how_to_step = "step what self.optimizers() returns"
    _on_scheduler = (
        'step it by the host, with interval="step" and frequency=1, or if not '
        "trainer.precision_plugin.last_result.skipped"
    )
    # False, as in the host's own precision: one region is around all of ``training_step``, which may call a
    # module several times (a GAN its discriminator). With a kept cast the gradients of those calls would be
    # summed in the low format. Without one each is cast to fp32 first, and they are summed in fp32.
    _caches = False
    _strategies: tuple[type, ...]
    # The host's own, which has no public name: hooks before the step, and clipping.
    _after_closure: Callable[..., None]

    def __init__(
        self, policy: Policy | str, *, scaler: GradScaler | None = None, explain_skips: bool = False
    ) -> None:
        super().__init__(policy, scaler=scaler, explain_skips=explain_skips)
        # The result of the last step of each optimizer.
        self._results: dict[torch.optim.Optimizer, StepResult | None] = {}

    def convert_module(self, module: Any) -> Any:
        try:
            strategy = module.trainer.strategy
        except (AttributeError, RuntimeError):
            raise OrderError(
                f"expected a LightningModule with a Trainer for {self!r}, got a {type(module).__name__} "
                "without one: in Fabric write FabricPrecision in place of NarrowcastPrecision"
            ) from None
        # DeepSpeed's is a subclass of DDP's.
        is_deepspeed = any(kind.__name__ == "DeepSpeedStrategy" for kind in type(strategy).__mro__)
        if is_deepspeed or not isinstance(strategy, self._strategies):
            names = " or ".join(kind.__name__ for kind in self._strategies)
            raise UnsupportedError(
                f"expected {names} for {self!r}, got {type(strategy).__name__}, which casts and steps by "
                "itself: leave strategy out, or write strategy='ddp'"
            )
        return super().convert_module(module)

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        self._trains = bool(optimizers)
        self._set_up()
        for config in lr_schedulers:
            # A scheduler with a frequency of n would lose n steps for one that was skipped.
            if config.interval == "step" and config.frequency == 1:
                _pause_after_skips(config.scheduler, self._results)
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        # Hooks get the loss before it is scaled.
        return self._scale(super().pre_backward(tensor, module))  # type: ignore[misc]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with self._outside():
            super().backward(*args, **kwargs)  # type: ignore[misc]
        self._changed.after_backward()

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Manual optimization gives the host's wrapper of the optimizer, before the step. Optimizers that wrap
        # another one, as Lookahead, have an ``optimizer`` too.
        if hasattr(type(optimizer), "toggle_model"):
            self._unscale(optimizer.optimizer)
        else:
            self._unscale(optimizer)
        super().clip_gradients(optimizer, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if not needs_closure(optimizer):
            loss = closure()
            # ``training_step`` returned None: the host leaves the step out.
            if loss is None and model.automatic_optimization:
                return None
            closure = functools.partial(_identity, loss)
        before_step = functools.partial(self._after_closure, model, optimizer)
        returned = self._step(optimizer, closure, before_step, **kwargs)
        self._results[optimizer] = self.last_result
        return returned

    def teardown(self) -> None:
        super().teardown()
        self._results.clear()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the scale of the host's own precision, if the checkpoint is of that."""
        state = checkpoint.get("MixedPrecision")
        if state and self.scaler.scales_losses:
            self.scaler.load_state_dict(state)


class FabricPlugin(Plugin):
    """The plugin of ``Fabric``, to be put in front of its ``Precision``."""

    _how_to_connect = "give it to Fabric(plugins=[...]), and set the model up by fabric.setup"
    _advice = (
        "call what fabric.setup returned, another method than its forward inside 'with fabric.autocast():', "
        "and delete torch.autocast, .half() and .bfloat16() around it"
    )
    _how_to_backward = "fabric.backward(loss)"
    _how_to_clip = "fabric.clip_gradients(model, optimizer, ...)"
    _how_to_step = "step the optimizer that fabric.setup returned"
    _on_scheduler = "write if not plugin.last_result.skipped: scheduler.step()"

    def __init__(
        self,
        policy: Policy | str,
        *,
        scaler: GradScaler | None = None,
        fp32_outputs: bool = True,
        explain_skips: bool = False,
    ) -> None:
        super().__init__(policy, scaler=scaler, explain_skips=explain_skips)
        self.fp32_outputs = fp32_outputs

    def convert_output(self, data: Any) -> Any:
        return cast_floating(data, torch.float32) if self.fp32_outputs else data

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        scaled = self._scale(tensor)
        with self._outside():
            super().backward(scaled, model, *args, **kwargs)  # type: ignore[misc]
        self._changed.after_backward()

    def unscale_gradients(self, optimizer: Any) -> None:
        self._unscale(optimizer)

    def optimizer_step(self, optimizer: Any, *, closure: Callable[[], Any] = _nothing, **kwargs: Any) -> Any:
        return self._step(optimizer, closure, _nothing, **kwargs)


def _has_one_of(model: torch.nn.Module, weights: set[int]) -> bool:
    return any(id(parameter) in weights for parameter in model.parameters())


def _pause_after_skips(scheduler: Any, results: Mapping[torch.optim.Optimizer, StepResult | None]) -> None:
    """Have ``scheduler.step`` do nothing after a step of its optimizer that was skipped."""
    kind = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        result = results.get(self.optimizer)
        if result is None or not result.skipped:
            kind.step(self, *args, **kwargs)

    # A subclass, since an attribute ``step`` of the scheduler itself would be saved in its state.
    names = {"step": step, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    scheduler.__class__ = type(kind.__name__, (kind,), names)

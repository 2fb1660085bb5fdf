"""``nc.GradScaler``: scales losses and steps optimizers; drop-in for ``torch.amp.GradScaler``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from narrowcast.errors import OrderError, ScaleError, UnsupportedError
from narrowcast.gradients import _scales
from narrowcast.gradients._check import clamp, clip_unscaled, scaled_by
from narrowcast.gradients._iteration import Iteration, OptimizerStates
from narrowcast.gradients._optimizer_gradients import gradients_of
from narrowcast.gradients._scales import DeviceScale
from narrowcast.gradients._steps import Listener, Outcomes, StepResult, closure_of
from narrowcast.gradients._torch_internals import untraced, wants_the_scaler
from narrowcast.scaling import Dynamic, LossScale, scale_in, state_of


def _setting(name: str) -> Any:
    """Return a property that reads and writes the setting ``name`` of a dynamic loss scale."""

    def read(scaler: TorchNames) -> Any:
        value = scaler._loss_scale.settings
        if not isinstance(value, Dynamic):
            raise ScaleError(f"{type(value).__name__} has no {name}: only Dynamic has")
        return getattr(value, name)

    def write(scaler: TorchNames, value: Any) -> None:
        scaler._loss_scale.change(**{name: value})

    return property(read, write)


def _initial(name: str) -> Any:
    """Return a property for a value at the start: as in torch, writing it has no effect on a placed scale."""

    def read(scaler: TorchNames) -> Any:
        return getattr(scaler._loss_scale.settings, name, 0)

    def write(scaler: TorchNames, value: Any) -> None:
        if scaler._loss_scale.factor is None:
            scaler._loss_scale.change(**{name: value})

    return property(read, write)


class TorchNames:
    """Private attributes of ``torch.amp.GradScaler`` that other libraries read and write.

    For example, Accelerate calls ``_lazy_init_scale_growth_tracker`` to put the scale on its device. Training
    scripts write to ``_scale``, to keep the scale above a floor, and to the flags in
    ``_per_optimizer_states``. Each name behaves as torch's does.
    """

    _loss_scale: DeviceScale
    _iteration: Iteration
    _enabled: bool

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        unused = [name for name in ("_maybe_opt_step", "_unscale_grads_") if name in vars(cls)]
        if unused:
            raise UnsupportedError(
                f"{cls.__name__} overrides {' and '.join(unused)} of torch.amp.GradScaler, which ours does "
                "not call: override unscale_ or step, or use on_step and on_skip"
            )

    # The getters and setters that are inherited from torch, such as ``set_growth_factor``, use these three.
    _growth_factor = _setting("growth_factor")
    _backoff_factor = _setting("backoff_factor")
    _growth_interval = _setting("growth_interval")
    _init_scale, _init_growth_tracker = _initial("scale"), _initial("good_steps")

    @property
    def _scale(self) -> torch.Tensor | None:
        self._iteration.scale_was_read()
        return self._loss_scale.factor

    @_scale.setter
    def _scale(self, value: torch.Tensor | None) -> None:
        if value is not None:
            self._loss_scale.place(value.device)
            self._loss_scale.change(scale=_scales.one_number(value))

    @property
    def _growth_tracker(self) -> torch.Tensor | None:
        return self._loss_scale.good_steps

    @_growth_tracker.setter
    def _growth_tracker(self, value: torch.Tensor | None) -> None:
        if value is not None:
            self._loss_scale.place(value.device)
            self._loss_scale.change(good_steps=int(value))

    @property
    def _per_optimizer_states(self) -> Any:  # torch's type of it is another mapping
        return self._iteration.states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        self._iteration.states = OptimizerStates()
        for key, state in states.items():
            self._iteration.states[key] = state

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self._loss_scale.place(torch.device(dev))


class GradScaler(TorchNames, torch.amp.GradScaler):
    """Scale losses so that small gradients survive in fp16, and step only on finite gradients.

    Drop-in for ``torch.amp.GradScaler``, of which it is a subclass, with the same scales, parameters and
    optimizer states to the bit. docs/deviations.md lists the differences, each with a test. Call its methods
    in this order:

    >>> import torch
    >>> import narrowcast as nc
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = nc.GradScaler("cpu")
    >>> scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
    >>> norm = scaler.clip_grad_norm_(optimizer, 1.0)  # unscales and clips in one pass
    >>> result = scaler.step(optimizer)  # .skipped, .scale, .grad_norm, .nonfinite
    >>> scaler.update()
    >>> result.skipped
    False

    Args:
        device: type of the device, such as ``"cuda"``; None: that of the first loss.
        init_scale: the scale at the start; from ``min_scale`` to ``max_scale``.
        growth_factor: multiplied in after ``growth_interval`` good steps in a row; above 1.
        backoff_factor: multiplied in after a step with a gradient that is not finite; between 0 and 1.
        growth_interval: good steps in a row before the scale grows; at least 1.
        enabled: False: losses are not scaled, gradients not checked, and ``step`` is the optimizer's.
        min_scale: lower limit; None: 2**-126, the smallest normal float32.
        max_scale: upper limit; None: 2**127.
        hysteresis: overflows in a row until the scale backs off (apex's rule); at least 1.
        patience: skipped steps in a row of one optimizer after which ``step`` raises; None: never.
        loss_scale: a loss scale of ``narrowcast.scaling`` in place of the settings above, such as
            ``Static(scale=8.0)`` or ``Dynamic(rule="megatron", hysteresis=2)``.
        process_group: ranks that skip together and clip by one norm. DDP's gradients agree without it, and
            DTensors use the groups of their mesh in any case.
        sharded: each rank of ``process_group`` holds different gradients, parts of one model, whose norms add
            up. By default they are copies, and copies that differ are an error.
        allow_fp16_gradients: accept gradients in fp16, although small updates are lost.

    Gradients may be on several devices, sparse, or DTensors. NaN and infinities skip a step; subnormals and
    -0.0 do not. The scale stays within [min_scale, max_scale]. Below a scale of 1 gradients are checked again
    after unscaling, so that no infinity reaches a parameter. With ``fused=True`` optimizers on CUDA there is
    no host sync: listeners and ``patience`` act at most one step late, and not at all in a CUDA graph.

    A scaler cannot be copied or pickled between the first ``unscale_``, clipping or ``step`` and ``update``,
    nor with listeners or a process group.

    Raises:
        ScaleError: at construction, for a setting outside its range.
        DeviceError: torch has no such device, or this machine lacks it.

    Source: https://docs.pytorch.org/docs/stable/amp.html
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        patience: int | None = 25,
        loss_scale: LossScale | None = None,
        process_group: Any | None = None,
        sharded: bool = False,
        allow_fp16_gradients: bool = False,
    ) -> None:
        value = _scales.loss_scale_of(
            loss_scale,
            scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
        )
        self._enabled = bool(enabled)
        self._device = _scales.device_type_of(device, enabled=self._enabled)  # type: ignore[assignment]
        # Arguments of ``Iteration``, kept for copies of the scaler.
        self._settings = {"sharded": sharded, "allow_fp16": allow_fp16_gradients}
        self._begin(value, Outcomes(patience), process_group)

    def _begin(self, value: LossScale, outcomes: Outcomes, process_group: Any | None) -> None:
        self._loss_scale = DeviceScale(value)
        self._outcomes = outcomes
        self._iteration = Iteration(self._loss_scale, outcomes, process_group=process_group, **self._settings)

    # ---- one iteration

    def scale(self, outputs: Any) -> Any:
        """Multiply ``outputs`` by the loss scale.

        Args:
            outputs: a tensor, or any nesting of lists, tuples, named tuples, dicts and other iterables of
                tensors. fp16 and bf16 come back in fp32, so that the product cannot overflow.

        Raises:
            ValueError: something inside is not a tensor.
        """
        if not self._enabled:
            return outputs
        scaled = self._loss_scale.times(outputs)
        self._iteration.loss_scaled(scaled)
        return scaled

    @untraced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and check them, without a host sync.

        Afterwards clip or inspect ``p.grad``. Call it once for each ``step``, after the last backward.

        Raises:
            OrderError: called twice, after ``step``, or without a ``scale`` since the last ``update``.
            ScaleError: gradients in fp16, without ``allow_fp16_gradients``.
        """
        if self._enabled:
            self._iteration.unscale(optimizer)

    @untraced
    def clip_grad_norm_(
        self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Unscale the optimizer's gradients and clip their norm, in one read of them.

        With a ``fused=True`` optimizer the division and the clipping happen inside its step, so ``p.grad`` is
        still scaled between this call and ``step``. Changing it there is an error; to inspect unscaled
        gradients call ``unscale_`` first. The result equals that of ``unscale_`` and
        ``torch.nn.utils.clip_grad_norm_`` to 1e-6. After ``unscale_`` it only clips.

        Args:
            optimizer: the optimizer whose gradients are clipped.
            max_norm: gradients of a larger norm are clipped to it; at least 0. With infinity the norm is only
                measured.
            norm_type: the order of the norm, above 0. 2 and infinity take one read of the gradients; for
                other orders they are unscaled first.

        Returns:
            The norm of all gradients together, unscaled and before clipping: 0-dim, on the scale's device.
            NaN or infinite if a gradient is; the step is then skipped.

        Raises:
            ScaleError: a ``max_norm`` that is negative or NaN; parameters instead of their optimizer;
                gradients in fp16, without ``allow_fp16_gradients``.
            OrderError: called before ``scale`` or after ``step``.
        """
        order = float(norm_type)
        _scales.check_clipping(optimizer, "max_norm", max_norm, order)
        if self._enabled:
            return self._iteration.clip_norm(optimizer, max_norm, order)
        gradients = gradients_of(optimizer, allow_fp16=True, summed=True)
        return clip_unscaled(gradients, max_norm, order, scaled_by(1.0, gradients)).norm

    @untraced
    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, value: float) -> None:
        """Unscale the optimizer's gradients and clamp each element to [-value, value]; NaN stays NaN.

        The check comes first: a gradient that was infinite skips the step.

        Raises:
            The errors of ``clip_grad_norm_``.
        """
        _scales.check_clipping(optimizer, "value", value)
        value = float(value)  # torch.nn.utils.clip_grad_value_ takes a tensor of one element too
        if self._enabled:
            self._iteration.clip_value(optimizer, value)
        else:
            clamp(gradients_of(optimizer, allow_fp16=True, summed=True), value)

    @untraced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> StepResult:  # type: ignore[override]
        """Unscale and check the gradients if that is still to do, and step if they are finite.

        A closure, positional or keyword, calls ``zero_grad`` and ``scale(loss).backward()`` and returns the
        loss. Its gradients are unscaled and checked at each evaluation. If they are not finite, the step
        ends, and parameters and state are restored from a copy.

        If no parameter has a gradient, as they had in earlier steps, this warns, and ``update`` does not move
        the scale.

        Returns:
            The result; ``.returned`` is what the optimizer's ``step`` returned.

        Raises:
            OrderError: called twice, without a ``scale`` since the last ``update``, without any gradient so
                far, or with gradients that came after ``unscale_``.
            ScaleCollapseError: ``patience`` steps of this optimizer in a row were skipped.
            ScaleError: gradients in fp16, without ``allow_fp16_gradients``.
            UnsupportedError: ranks of ``process_group`` hold different gradients.
        """
        if not self._enabled:
            result = StepResult(found_inf=False, scale=1.0, returned=optimizer.step(*args, **kwargs))
            self._outcomes.report(optimizer, result, self._outcomes.next_number())
            return result

        # First report earlier steps, so that listeners are called in the order of the steps.
        self._outcomes.report_pending()
        iteration = self._iteration
        if iteration.schedulers:
            iteration.schedulers.stepping(optimizer)

        closure = closure_of(args, kwargs)
        iteration.stepping = True
        try:
            if closure is not None:
                return iteration.step_with_closure(optimizer, closure, args, kwargs)
            if wants_the_scaler(optimizer):
                return iteration.step_by_itself(optimizer, args, {**kwargs, "grad_scaler": self})
            return iteration.step(optimizer, args, kwargs)
        finally:
            iteration.stepping = False

    @untraced
    def step_together(self, optimizers: Iterable[torch.optim.Optimizer]) -> tuple[StepResult, ...]:
        """Step all of these optimizers, or none if a gradient of any of them is not finite.

        Returns:
            A result for each optimizer, all of them skipped or none. ``nonfinite`` of each names only
            parameters of that optimizer.

        Raises:
            OrderError, and the other errors of ``step``.
        """
        to_step = list(optimizers)
        if not self._enabled or not to_step:
            return tuple(self.step(optimizer) for optimizer in to_step)
        self._outcomes.report_pending()
        if self._iteration.schedulers:
            for optimizer in to_step:
                self._iteration.schedulers.stepping(optimizer)

        self._iteration.stepping = True
        try:
            return self._iteration.step_together(to_step)
        finally:
            self._iteration.stepping = False

    @untraced
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End the iteration and update the scale.

        Args:
            new_scale: set the scale to this instead; a number, or a tensor of one element (which is read).

        Raises:
            OrderError: called before ``scale``, or no gradients were checked since the last ``update``.
            ScaleError: a ``new_scale`` outside the limits of the loss scale.
        """
        if not self._enabled:
            return
        factor = self._loss_scale.factor_for("update")

        # One flag stands for all optimizers: the scale backs off once if any of them overflowed.
        if new_scale is not None:
            self._loss_scale.change(scale=_scales.one_number(new_scale))
        else:
            flags = self._iteration.overflow_flags(factor.device)
            if not flags and not self._iteration.may_lack_checks():
                self._iteration.forget_steps()
                raise OrderError(
                    "No inf checks were recorded prior to update: call step(optimizer), or "
                    "unscale_(optimizer), after backward and before update"
                )
            if flags:
                self._loss_scale.move(flags[0] if len(flags) == 1 else torch.stack(flags).amax())
        self._iteration.end()

    def report_pending(self) -> None:
        """Call the listeners for steps whose flag was still on the device; waits for it.

        Raises:
            ScaleCollapseError: ``patience`` steps in a row were skipped.
        """
        self._outcomes.report_pending()

    def abandon(self) -> None:
        """Forget this iteration without updating the scale, for example after an error."""
        self._iteration.end()

    # ---- listeners

    def on_step(self, listener: Listener) -> RemovableHandle:
        """Call ``listener(result)`` after each step that was taken.

        A scheduler that is stepped here (``lambda _: scheduler.step()``) stays in step with the optimizer.

        Returns:
            A handle; ``handle.remove()`` removes the listener.
        """
        return self._outcomes.listen(self._outcomes.on_step, listener)

    def on_skip(self, listener: Listener) -> RemovableHandle:
        """Call ``listener(result)`` after each step that was skipped."""
        return self._outcomes.listen(self._outcomes.on_skip, listener)

    # ---- settings

    def get_scale(self) -> float:
        """Return the loss scale, 1.0 if disabled; waits for the device."""
        if not self._enabled:
            return 1.0
        self._iteration.scale_was_read()
        return float(self._loss_scale.read().scale)

    @property
    def process_group(self) -> Any | None:
        """Ranks that skip together, or None."""
        return self._iteration.process_group

    @property
    def scales_losses(self) -> bool:
        """Whether losses are multiplied by a scale: False only for ``loss_scale=Off()``."""
        return self._loss_scale.scales

    def factor_on(self, device: torch.device) -> torch.Tensor:
        """Return the loss scale, 0-dim fp32 on ``device``, for gradients that ``step`` will not unscale."""
        return self._loss_scale.factor_on(device)

    def factor(self) -> float | torch.Tensor:
        """Return the loss scale: a number; if only a device holds it, a copy there, 0-dim fp32."""
        return self._loss_scale.copied()

    def name_parameters(self, names: Mapping[int, str], *, refuses_steps_by_hand: bool = True) -> None:
        """Set names of parameters that take precedence over those of the optimizer.

        Args:
            names: the name of each parameter, by the parameter's ``id``.
            refuses_steps_by_hand: whether the caller, such as a ``Stepper``, refuses ``optimizer.step()`` by
                hand; the scaler then does not watch for it.
        """
        self._iteration.names = dict(names)
        self._iteration.refuses_steps_by_hand = refuses_steps_by_hand

    def advise_for_host(self, *, on_collapse: str, on_scheduler: str) -> None:
        """Set the advice in messages, for a host such as Lightning that owns the training loop.

        Args:
            on_collapse: the end of the message of ``ScaleCollapseError``.
            on_scheduler: the end of the warning that a scheduler moved after a skipped step.
        """
        self._outcomes.advice_on_collapse = on_collapse
        self._iteration.schedulers.advice = on_scheduler

    def loss_scale(self) -> LossScale:
        """Return the loss scale as a value, with its counts; waits for the device."""
        return self._loss_scale.read()

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to resume: ``loss_scale`` and, if it is dynamic, torch's entries.

        A disabled scaler returns the same, so that an enabled one can load it. Call it after ``update``.
        """
        return state_of(self._loss_scale.read())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class or of ``torch.amp.GradScaler``, even if disabled.

        The empty state of torch's disabled scaler changes nothing and warns.

        Raises:
            ScaleError: an entry is missing or outside its range.
        """
        value = scale_in(state_dict, self._loss_scale.settings, in_force=self._enabled)
        # Do not report steps from before the load: a listener could move a scheduler that was loaded as well.
        self._outcomes.pending.clear()
        if value is not None:
            self._loss_scale.set(value)

    def __getstate__(self) -> dict[str, Any]:
        # Flags and gradients of an iteration that has begun belong to this scaler's optimizers.
        if self._enabled and self._iteration.states:
            raise OrderError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end "
                "after scaler.update()."
            )
        if self.process_group is not None or self._outcomes.on_step or self._outcomes.on_skip:
            raise UnsupportedError(
                "a GradScaler with listeners or a process_group, which copies would lose, cannot be copied "
                "or pickled: save its state_dict()"
            )
        return {
            "enabled": self._enabled,
            "device": self._device,
            "settings": self._settings,
            "patience": self._outcomes.patience,
            "loss_scale": self._loss_scale.read(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._enabled, self._device, self._settings = state["enabled"], state["device"], state["settings"]
        self._begin(state["loss_scale"], Outcomes(state["patience"]), None)

    def __repr__(self) -> str:
        if not self._enabled:
            return "GradScaler(enabled=False)"
        kind = type(self._loss_scale.settings).__name__
        if not self._loss_scale.on_host:
            return f"GradScaler({kind})"
        return f"GradScaler({kind}, scale={self._loss_scale.read().scale:g})"

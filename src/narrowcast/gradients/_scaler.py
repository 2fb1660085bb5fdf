"""``nc.GradScaler``: the loss-scaling half of mixed precision, drop-in for ``torch.amp.GradScaler``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from narrowcast.errors import OrderError, ScaleError
from narrowcast.gradients import _saved, _settings
from narrowcast.gradients._closures import closure_of
from narrowcast.gradients._held import held_gradients
from narrowcast.gradients._iteration import Iteration
from narrowcast.gradients._look import clamp, clip_by_torch
from narrowcast.gradients._outcomes import Listener, Outcomes
from narrowcast.gradients._result import StepResult
from narrowcast.gradients._scales import Scales
from narrowcast.gradients._torch_internals import untraced, wants_the_scaler
from narrowcast.gradients._torch_names import TorchNames
from narrowcast.scaling import Dynamic, LossScale


class GradScaler(TorchNames, torch.amp.GradScaler):  # type: ignore[override]
    """Scales losses so that small gradients survive in fp16, and steps only on finite ones.

    Drop-in for ``torch.amp.GradScaler``, of which it is an instance: on the same events it gives the same
    scales, parameters and optimizer states to the bit. docs/deviations.md lists where it differs, each with a
    test. Called in this order::

        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)  # in place of unscale_ and torch.nn.utils.clip_grad_norm_
        result = scaler.step(optimizer)         # result.skipped, .scale, .grad_norm, .nonfinite
        scaler.update()

    Args:
        device: type of the device, as ``"cuda"``; None: that of the first loss.
        init_scale: the scale at the start; from ``min_scale`` to ``max_scale``.
        growth_factor: multiplied in after ``growth_interval`` good steps in a row; above 1.
        backoff_factor: multiplied in after a step with a gradient that is not finite; between 0 and 1.
        growth_interval: good steps in a row before the scale grows; at least 1.
        enabled: False: losses are not scaled, gradients not checked, and ``step`` is the optimizer's.
        min_scale: no backoff goes below; None: 2**-126, the smallest normal float32.
        max_scale: no growth goes above; None: 2**127.
        hysteresis: overflows in a row until the scale backs off (apex's rule); at least 1.
        patience: skipped steps in a row of one optimizer after which ``step`` raises; None: never.
        loss_scale: a loss scale of ``narrowcast.scaling`` in place of the settings above, such as
            ``Static(scale=8.0)`` or ``Dynamic(rule="megatron", hysteresis=2)``.
        process_group: ranks that skip together and clip by one norm. DDP's gradients agree by themselves, and
            DTensors are asked over their mesh in any case.
        sharded: each rank of ``process_group`` holds different gradients, parts of one model, whose norms add
            up. By default they are taken for copies, and copies that differ are an error.
        allow_fp16_gradients: go on where gradients are in fp16, though small updates are lost.

    Gradients may be on several devices, sparse, or DTensors. NaN and infinities of either sign skip a step;
    subnormals and -0.0 are numbers like any other. A scale never leaves [min_scale, max_scale], and where it
    is below 1 gradients are checked again after unscaling, so that none reaches a parameter as infinity.
    With ``fused=True`` optimizers on CUDA nothing waits for the device: listeners and ``patience`` act at
    most one step late; in a CUDA graph they do not act. Not picklable between ``scale`` and ``update``;
    listeners and groups stay behind.

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
        first = _settings.loss_scale_of(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
            loss_scale=loss_scale,
        )
        self._enabled = bool(enabled)
        self._device = _settings.device_type_of(device, enabled=self._enabled)  # type: ignore[assignment]
        self._settings = {"sharded": sharded, "allow_fp16": allow_fp16_gradients}
        self._begin(Scales(first), Outcomes(patience), process_group)

    def _begin(self, scales: Scales, outcomes: Outcomes, process_group: Any | None) -> None:
        self._scales, self._outcomes = scales, outcomes
        self._iteration = Iteration(scales, outcomes, process_group=process_group, **self._settings)

    # ---- one iteration

    def scale(self, outputs: Any, name: str | None = None) -> Any:
        """``outputs`` times the loss scale.

        Args:
            outputs: a tensor, or any nesting of lists, tuples, named tuples, dicts and other iterables of
                tensors. Those in fp16 and bf16 come back in fp32, so that the product cannot overflow.
            name: the scale of this loss, where each loss has its own. Gradients are then unscaled before they
                accumulate: ``p.grad`` is true from ``backward`` on, and losses may share parameters. Name
                every loss of a scaler or none.

        Raises:
            ValueError: something inside is no tensor.
            ScaleError: a named and an unnamed loss in one scaler.
            UnsupportedError: a named loss that goes through a reentrant checkpoint.
        """
        return self._scales.times(outputs, name) if self._enabled else outputs

    @untraced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and check them; waits for nothing.

        Afterwards ``p.grad`` is true: clip it or look at it. Once for each ``step``, after the last backward.

        Raises:
            OrderError: before ``scale``, twice, or after ``step``.
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
        still scaled between this call and ``step``. Changing it there is an error; to look at true gradients
        call ``unscale_`` first. The result equals that of ``unscale_`` and ``torch.nn.utils.clip_grad_norm_``
        to 1e-6. After ``unscale_`` it only clips.

        Args:
            max_norm: the largest norm that is left as it is; at least 0, infinity only measures.
            norm_type: the order; 2 and infinity take one read, others unscale first.

        Returns:
            The norm of all gradients together, unscaled and before clipping: 0-dim, on the scale's device.
            NaN or infinite where a gradient is; the step is then skipped.

        Raises:
            ScaleError: a ``max_norm`` that is negative or NaN; parameters instead of their optimizer.
            OrderError: before ``scale`` or after ``step``.
            ScaleError: gradients in fp16, without ``allow_fp16_gradients``.
        """
        _settings.check_clipping(optimizer, "max_norm", max_norm)
        if self._enabled:
            return self._iteration.clip_norm(optimizer, max_norm, float(norm_type))
        return clip_by_torch(optimizer, max_norm, float(norm_type))

    @untraced
    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, value: float) -> None:
        """Unscale the optimizer's gradients and clamp each element to [-value, value]; NaN stays NaN.

        The check sees gradients as they were: one that was infinite still skips the step.

        Raises:
            OrderError: and whatever else ``clip_grad_norm_`` raises.
        """
        _settings.check_clipping(optimizer, "value", value)
        if self._enabled:
            self._iteration.clip_value(optimizer, value)
        else:
            clamp(held_gradients(optimizer, allow_fp16=True, summed=True), value)

    @untraced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> StepResult:  # type: ignore[override]
        """Unscale and check the gradients if nobody has, and let the optimizer step if they are finite.

        A closure, by position or by keyword, is evaluated with gradients unscaled and checked inside: it
        calls ``zero_grad`` and ``scale(loss).backward()`` and returns the loss, as without a scaler. An
        evaluation that is not finite ends the step and restores parameters and state, of which a copy is
        held.

        Returns:
            What became of it; ``.returned`` is what the optimizer's ``step`` returned.

        Raises:
            OrderError: before ``scale``, twice, or without any gradient.
            ScaleCollapseError: ``patience`` steps of this optimizer in a row were skipped.
            ScaleError: gradients in fp16, without ``allow_fp16_gradients``.
            UnsupportedError: ranks of ``process_group`` hold different gradients.
        """
        if not self._enabled:
            result = StepResult(found_inf=False, scale=1.0, returned=optimizer.step(*args, **kwargs))
            self._outcomes.now(optimizer, result, self._outcomes.next_number())
            return result
        self._outcomes.settle()
        closure = closure_of(args, kwargs)
        if closure is not None:
            return self._iteration.step_with_closure(optimizer, closure, args, kwargs)
        if wants_the_scaler(optimizer):
            kwargs["grad_scaler"] = self
        return self._iteration.step(optimizer, args, kwargs)

    @untraced
    def step_together(self, optimizers: Iterable[torch.optim.Optimizer]) -> tuple[StepResult, ...]:
        """Step all of these optimizers, or none where a gradient of any of them is not finite.

        Returns:
            A result for each, all skipped or none; ``nonfinite`` holds each one's own parameters.

        Raises:
            OrderError: and whatever else ``step`` raises.
        """
        every = list(optimizers)
        if not self._enabled or not every:
            return tuple(self.step(optimizer) for optimizer in every)
        self._outcomes.settle()
        return self._iteration.step_together(every)

    @untraced
    def update(self, new_scale: float | torch.Tensor | None = None, name: str | None = None) -> None:
        """End the iteration and move each scale by what its steps found.

        Args:
            new_scale: the scale to go on with instead; a number, or a tensor of one element (which is read).
            name: whose scale ``new_scale`` is, where losses have names.

        Raises:
            OrderError: before ``scale``, or no optimizer's gradients were checked since the last ``update``.
            ScaleError: a ``new_scale`` outside the limits of the loss scale.
        """
        if not self._enabled:
            return
        self._scales.factor("update")
        if new_scale is not None:
            scale = self._scales.get(name)
            scale.set(_settings.changed(scale.read(), scale=_settings.one_number(new_scale)))
        else:
            found = self._iteration.found()
            if not any(flags for _, flags in found):
                raise OrderError(
                    "No inf checks were recorded prior to update: call step(optimizer), or "
                    "unscale_(optimizer), after backward and before update"
                )
            self._scales.move(found)
        self._iteration.end()

    def settle(self) -> None:
        """Tell listeners of the steps whose outcome only the device knew; waits for it.

        Raises:
            ScaleCollapseError: one of them was a skip too many.
        """
        self._outcomes.settle()

    def abandon(self) -> None:
        """Forget this iteration without moving the scale, as after an error in the middle of it."""
        self._iteration.end()

    # ---- listeners

    def on_step(self, listener: Listener) -> RemovableHandle:
        """Call ``listener(result)`` after each step that was taken, as ``lambda _: scheduler.step()``.

        A scheduler that is stepped here is held back on a skip, and torch has nothing to warn of.

        Returns:
            A handle; ``handle.remove()`` ends it.
        """
        return self._outcomes.listen(self._outcomes.on_step, listener)

    def on_skip(self, listener: Listener) -> RemovableHandle:
        """Call ``listener(result)`` after each step that was skipped."""
        return self._outcomes.listen(self._outcomes.on_skip, listener)

    # ---- settings

    def is_enabled(self) -> bool:
        """Whether losses are scaled and gradients checked."""
        return self._enabled

    def get_scale(self, name: str | None = None) -> float:
        """The loss scale now, 1.0 where disabled; waits for the device."""
        return float(self._scales.get(name).read().scale) if self._enabled else 1.0

    @property
    def process_group(self) -> Any | None:
        """Ranks that skip together; None where there is none."""
        return self._iteration.process_group

    @property
    def initial_loss_scale(self) -> LossScale:
        """The loss scale that this scaler began with, or was given since."""
        return self._scales.first

    def factor_on(self, device: torch.device) -> torch.Tensor:
        """A scale for gradients that nobody accumulates, 0-dim fp32: the loss scale, or one of several."""
        return self._scales.any_factor().to(device, non_blocking=True)

    def factors(self) -> float | torch.Tensor | dict[str, torch.Tensor]:
        """The loss scale now, without waiting: a copy on its device, 0-dim fp32; by name where there are."""
        return self._scales.copied()

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """What to call parameters in results and errors, by ``id``, before any name that an optimizer has."""
        self._iteration.names = dict(names)

    def loss_scale(self, name: str | None = None) -> LossScale:
        """The loss scale now as a value, its counts included; waits for the device."""
        return self._scales.get(name).read()

    def _setting(self, name: str) -> Any:
        if isinstance(self._scales.first, Dynamic):
            return getattr(self._scales.first, name)
        raise ScaleError(f"{type(self._scales.first).__name__} has no {name}: only Dynamic has")

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by when it grows."""
        return float(self._setting("growth_factor"))

    def set_growth_factor(self, new_factor: float) -> None:
        """Above 1, else ScaleError."""
        self._scales.change(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by when it backs off."""
        return float(self._setting("backoff_factor"))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Between 0 and 1, else ScaleError."""
        self._scales.change(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Good steps in a row before the scale grows."""
        return int(self._setting("growth_interval"))

    def set_growth_interval(self, new_interval: int) -> None:
        """At least 1, else ScaleError."""
        self._scales.change(growth_interval=new_interval)

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume: torch's five entries, where they suffice, and ``loss_scale``.

        The same where disabled, so that a checkpoint of a disabled run can be loaded. After ``update``.
        """
        return _saved.state_of(self._scales.read())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of ours or of ``torch.amp.GradScaler``; where disabled too.

        An empty one, which torch saves for a disabled scaler, leaves this scaler as it is and warns.

        Raises:
            ScaleError: an entry is missing or outside its range, or names do not match.
        """
        values = _saved.scales_in(state_dict, self._scales.first, in_force=self._enabled)
        if values is None:
            return
        self._scales.set(values)
        if not isinstance(values, Mapping):
            self._scales.first = values

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._iteration.states:
            raise OrderError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end "
                "after scaler.update()."
            )
        return {
            "enabled": self._enabled,
            "device": self._device,
            "settings": self._settings,
            "first": self._scales.first,
            "patience": self._outcomes.patience,
            "scales": self._scales.read(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._enabled, self._device, self._settings = state["enabled"], state["device"], state["settings"]
        self._begin(Scales(state["first"]), Outcomes(state["patience"]), None)
        self._scales.set(state["scales"])

    def __repr__(self) -> str:
        if not self._enabled:
            return "GradScaler(enabled=False)"
        kind = type(self._scales.first).__name__
        scales = {name: scale.read().scale for name, scale in self._scales.by_name.items() if scale.on_host}
        now = ", ".join(f"{'scale' if name is None else name}={scale:g}" for name, scale in scales.items())
        return f"GradScaler({kind}{f', {now}' if now else ''})"

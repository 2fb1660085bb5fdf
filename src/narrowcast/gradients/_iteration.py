"""One iteration of training: the state that a scaler keeps for each optimizer, and how it steps them."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.gradients import _check, _torch_internals
from narrowcast.gradients._check import GradientCheck, Scaling, versions_of
from narrowcast.gradients._devices import on_device
from narrowcast.gradients._misuse import (
    SchedulersAfterSkips,
    StepsByHand,
    leaves_below,
    warn_at_script,
)
from narrowcast.gradients._optimizer_gradients import (
    FlatCopies,
    OptimizerGradients,
    check_apart,
    gradients_of,
    labels_of,
    parameters_of,
)
from narrowcast.gradients._scales import DeviceScale, check_optimizer
from narrowcast.gradients._steps import (
    RANKS_DIFFER,
    Outcomes,
    SkipStep,
    StepResult,
    step_or_restore,
)
from narrowcast.gradients._torch_internals import OptState

_NO_GRADIENTS = (
    "No inf checks were recorded for this optimizer: none of its parameters had a gradient. Call "
    "scaler.scale(loss).backward() before unscale_ and step, zero_grad after them, and make sure that the "
    "loss depends on the optimizer's parameters"
)
_STEPPED_TWICE = "step() has already been called since the last update(): call update() once after it"
_UNSCALED_TWICE = (
    "unscale_() has already been called on this optimizer since the last update(): call it once, after the "
    "last backward; clip_grad_norm_ and clip_grad_value_ do it themselves"
)
_UPDATED_BEFORE = (
    "no loss was scaled since the last update(), so these gradients do not have the scale of now: call "
    "scaler.update() once, after scaler.step of every optimizer, and scaler.scale(loss).backward() before"
)
_BACKWARD_AFTER_UNSCALE = (
    "scaled gradients were added to unscaled ones: call unscale_, clip_grad_norm_ and clip_grad_value_, or "
    "what stands for them in a host, as fabric.clip_gradients, after the last "
    "scaler.scale(loss).backward() of the step (fabric.backward(loss))"
)
_ITERATIONS: weakref.WeakSet[Iteration] = weakref.WeakSet()
"""The iterations of all scalers that exist."""


def some_scaler_steps() -> bool:
    """Return whether any scaler is calling the step of an optimizer now."""
    return any(iteration.stepping for iteration in _ITERATIONS)


class OptimizerState(dict[str, Any]):
    """The state of one optimizer in this iteration.

    Its items ("stage", "found_inf_per_device") are torch's, and other libraries read and write them.

    Attributes:
        check: the check of its gradients; None before the check, and after the step.
        later_losses: the autograd nodes of losses that were scaled after these gradients were unscaled.
        unscaled_versions: the versions of the gradients when the first of these losses was scaled.
    """

    __slots__ = ("check", "later_losses", "unscaled_versions")

    def __init__(self) -> None:
        super().__init__(stage=OptState.READY, found_inf_per_device={})
        self.check: GradientCheck | None = None
        self.later_losses: list[Any] = []
        self.unscaled_versions: list[int] = []


class OptimizerStates(dict[int, OptimizerState]):
    """The state of each optimizer, by its id; a dict that a script stores becomes an ``OptimizerState``."""

    def __missing__(self, key: int) -> OptimizerState:
        state = self[key] = OptimizerState()
        return state

    def __setitem__(self, key: int, state: Mapping[str, Any]) -> None:
        if not isinstance(state, OptimizerState):
            converted = OptimizerState()
            converted.update(state)
            state = converted
        super().__setitem__(key, state)


class Iteration:
    """The optimizers of a scaler, from the first ``scale`` to ``update``; one object serves all iterations.

    Attributes:
        process_group: ranks that decide together; None: each rank decides alone.
        states: the state of each optimizer that was unscaled, clipped or stepped since the last ``update``.
        names: names of parameters, by id, for results and errors.
        stepping: whether the scaler is calling the step of an optimizer now.
        refuses_steps_by_hand: whether a Stepper refuses steps by hand, so that no warning is needed.
        steps_by_hand: warns of steps by hand in the first iteration; None before it.
        schedulers: warns of schedulers that move although the step was skipped.
    """

    def __init__(
        self,
        loss_scale: DeviceScale,
        outcomes: Outcomes,
        *,
        process_group: Any | None,
        sharded: bool,
        allow_fp16: bool,
    ) -> None:
        self._loss_scale = loss_scale
        self._outcomes = outcomes
        self.process_group = process_group
        self._sharded = sharded
        self._allow_fp16 = allow_fp16
        self.states = OptimizerStates()
        self.names: dict[int, str] = {}
        self.stepping = False
        self.refuses_steps_by_hand = False
        self.steps_by_hand: StepsByHand | None = None
        self.schedulers = SchedulersAfterSkips()
        # Memory for copies of small gradients, kept from step to step.
        self._flat_copies: weakref.WeakKeyDictionary[torch.optim.Optimizer, FlatCopies] = (
            weakref.WeakKeyDictionary()
        )
        # True from ``update`` to the next ``scale``.
        self._updated = False
        # Whether a CUDA graph captured a call of ``scale``. The host does not see the calls in its replays.
        self._scale_is_replayed = False
        # Ids of the optimizers that had gradients in some iteration.
        self._trained: set[int] = set()
        _ITERATIONS.add(self)

    def loss_scaled(self, scaled: Any) -> None:
        """Note that a loss was scaled; costs next to nothing after the first iteration."""
        self._updated = False
        # The rest is only for errors and warnings, and Dynamo need not trace it.
        if torch.compiler.is_compiling():
            return
        if self.states:
            self._remember_later_loss(scaled)

        # Watch for steps by hand from the first loss on. Not if a closure scaled it inside a step.
        may_watch = not self.stepping and not self.refuses_steps_by_hand
        if self.steps_by_hand is None and may_watch and self._loss_scale.scales:
            self.steps_by_hand = StepsByHand(scaled, weakref.WeakMethod(self.stage_outside))
        if _torch_internals.is_capturing():
            self._scale_is_replayed = True

    def _remember_later_loss(self, scaled: Any) -> None:
        """Remember the versions of unscaled gradients, before this loss may add scaled gradients to them."""
        node = getattr(scaled, "grad_fn", None)
        if node is None:
            return
        for state in self.states.values():
            if state["stage"] is OptState.UNSCALED and state.check is not None:
                # Only at the first of these losses, when the gradients are still as unscaling left them. Its
                # backward pass may change them before a second loss is scaled, and versions taken then would
                # hide that change.
                if not state.later_losses:
                    state.unscaled_versions = versions_of(state.check.gradients)
                state.later_losses.append(node)

    def _refuse_later_backward(
        self, optimizer: torch.optim.Optimizer, state: OptimizerState, check: GradientCheck
    ) -> None:
        """Raise OrderError if the backward pass of a later loss added scaled gradients to unscaled ones."""
        # A later loss may be that of another optimizer, which is fine. So refuse only if gradients changed
        # since that loss was scaled, and its graph contains their parameters.
        has_new_gradients = len(self._gradients(optimizer).values) != len(check.gradients.values)
        if not has_new_gradients and state.unscaled_versions == versions_of(check.gradients):
            return
        leaves = leaves_below(state.later_losses)
        if any(id(parameter) in leaves for parameter in parameters_of(optimizer)):
            raise OrderError(_BACKWARD_AFTER_UNSCALE)

    def stage_outside(self, optimizer: torch.optim.Optimizer) -> OptState | None:
        """Return the stage of an optimizer that steps now; None if a scaler steps it."""
        if some_scaler_steps():
            return None
        state = self.states.get(id(optimizer))
        if state is None:
            return OptState.READY
        stage: OptState = state["stage"]
        return stage

    def scale_was_read(self) -> None:
        """Stop watching for steps by hand: a script that knows the scale may unscale by hand too."""
        if self.steps_by_hand is not None:
            self.steps_by_hand.end()

    def state(self, method: str, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the optimizer's state; OrderError if ``method`` may not be called now."""
        self._loss_scale.factor_for(method)  # raises if no loss was scaled yet
        check_optimizer(optimizer)
        if self._updated and self._loss_scale.scales:
            raise OrderError(_UPDATED_BEFORE)
        state = self.states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            if method == "step":
                raise OrderError(_STEPPED_TWICE)
            raise OrderError(f"{method}() is being called after step(): call it between backward and step.")
        return state

    def overflow_flags(self, device: torch.device) -> list[torch.Tensor]:
        """Return the overflow flags of all optimizers in this iteration, on ``device``."""
        flags = []
        for state in self.states.values():
            for flag in state["found_inf_per_device"].values():
                flags.append(on_device(flag, device))
        return flags

    def may_lack_checks(self) -> bool:
        """Return whether ``update`` may go on although no flags were recorded.

        It may if an optimizer had gradients in an earlier iteration, and only this batch gave it none.
        """
        return any(key in self._trained for key in self.states)

    def forget_steps(self) -> None:
        """Forget the steps of this iteration, so that they may be repeated.

        ``update`` calls this before it raises because no step of the iteration has checked a gradient.
        """
        for key, state in list(self.states.items()):
            if state["stage"] is OptState.STEPPED:
                del self.states[key]

    def end(self) -> None:
        """Forget the state of each optimizer."""
        self.states = OptimizerStates()
        # If a CUDA graph captured ``scale``, the host does not see when the graph replays it. So it cannot
        # tell whether ``scale`` is missing before the next step.
        self._updated = not self._scale_is_replayed
        if self.steps_by_hand is not None:
            self.steps_by_hand.end()

    # ---- gradients

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale and check the gradients; OrderError if they were unscaled already."""
        state = self.state("unscale_", optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise OrderError(_UNSCALED_TWICE)
        self._set_check(state, self._unscaled(self._gradients(optimizer), self._scaling()))

    def _unscaled(self, gradients: OptimizerGradients, scaling: Scaling) -> GradientCheck:
        """Return the check of gradients; unscale them unless the scale is always 1."""
        if scaling.scales:
            return _check.unscale(gradients, scaling)
        return _check.check_finite(gradients, scaling)

    def clip_norm(self, optimizer: torch.optim.Optimizer, max_norm: float, order: float) -> torch.Tensor:
        """Clip the norm, after unscaling if that is still to do; return the unscaled norm before clipping."""
        state = self.state("clip_grad_norm_", optimizer)
        flat = self._flat_copies.get(optimizer)
        if flat is None:
            flat = self._flat_copies[optimizer] = FlatCopies()
        scaling = self._scaling()

        # One read gives the norm and the check.
        if state["stage"] is OptState.READY and order in (2.0, math.inf):
            gradients = self._gradients(optimizer, summed=True)
            defer = _torch_internals.takes_grad_scale(optimizer) and gradients.dense
            check = _check.clip(gradients, scaling, max_norm, order, defer=defer, flat=flat)
            self._set_check(state, check)
            assert check.norm is not None
            return check.norm

        # Norms of other orders may not tell whether a gradient is finite, so unscale and check first.
        if state["stage"] is OptState.READY:
            self.unscale(optimizer)
        check = self._ensure_unscaled(state, optimizer)
        gradients = self._gradients(optimizer, summed=True)
        total = _check.clip_unscaled(gradients, max_norm, order, scaling, flat=flat)

        # Add what clipping found to what the earlier check found, which still holds. They may differ: in
        # between a script may have written to the gradients, and DDP may have reduced them.
        check.norm = total.norm
        if check.flags is None and total.flags is not None:
            # There is one flag for each gradient, so flags and gradients are replaced together: a script may
            # have removed gradients since the earlier check. If that has flags, they still belong to its
            # gradients, and both stay.
            check.flags = total.flags
            check.gradients = gradients
        if check.ranks_differ is None:
            check.ranks_differ = total.ranks_differ
        elif total.ranks_differ is not None:
            check.ranks_differ = check.ranks_differ | total.ranks_differ
        if total.found_inf is not None:
            check.replace_flag(torch.maximum(check.found_inf, total.found_inf))
            # torch's entry still has the old flag: write the new one there too.
            self._set_check(state, check)
        return check.norm

    def clip_value(self, optimizer: torch.optim.Optimizer, value: float) -> None:
        """Clamp the gradients to [-value, value], after unscaling if that is still to do."""
        state = self.state("clip_grad_value_", optimizer)
        if state["stage"] is OptState.READY:
            self.unscale(optimizer)
        self._ensure_unscaled(state, optimizer)
        _check.clamp(self._gradients(optimizer, summed=True), value)

    def _gradients(self, optimizer: torch.optim.Optimizer, *, summed: bool = False) -> OptimizerGradients:
        return gradients_of(optimizer, allow_fp16=self._allow_fp16, summed=summed, names=self.names)

    def _scaling(self) -> Scaling:
        scale = self._loss_scale
        return Scaling(
            scale.factor_for("step"),
            scale.may_be_below(1.0),
            self.process_group,
            self._sharded,
            scales=scale.scales,
            on_host=scale.number() if scale.on_host else None,
        )

    def _set_check(
        self, state: OptimizerState, check: GradientCheck, stage: OptState = OptState.UNSCALED
    ) -> None:
        state.check = check
        state["stage"] = stage
        # torch's entry, which scripts and ``update`` read. It is empty if nothing was checked, as in torch.
        flags = {}
        if check.any_checked:
            flags[check.found_inf.device] = check.found_inf
        state["found_inf_per_device"] = flags

    def _ensure_unscaled(self, state: OptimizerState, optimizer: torch.optim.Optimizer) -> GradientCheck:
        """Make sure that the gradients are unscaled and have a check, and return the check.

        Callers that find the stage READY call ``unscale`` first. If ``clip_norm`` deferred the division to
        the step, the gradients are divided now.
        """
        check = state.check
        # Without a check, other code unscaled the gradients and wrote torch's entries, such as an optimizer
        # whose step takes ``grad_scaler``. Make the check from these entries.
        if check is None:
            flags = state["found_inf_per_device"]
            found_inf = torch.zeros_like(self._loss_scale.factor_for("step"))
            for flag in flags.values():
                torch.maximum(found_inf, flag.to(found_inf.device), out=found_inf)
            check = state.check = GradientCheck(
                found_inf,
                _check.known_on_host(found_inf),
                any_checked=bool(flags),
                gradients=self._gradients(optimizer),
            )
        check.divide_now()
        return check

    # ---- stepping

    def step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> StepResult:
        """Step without a closure."""
        state = self.state("step", optimizer)
        check = self._check_for_step(optimizer, state)
        return self._step_if_finite(optimizer, state, check, check.found_inf, check.overflowed, args, kwargs)

    def step_together(self, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[StepResult, ...]:
        """Step all optimizers or none."""
        check_apart(optimizers)
        for optimizer in optimizers:
            if _torch_internals.needs_closure(optimizer):
                raise OrderError(f"{type(optimizer).__name__} needs a closure: step it by itself")
        states = [self.state("step", optimizer) for optimizer in optimizers]
        checks = [self._check_for_step(o, state) for o, state in zip(optimizers, states, strict=True)]

        # One flag decides for all of them.
        device = checks[0].found_inf.device
        found_inf = torch.stack([on_device(check.found_inf, device) for check in checks]).amax()
        skipped = _check.known_on_host(found_inf)
        results = []
        for optimizer, state, check in zip(optimizers, states, checks, strict=True):
            results.append(self._step_if_finite(optimizer, state, check, found_inf, skipped, (), {}))
        return tuple(results)

    def _check_for_step(self, optimizer: torch.optim.Optimizer, state: OptimizerState) -> GradientCheck:
        """Return the check that decides on the step; OrderError if the gradients may not be used."""
        # Ask this before the gradients are checked. It reads an attribute of the optimizer, and an optimizer
        # of weights.hold raises there if its low-precision parameters still have gradients, which the fp32
        # masters did not get.
        skips_itself = _torch_internals.takes_grad_scale(optimizer)
        check = state.check

        # The gradients were neither unscaled nor clipped before, so check them now.
        if state["stage"] is OptState.READY:
            gradients = self._gradients(optimizer)
            scaling = self._scaling()
            if skips_itself and gradients.dense and self._defers_unscaling(optimizer, scaling):
                check = _check.check_scaled(gradients, scaling)
                # The stage stays READY, since the gradients are still scaled.
                self._set_check(state, check, OptState.READY)
            else:
                check = self._unscaled(gradients, scaling)
                self._set_check(state, check)
        else:
            # Only without a check, since this call would divide now. If ``clip_norm`` deferred the division,
            # the step is to do it.
            if check is None:
                check = self._ensure_unscaled(state, optimizer)
            # Read the flag again: a script may have written to it, as an all_reduce over ranks does.
            check.overflowed = _check.known_on_host(check.found_inf)
        assert check is not None

        # A script may have written other flags into torch's own entries.
        flags = list(state["found_inf_per_device"].values())
        if flags and (len(flags) > 1 or flags[0] is not check.found_inf):
            on_one_device = [flag.to(check.found_inf.device) for flag in flags]
            check.replace_flag(torch.stack(on_one_device).amax())
            check.any_checked = True
            # Find out now which gradients are not finite. A script may set its flag although all of them are
            # finite, and ``look_later``, which expects one that is not, would then name every gradient.
            check.flags = check.gradients.flags()

        if check.any_checked:
            self._trained.add(id(optimizer))
        else:
            self._handle_missing_gradients(optimizer, may_lack_at_first=skips_itself)
        if state.later_losses:
            self._refuse_later_backward(optimizer, state, check)
            state.later_losses = []
        # Reading ``ranks_differ`` costs nothing on a CPU. On other devices it is read later, with the result.
        if check.ranks_differ is not None and check.ranks_differ.device.type == "cpu" and check.ranks_differ:
            raise UnsupportedError(RANKS_DIFFER)
        check.refuse_changes()
        return check

    def _handle_missing_gradients(self, optimizer: torch.optim.Optimizer, *, may_lack_at_first: bool) -> None:
        """Raise, warn or do nothing, since no parameter had a gradient at the check.

        - Gradients came after the check: an error.
        - There were gradients in an earlier iteration: a warning.
        - There never were any, and ``may_lack_at_first``: nothing. As in torch, a fused optimizer may step
          without gradients at first, and only ``update`` raises.
        - There never were any, otherwise: an error.
        """
        came_late = bool(self._gradients(optimizer).values)
        if not came_late and id(optimizer) in self._trained:
            warn_at_script(
                f"no parameter of this {type(optimizer).__name__} had a gradient in this step, as they had "
                "before: the loss did not depend on them, and the scale does not change"
            )
        elif came_late or not may_lack_at_first:
            self.states.pop(id(optimizer), None)
            raise OrderError(_NO_GRADIENTS)

    def _defers_unscaling(self, optimizer: torch.optim.Optimizer, scaling: Scaling) -> bool:
        """Return whether to leave the division by the scale to the step of the optimizer, if it can divide.

        Not if the scale may be below 1, since the division may then overflow after the check. Not if the
        scale is always 1, since torch's kernels would write all gradients back for nothing.

        On a CPU, torch's own optimizers are faster with gradients that were unscaled before the step. But
        unscaling multiplies by the inverse of the scale, and equals the division to the bit only if the scale
        is a power of 2. So with other scales the step divides, as it does under torch's scaler.
        """
        if scaling.below_one or not scaling.scales:
            return False
        # If a script set grad_scale for this step, the step divides anyway.
        if hasattr(optimizer, "grad_scale") or not _torch_internals.is_torchs_own(optimizer):
            return True
        if scaling.factor.device.type != "cpu":
            return True
        is_power_of_2 = math.frexp(scaling.number())[0] == 0.5
        return not is_power_of_2

    def _step_if_finite(
        self,
        optimizer: torch.optim.Optimizer,
        state: OptimizerState,
        check: GradientCheck,
        found_inf: torch.Tensor,
        skipped: bool | None,
        args: Any,
        kwargs: Any,
    ) -> StepResult:
        """Step, or skip if ``found_inf`` is above 0.

        ``skipped`` says the same where the host knows the flag. It is None if only the device does; then an
        optimizer that skips by itself takes the flag, and for any other the host waits for it.
        """
        skips_itself = _torch_internals.takes_grad_scale(optimizer)
        # Wait also before the first step of torch's fused SGD. If that skipped by itself, it would keep
        # momentum buffers that it allocated and never wrote.
        if skipped is None and (not skips_itself or _torch_internals.starts_momentum(optimizer)):
            skipped = bool(found_inf.item())

        # Find the parameters whose gradients are not finite.
        # - ``skipped`` is False: the step is taken, and there is nothing to name.
        # - ``check.overflowed`` is False: nothing to name either. It holds for this optimizer alone, and
        #   ``skipped`` for all that step together, so another optimizer caused the skip.
        # - ``looks_later``: only the device knows whether the step is skipped, and the gradients can be held.
        #   They are read after the step, once the host knows.
        # - Otherwise they are read now, before the step may write to them.
        looks_later = skipped is None and check.can_look_later()
        nonfinite: Callable[[], tuple[str, ...]] | None = None
        if skipped is not False and check.overflowed is not False and not looks_later:
            nonfinite = self._names_of(optimizer, check, check.nonfinite().read)

        returned = None
        if skipped:
            _torch_internals.mark_as_stepped(optimizer)
            # A script may have set grad_scale, for this step alone. torch deletes it too.
            if hasattr(optimizer, "grad_scale"):
                del optimizer.grad_scale
        else:
            returned = call_step(
                optimizer, check, found_inf, skipped, args, kwargs, skips_itself=skips_itself
            )
        # Hold the gradients only now, because the step may write to them.
        if looks_later:
            nonfinite = self._names_of(optimizer, check, check.look_later())
        return self._result(optimizer, state, check, found_inf, skipped, nonfinite or (), returned)

    def step_by_itself(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> StepResult:
        """Step an optimizer that takes ``grad_scaler``, torch's old interface, and unscales by itself."""
        state = self.state("step", optimizer)
        warnings.warn(
            "an optimizer whose step takes grad_scaler unscales by itself; torch is going to hand it the "
            "tensors grad_scale and found_inf instead",
            FutureWarning,
            stacklevel=3,  # at the caller of ``GradScaler.step``
        )
        returned = optimizer.step(*args, **kwargs)
        check = self._ensure_unscaled(state, optimizer)
        skipped = bool(check.found_inf.item())
        nonfinite: Callable[[], tuple[str, ...]] | None = None
        if skipped:
            nonfinite = self._names_of(optimizer, check, check.nonfinite().read)
        return self._result(optimizer, state, check, check.found_inf, skipped, nonfinite or (), returned)

    def step_with_closure(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], args: Any, kwargs: Any
    ) -> StepResult:
        """Step with a closure that computes scaled gradients; the optimizer gets unscaled, finite ones."""
        if self.states[id(optimizer)]["stage"] is OptState.STEPPED:
            raise OrderError(_STEPPED_TWICE)
        # The gradients are computed inside the step, so there are no steps by hand to watch for.
        if self.steps_by_hand is not None:
            self.steps_by_hand.end()
        if getattr(optimizer, "holds_low_weights", False):
            raise UnsupportedError(
                f"a closure of a {type(optimizer).__name__} whose weights are held in a low format could not "
                "be undone where it overflows: step without a closure, or without a scaler (bf16)"
            )
        checks: list[GradientCheck] = []

        def evaluate() -> Any:
            # Each evaluation is an iteration of its own: it scales, unscales and checks.
            fresh_state = self.states[id(optimizer)] = OptimizerState()
            loss = closure()
            if self.states.get(id(optimizer)) is not fresh_state:
                # The closure has ended the iteration. If no loss was scaled yet, that is the first mistake,
                # and this call raises an error that says so. Its value is not needed.
                self._loss_scale.factor_for("step")
                raise OrderError("update() was called inside the closure of a step: call it after the step")

            # The closure may have unscaled and clipped the gradients itself.
            state = self.state("step", optimizer)
            if state["stage"] is OptState.READY:
                self.unscale(optimizer)
            check = self._ensure_unscaled(state, optimizer)
            if check.any_checked:
                self._trained.add(id(optimizer))
            else:
                self._handle_missing_gradients(optimizer, may_lack_at_first=False)
            checks.append(check)
            # Read the flag again: the closure may have written to it.
            if check.found_inf.item():
                raise SkipStep(loss)
            return loss

        # An optimizer may evaluate the closure many times. The first evaluation that is not finite ends the
        # step, so the last check decides.
        returned, skip = step_or_restore(optimizer, optimizer.step, args, kwargs, evaluate)
        if not checks:
            raise OrderError(f"{type(optimizer).__name__}.step never called its closure")
        check = checks[-1]
        nonfinite: tuple[str, ...] = ()
        if skip is not None:
            _torch_internals.mark_as_stepped(optimizer)
            nonfinite = self._names_of(optimizer, check, check.nonfinite().read)()
        state = self.states[id(optimizer)]
        return self._result(optimizer, state, check, check.found_inf, skip is not None, nonfinite, returned)

    # ---- results

    def _names_of(
        self, optimizer: torch.optim.Optimizer, check: GradientCheck, flags: Callable[[], list[bool]]
    ) -> Callable[[], tuple[str, ...]]:
        """Return a function that calls ``flags`` and returns the names of the parameters with a flag set."""
        parameters = check.gradients.parameters

        def names() -> tuple[str, ...]:
            flagged = [parameter for parameter, flag in zip(parameters, flags(), strict=True) if flag]
            return tuple(labels_of(optimizer, flagged, self.names))

        return names

    def _result(
        self,
        optimizer: torch.optim.Optimizer,
        state: OptimizerState,
        check: GradientCheck,
        found_inf: torch.Tensor,
        skipped: bool | None,
        nonfinite: Callable[[], tuple[str, ...]] | tuple[str, ...],
        returned: Any,
    ) -> StepResult:
        """End the step of an optimizer: report it, now or once the host can know its flag."""
        state["stage"] = OptState.STEPPED
        state.check = None  # frees the gradients, which it holds
        result = StepResult(
            found_inf=found_inf if skipped is None else skipped,
            scale=self._loss_scale.copied(),
            grad_norm=check.norm,
            nonfinite=nonfinite,
            returned=returned,
        )
        # Report no step of a CUDA graph: the host sees it once, but the graph is replayed many times.
        if _torch_internals.is_capturing():
            return result

        number = self._outcomes.next_number()
        ranks_differ = check.ranks_differ
        if skipped:
            self.schedulers.skipped(optimizer)
        if skipped is not None:
            self._outcomes.report(optimizer, result, number, ranks_differ=bool(ranks_differ))
            return result

        # Only the device knows the flag. Copy it to the host without waiting, together with the scale and
        # whether ranks differ.
        values = [found_inf, self._loss_scale.factor_for("step")]
        if ranks_differ is not None:
            values.append(ranks_differ.to(found_inf))
        # Once the values have arrived, ``learn`` gets the scale. Updates may have moved it further by then.
        # So ``learn`` also gets how often it has moved until now, and ignores a scale older than the one it
        # knows.
        learn_scale = functools.partial(self._loss_scale.learn, moves=self._loss_scale.moves)
        self._outcomes.wait_for(optimizer, result, number, torch.stack(values), learn_scale)
        return result


def call_step(
    optimizer: torch.optim.Optimizer,
    check: GradientCheck,
    found_inf: torch.Tensor,
    skipped: bool | None,
    args: Any,
    kwargs: Any,
    *,
    skips_itself: bool,
) -> Any:
    """Call the optimizer's step; set ``grad_scale`` and ``found_inf`` if it divides and skips by itself."""
    is_torchs_own = _torch_internals.is_torchs_own(optimizer)
    # A script may have set grad_scale, for this step alone.
    scale_of_script = getattr(optimizer, "grad_scale", None)
    may_divide_or_skip = check.divisor is not None or scale_of_script is not None or skipped is None
    # Set no attributes for a step that does not read them. torch's own steps do without them if they have
    # nothing to divide or to skip. A step of another library may expect them each time.
    if not skips_itself or (is_torchs_own and not may_divide_or_skip):
        return optimizer.step(*args, **kwargs)

    # The step divides by both scales.
    grad_scale = check.divisor
    if grad_scale is None:
        grad_scale = scale_of_script
    elif scale_of_script is not None:
        grad_scale = grad_scale * scale_of_script
    target: Any = optimizer  # for mypy: the class of torch declares neither attribute
    target.grad_scale = grad_scale
    target.found_inf = found_inf
    # With a flag torch's fused optimizers run one more kernel, which corrects their count of steps. If the
    # step is certainly taken, they need no flag: replace it by None.
    if skipped is False and is_torchs_own:
        target.found_inf = None
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del target.grad_scale, target.found_inf

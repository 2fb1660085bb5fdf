"""One iteration of training as a scaler sees it: what is known of each optimizer, and its step."""

from __future__ import annotations

import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.gradients import _look, _torch_internals
from narrowcast.gradients._calls import call_step
from narrowcast.gradients._closures import Snapshot, with_closure
from narrowcast.gradients._held import HeldGradients, check_apart, held_gradients, labels_of
from narrowcast.gradients._look import Look, Scaling
from narrowcast.gradients._outcomes import APART, Outcome, Outcomes, Readback, reference_to
from narrowcast.gradients._result import StepResult
from narrowcast.gradients._scales import Found, Scales
from narrowcast.gradients._torch_internals import OptState

_NO_GRADIENTS = (
    "No inf checks were recorded for this optimizer: none of its parameters had a gradient. Call "
    "scaler.scale(loss).backward() before unscale_ and step, zero_grad after them, and see that the loss "
    "depends on the optimizer's parameters"
)
_TWICE = (
    "unscale_() has already been called on this optimizer since the last update(): call it once, after the "
    "last backward; clip_grad_norm_ and clip_grad_value_ do it themselves"
)
State = dict[str, Any]


def fresh_state() -> State:
    """Of an optimizer of which nothing is known yet; the first two keys are torch's."""
    return {"stage": OptState.READY, "found_inf_per_device": {}, "look": None, "names": set()}


class _Skipped(BaseException):
    """Leaves an optimizer from inside its closure; no ``except Exception`` of the optimizer stops it."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class Iteration:
    """From the first ``scale`` to ``update``."""

    def __init__(
        self,
        scales: Scales,
        outcomes: Outcomes,
        *,
        process_group: Any | None,
        sharded: bool,
        allow_fp16: bool,
    ) -> None:
        self._scales = scales
        self._outcomes = outcomes
        self.process_group = process_group
        self._sharded = sharded
        self._allow_fp16 = allow_fp16
        self.states: dict[int, State] = defaultdict(fresh_state)
        self.names: dict[int, str] = {}

    def state(self, method: str, optimizer: torch.optim.Optimizer) -> State:
        """What is known of the optimizer, if ``method`` may be called now."""
        self._scales.factor(method)
        state = self.states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise OrderError(
                "step() has already been called since the last update(): call update() once after it"
                if method == "step"
                else f"{method}() is being called after step(): call it between backward and step."
            )
        return state

    def found(self) -> list[Found]:
        """What was found for each optimizer."""
        return [
            (state["names"], list(state["found_inf_per_device"].values())) for state in self.states.values()
        ]

    def end(self) -> None:
        """Forget what is known of each optimizer."""
        self.states = defaultdict(fresh_state)

    # ---- gradients

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        state = self.state("unscale_", optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise OrderError(_TWICE)
        held = self._held(optimizer)
        self._saw(state, _look.unscale(held, self._scaling(state, held)))

    def clip_norm(self, optimizer: torch.optim.Optimizer, max_norm: float, order: float) -> torch.Tensor:
        state = self.state("clip_grad_norm_", optimizer)
        one_pass = order in (2.0, math.inf)
        if state["stage"] is OptState.READY and one_pass:
            held = self._held(optimizer, summed=True)
            rides = _torch_internals.takes_grad_scale(optimizer) and held.dense
            look = _look.clip(held, self._scaling(state, held), max_norm, order, may_ride=rides)
            self._saw(state, look)
            assert look.norm is not None
            return look.norm
        if state["stage"] is OptState.READY:
            self.unscale(optimizer)
        look = self._unscaled(state, optimizer)
        if not one_pass and self.process_group is None:
            look.norm = _look.clip_by_torch(optimizer, max_norm, order)
            return look.norm
        if not order > 0:
            raise UnsupportedError(f"a norm of order {order} over process_group: use one above 0")
        held = self._held(optimizer, summed=True)
        total = _look.clip_unscaled(held, max_norm, order, self._scaling(state, held))
        look.norm, apart = total.norm, total.apart
        look.apart = apart if look.apart is None or apart is None else look.apart | apart
        look.flags = look.flags or total.flags
        if total.clipped is not None:
            found = torch.maximum(look.found_inf, (~total.clipped).float())
            self._saw(state, replace(look, found_inf=found))
        return look.norm

    def clip_value(self, optimizer: torch.optim.Optimizer, value: float) -> None:
        state = self.state("clip_grad_value_", optimizer)
        if state["stage"] is OptState.READY:
            self.unscale(optimizer)
        self._unscaled(state, optimizer)
        _look.clamp(self._held(optimizer, summed=True), value)

    def _held(self, optimizer: torch.optim.Optimizer, *, summed: bool = False) -> HeldGradients:
        return held_gradients(optimizer, allow_fp16=self._allow_fp16, summed=summed, names=self.names)

    def _scaling(self, state: State, held: HeldGradients) -> Scaling:
        """What these gradients were made with. Named ones are true already."""
        factor, below_one = self._scales.factor("step"), False
        if self._scales.passes is None:
            below_one = self._scales.only.may_be_below(1.0)
        else:
            state["names"] = self._scales.passes.names_in(held.parameters)
            factor = torch.ones_like(factor)
        return Scaling(factor, below_one, self.process_group, self._sharded)

    def _saw(self, state: State, look: Look, stage: OptState = OptState.UNSCALED) -> None:
        found = look.found_inf
        state["found_inf_per_device"] = {found.device: found} if look.any_checked else {}
        state["look"], state["stage"] = look, stage

    def _unscaled(self, state: State, optimizer: torch.optim.Optimizer) -> Look:
        """The look at gradients that are unscaled now."""
        look: Look | None = state["look"]
        if look is None:  # an optimizer that was handed this scaler filled torch's own entries
            found = torch.zeros_like(self._scales.factor("step"))
            for flag in state["found_inf_per_device"].values():
                found += flag.to(found.device)
            look = Look(found, bool(state["found_inf_per_device"]), self._held(optimizer))
            state["look"] = look
        _look.materialise(look)
        return look

    # ---- stepping

    def step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> StepResult:
        state = self.state("step", optimizer)
        if _torch_internals.wants_the_scaler(optimizer):
            return self._step_by_itself(optimizer, state, args, kwargs)
        look = self._look_for_step(optimizer, state)
        return self._finish(optimizer, state, look, look.found_inf, args, kwargs)

    def step_together(self, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[StepResult, ...]:
        check_apart(optimizers)
        for optimizer in optimizers:
            if _torch_internals.needs_closure(optimizer):
                raise OrderError(f"{type(optimizer).__name__} needs a closure: step it by itself")
        states = [self.state("step", optimizer) for optimizer in optimizers]
        looks = [self._look_for_step(o, state) for o, state in zip(optimizers, states, strict=True)]
        found = _look.worst_of(looks)
        return tuple(
            self._finish(optimizer, state, look, found, (), {})
            for optimizer, state, look in zip(optimizers, states, looks, strict=True)
        )

    def _look_for_step(self, optimizer: torch.optim.Optimizer, state: State) -> Look:
        look: Look | None = state["look"]
        if state["stage"] is OptState.READY:
            held = self._held(optimizer)
            scaling = self._scaling(state, held)
            rides = held.dense and self._rides(optimizer, scaling)
            look = _look.measure(held, scaling) if rides else _look.unscale(held, scaling)
            self._saw(state, look, OptState.READY if rides else OptState.UNSCALED)
        elif look is None:
            look = self._unscaled(state, optimizer)
        assert look is not None
        self._obey_flags(state, look)
        if not look.any_checked and not (
            _torch_internals.takes_grad_scale(optimizer) and not self._held(optimizer).values
        ):
            raise OrderError(_NO_GRADIENTS)
        if look.apart is not None and look.apart.device.type == "cpu" and look.apart:
            raise UnsupportedError(APART)
        look.check_unchanged()
        return look

    def _obey_flags(self, state: State, look: Look) -> None:
        """What somebody has written into torch's own entries counts, as with torch."""
        flags = list(state["found_inf_per_device"].values())
        if flags and not (len(flags) == 1 and flags[0] is look.found_inf):
            device = look.found_inf.device
            look.found_inf = torch.stack([flag.to(device) for flag in flags]).amax()
            look.any_checked, look.flags = True, None

    def _rides(self, optimizer: torch.optim.Optimizer, scaling: Scaling) -> bool:
        """Whether the division is left to the optimizer's step.

        On a CPU the step is faster without, and the host knows at once whether to call it; where the scale
        is no power of two, only the division that torch leaves to the step gives torch's bits.
        """
        if not _torch_internals.takes_grad_scale(optimizer) or scaling.below_one:
            return False
        if scaling.factor.device.type != "cpu" or hasattr(optimizer, "grad_scale"):
            return True
        return math.frexp(float(scaling.factor))[0] != 0.5

    def _finish(
        self,
        optimizer: torch.optim.Optimizer,
        state: State,
        look: Look,
        found: torch.Tensor,
        args: Any,
        kwargs: Any,
    ) -> StepResult:
        skipped = _look.found_on_host(found)
        if skipped is None and not _torch_internals.takes_grad_scale(optimizer):
            skipped = bool(found.item())
        finite = skipped is False or _look.found_on_host(look.found_inf) is False
        which = None if finite else self._which(optimizer, look)
        returned = None
        if skipped:
            _torch_internals.mark_as_stepped(optimizer)
            if hasattr(optimizer, "grad_scale"):  # somebody's own, for this step: torch takes it away too
                del optimizer.grad_scale
        else:
            returned = call_step(optimizer, look, found, skipped, args, kwargs)
        state["stage"], state["look"] = OptState.STEPPED, None
        result = StepResult(
            found_inf=found if skipped is None else skipped,
            scale=self._scale_of(state),
            grad_norm=look.norm,
            nonfinite=which or (),
            returned=returned,
        )
        self._record(optimizer, result, found, look.apart, known=skipped is not None)
        return result

    def _which(self, optimizer: torch.optim.Optimizer, look: Look) -> Callable[[], tuple[str, ...]]:
        flags, parameters = look.which(), look.held.parameters

        def names() -> tuple[str, ...]:
            bad = [p for p, flag in zip(parameters, flags.read(), strict=True) if flag]
            return tuple(labels_of(optimizer, bad, self.names))

        return names

    def _scale_of(self, state: State) -> float | torch.Tensor | dict[str, torch.Tensor]:
        """The scales that an optimizer's gradients were made with."""
        factors = self._scales.copied()
        if isinstance(factors, dict):
            return {name: factor for name, factor in factors.items() if name in state["names"]}
        return factors

    def _record(
        self,
        optimizer: torch.optim.Optimizer,
        result: StepResult,
        found: torch.Tensor,
        apart: torch.Tensor | None,
        *,
        known: bool,
    ) -> None:
        if _torch_internals.is_capturing():
            return  # the host sees this step once, and the graph is replayed many times
        number = self._outcomes.next_number()
        if known:
            self._outcomes.now(optimizer, result, number, apart=apart is not None and bool(apart))
            return
        values = [found, torch.zeros_like(found) if apart is None else apart.to(found)]
        learn = None
        if self._scales.passes is None:
            scale = self._scales.only
            values.append(self._scales.factor("step"))
            learn = functools.partial(scale.learn, moves=scale.moves)
        readback = Readback(torch.stack(values))
        self._outcomes.later(Outcome(reference_to(optimizer), result, number, readback, learn))

    def _step_by_itself(
        self, optimizer: torch.optim.Optimizer, state: State, args: Any, kwargs: Any
    ) -> StepResult:
        """An optimizer of torch's old contract, which ``kwargs`` hand the scaler."""
        warnings.warn(
            "an optimizer whose step takes grad_scaler unscales by itself; torch is going to hand it the "
            "tensors grad_scale and found_inf instead",
            FutureWarning,
            stacklevel=6,  # out of here, the scaler's step, and the two frames of @untraced
        )
        returned = optimizer.step(*args, **kwargs)
        look = self._unscaled(state, optimizer)
        skipped = bool(look.found_inf.item())
        state["stage"], state["look"] = OptState.STEPPED, None
        result = StepResult(
            found_inf=skipped,
            scale=self._scale_of(state),
            grad_norm=look.norm,
            nonfinite=self._which(optimizer, look) if skipped else (),
            returned=returned,
        )
        self._record(optimizer, result, look.found_inf, look.apart, known=True)
        return result

    # ---- closures

    def step_with_closure(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], args: Any, kwargs: Any
    ) -> StepResult:
        """A step whose closure makes scaled gradients; the optimizer sees true ones, and only finite ones."""
        if self.states[id(optimizer)]["stage"] is OptState.STEPPED:
            raise OrderError(
                "step() has already been called since the last update(): call update() once after it"
            )
        if getattr(optimizer, "holds_low_weights", False):
            raise UnsupportedError(
                f"a closure of a {type(optimizer).__name__} whose weights are held in a low format could not "
                "be undone where it overflows: step without a closure, or without a scaler (bf16)"
            )
        before = Snapshot(optimizer)
        looks: list[Look] = []

        def evaluate() -> Any:
            begun = self.states[id(optimizer)] = fresh_state()
            loss = closure()
            state = self.state("step", optimizer)
            if state is not begun:
                raise OrderError("update() was called inside the closure of a step: call it after the step")
            if state["stage"] is OptState.READY:
                self.unscale(optimizer)
            look = self._unscaled(state, optimizer)
            if not look.any_checked:
                raise OrderError(_NO_GRADIENTS)
            looks.append(look)
            if bool(look.found_inf.item()):
                raise _Skipped(loss)
            return loss

        args, kwargs = with_closure(args, kwargs, evaluate)
        try:
            returned, skipped = optimizer.step(*args, **kwargs), False
        except _Skipped as stopped:
            returned, skipped = stopped.loss, True
            before.restore()
            _torch_internals.mark_as_stepped(optimizer)
        state = self.states[id(optimizer)]
        if not looks:
            raise OrderError(f"{type(optimizer).__name__}.step never called its closure")
        state["stage"], state["look"] = OptState.STEPPED, None
        result = StepResult(
            found_inf=skipped,
            scale=self._scale_of(state),
            grad_norm=looks[-1].norm,
            nonfinite=self._which(optimizer, looks[-1])() if skipped else (),
            returned=returned,
        )
        self._record(optimizer, result, looks[-1].found_inf, looks[-1].apart, known=True)
        return result

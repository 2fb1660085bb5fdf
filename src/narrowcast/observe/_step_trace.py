"""``nc.observe.trace_step``: weights and gradients at every stage of one training step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from narrowcast.errors import OrderError, SettingError, near_names
from narrowcast.gradients import GradScaler, StepResult
from narrowcast.observe._step_trace_parts import (
    check_can_be_read,
    copied,
    dense,
    is_same,
    parameters_by_name,
    replaced,
    tensors_in,
)
from narrowcast.observe._step_trace_stages import (
    TRACE_SCHEMA,
    Stage,
    described,
    number_text,
    stage_as_json,
    stage_lines,
    table_head,
    tensor_line,
)
from narrowcast.observe._torch_internals import at_the_end_of_backward, graph_task_id
from narrowcast.training import Stepper

FORWARD, BACKWARD, UNSCALE, BEFORE_STEP = "forward", "backward", "unscale", "before step"
STEP, ZEROED, END = "step", "zeroed", "end"
_IN_ORDER = (FORWARD, BACKWARD, UNSCALE, BEFORE_STEP, STEP, ZEROED, END)
# What a scaler does to gradients, besides its step.
_UNSCALING = ("unscale_", "clip_grad_norm_", "clip_grad_value_")


class StepTrace:
    """One training step as it was; made by ``trace_step``.

    Attributes:
        stages: in the order of the step, each with copies of all weights and gradients.
        inputs: what the model was last called with, and ``outputs``, what it returned: copies by name.
        skipped: whether the step was skipped; None where no optimizer's step was called in the block.
        scale: the loss scale that the gradients were made with, by name where scales have names; None without
            a scaler.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Sequence[torch.amp.GradScaler],
    ) -> None:
        self._model, self._optimizers, self._scalers = model, list(optimizers), list(scalers)
        self._hooks: ExitStack | None = None
        self._forget()

    def _forget(self) -> None:
        self._stages: dict[str, Stage] = {}
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.skipped: bool | None = None
        self.scale: float | dict[str, float] | None = None
        self._steps = 0
        self._overflowed: torch.Tensor | None = None
        self._seen: dict[str, torch.Tensor | None] = {}
        self._unscaled: set[int] = set()
        self._waits_for: int | None = None

    # ---- the block

    def __enter__(self) -> Self:
        if self._hooks is not None:
            raise OrderError("this trace is open already: leave its block before it is entered again")
        self._forget()
        self._parameters = parameters_by_name(self._model, self._optimizers)
        with ExitStack() as hooks:
            for name, parameter in self._parameters.items():
                check_can_be_read(name, parameter)
                if parameter.requires_grad and parameter.is_leaf:
                    handle = parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
                    _removed(hooks, handle)
            _removed(hooks, self._model.register_forward_pre_hook(self._called, with_kwargs=True))
            _removed(hooks, self._model.register_forward_hook(self._returned))
            for optimizer in self._optimizers:
                _removed(hooks, optimizer.register_step_pre_hook(self._before_step))
                _removed(hooks, optimizer.register_step_post_hook(self._after_step))
            for scaler in self._scalers:
                self._listen_to(scaler, hooks)
            self._record(FORWARD)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.close()
        if exc_type is None:
            self._record_end()

    def _record_end(self) -> None:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not self._changed():
            return
        zero = not any(bool(gradient.detach().any()) for gradient in map(dense, gradients))
        self._record(ZEROED if zero else END)

    # ---- events

    def _called(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*tensors_in([*args], "input")]
        for keyword, value in kwargs.items():
            given += tensors_in(value, keyword)
        self.inputs = {name: copied(tensor) for name, tensor in given}

    def _returned(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        self.outputs = {name: copied(t) for name, t in tensors_in(output, "output")}

    def _arrived(self, _: torch.Tensor) -> None:
        """A gradient was accumulated; when this backward pass ends, all of them have been."""
        if self._waits_for != graph_task_id():
            self._waits_for = graph_task_id()
            # Twice, so that what reduces gradients over ranks, and began to wait later, goes first.
            at_the_end_of_backward(lambda: at_the_end_of_backward(self._went_backward))

    def _went_backward(self) -> None:
        self._waits_for = None
        if STEP in self._stages:  # another step begins
            for stage in (UNSCALE, BEFORE_STEP, STEP):
                self._stages.pop(stage, None)
            self._unscaled.clear()
        if self._hooks is not None:
            self._record(BACKWARD)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        overflow = getattr(optimizer, "found_inf", None)  # of a fused optimizer, which skips by itself
        self._overflowed = overflow.detach().clone() if isinstance(overflow, torch.Tensor) else None
        if self._scalers and id(optimizer) not in self._unscaled:
            if getattr(optimizer, "grad_scale", None) is None:  # else the step divides as it goes
                self._record_change(optimizer)
        elif self._changed():
            self._record_change(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._scalers and id(optimizer) not in self._unscaled:
            self._record(UNSCALE, optimizer, weights=False)
        self._record(STEP)
        self.skipped = bool(self.skipped)

    def _listen_to(self, scaler: torch.amp.GradScaler, hooks: ExitStack) -> None:
        """Until the block ends the scaler's own methods, of this object alone, tell of what they did."""
        for name in _UNSCALING:
            if callable(real := getattr(scaler, name, None)):
                hooks.callback(replaced(scaler, name, self._unscaling(real)))
        hooks.callback(replaced(scaler, "step", self._stepping(scaler, scaler.step)))
        if callable(together := getattr(scaler, "step_together", None)):
            hooks.callback(replaced(scaler, "step_together", self._stepping(scaler, together)))

    def _unscaling(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = real(optimizer, *args, **kwargs)
            if self._changed():  # one that clips may leave both to a fused step
                self._record_change(optimizer)
            return result

        return unscale

    def _stepping(self, scaler: torch.amp.GradScaler, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._overflowed = self._steps, None
            scale = None if isinstance(scaler, GradScaler) else float(scaler.get_scale())
            result = real(optimizer, *args, **kwargs)
            results = [result] if isinstance(result, StepResult) else result
            if isinstance(results, list | tuple) and results and isinstance(results[0], StepResult):
                skipped, self.scale = any(one.skipped for one in results), results[0].scale
            else:
                overflowed = self._overflowed is not None and bool(self._overflowed > 0)
                skipped, self.scale = self._steps == before or overflowed, scale
            self.skipped = skipped or bool(self.skipped)
            for one in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
                # A fused step that is skipped may leave its gradients as they were.
                if skipped and id(one) not in self._unscaled and (not _is_fused(one) or self._changed()):
                    self._record_change(one)
            self._record(STEP)
            return result

        return step

    # ---- copies

    def _changed(self) -> bool:
        """Whether a gradient differs from its last copy; waits for the device."""
        return not all(is_same(p.grad, self._seen[name]) for name, p in self._parameters.items())

    def _record_change(self, optimizer: torch.optim.Optimizer) -> None:
        """What first changes gradients after a backward pass under a scaler is that it unscales them."""
        unscales = bool(self._scalers) and id(optimizer) not in self._unscaled
        self._unscaled.add(id(optimizer))
        self._record(UNSCALE if unscales else BEFORE_STEP, optimizer)

    def _record(
        self, stage: str, optimizer: torch.optim.Optimizer | None = None, *, weights: bool = True
    ) -> None:
        """Copy everything; of a stage that is there already only what ``optimizer`` steps on."""
        known = self._stages.get(stage) if optimizer is not None else None
        only = None if optimizer is None else {id(p) for g in optimizer.param_groups for p in g["params"]}
        last = next(reversed(self._stages.values())) if self._stages else None
        values, gradients = {}, {}
        for name, parameter in self._parameters.items():
            if known is not None and only is not None and id(parameter) not in only:
                values[name], gradients[name] = known.weights[name], known.gradients[name]
                continue
            keeps = last is not None and not weights
            values[name] = last.weights[name] if keeps and last is not None else copied(parameter)
            gradients[name] = None if parameter.grad is None else copied(parameter.grad)
            self._seen[name] = gradients[name]
        self._stages[stage] = Stage(name=stage, weights=values, gradients=gradients)

    # ---- reading

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What was recorded, in the order of a step; a stage that changed nothing is not there."""
        return tuple(self._stages[name] for name in _IN_ORDER if name in self._stages)

    def __getitem__(self, stage: str) -> Stage:
        """The stage of this name.

        Raises:
            SettingError: it was not recorded.
        """
        if stage not in self._stages:
            there = near_names(str(stage), [one.name for one in self.stages])
            raise SettingError(f"stage {stage!r} is not in this trace. {there}")
        return self._stages[stage]

    def as_json(self, *, most_values: int | None = None) -> dict[str, Any]:
        """Everything, ready for ``json.dumps``, which needs no NaN: they and infinities are text.

        Args:
            most_values: of longer tensors only norm, extremes and counts are given; None: of none.

        Returns:
            ``schema`` (1), ``kind``, ``torch``, ``model``, ``skipped``, ``scale``, ``inputs`` and ``outputs``
            by name, and ``stages``: a list of ``stage`` and ``parameters``, by name each with ``weight`` and
            ``gradient`` (or null). Tensors are ``dtype``, ``shape``, ``norm``, ``min``, ``max``, ``nan``,
            ``infinite`` (counts) and ``values``, which are exact.
        """
        return {
            "schema": TRACE_SCHEMA,
            "kind": "step trace",
            "torch": str(torch.__version__),
            "model": type(self._model).__name__,
            "skipped": self.skipped,
            "scale": self.scale,
            "inputs": {name: described(tensor, most_values) for name, tensor in self.inputs.items()},
            "outputs": {name: described(tensor, most_values) for name, tensor in self.outputs.items()},
            "stages": [stage_as_json(stage, most_values) for stage in self.stages],
        }

    def __str__(self) -> str:
        lines = [f"one step of {type(self._model).__name__}: {_ending(self.skipped)}{_scale(self.scale)}"]
        tensors = (self.inputs | self.outputs).items()
        lines += [tensor_line(name, tensor) for name, tensor in tensors]
        lines += table_head()
        for stage in self.stages:
            label = "step skipped" if stage.name == STEP and self.skipped else stage.name
            lines += stage_lines(stage, label)
        return "\n".join(lines)

    def __repr__(self) -> str:
        names = ", ".join(stage.name for stage in self.stages)
        return f"StepTrace({type(self._model).__name__}, skipped={self.skipped}, stages={names or 'none'})"

    def save(self, path: Any) -> None:
        """Write ``as_json()`` to a file."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.as_json(), file, allow_nan=False, indent=1)


def trace_step(
    model: torch.nn.Module | Stepper,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
) -> StepTrace:
    """Record every weight and gradient at every stage of the step that is taken inside the block::

        with nc.observe.trace_step(model, optimizer, scaler=scaler) as trace:
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print(trace)

    Stages are ``forward`` (as the block began), ``backward`` (gradients as autograd accumulated them, still
    scaled), ``unscale`` (under a scaler), ``before step`` (where clipping or something else changed them
    since), ``step`` and ``zeroed`` (``end`` where gradients changed and are not zero).
    Of several backward passes, model calls or steps in a block the last is kept. A skipped step has its
    stages too, and ``trace.skipped`` says so. ``nc.GradScaler.clip_grad_norm_`` unscales and clips at once,
    and with a fused optimizer both happen inside the step: ``unscale`` then holds the gradients after it.
    Masters of weights in a low format have rows of their own. The step itself is not changed by a bit.

    Copies stay on their devices until they are read: up to seven times the model's weights and gradients.
    The block waits for the device at every stage. It may be entered again, and then begins anew.

    Args:
        model: the module that is called and trained, or an ``nc.Stepper``, which brings its optimizers and
            scalers.
        optimizer: what steps; one or several.
        scaler: any ``torch.amp.GradScaler`` whose ``step`` is called, ``nc.GradScaler`` too; without it what
            it does between backward and step is called ``before step``, and a step that it skips is none.

    Returns:
        The trace: a context manager that is read, printed or turned into JSON after the block.

    Raises:
        SettingError: an argument of another type, or an optimizer or scaler beside a Stepper.
        UnsupportedError: on entering, for parameters that are sharded (DTensor), lazy or on ``meta``.
        OrderError: on entering a trace that is open.
    """
    if isinstance(model, Stepper):
        if optimizer is not None or scaler is not None:
            raise SettingError("a Stepper brings its optimizers and scalers: trace_step(stepper)")
        return StepTrace(model.model, model.optimizers, list(model.scalers.values()))
    if not isinstance(model, torch.nn.Module):
        raise SettingError(f"expected a torch.nn.Module or an nc.Stepper, got {type(model).__name__}")
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            hint = ": write trace_step(stepper)" if isinstance(one, Stepper) else ""
            got = type(one).__name__ + hint
            raise SettingError(f"expected a torch.optim.Optimizer, or several, got {got}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise SettingError(f"expected a torch.amp.GradScaler or None, got {type(scaler).__name__}")
    return StepTrace(model, optimizers, [] if scaler is None else [scaler])


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _removed(hooks: ExitStack, handle: Any) -> None:
    hooks.callback(handle.remove)


def _ending(skipped: bool | None) -> str:
    return "no optimizer step" if skipped is None else "skipped" if skipped else "taken"


def _scale(scale: float | dict[str, float] | None) -> str:
    if scale is None:
        return ""
    if isinstance(scale, dict):
        return ", loss scales " + ", ".join(f"{name} {number_text(s)}" for name, s in scale.items())
    return f", loss scale {scale:g}"

"""``nc.observe.trace_step``: weights and gradients at every stage of one training step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch

from narrowcast.casting import tensors_inside
from narrowcast.errors import OrderError, SettingError, UnsupportedError, did_you_mean
from narrowcast.observe._torch_internals import at_the_end_of_backward, graph_task_id
from narrowcast.training import Stepper
from narrowcast.weights import held_by

FORWARD, BACKWARD, UNSCALE, BEFORE_STEP = "forward", "backward", "unscale", "before step"
STEP, ZEROED, END = "step", "zeroed", "end"
_STAGES = (FORWARD, BACKWARD, UNSCALE, BEFORE_STEP, STEP, ZEROED, END)
# Methods of a scaler that change gradients.
_UNSCALING = ("unscale_", "clip_grad_norm_", "clip_grad_value_")
_STEPPING = ("step", "step_together")
_WIDTHS = {"stage": 12, "tensor": 17, "weight": 22, "gradient": 23}
_MOST_SHOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """Copies of every weight and gradient at one moment of a step, on their own devices.

    Attributes:
        name: ``"forward"`` (as the step began), ``"backward"``, ``"unscale"``, ``"before step"``, ``"step"``,
            ``"zeroed"`` or ``"end"``.
        weights: by the name of the parameter, in its shape and dtype.
        gradients: as ``weights``; None for a parameter without a gradient. Sparse ones are dense here.
    """

    name: str
    weights: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]


class StepTrace:
    """One training step, recorded by ``trace_step``, which has an example.

    Attributes:
        inputs, outputs: copies of the tensors that the model was last called with, and that it returned.
        skipped: whether the step was skipped; None if no optimizer stepped in the block.
        scale: the loss scale of the gradients; None without a scaler.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Sequence[torch.amp.GradScaler],
    ) -> None:
        self._model, self._optimizers, self._scalers = model, list(optimizers), list(scalers)
        self._hooks: ExitStack | None = None
        self._clear()

    def _clear(self) -> None:
        self._stages: dict[str, Stage] = {}
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.skipped: bool | None = None
        self.scale: float | None = None
        self._last: dict[str, torch.Tensor | None] = {}  # gradients as they were copied last
        self._unscaled: set[int] = set()  # optimizers, since the last backward
        self._awaited_task: int | None = None
        # How many optimizers stepped in the current call of a scaler's method, and the ``found_inf`` of a
        # fused one, which skips by itself.
        self._step_count = 0
        self._found_inf: torch.Tensor | None = None

    def __enter__(self) -> Self:
        if self._hooks is not None:
            raise OrderError("this trace is open already: leave its block before it is entered again")
        self._clear()
        self._parameters = _parameters_by_name(self._model, self._optimizers)
        # All hooks are removed if one of them cannot be registered, or a copy does not fit into memory.
        with ExitStack() as hooks:
            for handle in self._registered():
                hooks.callback(handle.remove)
            for scaler in self._scalers:
                for name in (*_UNSCALING, *_STEPPING):
                    self._wrap(scaler, name, hooks)
            self._record(FORWARD)
            self._hooks = hooks.pop_all()
        return self

    def _registered(self) -> Iterator[Any]:
        """Register the hooks, and yield their handles."""
        yield self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        yield self._model.register_forward_hook(self._after_forward)
        parameters: Iterable[Any] = self._parameters.values()
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                yield parameter.register_post_accumulate_grad_hook(self._accumulated)
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(self._before_step)
            yield optimizer.register_step_post_hook(self._after_step)

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.close()
        if exc_type is None and self._changed():
            self._record(END if self._holds_gradients() else ZEROED)

    def _holds_gradients(self) -> bool:
        """Return whether a gradient is not zero; waits for the device."""
        for parameter in self._parameters.values():
            if parameter.grad is not None and bool(_dense(parameter.grad.detach()).any()):
                return True
        return False

    # ---- hooks

    def _before_forward(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = _copies("input", (args, kwargs))

    def _after_forward(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        self.outputs = _copies("output", output)

    def _accumulated(self, _: torch.Tensor) -> None:
        if self._awaited_task != graph_task_id():
            self._awaited_task = graph_task_id()
            # Twice: callbacks run in the order in which they were queued. DistributedDataParallel queues its
            # own, which reduces the gradients, later than this one. What this one queues runs after that.
            at_the_end_of_backward(lambda: at_the_end_of_backward(self._after_backward))

    def _after_backward(self) -> None:
        self._awaited_task = None
        if STEP in self._stages:  # another step begins
            for stage in (UNSCALE, BEFORE_STEP, STEP):
                self._stages.pop(stage, None)
            self._unscaled.clear()
            self.skipped = None
        if self._hooks is not None:
            self._record(BACKWARD)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._step_count += 1
        found_inf = getattr(optimizer, "found_inf", None)
        self._found_inf = None
        if isinstance(found_inf, torch.Tensor):
            self._found_inf = found_inf.detach().clone()
        self._record_change(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # The step of a fused optimizer unscales the gradients.
        if self._scalers:
            self._record_change(optimizer)
        self._record(STEP)
        # None becomes False; True stays, since another optimizer skipped.
        self.skipped = bool(self.skipped)

    def _wrap(self, scaler: torch.amp.GradScaler, name: str, hooks: ExitStack) -> None:
        """Replace a method of this one scaler until ``hooks`` closes."""
        method = getattr(scaler, name, None)
        if method is None:  # torch's own scaler does not clip
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            self._step_count, self._found_inf = 0, None
            result = method(*args, **kwargs)
            optimizers = args[0] if args else kwargs.get("optimizer", kwargs.get("optimizers"))
            for optimizer in _as_list(optimizers):
                self._record_change(optimizer)
            if name in _STEPPING:
                # To skip a step, a scaler does not call the optimizer. It always calls a fused one, which
                # then skips by itself, as its found_inf says.
                fused_skipped = self._found_inf is not None and bool(self._found_inf > 0)
                self.skipped = bool(self.skipped) or self._step_count == 0 or fused_skipped
                self.scale = float(scaler.get_scale())
                self._record(STEP)
            return result

        if name in vars(scaler):  # another trace is open
            hooks.callback(setattr, scaler, name, method)
        else:
            hooks.callback(delattr, scaler, name)
        setattr(scaler, name, call)

    # ---- copies

    def _changed(self) -> bool:
        """Return whether a gradient differs from its last copy; waits for the device."""
        for name, parameter in self._parameters.items():
            if not _is_same(parameter.grad, self._last[name]):
                return True
        return False

    def _record_change(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients if they changed since they were last recorded."""
        if self._changed():
            # Under a scaler, the first change after backward unscales them.
            unscales = bool(self._scalers) and id(optimizer) not in self._unscaled
            self._unscaled.add(id(optimizer))
            self._record(UNSCALE if unscales else BEFORE_STEP)

    def _record(self, stage: str) -> None:
        # When one optimizer unscales, another may have stepped already. These stages show the weights from
        # before any step.
        weights: Mapping[str, torch.Tensor]
        if stage in (UNSCALE, BEFORE_STEP) and BACKWARD in self._stages:
            weights = self._stages[BACKWARD].weights
        else:
            weights = {name: _copied(parameter) for name, parameter in self._parameters.items()}
        gradients: dict[str, torch.Tensor | None] = {}
        for name, parameter in self._parameters.items():
            gradients[name] = None if parameter.grad is None else _copied(parameter.grad)
        self._last = gradients
        self._stages[stage] = Stage(name=stage, weights=weights, gradients=gradients)

    # ---- reading

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What was recorded, in the order of a step; a stage that changed nothing is absent."""
        return tuple(self._stages[name] for name in _STAGES if name in self._stages)

    def __getitem__(self, stage: str) -> Stage:
        """Return the stage of this name.

        Raises:
            SettingError: it was not recorded.
        """
        if stage not in self._stages:
            hint = did_you_mean(str(stage), [recorded.name for recorded in self.stages])
            raise SettingError(f"stage {stage!r} is not in this trace. {hint}")
        return self._stages[stage]

    def __str__(self) -> str:
        title = f"one step of {type(self._model).__name__}"
        if self.skipped is None:
            title += ": no optimizer step"
        elif self.skipped:
            title += ": skipped"
        else:
            title += ": taken"
        if self.scale is not None:
            title += f", loss scale {self.scale:g}"
        lines = [title]
        for name, tensor in (self.inputs | self.outputs).items():
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            lines.append(f"{name}  {str(tensor.dtype).removeprefix('torch.')} {shape}  {_cell(tensor)}")
        rules = ["-" * width for width in _WIDTHS.values()]
        lines += [_row(*_WIDTHS), _row(*rules)]
        for stage in self.stages:
            label = "step skipped" if stage.name == STEP and self.skipped else stage.name
            lines += _stage_lines(stage, label)
        return "\n".join(lines)


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

    Stages: ``forward`` (as the block began), ``backward`` (gradients as autograd accumulated them, still
    scaled), ``unscale`` (with a scaler), ``before step`` (if clipping or something else changed gradients
    since), ``step``, and ``zeroed`` (``end`` if gradients changed and are not zero). The trace changes
    nothing in the step. fp32 masters of low-precision weights have rows of their own.

    If the block has several backward passes, calls of the model or steps, the last is kept. With
    ``nc.GradScaler.clip_grad_norm_`` or a fused optimizer, gradients are unscaled and clipped at once, and
    ``unscale`` holds the result. Each stage copies weights and gradients, and waits for the device.

    Args:
        model: the module that is trained, or an ``nc.Stepper``, which brings its optimizers and scalers.
        optimizer: one or several.
        scaler: any ``torch.amp.GradScaler`` whose ``step`` is called. If it is not given, what it does to
            gradients appears as ``before step``.

    Returns:
        The trace: a context manager; read or print it after the block.

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
    optimizers = _as_list(optimizer)
    for candidate in optimizers:
        if not isinstance(candidate, torch.optim.Optimizer):
            raise SettingError(
                f"expected a torch.optim.Optimizer, or several, got {type(candidate).__name__}"
            )
    scalers: list[torch.amp.GradScaler] = []
    if scaler is not None:
        if not isinstance(scaler, torch.amp.GradScaler):
            raise SettingError(f"expected a torch.amp.GradScaler or None, got {type(scaler).__name__}")
        scalers.append(scaler)
    return StepTrace(model, optimizers, scalers)


def _as_list(optimizers: Any) -> list[Any]:
    if isinstance(optimizers, list | tuple):
        return list(optimizers)
    return [optimizers]


# ---- tensors


def _parameters_by_name(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Return the model's parameters, then their masters."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    for optimizer in optimizers:
        held = held_by(optimizer)
        if held is None:
            continue
        for low, master in held.parameters:
            if id(low) in names:
                named[f"{names[id(low)]} (master)"] = master
    for name, parameter in named.items():
        is_lazy = torch.nn.parameter.is_lazy(parameter)
        if is_lazy or parameter.is_meta or hasattr(parameter, "full_tensor"):
            raise UnsupportedError(
                f"parameter {name} has no values here: trace a model that is not sharded, lazy or on meta"
            )
    return named


def _copies(name: str, value: Any) -> dict[str, torch.Tensor]:
    """Return copies of the tensors in a nested value, numbered if there are several."""
    tensors = tensors_inside(value)
    if len(tensors) == 1:
        return {name: _copied(tensors[0])}
    return {f"{name}.{number}": _copied(tensor) for number, tensor in enumerate(tensors)}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout == torch.strided:
        return tensor
    return tensor.to_dense()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return _dense(tensor.detach()).clone()


def _is_same(gradient: torch.Tensor | None, copy: torch.Tensor | None) -> bool:
    if gradient is None or copy is None:
        return gradient is copy
    return torch.allclose(_dense(gradient.detach()), copy, rtol=0, atol=0, equal_nan=True)


# ---- text


def _cell(tensor: torch.Tensor | None) -> str:
    """Return the numbers of a small tensor, else its norm, or how many of its numbers are not finite."""
    if tensor is None:
        return "none"
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = numbers.cpu().double().flatten()
    if tensor.numel() <= _MOST_SHOWN:
        return ", ".join(map(_number, flat.tolist())) or "empty"
    not_finite = flat.numel() - int(flat.isfinite().sum())
    if not_finite:
        return f"{not_finite} not finite"
    return f"norm {_number(float(torch.linalg.vector_norm(flat)))}"


def _stage_lines(stage: Stage, label: str) -> list[str]:
    """Return the lines of one stage; a long name of a parameter has a line of its own."""
    rows: list[tuple[str, str, str]] = []
    for name, weight in stage.weights.items():
        cells = (_cell(weight), _cell(stage.gradients[name]))
        if len(name) > _WIDTHS["tensor"]:
            rows += [(name, "", ""), ("", *cells)]
        else:
            rows.append((name, *cells))
    lines = []
    for row in rows:
        lines.append(_row(label, *row))
        label = ""  # before the first row alone
    return lines


def _row(*cells: str) -> str:
    padded = map(str.ljust, cells, _WIDTHS.values())
    return "  ".join(padded).rstrip()


def _number(value: float) -> str:
    """Format to four decimals, or as a power of ten where these would show zero or too many digits."""
    fits = value == 0 or 5e-5 <= abs(value) < 1e7 or not math.isfinite(value)
    if fits:
        return f"{value:.4f}"
    return f"{value:.4e}"

"""``UpdateMeter``: how much of each update survives the format of the parameters."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.errors import SettingError, UnsupportedError, not_copied
from narrowcast.gradients import on_device, parameters_of, untraced
from narrowcast.weights._held import HeldWeights, held_by
from narrowcast.weights._lower import LOW_DTYPES
from narrowcast.weights._torch_internals import (
    is_hook_table,
    is_outermost_step,
    local,
    step_without_hooks,
    tensors_in,
)
from narrowcast.weights._update_methods import widened

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivingUpdates:
    """How much of the updates of one parameter group, in one format, survived in the measured steps.

    Attributes:
        group: position in ``optimizer.param_groups``.
        format: that of the parameters, as "bf16"; for held ones that of the low parameters.
        updates: ``"masters"``, ``"kahan"`` or ``"stochastic"`` for held parameters, else ``"nearest"``.
        intended_elements: how many updates of single elements, over all steps, were not zero in float32;
            updates of NaN count too.
        swallowed_elements: how many of these left the element with the value from before the step.
        effective_gain: <applied, intended> / <intended, intended> over all of them: 1 for the full step,
            below 1 for a shorter one. NaN if no update was intended, or if the value before the step, the
            intended one or the one after it was not finite, as of an fp16 weight that overflows.
    """

    group: int
    format: str
    updates: str
    intended_elements: int
    swallowed_elements: int
    effective_gain: float

    @property
    def swallowed_share(self) -> float:
        """From 0 to 1; NaN if no update was intended."""
        if not self.intended_elements:
            return math.nan
        return self.swallowed_elements / self.intended_elements


_Row = tuple[int, str, str]
"""Group, format and updates, as in ``SurvivingUpdates``."""


@dataclass(slots=True, eq=False)
class _Step:
    """A step that is being measured.

    Attributes:
        rows: the row of the results that each parameter counts in.
        before: the float32 value of each parameter before the step.
        aimed: the value that a step in float32 gives each parameter; of all parameters of the optimizer, if
            some low parameter is not held. Else it is empty, and a float32 parameter counts as having got
            what was intended.
    """

    rows: dict[torch.Tensor, _Row]
    before: dict[torch.Tensor, torch.Tensor]
    aimed: dict[torch.Tensor, torch.Tensor]


class UpdateMeter:
    """Measure how much of an optimizer's updates the format of its parameters can represent.

    >>> import torch
    >>> from narrowcast.weights import UpdateMeter
    >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    >>> optimizer = torch.optim.SGD([weight], lr=1e-4)
    >>> with UpdateMeter(optimizer) as meter:
    ...     weight.sum().backward()
    ...     optimizer.step()
    >>> meter.read()[0].swallowed_share
    1.0

    The intended update is what the same optimizer does in float32 from the same parameters, gradients and
    state; the applied one is what is left of it. For parameters held by ``hold``:

    - intended: the working parameter after the step, minus the value before.
    - applied: the value that is kept, minus the value before. It is that of the master, of the low parameter
      plus its residual, or of the low parameter alone.

    For other bfloat16 and float16 parameters, a copy of the optimizer makes the step in float32 first. That
    costs one more step. While it runs it takes 12 bytes an element plus the state in float32, then 8 bytes
    until the optimizer has made its own step. Training does not change: nothing is written, no hook of the
    optimizer is called, the random state is restored.

    Args:
        optimizer: any dense optimizer, held or not, now or later.
        every: measure one step in so many, starting with the next.

    Raises:
        SettingError: ``every`` is not a positive integer.
        UnsupportedError: at a step, if low parameters that are not held get a closure, or the optimizer
            cannot be copied.

    Use it as a context manager, or call ``remove``. Sums stay on the device, in float64 (float32 on MPS),
    until they are read. Of a DTensor the part on this rank counts. Parameters of other dtypes are not
    measured. The squares for ``effective_gain`` are of float32, which holds them exactly enough for updates
    of 1e-19 or more; one below 1e-23 is counted, but weighs nothing in the gain.

    Source: the share of swallowed updates: Zamirai et al. 2020, arXiv 2010.06192, section 3.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, every: int = 1) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SettingError(f"expected an optimizer to measure, got {type(optimizer).__name__}")
        if not isinstance(every, int) or every < 1:
            raise SettingError(f"every must be a whole number of steps of at least 1, got {every!r}")
        self.optimizer = optimizer
        self.every = every
        self.measured_steps = 0
        self._steps = 0
        self._sums: dict[tuple[_Row, torch.device], torch.Tensor] = {}
        self._step: _Step | None = None
        self._subscribed: HeldWeights | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    __reduce_ex__ = not_copied("an UpdateMeter", "copy what read() returns, or measure the copied optimizer")

    def __enter__(self) -> UpdateMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Stop measuring; the results can still be read."""
        for hook in self._hooks:
            hook.remove()
        self._subscribe(None)
        self._step = None

    def reset(self) -> None:
        """Clear the results; the next step is measured."""
        self._sums.clear()
        self._steps = self.measured_steps = 0

    def read(self) -> tuple[SurvivingUpdates, ...]:
        """Return a record for each parameter group and format, in order; waits for the device."""
        totals: dict[_Row, torch.Tensor] = {}
        for (row, _), sums in self._sums.items():
            # A row has sums on each of its devices.
            sums_on_cpu = sums.cpu().double()
            if row in totals:
                sums_on_cpu = sums_on_cpu + totals[row]
            totals[row] = sums_on_cpu

        records = []
        for row in sorted(totals):
            group, format, updates = row
            intended, swallowed, applied_along_intended, intended_squared = totals[row].tolist()
            effective_gain = math.nan
            # An applied update is infinite where a weight overflowed.
            if intended_squared > 0 and math.isfinite(applied_along_intended):
                effective_gain = applied_along_intended / intended_squared
            records.append(
                SurvivingUpdates(
                    group=group,
                    format=format,
                    updates=updates,
                    intended_elements=int(intended),
                    swallowed_elements=int(swallowed),
                    effective_gain=effective_gain,
                )
            )
        return tuple(records)

    def __str__(self) -> str:
        """Format a table of at most 80 columns."""
        title = (
            f"Updates that survive, over {self.measured_steps} measured steps of "
            f"{type(self.optimizer).__name__}"
        )
        lines = [title[:80], "group  format  updates            elements    swallowed         gain"]
        for row in self.read():
            swallowed = "-"
            if not math.isnan(row.swallowed_share):
                swallowed = f"{100 * row.swallowed_share:.1f} %"
            gain = "-"
            if not math.isnan(row.effective_gain):
                gain = f"{row.effective_gain:.3f}"
            lines.append(
                f"{row.group:>5}  {row.format:<6}  {row.updates:<10}  {row.intended_elements:>15,}"
                f"  {swallowed:>11}  {gain:>11}"
            )
        return "\n".join(lines)

    # ---- one step

    @untraced
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not is_outermost_step(optimizer):
            return
        self._step = None
        self._steps += 1
        if (self._steps - 1) % self.every:
            return
        handle = held_by(optimizer)
        self._subscribe(handle)
        low_by_working: dict[torch.Tensor, torch.Tensor] = {}
        step = _Step({}, {}, {})
        if handle is not None:
            low_by_working = {working: low for low, working in handle.parameters}
            step.before = handle.full_values()

        needs_shadow = False
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                low = low_by_working.get(parameter)
                if handle is not None and low is not None:
                    step.rows[low] = (number, _NAMES[low.dtype], handle.updates)
                elif parameter.dtype in _NAMES:
                    step.rows[parameter] = (number, _NAMES[parameter.dtype], "nearest")
                    step.before[parameter] = parameter.detach().to(torch.float32, copy=True)
                    needs_shadow = needs_shadow or parameter.dtype in LOW_DTYPES
        if needs_shadow:
            _refuse_closure(optimizer, args, kwargs)
            step.aimed = aimed_values(optimizer)
        self._step = step

    def _subscribe(self, handle: HeldWeights | None) -> None:
        if self._subscribed is handle:
            return
        if self._subscribed is not None:
            self._subscribed.watchers.remove(self._watch_held)
        if handle is not None:
            handle.watchers.append(self._watch_held)
        self._subscribed = handle

    def _watch_held(self) -> Callable[[], None]:
        """Take the intended values of held weights, and return a function that adds them to the sums.

        The handle calls this after the optimizer's step, and the function once it has written the low
        weights. The hook ``_after_step`` may run before or after both, so neither clears ``_step``: the next
        step does.
        """
        step, handle = self._step, self._subscribed
        if step is None or handle is None:
            return lambda: None
        # The handle frees this memory or keeps it; nothing writes to it before ``finish`` reads it.
        aimed = {low: working.detach() for low, working in handle.parameters}

        def finish() -> None:
            after = handle.full_values()
            for low, value in aimed.items():
                self._add(step.rows[low], step.before.pop(low), value, after[low])

        return finish

    @untraced
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not is_outermost_step(optimizer) or self._step is None:
            return
        # Add the parameters that are not held; ``_watch_held`` adds the others.
        step = self._step
        self.measured_steps += 1
        for parameter, row in step.rows.items():
            _, _, updates = row
            if updates == "nearest":
                after = parameter.detach().to(torch.float32)
                aimed = step.aimed.pop(parameter, after)
                self._add(row, step.before.pop(parameter), aimed, after)

    def _add(self, row: _Row, before: torch.Tensor, aimed: torch.Tensor, after: torch.Tensor) -> None:
        """Add one parameter to the sums of its row; on the device, so that no step waits for it."""
        before, aimed, after = local(before), local(aimed), local(after)
        dtype = torch.float32 if before.device.type == "mps" else torch.float64
        with torch.no_grad():
            intended = aimed - before
            applied = after - before
            is_intended = intended != 0
            is_swallowed = is_intended & (after == before)
            sums = torch.stack(
                [
                    is_intended.sum(dtype=dtype),
                    is_swallowed.sum(dtype=dtype),
                    (applied * intended).sum(dtype=dtype),
                    intended.square().sum(dtype=dtype),
                ]
            )
        key = (row, before.device)
        if key in self._sums:
            sums = sums + self._sums[key]
        self._sums[key] = sums


def take_swallowed_share(meters: Iterable[UpdateMeter]) -> torch.Tensor | None:
    """Return the share of swallowed updates of low parameters since the last call, and clear the sums.

    0-dim, on the device of the first sums, without waiting for it if it is an accelerator. NaN if no update
    was intended; None if no step was measured, or if none had a low parameter. Which step is measured next
    stays as it is, unlike after ``UpdateMeter.reset``.
    """
    counts: list[torch.Tensor] = []
    for meter in meters:
        for (row, _), sums in meter._sums.items():
            _, format, _ = row
            if format != "fp32":
                counts.append(sums[:2])
        meter._sums.clear()
    if not counts:
        return None
    device = counts[0].device
    counts_there = [on_device(count, device) for count in counts]
    intended, swallowed = torch.stack(counts_there).sum(0).unbind()
    return swallowed / intended


def _refuse_closure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # torch hands the optimizer itself as the first argument.
    if kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None):
        raise UnsupportedError(
            f"the step of this {type(optimizer).__name__} computes its gradients in a closure, so that its "
            "update in float32 is not known beforehand: call backward before step, or hold the optimizer "
            "with narrowcast.weights.hold"
        )


# ---- the intended update of parameters that are not held: a step by a float32 copy of the optimizer

# Schedulers and ``hold`` replace these on one optimizer; they must not be copied.
_BOUND = {"step", "zero_grad"}


def aimed_values(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Return the float32 value that each parameter would have after a step in float32."""
    parameters = parameters_of(optimizer)
    with torch.no_grad():
        shadows = {parameter: _shadow_of(parameter) for parameter in parameters}
        shadow_optimizer = _shadow_optimizer(optimizer, shadows)

        # An optimizer may draw random numbers, on the CPU or on the devices of its parameters.
        # ``fork_rng`` restores the CPU's generator too. Without indices it does not use the device type.
        device_type = "cuda"
        indices = set()
        for parameter in parameters:
            if parameter.device.index is not None:
                device_type = parameter.device.type
                indices.add(parameter.device.index)
        with torch.random.fork_rng(sorted(indices), device_type=device_type):
            # The step of the class; a scheduler may have replaced that of the instance by one that counts.
            step_without_hooks(optimizer)(shadow_optimizer)
    return {parameter: value.detach() for parameter, value in shadows.items()}


def _shadow_of(parameter: torch.Tensor) -> torch.Tensor:
    shadow = torch.nn.Parameter(widened(parameter).detach().clone(), requires_grad=parameter.requires_grad)
    vars(shadow).update(vars(parameter))
    if parameter.grad is not None:
        shadow.grad = widened(parameter.grad).detach().clone()
    return shadow


def _shadow_optimizer(
    optimizer: torch.optim.Optimizer, shadows: dict[torch.Tensor, torch.Tensor]
) -> torch.optim.Optimizer:
    """Copy the optimizer, with every reference to a parameter replaced by one to its shadow."""
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))

    # ``deepcopy`` takes these in place of copies that it would make of the objects with these ids.
    copies: dict[int, Any] = {id(parameter): copied for parameter, copied in shadows.items()}
    copies[id(optimizer)] = shadow
    for tensor in tensors_in(list(optimizer.state.values())):
        if id(tensor) not in copies:
            copies[id(tensor)] = widened(tensor).detach().clone()

    attributes = {name: value for name, value in vars(optimizer).items() if name not in _BOUND}
    for name in attributes:
        if is_hook_table(name):
            attributes[name] = OrderedDict()
    try:
        vars(shadow).update(copy.deepcopy(attributes, copies))
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            "an optimizer with parameters in a low format is measured by a copy of it, and this "
            f"{type(optimizer).__name__} cannot be copied ({error}): hold it with narrowcast.weights.hold, "
            "which needs no copy"
        ) from error
    return shadow

"""What a Stepper writes of each step to TensorBoard, or to another writer with the same two methods."""

from __future__ import annotations

import math
import textwrap
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.errors import SettingError
from narrowcast.gradients import HostCopies, HostCopy, StepResult, is_capturing, parameters_of
from narrowcast.replay import SkipExplainer
from narrowcast.training._optimizer_group import OptimizerGroup
from narrowcast.weights import LOW_DTYPES, UpdateMeter, held_by, take_swallowed_share

# A step whose updates are measured costs a copy of the optimizer and a step of it in fp32.
_MEASURE_EVERY = 100


@dataclass(slots=True)
class _EndedStep:
    """A step that has not been written.

    Attributes:
        folder: the first part of its tags, as ``"narrowcast/g"``.
        number: of the step.
        values: those that the host knows, by name; ``skipped`` is 0 or 1.
        names: the names of the values that are on their way to the host.
        copy: these values; None if there are none.
    """

    folder: str
    number: int
    values: dict[str, float] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    copy: HostCopy | None = None

    def is_known(self) -> bool:
        return self.copy is None or self.copy.has_arrived()


class StepBoard:
    """Writes what each step of a Stepper shows, late enough that no step waits for a device.

    What only a device knows starts its way to the host when the step ends, and is written when a later step
    ends and it has arrived. Steps are written in their order.

    Args:
        writer: has ``add_scalar(tag, value, step)`` and ``add_text(tag, text, step)``.
        groups: of the Stepper, by name.
        explainer: of its skipped steps, whose stories are written as text.

    Attributes:
        meters: of optimizers that update low weights without masters.
    """

    def __init__(
        self, writer: Any, groups: Mapping[str | None, OptimizerGroup], explainer: SkipExplainer
    ) -> None:
        self._writer = writer
        self._explainer = explainer
        self._written_stories = 0
        self._unwritten: deque[_EndedStep] = deque()
        self._skipped_steps: dict[str, int] = {}  # by the folder of tags
        self._copies = HostCopies()
        self._folders: dict[OptimizerGroup, str] = {}
        self._meters: dict[OptimizerGroup, list[UpdateMeter]] = {}
        for name, group in groups.items():
            self._folders[group] = "narrowcast"
            if name is not None:
                self._folders[group] = f"narrowcast/{name}"
            self._meters[group] = _meters_of(group)

    @property
    def meters(self) -> list[UpdateMeter]:
        meters: list[UpdateMeter] = []
        for meters_of_group in self._meters.values():
            meters += meters_of_group
        return meters

    def step_ended(self, group: OptimizerGroup, number: int, result: StepResult) -> None:
        """Write the stories so far and the steps that the host knows, perhaps this one too.

        While a CUDA graph is captured nothing is written: the host sees its step once, though it is replayed
        many times.
        """
        if is_capturing():
            return
        folder = self._folders[group]

        # Stories that were added since the last call, mostly of this step.
        stories = self._explainer.told
        for story in stories[self._written_stories :]:
            # Indented, so that TensorBoard, which shows Markdown, keeps its lines.
            self._writer.add_text(f"{folder}/skips", textwrap.indent(story, "    "), number)
        self._written_stories = len(stories)

        values = result.values_on_device()
        values["swallowed_updates"] = take_swallowed_share(self._meters[group])
        self._unwritten.append(self._on_the_way(folder, number, values))
        while self._unwritten and self._unwritten[0].is_known():
            self._write(self._unwritten.popleft())

    def write_all(self) -> None:
        """Write every step; waits for the device."""
        while self._unwritten:
            self._write(self._unwritten.popleft())

    def _on_the_way(
        self, folder: str, number: int, values: Mapping[str, torch.Tensor | float | None]
    ) -> _EndedStep:
        """Return a step whose values the host knows, or will know without a sync."""
        step = _EndedStep(folder, number)
        on_device: list[torch.Tensor] = []
        for name, value in values.items():
            if value is None:
                continue
            if isinstance(value, torch.Tensor) and not _is_on_host(value):
                step.names.append(name)
                on_device.append(value.detach().float().reshape(()))
            else:
                step.values[name] = float(value)

        if on_device:
            device = on_device[0].device
            together = torch.stack([value.to(device, non_blocking=True) for value in on_device])
            step.copy = self._copies.start(together)
        return step

    def _write(self, step: _EndedStep) -> None:
        values = step.values
        if step.copy is not None:
            values.update(zip(step.names, step.copy(), strict=True))

        skipped_steps = self._skipped_steps.get(step.folder, 0) + int(values["skipped"])
        self._skipped_steps[step.folder] = skipped_steps
        self._writer.add_scalar(f"{step.folder}/loss_scale", values["scale"], step.number)
        self._writer.add_scalar(f"{step.folder}/skipped_steps", skipped_steps, step.number)
        if "grad_norm" in values:
            self._writer.add_scalar(f"{step.folder}/grad_norm", values["grad_norm"], step.number)
        # NaN if no update was intended, as in a step that was skipped on the device.
        share = values.get("swallowed_updates", math.nan)
        if not math.isnan(share):
            self._writer.add_scalar(f"{step.folder}/swallowed_updates", share, step.number)


def check_writer(writer: Any) -> None:
    """Refuse an object that is no writer.

    Raises:
        SettingError: a method is missing, or it is a class.
    """
    for method in ("add_scalar", "add_text"):
        if isinstance(writer, type) or not callable(getattr(writer, method, None)):
            raise SettingError(
                "expected a writer with add_scalar(tag, value, step) and add_text(tag, text, step), as "
                f"torch.utils.tensorboard.SummaryWriter(folder) is, got {writer!r:.80}"
            )


def _meters_of(group: OptimizerGroup) -> list[UpdateMeter]:
    """Return a meter for each optimizer of a group that updates low weights without masters."""
    meters: list[UpdateMeter] = []
    # The meter cannot know the update of an optimizer that computes its gradients in a closure.
    if group.needs_closure:
        return meters
    for optimizer in group.optimizers:
        held = held_by(optimizer)
        if held is None:
            is_low = any(parameter.dtype in LOW_DTYPES for parameter in parameters_of(optimizer))
        else:
            is_low = held.updates != "masters"
        if is_low:
            meters.append(UpdateMeter(optimizer, every=_MEASURE_EVERY))
    return meters


def _is_on_host(value: torch.Tensor) -> bool:
    return value.device.type == "cpu"

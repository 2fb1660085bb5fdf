"""Run skipped steps of a host again on request, and say where they went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from narrowcast.gradients import GradScaler, StepResult
from narrowcast.policy import Policy
from narrowcast.replay import Caller, SkipExplainer, Surroundings, called_modules


class HostSkips:
    """Explains the skipped steps of the models that a host trains.

    Args:
        policy: that of the training.
        mixed: calls a module by the policy.
        model: the model in which the paths of rules start; None: each module that is called.
    """

    def __init__(self, policy: Policy, mixed: Caller, model: torch.nn.Module | None = None) -> None:
        self._explainer = SkipExplainer(policy, model=model)
        self._mixed = mixed
        self._steps = 0
        self._handles: list[Any] = []

    def watch(self, model: torch.nn.Module) -> None:
        """Record calls of ``model``, or of the modules in it if these are called one by one."""
        self._explainer.recording.records = True
        for module in called_modules(model):
            self._handles += self._explainer.recording.watch(module)

    def step_ended(
        self,
        result: StepResult,
        scaler: GradScaler,
        formats: Mapping[str, torch.dtype],
        *,
        may_step_again: bool,
    ) -> None:
        """Explain a step if it was skipped, and drop its recorded calls.

        A step on a GPU whose result the host does not know yet is not explained; a message says so once. With
        ``may_step_again`` another optimizer may step on the same calls, which are kept until the next one.
        """
        self._steps += 1
        if not result.is_known:
            self._explainer.tell_of_late_flags()
        elif result.skipped:
            lower_scale = scaler.get_scale()
            if lower_scale == result.scale:  # the host has not moved it yet
                lower_scale = scaler.loss_scale().after_step(overflow=True).scale
            with ExitStack() as outside:
                # Lightning's manual optimization steps inside the region, which must be off in the replay.
                for device in formats:
                    outside.enter_context(torch.autocast(device, enabled=False))
                self._explainer.explain(
                    Surroundings(self._mixed, nullcontext, formats),
                    number=self._steps,
                    scale=result.scale,
                    lower_scale=lower_scale,
                    names=result.nonfinite,
                )
        self._explainer.step_ended(may_step_again=may_step_again)

    def remove(self) -> None:
        """Stop recording, and drop what was recorded."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._explainer.recording.clear()


def plain_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module, as a ``Caller``."""
    return module(*args, **kwargs)

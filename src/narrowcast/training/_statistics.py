"""Buffers as they were when a window began, for the case that its step is skipped.

A batch norm that saw an overflow keeps running_mean = inf though the step is skipped. Putting the old values
back by ``torch.where`` on the overflow flag waits for no device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from narrowcast.errors import SettingError, near_names
from narrowcast.gradients import StepResult

RESTORE = ("norms", "all", "none")


class Statistics:
    """The buffers of a model that a skipped step must leave as they were."""

    def __init__(self, model: torch.nn.Module, restore: str) -> None:
        if restore not in RESTORE:
            raise SettingError(f"unknown restore={restore!r}. {near_names(str(restore), RESTORE)}")
        self._model = model
        self._restore = restore
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def remember(self) -> None:
        """Keep the values of now, unless those of this window's start are kept already."""
        if self._kept is None and self._restore != "none" and torch.is_grad_enabled():
            with torch.no_grad():
                self._kept = [(buffer, buffer.detach().clone()) for buffer in self._buffers()]

    def _buffers(self) -> Iterator[torch.Tensor]:
        for module in self._model.modules():
            if self._restore == "all" or isinstance(module, torch.nn.modules.batchnorm._NormBase):
                yield from module.buffers(recurse=False)

    @torch.no_grad()
    def end(self, result: StepResult) -> None:
        """The window's step was taken or skipped: forget, or put everything back first."""
        kept, self._kept = self._kept or (), None
        skipped = result.skipped_on_device()
        if skipped is False:
            return
        for buffer, before in kept:
            if isinstance(skipped, torch.Tensor):
                buffer.copy_(torch.where(skipped.to(buffer.device, non_blocking=True), before, buffer))
            else:
                buffer.copy_(before)

    def rewind(self) -> None:
        """Put everything back and keep remembering: the window begins anew."""
        with torch.no_grad():
            for buffer, before in self._kept or ():
                buffer.copy_(before)

    def forget(self) -> None:
        self._kept = None

"""The statistics of normalization layers, which a skipped step restores."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from narrowcast.errors import SettingError, did_you_mean
from narrowcast.gradients import on_device
from narrowcast.training._torch_internals import buffers_of
from narrowcast.weights import is_batch_or_instance_norm

RESTORE = ("norms", "all", "none")


class Statistics:
    """Buffers as they were at the start of an accumulation, in case its step is skipped.

    A batch norm that saw an overflow keeps running_mean = inf although the step is skipped. ``torch.where``
    on the overflow flag restores the old values without waiting for the device.

    Modules are listed once, at the first step. Buffers of one device and dtype are copied by one operator,
    into memory that is kept from step to step.
    """

    def __init__(self, model: torch.nn.Module, restore: str) -> None:
        if restore not in RESTORE:
            raise SettingError(f"unknown restore={restore!r}. {did_you_mean(str(restore), RESTORE)}")
        self._model = model
        self._restore = restore
        self._modules: list[torch.nn.Module] | None = None
        self._buffers: list[torch.Tensor] = []
        self._groups: list[BufferGroup] = []
        # Buffers that a group cannot hold, such as sparse ones, and their copies.
        self._others: list[torch.Tensor] = []
        self._other_values: list[torch.Tensor] = []
        self._remembers = False

    def remember(self) -> None:
        """Copy the current values, unless those of the accumulation's start are kept already."""
        if self._remembers or self._restore == "none":
            return
        if self._modules is None:
            self._modules = self._restored_modules()
        self._list_buffers(self._modules)
        if self._buffers:
            self._copy_values()

    @torch.no_grad()
    def _copy_values(self) -> None:
        for group in self._groups:
            group.save()
        self._other_values = [buffer.detach().clone() for buffer in self._others]
        self._remembers = True

    def restore(self, skipped: torch.Tensor | bool = True) -> None:
        """Restore the values if the step was skipped; the copies stay until ``forget``."""
        if skipped is not False and self._remembers:
            self._restore_values(skipped)

    @torch.no_grad()
    def _restore_values(self, skipped: torch.Tensor | bool) -> None:
        for group in self._groups:
            if isinstance(skipped, torch.Tensor):
                group.restore_where(skipped)
            else:
                group.restore()
        for buffer, before in zip(self._others, self._other_values, strict=True):
            # torch.where takes neither sparse nor quantized buffers: for those the host waits for the flag.
            has_where = buffer.layout == torch.strided and not buffer.is_quantized
            if isinstance(skipped, torch.Tensor) and has_where:
                buffer.copy_(torch.where(on_device(skipped, buffer.device), before, buffer))
            elif skipped:
                buffer.copy_(before)

    def forget(self) -> None:
        self._remembers = False
        self._other_values = []

    def _restored_modules(self) -> list[torch.nn.Module]:
        modules = list(self._model.modules())
        if self._restore == "all":
            return modules
        return list(filter(is_batch_or_instance_norm, modules))

    def _list_buffers(self, modules: list[torch.nn.Module]) -> None:
        """Group the buffers, unless they are those of the last step; after ``model.to`` they are new ones."""
        buffers = buffers_of(modules)
        if _are_the_same(buffers, self._buffers):
            return

        # A lazy buffer has no values before the first forward pass. Until then it is left out, so that the
        # comparison above finds a difference at each step, and the buffers are grouped again.
        self._buffers = [buffer for buffer in buffers if not torch.nn.parameter.is_lazy(buffer)]

        plain_buffers: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        self._others = []
        for buffer in self._buffers:
            if _is_plain(buffer):
                plain_buffers.setdefault((buffer.device, buffer.dtype), []).append(buffer)
            elif not _is_expanded(buffer):  # nothing can write to an expanded one
                self._others.append(buffer)
        self._groups = list(map(BufferGroup, plain_buffers.values()))


class BufferGroup:
    """Contiguous buffers of one device and dtype, and one tensor that holds a copy of all."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        # Views in one dimension, which torch.cat copies side by side: ten times as fast as a copy of each.
        self._values = [buffer.detach().view(-1) for buffer in buffers]
        self._sizes = [buffer.numel() for buffer in buffers]
        self._before = torch.cat(self._values)
        self._before_by_buffer = torch.split(self._before, self._sizes)
        self._after: torch.Tensor | None = None
        self._after_by_buffer: tuple[torch.Tensor, ...] = ()

    def save(self) -> None:
        torch.cat(self._values, out=self._before)

    def restore(self) -> None:
        torch._foreach_copy_(self._values, self._before_by_buffer)

    def restore_where(self, skipped: torch.Tensor) -> None:
        """Restore if ``skipped``, which only the device knows: three operators, for any number of buffers."""
        if self._after is None:
            self._after = torch.empty_like(self._before)
            self._after_by_buffer = torch.split(self._after, self._sizes)
        after = self._after
        torch.cat(self._values, out=after)
        torch.where(on_device(skipped, after.device), self._before, after, out=after)
        torch._foreach_copy_(self._values, self._after_by_buffer)


def _is_expanded(buffer: torch.Tensor) -> bool:
    """Return whether several elements of ``buffer`` are one in memory, so that nothing writes to it."""
    return buffer.layout == torch.strided and 0 in buffer.stride() and buffer.numel() > 1


def _is_plain(buffer: torch.Tensor) -> bool:
    """Return whether ``buffer`` is a contiguous torch.Tensor of plain numbers.

    That is, not sparse, not quantized, not of a subclass, and not conjugated or negated lazily.
    """
    dense = type(buffer) is torch.Tensor and buffer.layout == torch.strided and not buffer.is_quantized
    return dense and buffer.is_contiguous() and not buffer.is_conj() and not buffer.is_neg()


def _are_the_same(now: Sequence[object], before: Sequence[object]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))

"""Updates from several chunks of a batch, with torch.amp and with narrowcast.

Gradients of all chunks add up scaled. They are unscaled once, before they are clipped and the parameters
updated, and DDP reduces them once, with the last chunk.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_NORM = 1.0


class TorchUpdates:
    """``torch.autocast`` and ``torch.amp.GradScaler``; with ``format_name=None`` no mixed precision."""

    def __init__(
        self, model: nn.Module, optimizer: Any, scheduler: Any, chunks: int, format_name: str | None
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.chunks = model, optimizer, scheduler, chunks
        self.device_type = next(model.parameters()).device.type
        self.format_name = format_name
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=format_name == "fp16")

    def chunk(self, number: int) -> AbstractContextManager[Any]:
        """Around forward and backward of a chunk, counted from 0."""
        last = number == self.chunks - 1
        ddp = isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync() if ddp and not last else nullcontext()

    def region(self) -> AbstractContextManager[Any]:
        """Around the forward pass of a chunk and its loss."""
        if self.format_name is None:
            return nullcontext()
        return torch.autocast(self.device_type, DTYPES[self.format_name])

    def backward(self, loss: torch.Tensor, number: int) -> Any:
        """Go backward from a chunk's mean loss, update after the last; return the norm before clipping."""
        self.scaler.scale(loss / self.chunks).backward()
        if number < self.chunks - 1:
            return None
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()  # narrowcast: ignore[scheduler-on-skip]
        self.optimizer.zero_grad()
        return norm

    def taken(self) -> int:
        """How many updates were not skipped; reads it from the device."""
        return int(next(iter(self.optimizer.state.values()), {"step": 0})["step"])

    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint needs, by the names of its arguments."""
        saved = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return saved | ({"scaler": self.scaler} if self.format_name else {})


class NarrowcastUpdates(TorchUpdates):
    """``nc.Stepper``: ``accumulate`` is all that it must know of chunks."""

    def __init__(
        self, model: nn.Module, optimizer: Any, scheduler: Any, chunks: int, format_name: str
    ) -> None:
        super().__init__(model, optimizer, scheduler, chunks, None)
        self.stepper = nc.Stepper(
            model, optimizer, format_name, accumulate=chunks, max_norm=MAX_NORM, scheduler=scheduler
        )

    def chunk(self, number: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def region(self) -> AbstractContextManager[Any]:
        return self.stepper.autocast()

    def backward(self, loss: torch.Tensor, number: int) -> Any:
        return self.stepper.step(loss)

    def loss_scale(self) -> float:
        return self.stepper.scaler.get_scale()

    def saved(self) -> dict[str, Any]:
        return {"stepper": self.stepper}

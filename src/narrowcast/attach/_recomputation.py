"""What a checkpoint's recomputation tells the backward pass that it starts next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch


class _Thread(threading.local):
    pending = False


class Recomputation:
    """Stand-ins: leaves that a reentrant checkpoint makes of its inputs when it runs its function again.

    Their gradients are not kept but passed on, scaled as they are, through the inputs they stand for.
    """

    def __init__(self) -> None:
        self._thread = _Thread()
        self._stand_ins: dict[int, weakref.ref[torch.Tensor]] = {}

    def begins(self, stand_ins: Sequence[torch.Tensor]) -> None:
        """A checkpoint runs its function again, on ``stand_ins``; its own backward follows in this thread."""
        self._thread.pending = True
        self._stand_ins = {key: kept for key, kept in self._stand_ins.items() if kept() is not None}
        self._stand_ins |= {id(tensor): weakref.ref(tensor) for tensor in stand_ins}

    def take_pending(self) -> bool:
        """Whether the backward that begins now in this thread is that of a recomputation."""
        pending, self._thread.pending = self._thread.pending, False
        return pending

    def is_stand_in(self, tensor: torch.Tensor) -> bool:
        kept = self._stand_ins.get(id(tensor))
        return kept is not None and kept() is tensor

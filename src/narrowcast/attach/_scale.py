"""The loss scale of a run: one for the process, moved once for each backward that an optimizer used."""

from __future__ import annotations

import threading

from narrowcast.scaling import LossScale, Off


class RunningScale:
    """The loss scale in force, and which backwards have already moved it.

    Backwards are numbered. Several optimizers may step on the gradients of one backward: it counts once
    as good and backs the scale off once, as ``torch.amp.GradScaler.update`` does once an iteration.
    """

    def __init__(self, value: LossScale) -> None:
        self.value = value
        self.backward = 0
        self._moved_for = 0
        self._backed_off_for = 0
        self._lock = threading.Lock()

    @property
    def active(self) -> bool:
        """Whether losses are scaled and gradients checked."""
        return not isinstance(self.value, Off)

    def next_backward(self) -> int:
        """Number of the outermost backward that begins now."""
        with self._lock:
            self.backward += 1
            return self.backward

    def discarded(self, backward: int) -> None:
        """Gradients of ``backward`` overflowed, and the script threw them away without a step."""
        with self._lock:
            if self._backed_off_for < backward:
                self.value = self.value.after_step(overflow=True)
                self._backed_off_for = self._moved_for = backward

    def after_step(self, *, overflow: bool) -> None:
        """An optimizer used the gradients of the latest backward, or skipped them."""
        with self._lock:
            if overflow and self._backed_off_for < self.backward:
                self.value = self.value.after_step(overflow=True)
                self._backed_off_for = self._moved_for = self.backward
            elif not overflow and self._moved_for < self.backward:
                self.value = self.value.after_step(overflow=False)
                self._moved_for = self.backward

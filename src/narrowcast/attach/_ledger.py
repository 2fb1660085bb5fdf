"""What was seen of a script: counts, notes for the person, and the events of its capture."""

from __future__ import annotations

import resource
import sys
import threading
import time
from typing import Any

import torch

from narrowcast.machine import versions
from narrowcast.observe import CaptureWriter

_FLUSH_EVERY_S = 1.0
_FLUSH_EVERY_STEPS = 256


class Ledger:
    """Counts what happens and writes it to the capture, late enough that no step waits for a device."""

    def __init__(self, writer: CaptureWriter | None = None) -> None:
        self._writer = writer
        self._lock = threading.RLock()
        self._started = time.perf_counter()
        self._last_step: float | None = None
        self._last_flush = self._started
        self._unwritten: list[tuple[dict[str, Any], torch.Tensor | None]] = []
        self._loss: torch.Tensor | None = None
        self.devices: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.backwards = 0
        self.steps = 0
        self.skipped_steps = 0
        self.final_scale: float | None = None

    def saw_device(self, device_type: str, format_name: str, because: str) -> None:
        """The first region on a device type was opened, or was found not to be needed."""
        self.devices[device_type] = {"device_type": device_type, "format": format_name, "because": because}
        if self._writer:
            self._writer.write({"event": "device", **self.devices[device_type]})

    def saw_backward(self, loss: torch.Tensor | None) -> None:
        """An outermost backward begins, at ``loss`` where that is one number."""
        with self._lock:
            self.backwards += 1
            self._loss = None if loss is None else loss.detach()

    def saw_step(self, *, skipped: bool, scale: float | None) -> None:
        """An optimizer took a step or skipped one; ``scale`` is the one its gradients were made with."""
        with self._lock:
            self.steps += not skipped
            self.skipped_steps += skipped
            if not self._writer:
                return
            now = time.perf_counter()
            event = {
                "event": "step",
                "time_s": now - self._started,
                "interval_s": None if self._last_step is None else now - self._last_step,
                "skipped": skipped,
                "scale": scale,
            }
            self._last_step = now
            self._unwritten.append((event, self._loss))
            if now - self._last_flush > _FLUSH_EVERY_S or len(self._unwritten) >= _FLUSH_EVERY_STEPS:
                self.flush()

    def note(self, text: str) -> None:
        """Something that the person should know; said once however often it happens."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)
                if self._writer:
                    self._writer.write({"event": "note", "text": text})

    def flush(self) -> None:
        """Write the steps seen since the last flush; reads their losses from the device."""
        with self._lock:
            if self._writer and self._unwritten:
                self._writer.write(*({**event, "loss": _number(loss)} for event, loss in self._unwritten))
            self._unwritten.clear()
            self._last_flush = time.perf_counter()

    def forget_writer(self) -> None:
        """A forked child leaves the file to its parent."""
        self._writer = None
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._unwritten.clear()

    def facts(self, exit_code: int | None) -> dict[str, Any]:
        """The ``end`` event: everything that the block at the end of a run is made from."""
        return {
            "event": "end",
            "exit_code": exit_code,
            "wall_s": time.perf_counter() - self._started,
            "backwards": self.backwards,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "final_scale": self.final_scale,
            "final_loss": _number(self._loss),
            "peak_resident_bytes": _peak_resident_bytes(),
            "peak_tensor_bytes": _peak_gpu_tensor_bytes(),
            "versions": versions(),
        }

    def close(self, exit_code: int | None) -> dict[str, Any]:
        """Flush, write the ``end`` event, and return it."""
        self.flush()
        facts = self.facts(exit_code)
        if self._writer:
            self._writer.write(facts)
            self._writer.close()
        return facts


def _number(loss: torch.Tensor | None) -> float | None:
    return None if loss is None else float(loss.float())


def _peak_gpu_tensor_bytes() -> int | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.max_memory_allocated()


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

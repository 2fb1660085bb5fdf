"""What was seen of a script: counts, notes for the person, and the events of its capture."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from narrowcast.machine import arithmetic_settings, versions
from narrowcast.observe.capture import CaptureWriter

# Reading a value from a device waits for it, so seldom; on a CPU every value is here already.
_FLUSH_EVERY_S = 1.0
_FLUSH_PLAIN_EVERY_S = 0.1
_FLUSH_EVERY = 1024

# A number, or what reads it from a device when the capture is written.
Reading = float | Callable[[], float]


class Ledger:
    """Counts what happens and writes it to the capture, late enough that no step waits for a device.

    A killed run lacks at most the events that came within a second of the last one that was written.
    """

    def __init__(self, writer: CaptureWriter | None = None) -> None:
        self._writer = writer
        self._lock = threading.RLock()
        self._started = time.perf_counter()
        self._last_step: float | None = None
        self._last_step_of: dict[int, float] = {}
        self._last_flush = self._started
        self._unwritten: list[dict[str, Any]] = []
        self._waits_for_device = False
        self.devices: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.backwards = 0
        self.forwards = 0
        self.steps = 0
        self.skipped_steps = 0
        self.final_scale: float | None = None
        self.stopped = False
        self.aside: str | None = None

    def saw_device(self, device_type: str, format_name: str, because: str) -> None:
        """The first region on a device type was opened, or was found not to be needed."""
        self.devices[device_type] = {"device_type": device_type, "format": format_name, "because": because}
        self._write_at_once({"event": "device", **self.devices[device_type]})

    def saw_forward(self, duration_s: Reading, *, training: bool) -> None:
        """The outermost call of a module ended.

        Before the first backward only: a script that trains is timed by its steps.
        """
        with self._lock:
            self.forwards += 1
            self._add(
                {
                    "event": "forward",
                    "duration_s": duration_s,
                    "gradients": torch.is_grad_enabled(),
                    "training": training,
                }
            )

    def saw_backward(self, loss: torch.Tensor | None, site: str) -> None:
        """An outermost backward begins, at ``loss`` where that is one number, called at ``site``."""
        with self._lock:
            self.backwards += 1
            value = _reading(loss) if loss is not None and self._writer else None
            if value is not None:
                self._add({"event": "loss", "backward": self.backwards, "site": site, "value": value})

    def saw_step(self, *, optimizer: int, skipped: bool, scale: float | None) -> None:
        """An optimizer took a step or skipped one; ``scale`` is the one its gradients were made with.

        ``optimizer`` is its number in the order of first steps, from 0. A step lasts since the one before
        of the same optimizer: where several step by turns, that is a whole iteration.
        """
        with self._lock:
            self.steps += not skipped
            self.skipped_steps += skipped
            now = time.perf_counter()
            before, of_any = self._last_step_of.get(optimizer), self._last_step
            self._last_step_of[optimizer] = self._last_step = now
            self._add(
                {
                    "event": "step",
                    "interval_s": None if before is None else now - before,
                    "optimizer": optimizer,
                    "skipped": skipped,
                    "scale": scale,
                    "backward": self.backwards,
                }
            )
            if of_any is not None and now - of_any > _FLUSH_EVERY_S:
                self.flush()  # the next event is far

    def _add(self, event: dict[str, Any]) -> None:
        """Keep ``event`` for the next flush; what is read from a device is read then."""
        if not self._writer:
            return
        now = time.perf_counter()
        self._unwritten.append(event | {"time_s": now - self._started})
        self._waits_for_device = self._waits_for_device or any(map(callable, event.values()))
        patience_s = _FLUSH_EVERY_S if self._waits_for_device else _FLUSH_PLAIN_EVERY_S
        if now - self._last_flush > patience_s or len(self._unwritten) >= _FLUSH_EVERY:
            self.flush()

    def note(self, text: str) -> None:
        """Something that the person should know; said once however often it happens."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)
                self._write_at_once({"event": "note", "text": text})

    def _write_at_once(self, event: dict[str, Any]) -> None:
        """After what was seen before it: the file keeps the order in which things happened."""
        with self._lock:
            self.flush()
            if self._writer:
                self._writer.write(event)

    def flush(self) -> None:
        """Write what was seen since the last flush; reads losses from the device."""
        with self._lock:
            if self._waits_for_device and is_capturing():
                return
            if self._writer and self._unwritten:
                self._writer.write(*map(_read, self._unwritten))
            self._unwritten.clear()
            self._waits_for_device = False
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
            "stopped": self.stopped,
            "aside": self.aside,
            "wall_s": time.perf_counter() - self._started,
            "backwards": self.backwards,
            "forwards": self.forwards,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "final_scale": self.final_scale,
            "peak_resident_bytes": _peak_resident_bytes(),
            "peak_tensor_bytes": _peak_gpu_tensor_bytes(),
            "settings": arithmetic_settings(),
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


def _reading(loss: torch.Tensor) -> Reading | None:
    """``loss`` as it is now, since the script may change it in place; None: it cannot be read."""
    if loss.is_meta or is_capturing():
        return None
    if loss.device.type == "cpu":
        return float(loss.item())
    kept = loss.detach().clone()
    return lambda: float(kept.item())


def _read(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value() if callable(value) else value for name, value in event.items()}


def is_capturing() -> bool:
    """Whether this thread records a CUDA graph, where nothing may be read and what is launched is kept."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def _peak_gpu_tensor_bytes() -> int | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.max_memory_allocated()


def _peak_resident_bytes() -> int:
    """Of this process: what ``getrusage`` says begins, on Linux, with the peak of the one that started it."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""What was seen of a script: counts, notes for the person, and the events of its capture."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.machine import arithmetic_settings, versions
from narrowcast.observe import CaptureWriter

_FLUSH_EVERY_S = 1.0
_FLUSH_EVERY = 1024

# An event, the name of a field that is read from the device only when it is written, and what reads it.
_Pending = tuple[dict[str, Any], str | None, Callable[[], float] | None]


class Ledger:
    """Counts what happens and writes it to the capture, late enough that no step waits for a device."""

    def __init__(self, writer: CaptureWriter | None = None) -> None:
        self._writer = writer
        self._lock = threading.RLock()
        self._started = time.perf_counter()
        self._last_step: float | None = None
        self._last_flush = self._started
        self._unwritten: list[_Pending] = []
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
        if self._writer:
            self._writer.write({"event": "device", **self.devices[device_type]})

    def saw_forward(self, duration_s: Callable[[], float], *, training: bool) -> None:
        """The outermost call of a module ended; ``duration_s`` is asked when the capture is written.

        Before the first backward only: a script that trains is timed by its steps.
        """
        with self._lock:
            self.forwards += 1
            self._add(
                {"event": "forward", "gradients": torch.is_grad_enabled(), "training": training},
                "duration_s",
                duration_s,
            )

    def saw_backward(self, loss: torch.Tensor | None, site: str) -> None:
        """An outermost backward begins, at ``loss`` where that is one number, called at ``site``."""
        with self._lock:
            self.backwards += 1
            if loss is not None:
                self._add({"event": "loss", "backward": self.backwards, "site": site}, "value", _reader(loss))

    def saw_step(self, *, skipped: bool, scale: float | None) -> None:
        """An optimizer took a step or skipped one; ``scale`` is the one its gradients were made with."""
        with self._lock:
            self.steps += not skipped
            self.skipped_steps += skipped
            now = time.perf_counter()
            interval_s = None if self._last_step is None else now - self._last_step
            self._last_step = now
            self._add(
                {
                    "event": "step",
                    "interval_s": interval_s,
                    "skipped": skipped,
                    "scale": scale,
                    "backward": self.backwards,
                }
            )

    def _add(
        self, event: dict[str, Any], later: str | None = None, read: Callable[[], float] | None = None
    ) -> None:
        """Keep ``event`` for the next flush; its field ``later`` is read from the device then."""
        if not self._writer:
            return
        now = time.perf_counter()
        self._unwritten.append((event | {"time_s": now - self._started}, later, read))
        if now - self._last_flush > _FLUSH_EVERY_S or len(self._unwritten) >= _FLUSH_EVERY:
            self.flush()

    def note(self, text: str) -> None:
        """Something that the person should know; said once however often it happens."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)
                if self._writer:
                    self._writer.write({"event": "note", "text": text})

    def flush(self) -> None:
        """Write what was seen since the last flush; reads losses from the device."""
        with self._lock:
            if self._writer and self._unwritten:
                self._writer.write(
                    *(
                        event if later is None or read is None else event | {later: read()}
                        for event, later, read in self._unwritten
                    )
                )
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


def _reader(loss: torch.Tensor) -> Callable[[], float]:
    """What reads ``loss`` later; on a CPU it is read now, before the script can change it in place."""
    kept = loss.detach()
    if kept.device.type != "cpu":
        return lambda: float(kept.float())
    value = float(kept.float())
    return lambda: value


def _peak_gpu_tensor_bytes() -> int | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.max_memory_allocated()


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Counts, notes and capture events of a script, and the line of the script that caused an event."""

from __future__ import annotations

import itertools
import os
import re
import resource
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch

import narrowcast
from narrowcast.attach._tensorboard import TensorBoard
from narrowcast.capture import CaptureWriter
from narrowcast.gradients import is_capturing
from narrowcast.machine import UNREADABLE, arithmetic_settings, first_line, read_each, versions

# Reading a value from a device waits for the device, so it is done seldom; a CPU needs no waiting.
_FLUSH_EVERY_S = 1.0
_FLUSH_HOST_ONLY_EVERY_S = 0.1
_FLUSH_AFTER_EVENTS = 1024

# An option that a note names alone, not one in a command such as ``narrowcast run --policy fp32 SCRIPT``.
_OPTION = re.compile(r"(?<!narrowcast run )(?<!narrowcast compare )--(policy|loss-scale) ")

# A number, or a function that reads it from a device when the capture is written.
Reading = float | Callable[[], float]


class EventRecorder:
    """Count what happens and write it to the capture, late enough that no step waits for a device.

    A killed run loses at most its last event and those of the second before it. Without a writer, only counts
    and notes are kept. With a board, what is written to the capture is shown there too.

    Attributes:
        devices: for each type of device, the format of its regions and why.
        backwards: outermost backward passes.
        forwards: outermost calls of modules before the first backward.
        module_calls: calls of every module, those inside of others too.
        left_alone: why narrowcast does nothing more for this script; None while it does.
        in_python: whether it belongs to ``nc.attached``: notes then name its arguments in place of options.
        shared: steps taken and skipped, in memory that the process that started this one reads too.
    """

    def __init__(
        self,
        writer: CaptureWriter | None,
        tell: Callable[[str], None],
        *,
        in_python: bool = False,
        board: TensorBoard | None = None,
    ) -> None:
        self._writer = writer
        self._board = board
        self._tell = tell
        self._lock = threading.RLock()
        self._started = time.perf_counter()
        self._last_step_of: dict[int, float] = {}  # number of an optimizer -> when it stepped

        # Events that are to be written, and whether one of them is read from a device.
        self._unwritten: list[dict[str, Any]] = []
        self._waits_for_device = False
        self._last_flush = self._started
        # Numbers are not given again if a module is gone.
        self._module_numbers: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
        self._next_module = itertools.count()

        self.devices: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.backwards = 0
        self.forwards = 0
        self.module_calls = 0
        self.steps = 0
        self.skipped_steps = 0
        self.left_alone: str | None = None
        self.in_python = in_python
        self.shared: Any = None

    @property
    def keeps_losses(self) -> bool:
        """Whether losses and the lines of their backwards are written."""
        return self._writer is not None

    @property
    def keeps_norms(self) -> bool:
        """Whether the norms of gradients are written."""
        return self._board is not None

    def saw_device(self, device_type: str, format_name: str, because: str) -> None:
        """Record that the first region on a device type was opened, or turned out not to be needed."""
        self.devices[device_type] = {"device_type": device_type, "format": format_name, "because": because}
        self._write_at_once({"event": "device", **self.devices[device_type]})

    def saw_forward(self, duration_s: Reading, module: torch.nn.Module) -> None:
        """Record that the outermost call of ``module`` ended.

        Called before the first backward only: a script that trains is timed by its steps.
        """
        with self._lock:
            self.forwards += 1
            if module not in self._module_numbers:
                self._module_numbers[module] = next(self._next_module)
            self._add(
                "forward",
                duration_s=duration_s,
                gradients=torch.is_grad_enabled(),
                training=module.training,
                module=self._module_numbers[module],
            )

    def saw_backward(self, loss: torch.Tensor | None, site: str) -> None:
        """Record an outermost backward, called at ``site``; ``loss`` is None unless it is one number."""
        with self._lock:
            self.backwards += 1
            if loss is None or not self.keeps_losses:
                return
            value = _reading(loss)
            if value is not None:
                self._add("loss", backward=self.backwards, site=site, value=value)

    def saw_step(
        self, *, optimizer: int, skipped: bool, scale: float | None, grad_norm: torch.Tensor | None = None
    ) -> None:
        """Record a step that an optimizer took or skipped; ``scale`` is the loss scale of its gradients.

        ``grad_norm`` is their norm, kept only for a board. ``optimizer`` is its number in the order of first
        steps, from 0. The duration of a step is the time since the previous step of the same optimizer: if
        several take turns, that is a whole iteration.
        """
        with self._lock:
            self.steps += not skipped
            self.skipped_steps += skipped
            if self.shared is not None:
                self.shared[int(skipped)] += 1
            if self._writer is None:
                return
            now = time.perf_counter()
            last_of_any = max(self._last_step_of.values(), default=now)
            last_of_own = self._last_step_of.get(optimizer)
            self._last_step_of[optimizer] = now
            for_board: dict[str, Any] = {}
            if self._board is not None:
                for_board["skipped_steps"] = self.skipped_steps
                for_board["grad_norm"] = None if grad_norm is None else _reading(grad_norm)
            self._add(
                "step",
                optimizer=optimizer,
                skipped=skipped,
                scale=scale,
                interval_s=None if last_of_own is None else now - last_of_own,
                backward=self.backwards,
                **for_board,
            )
            # If a step takes longer than a second, the event of its loss has just been flushed, and that of
            # the step would wait until the next one ends. Write it now.
            if now - last_of_any > _FLUSH_EVERY_S:
                self.flush()

    def saw_skip_late(self) -> None:
        """Record that a step was skipped which had been recorded as taken."""
        with self._lock:
            self.steps -= 1
            self.skipped_steps += 1
            if self.shared is not None:
                self.shared[0] -= 1
                self.shared[1] += 1

    def paused(self, seconds: float, waited_s: float) -> None:
        """Record that the process stood still for ``seconds``, which are left out of the times of steps.

        ``waited_s``: how long of that it waited for the device to finish the steps so far; this counts as
        time of the run.
        """
        with self._lock:
            self._started += seconds - waited_s
            self._last_flush += seconds
            for optimizer in self._last_step_of:
                self._last_step_of[optimizer] += seconds
            self._add("pause", waited_s=waited_s)

    def _add(self, event: str, **values: Any) -> None:
        """Keep an event for the next flush, which reads its values from the device."""
        if not self._writer:
            return
        now = time.perf_counter()
        self._unwritten.append({"event": event, **values, "time_s": now - self._started})
        if any(map(callable, values.values())):
            self._waits_for_device = True
        flush_every_s = _FLUSH_EVERY_S if self._waits_for_device else _FLUSH_HOST_ONLY_EVERY_S
        if now - self._last_flush > flush_every_s or len(self._unwritten) >= _FLUSH_AFTER_EVENTS:
            self.flush()

    def note(self, text: str, *, at_once: bool = False, told: bool = False, story: bool = False) -> None:
        """Record a note for the user, once however often it is given.

        Args:
            text: a sentence without its period.
            at_once: whether to show it now.
            told: whether the user has seen it, so that the end of ``run`` leaves it out.
            story: whether it says where a skipped step went wrong.
        """
        if self.in_python:
            text = _OPTION.sub(lambda option: f"{option[1].replace('-', '_')} ", text)
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)
                event: dict[str, Any] = {"event": "note", "text": text}
                if told:
                    event["told"] = True
                if story:
                    event["story"] = True
                self._write_at_once(event)
                if at_once:
                    self._tell(text)

    def _write_at_once(self, event: dict[str, Any]) -> None:
        """Write ``event`` after the events before it, so that the file keeps their order."""
        with self._lock:
            self._unwritten.append(event)
            self.flush()

    def flush(self) -> None:
        """Write the events since the last flush; reads their values from the device."""
        with self._lock:
            if self._waits_for_device and is_capturing():
                return  # a CUDA graph is being recorded, where reading is an error
            if self._writer and self._unwritten:
                events = list(map(_read, self._unwritten))
                self._writer.write(*events)
                if self._board is not None:
                    self._board.write(events)
            self._unwritten.clear()
            self._waits_for_device = False
            self._last_flush = time.perf_counter()

    def forget_writer(self) -> None:
        """Stop writing in a forked child: the file belongs to its parent."""
        self._writer = None
        self._board = None
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._unwritten.clear()

    def close(self, **more: Any) -> dict[str, Any]:
        """Flush, write the ``end`` event with the fields ``more`` too, and return it."""
        self.flush()

        peaks = read_each(
            {
                "peak_resident_bytes": _peak_resident_bytes,
                # Empty before CUDA is initialized.
                "peak_tensor_bytes": lambda: torch.cuda.memory_stats().get("allocated_bytes.all.peak"),
            }
        )
        settings = arithmetic_settings()
        software = versions()
        # What cannot be read is a text that begins with UNREADABLE: say it in a note.
        for name, value in (peaks | settings | software).items():
            if str(value).startswith(UNREADABLE):
                self.note(f"{name} is {value}")
        for name, value in peaks.items():
            if isinstance(value, str):  # why it is unreadable
                peaks[name] = None

        # The board shows notes, so it ends after all of them but the one on itself.
        if self._board is not None:
            self._board.close(skipped_steps=self.skipped_steps)
            if self._board.error is not None:
                self.note(f"TensorBoard's files in {self._board.folder} are incomplete: {self._board.error}")
        facts = {
            "event": "end",
            **more,
            "left_alone": self.left_alone,
            "wall_s": time.perf_counter() - self._started,
            "backwards": self.backwards,
            "forwards": self.forwards,
            "module_calls": self.module_calls,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "settings": settings,
            "versions": software,
            **peaks,
        }
        if self._writer:
            self._writer.write(facts)
            self._writer.close()
        return facts


def _reading(loss: torch.Tensor) -> Reading | None:
    """Return the value of ``loss`` as it is now, since the script may change it in place.

    For a device return a function that reads a copy; None if it cannot be read.
    """
    if loss.is_meta or is_capturing():
        return None
    if loss.device.type == "cpu":
        return float(loss.item())
    kept = loss.detach().clone()
    return lambda: float(kept.item())


def _read(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event with its values, which are read from the device here."""
    values = dict(event)
    try:
        for name, value in event.items():
            if callable(value):
                values[name] = value()
    except Exception as error:  # CUDA raises at each reading once a kernel of the script has failed
        return {"event": "note", "text": f"a {event['event']} could not be read: {first_line(error)}"}
    return values


def _peak_resident_bytes() -> int:
    """Return the peak of the resident memory of this process, in bytes."""
    # Not by ``getrusage`` on Linux, where a process inherits the peak of its parent.
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # In bytes on macOS, in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# ---- which line of the script called

_SKIPPED = tuple(str(Path(path).parent) + os.sep for path in (narrowcast.__file__, torch.__file__))
_STANDARD = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_STARTED_IN = os.getcwd()  # read once, since the script may change its folder


def call_site() -> str:
    """Return file and line of the nearest caller that belongs to the script, as ``"train.py:42"``.

    Frames of installed libraries are skipped (a training framework calls ``backward`` for the script). If
    there are only those, the nearest one outside of torch is returned.
    """
    nearest = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        owner = _owner(path)
        if owner == "script":
            return f"{_shown_path(path)}:{frame.f_lineno}"
        if owner == "library" and not nearest:
            nearest = f"{_shown_path(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return nearest or "unknown"


# Takes the path, not the code object, which would be hashed anew at each look-up.
@lru_cache(maxsize=4096)
def _owner(path: str) -> str:
    """Return ``"script"``, ``"library"``, or ``"skipped"`` for narrowcast, torch and the standard library."""
    if path.startswith((*_SKIPPED, "<")):
        return "skipped"
    # Before the standard library, in whose folder the installed libraries are.
    if any(folder in path for folder in _INSTALLED):
        return "library"
    if path.startswith(_STANDARD):
        return "skipped"
    return "script"


@lru_cache(maxsize=4096)
def _shown_path(path: str) -> str:
    file = Path(path)
    if file.is_relative_to(_STARTED_IN):
        return file.relative_to(_STARTED_IN).as_posix()
    return file.name

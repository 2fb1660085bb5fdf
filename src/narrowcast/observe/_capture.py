"""The capture: JSON lines, appended as they happen, so that a killed run keeps what it had.

The first line is ``{"event": "start", "schema": 2, "kind": "run", ...}``. Then, in the order in which they
happened:

==========  ==================================================================================
event       fields
==========  ==================================================================================
start       schema, kind, argv, policy, started (seconds since 1970); of the script itself: rules (how
            many the policy has), loss_scale, rank, seed; of a process that it started: process (its number)
device      device_type, format, because: the first region on a device type
loss        time_s (since start), backward (its number, from 1), site (file and line that called it), value:
            the one number that an outermost ``backward`` started from
step        time_s, interval_s (since the step before of the same optimizer; null for its first),
            optimizer (its number in the order of first steps, from 0), skipped, scale, backward (number
            of the latest backward)
forward     time_s, duration_s (of the outermost call of a module), gradients (whether they were recorded),
            training (the module's mode): those before the first backward
note        text: something that the person should know
end         exit_code, stopped (as many steps were taken as were asked for), aside (why the script was
            left to its own mixed precision, or null), wall_s, backwards, forwards, steps,
            skipped_steps, final_scale, peak_resident_bytes, peak_tensor_bytes (CUDA's allocator;
            null elsewhere), settings (TF32 and the like), versions
==========  ==================================================================================

A comparison's capture has ``"kind": "compare"`` and other events: see ``_comparison.py``; that of what ran in
which format ``"kind": "explain"``: see ``_op_trace_file.py``.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from narrowcast.errors import FileError
from narrowcast.observe._schema import SCHEMA, checked_event

Event = dict[str, Any]


def start_event(argv: Sequence[str], policy: str, *, kind: str = "run", **more: Any) -> Event:
    """The event that a capture begins with, now."""
    started = {"event": "start", "schema": SCHEMA, "kind": kind, "argv": list(argv), "policy": policy}
    return {**started, "started": time.time(), **more}


class CaptureWriter:
    """Appends events to a capture file; each ``write`` reaches the operating system before it returns.

    A NaN or an infinity is written as the string ``"nan"``, ``"inf"`` or ``"-inf"``, since JSON has none.
    A write that fails (a full disk) ends the capture and not the run: nothing more is written.

    Attributes:
        path: where the file is.
        error: what ended the capture early; None: nothing did.

    Raises:
        FileError: when the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._lock = threading.Lock()
        try:
            # Unbuffered, so that nothing is left over that close could fail to write.
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise FileError(f"cannot write the capture {path}: {error.strerror}") from error

    def write(self, *events: Event) -> None:
        """Append ``events``, each a line."""
        lines = [json.dumps(json_ready(event)) for event in events]
        left = memoryview("".join(line + "\n" for line in lines).encode())
        with self._lock:
            try:
                while left and self.error is None:
                    left = left[self._file.write(left) :]
            except OSError as error:
                self.error = error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A capture that was read back: its events, in order, as dictionaries."""

    events: tuple[Event, ...]

    def of(self, kind: str) -> list[Event]:
        """All events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def start(self) -> Event:
        return self.events[0]

    @property
    def end(self) -> Event | None:
        """The last line of a run that ended by itself; None for one that was killed."""
        ends = self.of("end")
        return ends[-1] if ends else None

    def totals(self) -> Event:
        """The ``end`` event; for a run that was killed, as much of it as its steps tell."""
        end = self.end
        if end is not None:
            return end
        steps = self.of("step")
        last = steps[-1] if steps else {}
        skipped_steps = sum(step["skipped"] for step in steps)
        return {
            "event": "end",
            "exit_code": None,
            "stopped": False,
            "aside": None,
            "wall_s": last.get("time_s"),
            "backwards": None,
            "forwards": None,
            "steps": len(steps) - skipped_steps,
            "skipped_steps": skipped_steps,
            "final_scale": last.get("scale"),
            "peak_resident_bytes": None,
            "peak_tensor_bytes": None,
            "settings": {},
            "versions": {},
        }


def read_capture(path: Path) -> Capture:
    """Read a capture. A line cut short at the end (the run was killed while writing) is left out.

    Raises:
        FileError: when the file is missing, holds no event, has another schema, or holds a value that
            its field does not take; nothing in it is trusted.
    """
    try:
        lines = path.read_bytes().decode().rstrip("\n").split("\n")
    except OSError as error:
        raise FileError(f"cannot read the capture {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no text: is it a capture of narrowcast?") from error
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            why = error.msg if isinstance(error, json.JSONDecodeError) else "its values are too large"
            raise FileError(f"{path}:{number} is no JSON: {why}") from error
        if number == 1:
            _check_start(event, path)
        events.append(checked_event(event, f"{path}:{number}"))
    if not events:
        raise FileError(f"{path} does not begin with a start event: is it a capture of narrowcast?")
    return Capture(events=tuple(events))


def _check_start(event: Any, path: Path) -> None:
    if not isinstance(event, dict) or event.get("event") != "start":
        raise FileError(f"{path} does not begin with a start event: is it a capture of narrowcast?")
    if event.get("schema") != SCHEMA:
        raise FileError(
            f"{path} has schema {str(event.get('schema'))[:20]!r} and this version of narrowcast reads "
            f"{SCHEMA}: use the version that wrote it"
        )


def json_ready(value: Any) -> Any:
    """``value`` without what JSON lacks: NaN and infinities as text, tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    return [json_ready(item) for item in value] if isinstance(value, list | tuple) else value

"""The capture: JSON lines, appended as they happen, so that a killed run keeps what it had.

The first line is ``{"event": "start", "schema": 1, ...}``. Then, in the order in which they happened:

==========  ==================================================================================
event       fields
==========  ==================================================================================
start       schema, argv, policy, started (seconds since 1970); of the script itself: loss_scale, rank,
            seed; of a process that it started: process (its number)
device      device_type, format, because: the first region on a device type
step        time_s (since start), interval_s (since the step before; null for the first),
            skipped, scale, loss (the scalar that the latest ``backward`` started from, or null)
note        text: something that the person should know
end         exit_code, wall_s, backwards, steps, skipped_steps, final_scale, final_loss,
            peak_resident_bytes, peak_tensor_bytes (CUDA's allocator; null elsewhere), versions
==========  ==================================================================================
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

from narrowcast.errors import CaptureError, RunFolderError

SCHEMA = 1
Event = dict[str, Any]


def start_event(argv: Sequence[str], policy: str, **more: Any) -> Event:
    """The event that a capture begins with, now."""
    started = {"event": "start", "schema": SCHEMA, "argv": list(argv), "policy": policy}
    return {**started, "started": time.time(), **more}


class CaptureWriter:
    """Appends events to a capture file; each ``write`` reaches the operating system before it returns.

    A NaN or an infinity is written as the string ``"nan"``, ``"inf"`` or ``"-inf"``, since JSON has none.
    A write that fails (a full disk) ends the capture and not the run: nothing more is written.

    Attributes:
        path: where the file is.
        error: what ended the capture early; None: nothing did.

    Raises:
        RunFolderError: when the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._lock = threading.Lock()
        try:
            # Unbuffered, so that nothing is left over that close could fail to write.
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise RunFolderError(f"cannot write the capture {path}: {error.strerror}") from error

    def write(self, *events: Event) -> None:
        """Append ``events``, each a line."""
        lines = [json.dumps({key: _plain(value) for key, value in event.items()}) for event in events]
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
            "wall_s": last.get("time_s"),
            "backwards": None,
            "steps": len(steps) - skipped_steps,
            "skipped_steps": skipped_steps,
            "final_scale": last.get("scale"),
            "final_loss": last.get("loss"),
            "peak_resident_bytes": None,
            "peak_tensor_bytes": None,
            "versions": {},
        }


def read_capture(path: Path) -> Capture:
    """Read a capture. A line cut short at the end (the run was killed while writing) is left out.

    Raises:
        CaptureError: when the file is missing, holds no event, or has another schema.
    """
    try:
        lines = path.read_bytes().decode().rstrip("\n").split("\n")
    except OSError as error:
        raise CaptureError(f"cannot read the capture {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CaptureError(f"{path} is no text: is it a capture of narrowcast run?") from error
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise CaptureError(f"{path}:{number} is no JSON: {error.msg}") from error
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise CaptureError(f"{path}:{number} is no event: is it a capture of narrowcast run?")
        events.append({key: _number(value) for key, value in event.items()})
    if not events or events[0]["event"] != "start":
        raise CaptureError(f"{path} does not begin with a start event: is it a capture of narrowcast run?")
    if events[0].get("schema") != SCHEMA:
        raise CaptureError(
            f"{path} has schema {events[0].get('schema')!r} and this version of narrowcast reads {SCHEMA}: "
            "use the version that wrote it"
        )
    return Capture(events=tuple(events))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value

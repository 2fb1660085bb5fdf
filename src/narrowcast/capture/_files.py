"""Files of a run: capture, folder of a comparison, and the folder in which they are. No torch is needed.

A capture is written as the run goes, so that a killed run keeps what it had.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from narrowcast._files import lock, named_cache_folder
from narrowcast.capture._events import EVENTS, SCHEMA, Event, checked_event
from narrowcast.errors import FileError

RUN = "capture.jsonl"
"""Name of the capture of a run in its folder."""
COMPARISON = "comparison.jsonl"
"""Name of the capture of a comparison in its folder."""
EXPLANATION = "explain.jsonl"
"""Name of the capture of ``narrowcast explain`` in the folder of a run."""
PAGE = "report.html"
"""Name of the page beside a capture."""

# A comparison names the captures of its runs; a path that leads out of its folder is refused.
_WITHIN = re.compile(r"[\w-]+(/[\w-]+)*\.jsonl")
_OF_A_RANK = re.compile(r"capture-rank(\d+)")
_READ_ONLY_OR_FULL = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
# In characters of up to four bytes each; most file systems allow 255 bytes, and a time is added to the name.
_LONGEST_NAME = 40


# ---- writing


def start_event(argv: Sequence[str], policy: str, *, kind: str = "run", **more: Any) -> Event:
    """Return the event that a capture begins with, now."""
    started = {"event": "start", "schema": SCHEMA, "kind": kind, "argv": list(argv), "policy": policy}
    return {**started, "started": time.time(), **more}


class CaptureWriter:
    """Appends events to a capture file; each ``write`` has reached the operating system when it returns.

    NaN and infinities are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``. A write that fails (a
    full disk) ends the capture, not the run. The file is locked while the run goes on.

    Attributes:
        path: of the file.
        error: what ended the capture early, or None.

    Raises:
        FileError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._lock = threading.Lock()
        try:
            # Unbuffered: nothing is left that close could fail to write.
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise FileError(f"cannot write the capture {path}: {error.strerror}") from error
        with suppress(OSError):  # some file systems have no locks
            lock(self._file)

    def write(self, *events: Event) -> None:
        """Append ``events``, one a line."""
        text = ""
        for event in events:
            text += json.dumps(json_ready(event)) + "\n"
        left = memoryview(text.encode())
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

    def __exit__(self, *_: object) -> None:
        self.close()


def json_ready(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as text and tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value


# ---- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The events of a capture, in order, as dictionaries; made by ``read_capture``.

    >>> capture = Capture(events=({"event": "start"}, {"event": "note", "text": "hello"}))
    >>> [note["text"] for note in capture.of("note")]
    ['hello']
    """

    events: tuple[Event, ...]

    def of(self, kind: str) -> list[Event]:
        """Return all events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def start(self) -> Event:
        return self.events[0]

    def last(self, kind: str) -> Event | None:
        """Return the latest event of one kind, or None."""
        events = self.of(kind)
        if not events:
            return None
        return events[-1]

    @property
    def end(self) -> Event | None:
        """The last line of a run; None if the run was killed."""
        return self.last("end")

    def totals(self) -> Event:
        """Return the ``end`` event; if the run was killed, as much of it as its steps show."""
        if self.end is not None:
            return self.end
        steps = self.of("step")
        last = self.last("step") or {}
        skipped_steps = sum(step["skipped"] for step in steps)
        known = {
            "event": "end",
            "stopped": False,
            "wall_s": last.get("time_s"),
            "steps": len(steps) - skipped_steps,
            "skipped_steps": skipped_steps,
            "final_scale": last.get("scale"),
            "settings": {},
            "versions": {},
        }
        # Other fields of the event are not known: None.
        return dict.fromkeys(EVENTS["end"].__annotations__) | known


def read_capture(path: Path) -> Capture:
    """Read a capture. An incomplete last line is ignored: the run was killed while it wrote.

    Example::

        capture = nc.observe.read_capture(Path("out/capture.jsonl"))
        print([loss["value"] for loss in capture.of("loss")])

    Raises:
        FileError: the file is missing, has no event, has another schema, or has a field of another type.
    """
    try:
        lines = path.read_bytes().decode().rstrip("\n").split("\n")
    except OSError as error:
        raise FileError(f"cannot read the capture {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not text: is it a capture of narrowcast?") from error
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        try:
            # Not msgspec's decoder: it refuses the lone surrogates of file names that are not UTF-8.
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise FileError(f"{path}:{number} is not valid JSON: {error}") from error
        # Without a start event the list stays empty, which is refused below.
        if number == 1 and (not isinstance(event, dict) or event.get("event") != "start"):
            break
        if number == 1 and event.get("schema") != SCHEMA:
            found = str(event.get("schema"))[:20]
            raise FileError(
                f"{path} has schema {found!r} and this version of narrowcast reads {SCHEMA}: use the one "
                "that wrote it"
            )
        events.append(checked_event(event, f"{path}:{number}"))
    if not events:
        raise FileError(f"{path} does not begin with a start event: is it a capture of narrowcast?")
    return Capture(events=tuple(events))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """One timed run of a comparison, with the capture that it left."""

    name: str  # of its folder, such as ``fp32-1``
    format: str  # ``"fp32"`` or ``"mixed"``
    seed: int
    last_line: str  # of the script's stdout
    capture: Capture
    cut: bool = False  # ended early, to keep to the time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonCapture:
    """A comparison and its runs; made by ``read_comparison``.

    >>> own = Capture(events=({"event": "start"}, {"event": "finished", "wall_s": 41.0}))
    >>> ComparisonCapture(folder=Path("out"), own=own, runs=()).finished
    True

    Attributes:
        folder: of the comparison.
        own: events of the comparison itself.
        runs: in the order in which they ran.
    """

    folder: Path
    own: Capture
    runs: tuple[TimedRun, ...]

    @property
    def finished(self) -> bool:
        """Whether the comparison reached its end; False if it was killed."""
        return bool(self.own.of("finished"))


def read_comparison(folder: Path) -> ComparisonCapture:
    """Read the comparison in ``folder``, complete or not.

    Example::

        comparison = nc.observe.read_comparison(Path("out"))
        print({run.name: run.capture.totals()["wall_s"] for run in comparison.runs})

    Raises:
        FileError: a file is missing, is not the capture of a comparison, or names one outside of ``folder``.
    """
    own = read_capture(folder / COMPARISON)
    if own.start["kind"] != "compare":
        raise FileError(f"{folder / COMPARISON} is the capture of a run and not of a comparison")
    runs: dict[str, TimedRun] = {}
    for event in own.of("run"):
        if not _WITHIN.fullmatch(event["capture"]):
            raise FileError(
                f"{folder / COMPARISON} names {event['capture'][:80]!r}, not a capture in its folder"
            )
        try:
            capture = read_capture(folder / event["capture"])
        except FileError:
            if event.get("ended") is False:
                continue  # the comparison was killed before the run had written anything
            raise
        # The event of a run that has ended replaces that of its beginning.
        runs[event["name"]] = TimedRun(
            name=event["name"],
            format=event["format"],
            seed=event["seed"],
            last_line=event["last_line"],
            capture=capture,
            cut=event.get("cut", False),
        )
    return ComparisonCapture(folder=folder, own=own, runs=tuple(runs.values()))


# ---- folders


def make_run_folder(
    name: str,
    *,
    asked: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """Create and return the folder of one run: ``asked``, or a new one in the cache, named after ``name``.

    The cache is the folder that ``NARROWCAST_CACHE_DIR`` names, else ``~/.cache/narrowcast``. A run should
    not fail because of a folder that no option named. So it gets a temporary folder instead if
    ``~/.cache/narrowcast`` cannot be written, or if ``NARROWCAST_CACHE_DIR`` is read-only or full; in the
    second case ``tell`` gets a note.

    Raises:
        FileError: ``asked`` cannot be written, or what ``NARROWCAST_CACHE_DIR`` names cannot be a folder.
    """
    if asked is not None:
        return _writable(asked)
    stamp = f"{name[:_LONGEST_NAME]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    cache = named_cache_folder()
    try:
        folder = cache or Path.home() / ".cache" / "narrowcast"
        return _writable(folder / "runs" / stamp)
    except (FileError, RuntimeError) as error:
        why = error.__cause__
        if cache is not None and not (isinstance(why, OSError) and why.errno in _READ_ONLY_OR_FULL):
            raise
        made = Path(tempfile.mkdtemp(prefix=f"narrowcast-{stamp}-"))
        if cache is not None and isinstance(why, OSError):
            tell(f"cannot write in NARROWCAST_CACHE_DIR, {cache}: {why.strerror}; using {made} instead")
        return made


def discard_captures(folder: Path, *, from_rank: int = 0) -> None:
    """Delete the captures and outputs of an earlier run in ``folder``; files of the script stay.

    Captures of ranks below ``from_rank`` stay: their own processes, which may run already, overwrite them.

    Raises:
        FileError: one cannot be deleted.
    """
    # The page first, so that it is not mistaken for that of this run if this run is killed. The capture of a
    # comparison goes too, since ``find_capture`` prefers it to the capture of a run.
    stale = [folder / name for name in (PAGE, COMPARISON, EXPLANATION)]
    stale += folder.glob("capture-process*.jsonl")
    for path in folder.glob("capture-rank*.jsonl"):
        rank = _OF_A_RANK.match(path.name)
        if rank is not None and int(rank[1]) >= from_rank:
            stale.append(path)
    if from_rank == 0:
        stale += [folder / name for name in (RUN, "stdout.txt", "stderr.txt")]
    for path in stale:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"cannot delete what an earlier run left, {path}: {error.strerror}") from error


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FileError(
            f"cannot write in the folder {folder}: {error.strerror}; choose another with --run-dir, or set "
            "NARROWCAST_CACHE_DIR"
        ) from error
    return folder.resolve()

"""The capture of a comparison: which runs it made, each with a capture of its own, and what it found.

``comparison.jsonl`` begins with ``{"event": "start", "kind": "compare", ...}`` and goes on as runs end:

===========  =================================================================================
event        fields
===========  =================================================================================
start        schema, kind, argv (of the script), policy, started; loss_scale, seed, steps (0: the whole
             script), repeats, at_step
run          name, format ("fp32" or "mixed"), seed, capture (path within the folder), last_line (of the
             script's stdout): a run that is timed, when it begins (with ``"ended": false``) and when
             it has ended
memory       format, peak_tensor_bytes (null with its reason), reason: a run whose tensors were counted
certificate  what ``Certificate.to_dict`` gives: of a script that trains
output       relative_error, sqnr_db, calls, verdict, reason: of one that only computes
note         text: something that the person should know
finished     wall_s: of the whole comparison
===========  =================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import FileError
from narrowcast.observe._capture import Capture, read_capture

COMPARISON = "comparison.jsonl"
"""Name of the capture of a comparison in its folder."""
RUN = "capture.jsonl"
"""Name of the capture of a run in its folder."""

# A capture names its runs' captures; a name that leads elsewhere is not followed.
_WITHIN = re.compile(r"[\w-]+(/[\w-]+)*\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """One run of the script that was timed.

    Attributes:
        name: of its folder, as ``fp32-1``.
        format: ``"fp32"`` or ``"mixed"``.
        seed: what it started with.
        last_line: of the script's stdout.
        capture: what it left.
    """

    name: str
    format: str
    seed: int
    last_line: str
    capture: Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonCapture:
    """A comparison that was read back: its own events and its runs.

    Attributes:
        folder: where it is.
        own: events of the comparison itself.
        runs: in the order in which they were made.
    """

    folder: Path
    own: Capture
    runs: tuple[TimedRun, ...]

    @property
    def finished(self) -> bool:
        """Whether the comparison came to its end; False for one that was killed."""
        return bool(self.own.of("finished"))

    def only(self, kind: str) -> dict[str, Any] | None:
        """The latest event of a kind that happens once; None: it did not happen."""
        events = self.own.of(kind)
        return events[-1] if events else None


def read_comparison(folder: Path) -> ComparisonCapture:
    """Read the comparison in ``folder``, whole or cut short.

    Raises:
        FileError: a file is missing, is no capture of a comparison, or names one outside of ``folder``.
    """
    own = read_capture(folder / COMPARISON)
    if own.start["kind"] != "compare":
        raise FileError(f"{folder / COMPARISON} is the capture of a run and not of a comparison")
    runs: dict[str, TimedRun] = {}
    for event in own.of("run"):
        if not _WITHIN.fullmatch(event["capture"]):
            raise FileError(
                f"{folder / COMPARISON} names {event['capture'][:80]!r}, which is no capture in its folder"
            )
        try:
            capture = read_capture(folder / event["capture"])
        except FileError:
            if event.get("ended") is False:
                continue  # the comparison was killed before the run had written anything
            raise
        runs[event["name"]] = TimedRun(
            name=event["name"],
            format=event["format"],
            seed=event["seed"],
            last_line=event["last_line"],
            capture=capture,
        )
    return ComparisonCapture(folder=folder, own=own, runs=tuple(runs.values()))

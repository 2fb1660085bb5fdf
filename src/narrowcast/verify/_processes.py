"""A run's process: started, watched and, where it must be, ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from narrowcast.attach import READ_OF_AN_EARLIER_RUN, read_files
from narrowcast.errors import ScriptError
from narrowcast.verify._child import FILES, RunSettings

_POLL_S = 0.1
_TAIL_BYTES = 4096
_ERROR_BYTES = 65_536
_ERROR_LINES = 15
_LONGEST_LINE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run that came to its end.

    Attributes:
        folder: where it left what it left.
        last_line: of its stdout.
        written: files that it wrote.
    """

    folder: Path
    last_line: str
    written: tuple[str, ...]


def run_process(
    title: str, settings: RunSettings, target: Sequence[str], progress: Callable[[str], None]
) -> EndedRun:
    """Run the script ``target`` in a fresh process as ``settings`` say, and wait for its end.

    Args:
        title: what the run is called in messages.
        settings: of the run.
        target: script and its arguments.
        progress: told the script's latest line now and then.

    Raises:
        ScriptError: the script failed; the message has the last lines that it wrote to stderr.
        ScriptError: it read a file that an earlier run wrote.
    """
    folder = Path(settings.folder)
    command = [sys.executable, "-m", "narrowcast.verify", str(settings.write()), *target]
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=_environment(),
            start_new_session=True,
        )
        try:
            code = _wait(process, folder, lambda: progress(_last_line(out)))
        finally:
            # What it has started and left behind would disturb the next run, too.
            _end_group(process)
    seen = read_files(folder / FILES)
    if seen.read is not None:
        file, wrote = seen.read
        raise ScriptError(
            f"run {folder.name} read {file}, which run {wrote} had written. A script that resumes from what "
            "it saved does other work each time, so there is nothing to compare: let it start afresh each "
            "time (by an option of its own, or by saving to the folder that NARROWCAST_RUN_DIR names). "
            "A file that is only prepared once, as downloaded data, is no trouble where it is there before"
        )
    if code != 0:
        raise ScriptError(_failure(title, code, _last_lines(err)) + f"\nall of its output: {folder}")
    return EndedRun(folder=folder, last_line=_last_line(out), written=seen.written)


def _wait(process: subprocess.Popen[bytes], folder: Path, tick: Callable[[], None]) -> int:
    """The exit code; a run that has read what it should not is ended at once, whichever process did."""
    looked_at = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        new = _from(folder / FILES, looked_at)
        looked_at += len(new)
        # Only what is new is looked at: a run may write very many files, and should not be slowed by that.
        if b'"read"' in new:
            _end_group(process)
            return READ_OF_AN_EARLIER_RUN
        tick()


def _from(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError:
        return b""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started; it leads a group of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment() -> dict[str, str]:
    """The same, but for two things. The script's output is not held back, so that its progress can be shown.

    And threads that wait for each other sleep: where they spin, as OpenMP's do, a core that something else
    needs makes a step last sixty times as long, now in the one run and now in the other.
    """
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONUNBUFFERED": "1"}


def _failure(title: str, code: int, said: list[str]) -> str:
    ended = f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    text = "; it ended with:\n" + "\n".join(said) if said else "; it wrote nothing to stderr"
    return f"the script {ended} in {title}{text}"


def in_short(error: ScriptError) -> str:
    """What failed and why in one line: the first of the message, and the last that the script wrote."""
    first, *rest = str(error).splitlines()
    said = [line.strip() for line in rest if line.strip() and not line.startswith("all of its output")]
    return f"{first.removesuffix('; it ended with:')}: {said[-1]}" if said else first


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name


def _tail(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""  # the script cleared the folder


def _last_lines(path: Path) -> list[str]:
    """Each no longer than a person reads, and without what a terminal would obey."""
    lines = _tail(path, _ERROR_BYTES).splitlines()[-_ERROR_LINES:]
    return ["".join(c if c.isprintable() else " " for c in line[:_LONGEST_LINE]) for line in lines]


def _last_line(path: Path) -> str:
    lines = _tail(path, _TAIL_BYTES).replace("\r", "\n").splitlines()
    written = [line for raw in lines if (line := raw.strip())]
    return written[-1] if written else ""

"""The runs of a script that ``compare``, ``doctor`` and ``explain`` make, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from narrowcast.attach import READ_OF_AN_EARLIER_RUN, read_files
from narrowcast.errors import ScriptError, UnsupportedError
from narrowcast.observe.capture import make_run_folder
from narrowcast.verify.compare._probes import RESULT

FILES = "files.jsonl"
SETTINGS = "narrowcast-run.json"
TIMED, MEMORY, GRADIENTS, OUTPUTS, PROFILE = "timed", "memory", "gradients", "outputs", "profile"
EXPLAIN = "explain"
_KEEPS = {MEMORY: "counts its tensors", GRADIENTS: "keeps its gradients", OUTPUTS: "keeps its outputs"}
_POLL_S = 0.1
_TAIL_BYTES = 4096
_ERROR_BYTES = 65_536
_ERROR_LINES = 15
_LONGEST_LINE = 500


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one run is made. It is passed to the process as a JSON file.

    Attributes:
        purpose: ``TIMED``, ``MEMORY``, ``GRADIENTS``, ``OUTPUTS``, ``PROFILE`` or ``EXPLAIN``.
        policy: of the run.
        loss_scale: as on the command line; None: as ``run`` decides.
        seed: set before the script starts.
        seed_shift: added to the seeds that the script sets itself.
        steps: after which the run is ended; 0: it ends by itself.
        is_module: the script is the name of a module, as for ``python -m``.
        folder: of this run.
        earlier: files that earlier runs wrote -> name of the run.
        role: of a run that keeps gradients.
        reference: folder of the reference of such a run.
        at_step: optimizer steps before such a run holds updates back.
        start_scale: loss scale with which such a run begins; None: as ``loss_scale`` says.
        watched_steps: how many steps are watched to explain them.
    """

    purpose: str
    policy: str
    loss_scale: str | None
    seed: int
    seed_shift: int
    steps: int
    is_module: bool
    folder: str
    earlier: dict[str, str]
    role: str | None = None
    reference: str | None = None
    at_step: int = 0
    start_scale: float | None = None
    watched_steps: int = 0

    def write(self) -> Path:
        """Write them into their folder; return the file."""
        path = Path(self.folder) / SETTINGS
        path.write_bytes(msgspec.json.encode(self))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``write`` wrote.

        Raises:
            OSError: the file cannot be read.
            msgspec.MsgspecError: it holds something else.
        """
        return msgspec.json.decode(path.read_bytes(), type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """Which script, and how it is run.

    Attributes:
        target: the script, or with ``is_module`` the module, and its arguments.
        is_module: whether ``target`` begins with the name of a module, as for ``python -m``.
        policy: name or file of the policy of the mixed runs.
        seed: set before each run; a repeat adds its number.
        folder: of all results.
    """

    target: tuple[str, ...]
    is_module: bool = False
    policy: str = "auto"
    seed: int = 0
    folder: Path

    def whole_run(self, purpose: str, folder: Path, policy: str, **more: Any) -> RunSettings:
        """Return the settings of a run that is not cut short and has no loss scale of its own.

        Args:
            purpose: of the run.
            folder: of the run.
            policy: of the run.
            more: other fields of ``RunSettings``.
        """
        fields = {"loss_scale": None, "seed": self.seed, "seed_shift": 0, "steps": 0} | more
        return RunSettings(
            purpose=purpose, policy=policy, is_module=self.is_module, folder=str(folder), **fields
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run that ended.

    Attributes:
        folder: of its results.
        last_line: of its stdout.
        written: files that it wrote.
    """

    folder: Path
    last_line: str
    written: tuple[str, ...]


@dataclass(slots=True)
class ScriptRuns:
    """Make runs of a script in FP32 or in mixed precision.

    Attributes:
        settings: of the script; each run's folder is in ``settings.folder``.
        loss_scale: of the mixed runs, as on the command line; None: as ``run`` decides.
        progress: called with short messages.
        earlier: files that runs have written so far -> name of the run.
        folders: of the runs that were made.
    """

    settings: ScriptSettings
    loss_scale: str | None = None
    progress: Callable[[str], None] = lambda _: None
    earlier: dict[str, str] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)

    def start(
        self, name: str, format_: str, purpose: str, *, steps: int, repeat: int = 0, **more: Any
    ) -> EndedRun:
        """Make one run and wait for its end.

        Args:
            name: of its folder.
            format_: ``"fp32"`` or ``"mixed"``.
            purpose: of the run.
            steps: after which it is ended; 0: it ends by itself.
            repeat: added to its seed and to those that the script sets.
            more: other fields of ``RunSettings``.

        Raises:
            ScriptError: the script failed.
            UnsupportedError: it read a file that an earlier run wrote.
        """
        folder = make_run_folder(name, asked=self.settings.folder / name)
        self.folders.append(folder)
        (folder / RESULT).unlink(missing_ok=True)
        settings = self.settings.whole_run(
            purpose,
            folder,
            "fp32" if format_ == "fp32" else self.settings.policy,
            loss_scale=None if format_ == "fp32" else self.loss_scale,
            seed_shift=repeat,
            steps=steps,
            earlier=self.earlier,
            **more,
        )
        shown = f"run {len(self.folders)}, {name}"
        self.progress(shown)
        ended = run_process(
            _title(format_, purpose),
            settings,
            self.settings.target,
            lambda line: self.progress(f"{shown}: {line}"),
        )
        self.earlier |= dict.fromkeys(ended.written, name)
        return ended


def _title(format_: str, purpose: str) -> str:
    """Return how messages call a run."""
    title = "its FP32 run" if format_ == "fp32" else "its mixed run"
    if purpose != TIMED:
        return f"the run that {_KEEPS.get(purpose, purpose)}"
    return f"{title}, after its FP32 run had succeeded" if format_ == "mixed" else title


# ---- the process


def run_process(
    title: str, settings: RunSettings, target: Sequence[str], progress: Callable[[str], None]
) -> EndedRun:
    """Run the script ``target`` in a fresh process as ``settings`` say, and wait for its end.

    Args:
        title: how messages call the run.
        settings: of the run.
        target: script and its arguments.
        progress: called with the script's latest line now and then.

    Raises:
        ScriptError: the script failed; the message has the last lines that it wrote to stderr.
        UnsupportedError: it read a file that an earlier run wrote.
    """
    folder = Path(settings.folder)
    command = [sys.executable, "-m", "narrowcast.verify", str(settings.write()), *target]
    # Output is not buffered, to show its progress. OpenMP threads sleep while they wait: spinning ones make a
    # step take sixty times as long as soon as something else needs a core, in one run and not in the other.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONUNBUFFERED": "1"}
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        try:
            code = _wait(process, folder, lambda: progress(_last_line(out)))
        finally:
            _end_group(process)  # processes that the script left behind would disturb the next run
    seen = read_files(folder / FILES)
    if seen.read is not None:
        file, wrote = seen.read
        raise UnsupportedError(
            f"run {folder.name} read {file}, which run {wrote} had written. A script that resumes from what "
            "it saved does other work each time, so there is nothing to compare: let it start afresh each "
            "time (by an option of its own, or by saving to the folder that NARROWCAST_RUN_DIR names). "
            "A file that is only prepared once, as downloaded data, is no trouble where it is there before"
        )
    if code != 0:
        raise ScriptError(_failure(title, code, _last_lines(err)) + f"\nall of its output: {folder}")
    return EndedRun(folder=folder, last_line=_last_line(out), written=seen.written)


def _wait(process: subprocess.Popen[bytes], folder: Path, tick: Callable[[], None]) -> int:
    """Return the exit code; end a run at once if any of its processes read a file of an earlier run."""
    position = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        new = _bytes_from(folder / FILES, position)  # only the new part: a run may write very many files
        position += len(new)
        if b'"read"' in new:
            _end_group(process)
            return READ_OF_AN_EARLIER_RUN
        tick()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started, which are one process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(title: str, code: int, lines: list[str]) -> str:
    ended = f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    text = "; it ended with:\n" + "\n".join(lines) if lines else "; it wrote nothing to stderr"
    return f"the script {ended} in {title}{text}"


def in_short(error: ScriptError) -> str:
    """Return what failed and why in one line: the first line of the message, and the last of stderr."""
    first, *rest = str(error).splitlines()
    said = [line.strip() for line in rest if line.strip() and not line.startswith("all of its output")]
    return f"{first.removesuffix('; it ended with:')}: {said[-1]}" if said else first


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name


def _bytes_from(path: Path, start: int) -> bytes:
    """Return the file from ``start``, or its last ``-start`` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(start if start >= 0 else max(0, path.stat().st_size + start))
            return file.read()
    except OSError:
        return b""  # the script deleted the folder


def _last_lines(path: Path) -> list[str]:
    """Return the last lines, cut to a readable length, without control characters."""
    lines = _bytes_from(path, -_ERROR_BYTES).decode(errors="replace").splitlines()[-_ERROR_LINES:]
    return ["".join(c if c.isprintable() else " " for c in line[:_LONGEST_LINE]) for line in lines]


def _last_line(path: Path) -> str:
    lines = _bytes_from(path, -_TAIL_BYTES).decode(errors="replace").replace("\r", "\n").splitlines()
    written = [line for raw in lines if (line := raw.strip())]
    return written[-1] if written else ""

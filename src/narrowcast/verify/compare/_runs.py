"""The runs of a script that ``compare``, ``doctor`` and ``explain`` make, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from narrowcast._files import replacing
from narrowcast.attach import READ_OF_AN_EARLIER_RUN, read_files
from narrowcast.errors import FileError, ScriptError, UnsupportedError
from narrowcast.observe.capture import RUN, discard_captures, make_run_folder, read_capture

FILES = "files.jsonl"
SETTINGS = "narrowcast-run.json"
RESULT = "result.json"
TENSORS = "narrowcast-tensors"
"""Folder, in that of a run, of tensors that are compared and then deleted."""

# Purposes of a run.
TIMED, MEMORY, OUTPUTS, PROFILE, EXPLAIN = "timed", "memory", "outputs", "profile", "explain"
REFERENCE, EXACT, MIXED = "gradients-reference", "gradients-exact", "gradients-mixed"
_POLL_S = 0.1
_TAIL_BYTES = 4096
_ERROR_BYTES = 65_536
_ERROR_LINES = 15
_LONGEST_LINE = 500


class ScriptSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which script, and how it is run.

    Attributes:
        target: the script, or with ``is_module`` the module, and its arguments.
        is_module: whether ``target`` begins with the name of a module, as for ``python -m``.
        policy: name or file of the policy of the mixed runs.
        loss_scale: of the mixed runs, as on the command line; None: as ``run`` decides.
        seed: set before each run; a repeat adds its number.
        folder: of all results.
    """

    target: tuple[str, ...]
    is_module: bool = False
    policy: str = "auto"
    loss_scale: str | None = None
    seed: int = 0
    folder: Path


class RunSettings(ScriptSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one run is made, with its own policy and folder. The process gets it as a JSON file.

    Attributes:
        purpose: one of the purposes above.
        seed_shift: added to ``seed`` and to the seeds that the script sets itself.
        steps: after which the run is ended; 0: it ends by itself.
        earlier: files that earlier runs wrote -> name of the run.
        at_step: optimizer steps before updates are held back, in a run that keeps gradients.
        start_scale: loss scale with which such a run begins; None: as ``loss_scale`` says.
        watched_steps: how many steps are watched to explain them.
    """

    purpose: str
    seed_shift: int = 0
    steps: int = 0
    earlier: dict[str, str] = {}
    at_step: int = 0
    start_scale: float | None = None
    watched_steps: int = 0

    def write(self) -> Path:
        """Write them into their folder; return the file."""
        path = self.folder / SETTINGS
        path.write_bytes(msgspec.json.encode(self, enc_hook=str))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``write`` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls, dec_hook=lambda kind, value: kind(value))


@dataclass(slots=True)
class ScriptRuns:
    """Make runs of a script in FP32 or in mixed precision, each in a folder inside ``settings.folder``.

    Attributes:
        earlier: files that runs have written so far -> name of the run.
        folders: of the runs that were made.
    """

    settings: ScriptSettings
    progress: Callable[[str], None] = lambda _: None
    earlier: dict[str, str] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)

    def start(self, name: str, format_: str, purpose: str, **more: Any) -> Path:
        """Make one run in a fresh process, wait for its end, and return its folder.

        Without a name that is ``settings.folder`` itself; ``more`` are other fields of ``RunSettings``.

        Raises:
            ScriptError: the script failed; the message has the last lines that it wrote to stderr.
            UnsupportedError: it read a file that an earlier run wrote.
        """
        asked = {name: getattr(self.settings, name) for name in ScriptSettings.__struct_fields__}
        folder = self.settings.folder / name
        if name and (folder / SETTINGS).exists():
            _discard(folder)
        self.folders.append(make_run_folder(name, asked=folder))
        discard_captures(folder)
        if format_ == "fp32":
            asked |= {"policy": "fp32", "loss_scale": None}
        asked |= {"folder": folder, "purpose": purpose, "earlier": self.earlier}
        settings = RunSettings(**asked, **more)
        title = name or purpose
        shown = f"run {len(self.folders)}, {title}"
        self.progress(shown)
        code = _run_process(settings, lambda line: self.progress(f"{shown}: {line}"))
        seen = read_files(folder / FILES)
        if seen.read is not None:
            file, wrote = seen.read
            raise UnsupportedError(
                f"run {folder.name} read {file}, which run {wrote} had written. A script that resumes from "
                "what it saved does other work each time, so there is nothing to compare: let it start "
                "afresh each time (by an option of its own, or by saving to the folder that "
                "NARROWCAST_RUN_DIR names). A file that is only prepared once, such as downloaded data, is "
                "no problem if it is there before the first run"
            )
        if code != 0:
            if format_ == "mixed" and purpose in (TIMED, PROFILE):
                title += ", after its FP32 run had succeeded"
            raise ScriptError(_failure(title, code, folder))
        self.earlier |= dict.fromkeys(seen.written, name)
        return folder


def _discard(folder: Path) -> None:
    """Delete an earlier run of the same name, whose pictures and results would pass for those of this one."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise FileError(f"cannot delete what an earlier run left, {folder}: {error.strerror}") from error


# ---- what a run leaves


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write ``result.json`` atomically."""
    with replacing(folder / RESULT) as file:
        file.write(json.dumps(result).encode())


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read what a probe wrote there; None: it saw nothing, or was killed."""
    try:
        result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result


class GradientFacts(msgspec.Struct, kw_only=True):
    """What a run that keeps gradients notes about them.

    Attributes:
        problem: why they cannot be compared, as a sentence.
        steps_before: optimizer steps before updates were held back.
        batch: fingerprint of the inputs of the first call.
        random: of each optimizer, a hash of the random states when it first stepped.
        scale: the loss scale when the first of them did.
        good_scale: the first one at which no gradient overflowed, if those of the first batch did.
        never_stepped: how many optimizers did not step in time.
    """

    problem: str | None = None
    steps_before: int = 0
    batch: str | None = None
    random: list[str] = []
    scale: float | None = None
    good_scale: float | None = None
    never_stepped: int = 0


def why_unseen(folder: Path, *, advice: str, verb: str | None) -> str | None:
    """Return why a probe did not see what the script does, if the capture of the run shows it.

    ``advice`` is for a script that uses mixed precision itself; without a ``verb``, as ``"profiled"``, the
    probe saw enough, whatever other processes do.
    """
    try:
        capture = read_capture(folder / RUN)
    except FileError:
        return "the run left no record of itself"
    left_alone = capture.totals()["aside"]
    if left_alone is not None:
        return f"{left_alone}: {advice}"
    if verb is not None and any("started processes" in note["text"] for note in capture.of("note")):
        return f"the script computes in processes that it starts itself, which are not {verb}"
    return None


# ---- the process


def _run_process(settings: RunSettings, progress: Callable[[str], None]) -> int:
    """Run a script in a fresh process; return its exit code."""
    folder = settings.folder
    command = [sys.executable, "-m", "narrowcast.verify.compare._child", str(settings.write())]
    # Output is not buffered, to show its progress. OpenMP threads sleep while they wait: spinning ones make a
    # step take sixty times as long as soon as something else needs a core, in one run and not in the other.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONUNBUFFERED": "1"}
    with (folder / "stdout.txt").open("wb") as stdout, (folder / "stderr.txt").open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        try:
            return _wait(process, folder, lambda: progress(last_line(folder)))
        finally:
            _end_group(process)  # processes that the script left behind would disturb the next run


def _wait(process: subprocess.Popen[bytes], folder: Path, tick: Callable[[], None]) -> int:
    """Return the exit code; end a run at once if any of its processes read a file of an earlier run."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        if '"read"' in _tail(folder / FILES):  # the last part alone: a run may write very many files
            _end_group(process)
            return READ_OF_AN_EARLIER_RUN
        tick()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started, which are one process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(title: str, code: int, folder: Path) -> str:
    names = {-known.value: known.name for known in signal.Signals}
    ended = (
        f"was killed by {names.get(code, f'signal {-code}')}" if code < 0 else f"failed with exit code {code}"
    )
    guess = " (out of memory?)" if code == -signal.SIGKILL else ""
    lines = _last_lines(folder / "stderr.txt")
    text = "; it ended with:\n" + "\n".join(lines) if lines else "; it wrote nothing to stderr"
    return f"the script {ended}{guess} in run {title}{text}\nall of its output: {folder}"


def in_short(error: ScriptError) -> str:
    """Return what failed and why in one line: the first line of the message, and the last of stderr."""
    first, *rest = str(error).splitlines()
    said = [line.strip() for line in rest if line.strip() and not line.startswith("all of its output")]
    return f"{first.removesuffix('; it ended with:')}: {said[-1]}" if said else first


def _tail(path: Path, size: int = _TAIL_BYTES) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""  # the script deleted the folder


def _last_lines(path: Path) -> list[str]:
    """Return the last lines, cut to a readable length, without control characters."""
    lines = _tail(path, _ERROR_BYTES).splitlines()[-_ERROR_LINES:]
    return ["".join(c if c.isprintable() else " " for c in line[:_LONGEST_LINE]) for line in lines]


def last_line(folder: Path) -> str:
    """Return the last line on stdout of the run in ``folder``."""
    lines = _tail(folder / "stdout.txt").replace("\r", "\n").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")

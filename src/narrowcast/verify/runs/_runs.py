"""The runs of a script that ``compare``, ``doctor`` and ``explain`` make, each in a process of its own."""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import msgspec

from narrowcast._files import replacing
from narrowcast.capture import RUN, discard_captures, make_run_folder, read_capture
from narrowcast.errors import FileError, ScriptError
from narrowcast.scripts import (
    OUTPUTS,
    bring_back,
    changed_files,
    has_files_to_move,
    locked_journal,
    only_run_in_folder,
    restore_files,
    set_aside,
)
from narrowcast.verify.runs._inputs import RoundedColumn
from narrowcast.verify.runs._processes import Processes

# Names of files and folders in the folder of a run.
SETTINGS = "narrowcast-run.json"
RESULT = "result.json"
TENSORS = "narrowcast-tensors"
"""Holds tensors that are deleted once they are compared."""

MOVES_FILE = "moves.pt"
"""A run that keeps gradients saves here how far its last steps move the weights."""

STEPS_AFTER_THE_END = 20
"""The steps of one optimizer are counted. After so many steps of another one in a row, the script no longer
uses the first, and those of the other are counted. (A GAN's generator steps once in five steps of its critic,
so a few steps in a row do not show that.)"""

MOVES = 3
"""A run that keeps gradients takes so many steps at its end.

Updates of the four batches before them are held back. So these are seven batches in a row, and a script that
leaves out every fifth step in mixed precision leaves out at least one of them.
"""

_TURNS = "narrowcast-turns"
UNTIL, STEPS, PAUSED, MEMORY = range(4)
"""Places in ``shared_numbers``."""

# How often to look at a run that goes on to its end, and at one that will pause.
_POLL_S = 0.1
_TURN_POLL_S = 0.002
# A disk with less space is full.
_FULL_BYTES = 65_536
# How much of stderr the message of a failed run shows.
_ERROR_BYTES = 65_536
_ERROR_LINES = 15
_LONGEST_LINE = 500

# Steps of each run before the two runs take turns.
_WARM_UP = 3
# The steps of one turn are a block. A block lasts about so long, or less where a run would otherwise have
# fewer blocks than ``_BLOCKS``.
_BLOCK_S = 0.1
_BLOCKS = 30
# Steps of the first block. It has fewer in a short run, so that the run has ``_FEWEST_BLOCKS`` blocks. The
# interval of a speedup from one or two pairs of runs needs four blocks (``speedup_of_pairs``); two are spare.
_FIRST_BLOCK = 5
_FEWEST_BLOCKS = 6
# In thousandths of the machine's memory. A run that takes more than the first takes no turns with another
# one; only if timed runs take less than the second may two untimed ones go on at once.
_MOST_MEMORY = 450
LITTLE_MEMORY = 200
# A run whose turn takes so long, and so many times as long as the other run's, may wait for what that one
# holds, as a lock or a port.
_PATIENCE_S = 10.0
_PATIENCE = 10
_STOPPED = "TtZXx"  # stopped, traced, or dead: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
_TOO_SHORT = f"the script's own process took fewer than {_WARM_UP} steps"


class Purpose(StrEnum):
    """What a run is made for; those that keep gradients are in folders of these names."""

    TIMED = "timed"
    MEMORY = "memory"
    OUTPUTS = "outputs"
    PROFILE = "profile"
    SHARES = "shares"
    EXPLAIN = "explain"
    RANGES = "ranges"
    REFERENCE = "gradients-reference"
    EXACT = "gradients-exact"
    MIXED = "gradients-mixed"


# How progress names these purposes.
_PHASES = {
    Purpose.TIMED: "timing",
    Purpose.MEMORY: "counting tensors",
    Purpose.OUTPUTS: "comparing outputs",
    Purpose.PROFILE: "profiling",
    Purpose.SHARES: "profiling",
    Purpose.EXPLAIN: "watching",
    Purpose.RANGES: "counting numbers",
    Purpose.REFERENCE: "comparing gradients",
    Purpose.EXACT: "comparing gradients",
    Purpose.MIXED: "comparing gradients",
}


class ScriptSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which script, and how it is run.

    Attributes:
        target: the script, or with ``is_module`` the module, and its arguments.
        is_module: whether ``target`` begins with the name of a module, as for ``python -m``.
        policy: name or file of the policy of the mixed runs.
        loss_scale: of the mixed runs, as on the command line; None: as ``run`` decides.
        seed: set before each run; a repeat adds its number.
        fp32_because: why ``auto`` is fp32 here, where another format is compared instead.
        folder: of all results.
    """

    target: tuple[str, ...]
    is_module: bool = False
    policy: str = "auto"
    loss_scale: str | None = None
    seed: int = 0
    fp32_because: str | None = None
    folder: Path


class RunSettings(ScriptSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one run is made, with its own policy and folder. The process gets it as a JSON file.

    Attributes:
        seed_shift: added to ``seed`` and to the seeds that the script sets itself.
        steps: after which the run is ended; 0: it ends by itself.
        is_training: whether an earlier run trained, so that calls of modules before training are not steps.
        at_steps: how many optimizer steps come before updates are held back, in a run that keeps gradients;
            between two of them it trains in mixed precision.
        start_scale: if the loss scale is larger when updates begin to be held back, it is lowered to this;
            None: it stays as ``loss_scale`` says.
        modules: how many modules the script calls, in a run that keeps outputs of each.
        math_attention: whether attention is computed without fused kernels.
        watched_steps: how many steps are watched to explain them.
        number: which run of its ``ScriptRuns`` it is, from 1 on.
    """

    purpose: Purpose
    number: int = 1
    seed_shift: int = 0
    steps: int = 0
    is_training: bool = False
    at_steps: tuple[int, ...] = (0,)
    start_scale: float | None = None
    modules: int = 1
    math_attention: bool = False
    watched_steps: int = 0

    def write(self) -> Path:
        """Write them into their folder; return the file."""
        path = self.folder / SETTINGS
        with replacing(path) as file:
            file.write(msgspec.json.encode(self, enc_hook=str))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the settings of a run from their file."""
        return msgspec.json.decode(path.read_bytes(), type=cls, dec_hook=lambda kind, value: kind(value))


@dataclass(slots=True)
class ScriptRuns:
    """Make runs of a script in FP32 or in mixed precision, each in a folder inside ``settings.folder``.

    Attributes:
        written: files outside of their folders that runs have written so far.
        folders: of the runs that were made.
        expected: how many runs there will be; 0: unknown.
        ends: when the last one ends at the latest, by ``time.monotonic``, as far as is known.
        beside: whether a run may go on beside another one, as ``ahead`` begins it.
    """

    settings: ScriptSettings
    progress: Callable[[str], None] = lambda _: None
    written: set[str] = field(default_factory=set)
    folders: list[Path] = field(default_factory=list)
    expected: int = 0
    ends: float = 0.0
    beside: bool = False
    _ahead: dict[str, LiveRun] = field(default_factory=dict)
    _processes: Processes = field(default_factory=Processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str, trains_in: str, purpose: Purpose, **more: Any) -> Path:
        """Make one run in a fresh process, wait for its end, restore the user's files, and return its folder.

        If ``name`` is empty, the folder is ``settings.folder`` itself. ``trains_in`` is ``"fp32"`` or
        ``"mixed"``, and ``more`` are other fields of ``RunSettings``.

        Raises:
            ScriptError: the script failed.
            FileError: a file of the user cannot be put back.
        """
        # The wait for the folder may be interrupted. A run that ``ahead`` began is then still in ``_ahead``,
        # so that ``close`` ends it.
        with only_run_in_folder(self.progress):
            begun = self._ahead.pop(name, None)
            with begun or self.begin(name, trains_in, purpose, **more) as run:
                run.go()
        return run.checked()

    def ahead(self, name: str, trains_in: str, purpose: Purpose, **more: Any) -> None:
        """Begin a run that ``start`` will wait for later, so that both go on at once."""
        if self.beside:
            self._ahead[name] = self.begin(name, trains_in, purpose, **more)

    def close(self) -> None:
        """End runs that ``ahead`` began and nobody waited for, and the process that forks runs."""
        for run in self._ahead.values():
            run.close()
        self._processes.close()

    def begin(self, name: str, trains_in: str, purpose: Purpose, **more: Any) -> LiveRun:
        """Begin a run as ``start`` does, without waiting for its end.

        Its process starts at once. It does not pause before ``LiveRun.go`` names a step to pause at.
        """
        folder = self.settings.folder / name
        self.folders.append(self._made_folder(name, folder))

        # The settings of the script, with those that differ in this run.
        fields = {key: getattr(self.settings, key) for key in ScriptSettings.__struct_fields__}
        fields |= {"folder": folder, "purpose": purpose}
        if trains_in == "fp32":
            fields |= {"policy": "fp32", "loss_scale": None}
        title, number = name or purpose, len(self.folders)

        def tell(line: str = "") -> None:
            text = f"run {number}"
            if self.expected:
                text += f" of {max(self.expected, number)}"
            left_s = self.ends - time.monotonic()
            if left_s > 0:
                text += f", up to {left_s:.0f} s left"
            text += f", {_PHASES[purpose]} ({title})"
            if line:
                text += f": {line}"
            self.progress(text)

        tell()
        # If the script ran in FP32, the low format may be the cause of an error. The message says so.
        ran = title
        if trains_in == "mixed" and purpose in (Purpose.TIMED, Purpose.PROFILE, Purpose.SHARES):
            ran = f"{title}, after its FP32 run had succeeded"
        run_settings = RunSettings(**fields, **more, number=number)
        return LiveRun(run_settings, trains_in, ran, tell, self.written.update, self._processes)

    def _made_folder(self, name: str, folder: Path) -> Path:
        """Make the folder of a run, without what an earlier run left there."""
        if Path.cwd().is_relative_to(folder.resolve()):
            raise FileError(f"{folder} holds the working folder; name another one with --run-dir")
        restore_files(folder)  # of a run that was killed
        # Pictures and results of an earlier run would pass for those of this one.
        if name and (folder / SETTINGS).exists():
            try:
                shutil.rmtree(folder)
            except OSError as error:
                why = f"cannot delete what an earlier run left, {folder}: {error.strerror}"
                raise FileError(why) from error
        made = make_run_folder(name, asked=folder)
        discard_captures(folder)
        shutil.rmtree(folder / OUTPUTS, ignore_errors=True)
        return made


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


def collapsed(folder: Path) -> str | None:
    """Return how the training of a run came to a stop, if its loss scale collapsed."""
    result = read_result(folder)
    if not result:
        return None
    return result.get("collapsed")


class GradientFacts(msgspec.Struct, kw_only=True):
    """What a run that keeps gradients notes about those of one step.

    Attributes:
        at_step: after how many optimizer steps they were to be kept.
        problem: why they cannot be compared, as a sentence.
        steps_before: optimizer steps before updates were held back.
        batch: fingerprint of the inputs of the first call; of floating tensors only the shapes count.
        batch_values: some values of each of these floating tensors.
        rounded_columns: by format, the column of these inputs that loses most of its spread in it; a format
            in which none loses much is absent.
        samples: in one minibatch; None: not known.
        backwards: how many minibatches one step averages, mostly one for each backward pass; the most of any
            optimizer, over the steps whose gradients were kept.
        ranks: processes whose gradients are averaged; ``launched``: those that a launcher says there are.
        random: of each optimizer, hashes of the random states when its gradients were kept.
        scale: the loss scale when the first of the optimizers kept its gradients.
        good_scale: the loss scale at which the gradients of every optimizer were finite again, after one of
            the first four batches overflowed; None if none of these did, or if the overflow did not end.
        in_attention: whether the problem is dropout that a fused kernel of attention draws.
        never_stepped: how many optimizers did not step in time.
        passes: all backward passes from the first batch whose update was held back to the last of ``MOVES``
            steps; 0 if these steps were not taken, or one of them was skipped.
    """

    at_step: int = 0
    problem: str | None = None
    steps_before: int = 0
    batch: str | None = None
    batch_values: list[list[float]] = []
    rounded_columns: dict[str, RoundedColumn] = {}
    samples: int | None = None
    backwards: int = 1
    ranks: int = 1
    launched: int = 1
    random: list[list[str]] = []
    scale: float | None = None
    good_scale: float | None = None
    in_attention: bool = False
    never_stepped: int = 0
    passes: int = 0


class OutputFacts(msgspec.Struct, kw_only=True):
    """What a run that keeps outputs notes about one call.

    Attributes:
        module: its number, in the order of first calls; ``kind``: its class.
        inputs: their fingerprint.
        batch: a fingerprint for which of floating tensors only the shapes count.
        batch_values: some values of each of these floating tensors.
    """

    module: int
    kind: str
    inputs: str
    batch: str
    batch_values: list[list[float]]


def tensors_at(folder: Path, at_step: int) -> Path:
    """Return where a run in ``folder`` keeps the gradients of one step."""
    return folder / TENSORS / f"step-{at_step}"


def why_unseen(folder: Path, *, advice: str, verb: str | None) -> str | None:
    """Return why a probe did not see what the script does, if the capture of the run shows it.

    ``advice`` is for a script that uses mixed precision itself. ``verb`` is what the probe does, such as
    ``"profiled"``; None: the probe saw enough, so processes that the script starts do not matter.
    """
    try:
        capture = read_capture(folder / RUN)
    except FileError:
        return "the run left no record of itself"
    left_alone = capture.totals()["left_alone"]
    if left_alone is not None:
        return f"{left_alone}: {advice}"
    if verb is not None and any("started processes" in note["text"] for note in capture.of("note")):
        return f"the script computes in processes that it starts itself, which are not {verb}"
    return None


# ---- the process


def shared_numbers(folder: Path) -> memoryview[int]:
    """Map the numbers that the process of a run and its parent share, zero at first.

    ``UNTIL``: the step at which it pauses; 0: it goes on; negative: it ends. ``STEPS``: how many it took.
    ``PAUSED``: whether it pauses. ``MEMORY``: the most that it claimed, in thousandths of what there is.
    """
    # Four integers of eight bytes.
    with (folder / _TURNS).open("a+b") as file:
        file.truncate(32)
        return memoryview(mmap.mmap(file.fileno(), 32)).cast("q")


class LiveRun(ExitStack):
    """The process of a run. Closing it ends the process and restores the user's files.

    The process starts at once. It pauses only at a step that ``go`` names, until the next ``go``.

    Attributes:
        folder: of the run.
        format: ``"fp32"`` or ``"mixed"``.
        name: of its folder.
        numbers: what it shares with the process, as ``shared_numbers`` has it.
        code: the exit code; None: it has not ended.
        active_s: how long it was not paused; ``startup_s``: until its first step.
        changes_files: whether it changed files of the user before it paused.
    """

    def __init__(
        self,
        settings: RunSettings,
        format_: str,
        title: str,
        tell: Callable[[str], None],
        written: Callable[[list[str]], None],
        processes: Processes,
    ) -> None:
        super().__init__()
        self.folder, self.format, self.name = settings.folder, format_, settings.folder.name
        self.numbers = shared_numbers(self.folder)
        self.code: int | None = None
        self.active_s = self.startup_s = 0.0
        self.changes_files = self._files_made_way = False
        self._title, self._tell, self._full_disk = title, tell, ""
        # Files are restored last, once the process has ended that changes them.
        self.enter_context(locked_journal(self.folder))
        self.callback(lambda: written(restore_files(self.folder)))
        try:
            self._process = processes.start(settings.write())
        except BaseException:
            self.close()
            raise
        self.callback(self._end)

    def _end(self) -> None:
        """End the process and what it left behind, which would disturb the next run."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):
            (self.folder / _TURNS).unlink()
        # Looked at before the user's files are restored, which may free the disk.
        if self.code:
            self._full_disk = full_disk(self.folder)

    def go(self, until: int = 0, *, patience_s: float = math.inf, limit_s: float = math.inf) -> bool:
        """Go on until a step, by default to the end; return whether it pauses there.

        Args:
            until: number of the step.
            patience_s: after how many seconds to return in any case; the run is stopped wherever it is.
            limit_s: after how many seconds of steps the run is told to end.
        """
        if self._files_made_way:
            bring_back(self.folder)
            self._files_made_way = False
        began = time.monotonic()
        before_s = self.active_s
        told_at = 0.0
        self.numbers[UNTIL] = until
        while self.code is None:
            self._signal(signal.SIGCONT)  # again, since it may have come before the process stopped itself
            with suppress(subprocess.TimeoutExpired):
                self.code = self._process.wait(_TURN_POLL_S if until else _POLL_S)
            now = time.monotonic()
            self.active_s = before_s + now - began
            if not self.steps:
                self.startup_s = self.active_s

            if until and self.numbers[PAUSED] and self.steps >= until:
                return True
            if now - began > patience_s:
                self._signal(signal.SIGSTOP)
                return False
            if self.stepping_s > limit_s:
                self.numbers[UNTIL] = -1
            if now - told_at > _POLL_S:
                told_at = now
                self._tell(last_line(self.folder))
        return False

    def make_way(self) -> str | None:
        """Put the user's files back as they were before this run, which is paused, until it goes on.

        Returns:
            Why that is not possible; then the files stay as they are.
        """
        if not has_files_to_move(self.folder):
            return None
        self.changes_files = True
        why = self._why_not_still() or set_aside(self.folder)
        if why:
            return why
        self._files_made_way = True
        return None

    def _why_not_still(self) -> str | None:
        """Wait a moment until every thread of the run stands still; return why that cannot be told, if so.

        A thread or a loader that still writes would write to the files of the other run.
        """
        if not os.path.isdir("/proc/self/task"):
            return "the script changes files, and this system has no /proc to tell when a run stands still"
        began = time.monotonic()
        while _is_any_thread_running(self._process.pid):
            if time.monotonic() - began > _PATIENCE_S:
                return f"the script changes files, and a process of {self.name} does not stand still"
            time.sleep(_TURN_POLL_S)
        return None

    @property
    def steps(self) -> int:
        return self.numbers[STEPS]

    @property
    def stepping_s(self) -> float:
        """How long it was not paused since its first step."""
        return self.active_s - self.startup_s

    def _signal(self, number: int) -> None:
        """Send a signal to the process and whatever it started, which are one process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def checked(self) -> Path:
        """Return the folder.

        Raises:
            ScriptError: the script failed; the message has the last lines that it wrote to stderr.
        """
        if not self.code:
            return self.folder
        ended = f"failed with exit code {self.code}"
        if self.code < 0:
            # A kill that nobody asked for comes most often from the system, when memory runs out.
            names = {known.value: known.name for known in signal.Signals}
            ended = f"was killed by {names.get(-self.code, f'signal {-self.code}')}"
            if self.code == -signal.SIGKILL:
                ended += " (out of memory?)"
        text = "; it wrote nothing to stderr"
        lines = _tail(self.folder / "stderr.txt", _ERROR_BYTES).splitlines()[-_ERROR_LINES:]
        if lines:
            text = "; it ended with:\n" + "\n".join(map(_printable, lines))
        where = f"in run {self._title}{self._full_disk}"
        raise ScriptError(f"the script {ended} {where}{text}\nall of its output: {self.folder}")


def _printable(line: str) -> str:
    """Return the first characters of a line of a script's output, with spaces for unprintable ones."""
    return "".join(character if character.isprintable() else " " for character in line[:_LONGEST_LINE])


def _is_any_thread_running(group: int) -> bool:
    """Return whether a thread of a process group is not stopped, by the system's ``/proc``."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if os.getpgid(int(process.name)) != group:
                continue
            for thread in (process / "task").iterdir():
                # The state stands after the name, which may have spaces and parentheses.
                _, _, after_name = (thread / "stat").read_text().rpartition(")")
                if after_name.split()[0] not in _STOPPED:
                    return True
    return False


def full_disk(folder: Path, name: str = "stderr.txt") -> str:
    """Return the end of a message that says where the disk is full; empty if it is not.

    Looks at the disks of the files that the run changed, the latest first, and of ``name`` in its folder.
    """
    for path in [*map(Path, reversed(changed_files(folder))), folder / name]:
        with suppress(OSError):
            if shutil.disk_usage(path.parent).free < _FULL_BYTES:
                return f": no space left on device (ENOSPC) in {path.parent}, for {path.name}"
    return ""


def in_short(error: ScriptError) -> str:
    """Return what failed and why in one line: the first line of the message, and the last of stderr."""
    first, *rest = str(error).splitlines()
    last = ""
    for line in rest:
        if line.strip() and not line.startswith("all of its output"):
            last = line.strip()
    if not last:
        return first
    return f"{first.removesuffix('; it ended with:')}: {last}"


def _tail(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""  # the script deleted the folder


def last_line(folder: Path) -> str:
    """Return the last line on stdout of the run in ``folder``."""
    lines = _tail(folder / "stdout.txt", 4096).replace("\r", "\n").splitlines()
    for line in reversed(lines):
        if line.strip():
            return line.strip()
    return ""


# ---- two runs whose steps take turns, in blocks, so that a machine that gets slower slows both alike

_Limit = Callable[[LiveRun, LiveRun], float]


def take_turns(
    formats: Sequence[str],
    begin: Callable[[str], LiveRun],
    ended: Callable[[LiveRun], None],
    *,
    steps: int,
    limit_s: _Limit,
) -> str | None:
    """Make a run of each of two formats, their steps in turns; return why they did not take turns, if so.

    A run pauses at the end of a step, with all of its processes. What it has changed of the user's files is
    set aside before the other one goes on, and brought back when it goes on itself.

    Args:
        formats: that of the first run, and that of the second.
        begin: begins a run of a format.
        ended: called with each run after its end, when the user's files are restored.
        steps: that each will take; 0: not known.
        limit_s: called with a run and the first run of the pair; returns after how long to end the run.
    """
    # ``why`` is what this function returns. The first run may show at once that it cannot take turns. Only
    # otherwise the second run begins.
    first_format, second_format = formats
    with begin(first_format) as first_run:
        why = _why_no_turns(first_run)
        if why is None:
            with begin(second_format) as second_run:
                # Turns may stop early; ``why`` then says so. Both runs still go on to their ends, one by one.
                to_end_first, why = _alternate(first_run, second_run, steps, limit_s)
                to_end_last = first_run
                if to_end_first is first_run:
                    to_end_last = second_run
                for run in (to_end_first, to_end_last):
                    run.go(limit_s=limit_s(run, first_run))
                    run.close()
            failed = [run for run in (first_run, second_run) if run.code and not collapsed(run.folder)]
            if not failed:
                # ``ended`` raises for a run whose loss scale collapsed, so one that succeeded comes first.
                for run in sorted((first_run, second_run), key=lambda run: run.code or 0):
                    ended(run)
                return why
            # They may have been in each other's way, so both are made again, each by itself.
            why = f"{failed[0].name} failed beside the other run"
            again = [first_format, second_format]
        else:
            # The first run goes on to its end alone, and the second one is still to be made.
            first_run.go(limit_s=limit_s(first_run, first_run))
            first_run.close()
            ended(first_run)
            again = [second_format]

    # Make the runs that are left, one after the other: both again, or only the second one.
    for format_ in again:
        with begin(format_) as run:
            run.go(limit_s=limit_s(run, first_run))
        ended(run)
    return why


def _why_no_turns(run: LiveRun) -> str | None:
    """Let the first run warm up; return why no other one can take turns with it, if so."""
    if not run.go(_WARM_UP):
        return _TOO_SHORT
    return _why_alone(run) or run.make_way()


def _alternate(
    first_run: LiveRun, second_run: LiveRun, steps: int, limit_s: _Limit
) -> tuple[LiveRun, str | None]:
    """Let two runs take turns until one ends, or they no longer can.

    Returns:
        The run that goes on to its end first, while the files of the other one have made way; and why they
        stopped taking turns, None if a run has ended or has reached its time limit.
    """
    order = [second_run, first_run]  # the run that goes first in a round, and the one that follows
    block = 0  # steps of a turn; 0: the warm-up
    first_block = _FIRST_BLOCK
    # Runs of a few steps take shorter turns.
    if steps:
        first_block = max(1, min(_FIRST_BLOCK, (steps - _WARM_UP) // _FEWEST_BLOCKS))
    while True:
        spent_s: list[float] = []
        # A round: one turn of each run. ``other`` is paused meanwhile.
        for run, other in (order, order[::-1]):
            # The first round is the warm-up. The first run of the pair took its own before the second began.
            if not block and run is first_run:
                continue
            until = _WARM_UP
            if block:
                until = run.steps + block
            # If a turn takes far longer than usual, the run may be waiting for what the other one holds. The
            # usual time is that of the other run's turn in this round. If there was none yet, it is all the
            # time that the first run of the pair has taken so far.
            usual_s = first_run.active_s
            if spent_s:
                usual_s = spent_s[0]
            patience_s = max(_PATIENCE_S, _PATIENCE * usual_s)
            before_s = run.active_s
            paused = run.go(until, patience_s=patience_s)
            spent_s.append(run.active_s - before_s)
            # The run has ended.
            if run.code is not None:
                return run, None
            # No other run may go on while this one is paused, so this one goes on to its end first.
            why = _why_alone(run) or run.make_way()
            if why:
                return run, why
            # The run was stopped in the middle of its turn. The other one goes on, and may free what it waits
            # for.
            if not paused:
                return other, f"{run.name} took no step in {patience_s:.0f} s beside the other run"
            # The run has had its time, and is told to end when it goes on. So the other one goes on first.
            if run.stepping_s > limit_s(run, first_run):
                return other, None
        block = _next_block(block, min(spent_s), first_run, steps, first_block)
        # The run that went last goes first, so that a machine that gets slower slows both alike.
        order.reverse()


def _next_block(block: int, spent_s: float, first_run: LiveRun, steps: int, first_block: int) -> int:
    """Return how many steps the next turns have, so that they last as long as a block should."""
    # The warm-up has shown how long a step takes. ``stepping_s`` begins at the end of its first step. If a
    # step lasts as long as a block should, a block has one step.
    if not block:
        is_fast = first_run.stepping_s < (_WARM_UP - 1) * _BLOCK_S
        return first_block if is_fast else 1
    fitting = max(1, math.ceil(block * _BLOCK_S / max(spent_s, 1e-6)))
    if not steps:
        return fitting
    return min(fitting, max(first_block, steps // _BLOCKS))


def _why_alone(run: LiveRun) -> str | None:
    """Return why no other process of the script can run beside this one; None: it can."""
    if "RANK" in os.environ:
        return "it is one of the ranks of a job, which wait for each other"
    if run.numbers[MEMORY] > _MOST_MEMORY:
        return f"{run.name} takes {run.numbers[MEMORY] / 1000:.0%} of the memory"
    return None

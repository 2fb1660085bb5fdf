"""``compare``: one script in FP32 and in mixed precision, each in a fresh process with the same seed."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import CaptureError, ScriptError
from narrowcast.machine import best_format
from narrowcast.observe import Capture, discard_captures, make_run_folder, read_capture

_WARM_UP_SHARE = 0.1
_TOO_UNEVEN = 4.0
_ERROR_LINES = 15
_POLL_S = 0.2
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings:
    """What to compare.

    Attributes:
        target: the words after ``narrowcast run [options]``: script or ``-m module``, and its arguments.
        policy: policy of the mixed run.
        loss_scale: loss scale of the mixed run in a command line's words; None: as ``run`` decides.
        seed: both processes start with it.
        folder: where both runs put what they leave, each in a folder of its own.
    """

    target: tuple[str, ...]
    policy: str
    loss_scale: str | None
    seed: int
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both captures, and the numbers side by side as plain data (``to_dict``)."""

    fp32: Capture
    mixed: Capture
    last_lines: tuple[str, str]
    settings: ComparisonSettings

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready numbers; None for one that cannot be had, ``"nan"``, ``"inf"`` or ``"-inf"`` as strings.

        ``fp32`` and ``mixed``: step_time_s_median (of the intervals between optimizer steps, the first tenth
        left out as warm-up), steps, skipped_steps, final_scale, final_loss (the scalar that the last
        ``backward`` started from), peak_tensor_bytes (CUDA's allocator), peak_resident_bytes (the process),
        wall_s (of the script, imports of torch left out), format, last_line (of the script's stdout), notes;
        ``mixed`` has policy too. ``ratio``: speed (FP32 time over mixed time), peak_tensor_bytes and
        peak_resident_bytes (mixed over FP32). Then seed, folder, versions.
        """
        fp32 = _numbers(self.fp32, self.last_lines[0])
        mixed = _numbers(self.mixed, self.last_lines[1]) | {"policy": self.settings.policy}
        mixed["notes"] += _doubts(self.fp32, self.mixed)
        speed = _ratio(fp32["step_time_s_median"], mixed["step_time_s_median"])
        return {
            "fp32": fp32,
            "mixed": mixed,
            "ratio": {
                "speed": speed,
                "peak_tensor_bytes": _ratio(mixed["peak_tensor_bytes"], fp32["peak_tensor_bytes"]),
                "peak_resident_bytes": _ratio(mixed["peak_resident_bytes"], fp32["peak_resident_bytes"]),
            },
            "seed": self.settings.seed,
            "folder": str(self.settings.folder),
            "versions": self.mixed.totals()["versions"],
        }


def stays_in_fp32(policy: str) -> str | None:
    """Why ``policy`` would change nothing on this machine, so that there is nothing to compare; else None."""
    if policy == "fp32":
        return "the policy is fp32"
    if policy != "auto" or torch.cuda.is_available():
        return None
    choice = best_format("cpu")
    return choice.because if choice.format == "fp32" else None


def compare(settings: ComparisonSettings, *, progress: Callable[[str], None] = lambda _: None) -> Comparison:
    """Run the script in FP32, then in mixed precision.

    What an earlier comparison left in the same folder is deleted first, so that two are never mixed.

    Args:
        settings: what to run, and how.
        progress: told now and then, in a few words, what is going on.

    Raises:
        ScriptError: the script failed; the message has the last lines that it wrote to stderr.
        RunFolderError: the folder cannot be written.
    """
    for name in ("FP32", "mixed"):
        discard_captures(make_run_folder(name, asked=settings.folder / name.lower()))
    scaling = [] if settings.loss_scale is None else ["--loss-scale", settings.loss_scale]
    fp32, fp32_line = _run("FP32", settings, ["--policy", "fp32"], progress)
    mixed, mixed_line = _run("mixed", settings, ["--policy", settings.policy, *scaling], progress)
    return Comparison(fp32=fp32, mixed=mixed, last_lines=(fp32_line, mixed_line), settings=settings)


def _run(
    name: str, settings: ComparisonSettings, options: list[str], progress: Callable[[str], None]
) -> tuple[Capture, str]:
    folder = settings.folder.resolve() / name.lower()
    seed = ["--seed", str(settings.seed)]
    command = [
        sys.executable,
        "-m",
        "narrowcast",
        "run",
        *options,
        *seed,
        "--run-dir",
        str(folder),
        *settings.target,
    ]
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=_environment()
        )
        try:
            while True:
                try:
                    code = process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    progress(f"{name}: {_last_line(out) or 'starting'}")
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code != 0:
        raise ScriptError(_failure(name, code, _last_lines(err)) + f"\nall of its output: {folder}")
    try:
        capture = _that_trained(folder)
    except CaptureError as error:
        raise ScriptError(
            f"the {name} run left no capture, so there is nothing to compare: {error}"
        ) from error
    return capture, _last_line(out)


def _that_trained(folder: Path) -> Capture:
    """The run's capture, or that of the first process it spawned which took a step if it took none itself."""
    own = read_capture(folder / "capture.jsonl")
    spawned = (read_capture(path) for path in sorted(folder.glob("capture-process*.jsonl")))
    return own if own.of("step") else next((c for c in spawned if c.of("step")), own)


def _failure(name: str, code: int, said: list[str]) -> str:
    ended = f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    before = "" if name == "FP32" else ", after its FP32 run had succeeded"
    text = "; it ended with:\n" + "\n".join(said) if said else "; it wrote nothing to stderr"
    return f"the script {ended} in its {name} run{before}{text}"


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name


def _last_lines(path: Path) -> list[str]:
    """The last that the script wrote there; the block that ends a run comes after that."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # the script cleared the folder
    if lines and lines[-1].startswith("  capture: "):
        begins = max(
            (n for n, line in enumerate(lines) if line.startswith("narrowcast: ")), default=len(lines)
        )
        lines = lines[:begins]
    return lines[-_ERROR_LINES:]


def _environment() -> dict[str, str]:
    """The same, but for two things. The script's output is not held back, so that its progress can be shown.

    And threads that wait for each other sleep: where they spin, as OpenMP's do, a core that something else
    needs makes a step last sixty times as long, now in the one run and now in the other.
    """
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONUNBUFFERED": "1"}


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            tail = file.read().decode(errors="replace")
    except OSError:
        return ""  # the script cleared the folder
    written = [line for raw in tail.replace("\r", "\n").splitlines() if (line := raw.strip())]
    return written[-1] if written else ""


def _numbers(capture: Capture, last_line: str) -> dict[str, Any]:
    totals = capture.totals()
    formats = list(dict.fromkeys(device["format"] for device in capture.of("device")))
    kept = (
        "steps",
        "skipped_steps",
        "final_scale",
        "peak_tensor_bytes",
        "peak_resident_bytes",
        "final_loss",
        "wall_s",
    )
    return {
        "step_time_s_median": median_step_time_s(capture),
        **{key: _json_ready(totals[key]) for key in kept},
        "format": ", ".join(formats) or None,
        "last_line": last_line,
        "notes": [note["text"] for note in capture.of("note")],
    }


def _doubts(fp32: Capture, mixed: Capture) -> list[str]:
    """Reasons not to believe the comparison, each a line for a person."""
    doubts = []
    taken = [len(capture.of("step")) for capture in (fp32, mixed)]
    if taken[0] != taken[1]:
        doubts.append(
            f"the runs took different numbers of steps ({taken[0]} and {taken[1]}): if the script resumes "
            "from what it saved, the second run resumed from the first, and this comparison is void"
        )
    spread = max(map(_spread, (fp32, mixed)))
    if spread > _TOO_UNEVEN:
        doubts.append(
            f"step times varied {spread:.0f}-fold within a run (10th to 90th percentile): the machine was "
            "busy or the steps differ, so do not trust the ratio of their medians"
        )
    return doubts


def _spread(capture: Capture) -> float:
    kept = sorted(_step_times_s(capture))
    if len(kept) < 10:
        return 1.0
    return kept[int(len(kept) * 0.9)] / max(kept[int(len(kept) * 0.1)], 1e-9)


def _json_ready(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def median_step_time_s(capture: Capture) -> float | None:
    """Median seconds from one optimizer step to the next, the first tenth left out as warm-up."""
    kept = _step_times_s(capture)
    return statistics.median(kept) if kept else None


def _step_times_s(capture: Capture) -> list[float]:
    intervals = [step["interval_s"] for step in capture.of("step") if step["interval_s"] is not None]
    return intervals[int(len(intervals) * _WARM_UP_SHARE) :]


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None

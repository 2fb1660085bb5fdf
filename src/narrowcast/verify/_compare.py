"""``compare``: one script in FP32 and in mixed precision, each in a fresh process with the same seed."""

from __future__ import annotations

import os
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
from narrowcast.observe import Capture, read_capture

_WARM_UP_SHARE = 0.1
_ERROR_LINES = 15
_POLL_S = 0.2


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
        """JSON-ready numbers; None for one that cannot be had."""
        fp32 = _numbers(self.fp32, self.last_lines[0])
        mixed = _numbers(self.mixed, self.last_lines[1]) | {"policy": self.settings.policy}
        return {
            "fp32": fp32,
            "mixed": mixed,
            "ratio": {
                "speed": _ratio(fp32["step_time_s_median"], mixed["step_time_s_median"]),
                "peak_tensor_bytes": _ratio(mixed["peak_tensor_bytes"], fp32["peak_tensor_bytes"]),
                "peak_resident_bytes": _ratio(mixed["peak_resident_bytes"], fp32["peak_resident_bytes"]),
            },
            "seed": self.settings.seed,
            "folder": str(self.settings.folder),
            "versions": self.mixed.end["versions"] if self.mixed.end else {},
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

    Args:
        settings: what to run, and how.
        progress: told now and then, in a few words, what is going on.

    Raises:
        ScriptError: the script failed; the message ends with the last lines that it wrote to stderr.
    """
    scaling = [] if settings.loss_scale is None else ["--loss-scale", settings.loss_scale]
    fp32, fp32_line = _run("FP32", settings, ["--policy", "fp32"], progress)
    mixed, mixed_line = _run("mixed", settings, ["--policy", settings.policy, *scaling], progress)
    return Comparison(fp32=fp32, mixed=mixed, last_lines=(fp32_line, mixed_line), settings=settings)


def _run(
    name: str, settings: ComparisonSettings, options: list[str], progress: Callable[[str], None]
) -> tuple[Capture, str]:
    folder = settings.folder / name.lower()
    folder.mkdir(parents=True, exist_ok=True)
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
        said = "\n".join(err.read_text(errors="replace").splitlines()[-_ERROR_LINES:])
        raise ScriptError(
            f"the script failed in its {name} run, with exit code {code}; it ended with:\n{said}"
        )
    try:
        capture = read_capture(folder / "capture.jsonl")
    except CaptureError as error:
        raise ScriptError(
            f"the {name} run left no capture, so there is nothing to compare: {error}"
        ) from error
    return capture, _last_line(out)


def _environment() -> dict[str, str]:
    """The same, with the script's output not held back, so that its progress can be shown."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = [
            line.strip() for line in file.read().decode(errors="replace").replace("\r", "\n").splitlines()
        ]
    written = [line for line in lines if line]
    return written[-1] if written else ""


def _numbers(capture: Capture, last_line: str) -> dict[str, Any]:
    end = capture.end or {}
    formats = list(dict.fromkeys(device["format"] for device in capture.of("device")))
    return {
        "step_time_s_median": median_step_time_s(capture),
        "steps": end.get("steps"),
        "skipped_steps": end.get("skipped_steps"),
        "final_scale": end.get("final_scale"),
        "peak_tensor_bytes": end.get("peak_tensor_bytes"),
        "peak_resident_bytes": end.get("peak_resident_bytes"),
        "final_loss": end.get("final_loss"),
        "wall_s": end.get("wall_s"),
        "format": ", ".join(formats) or None,
        "last_line": last_line,
        "notes": [note["text"] for note in capture.of("note")],
    }


def median_step_time_s(capture: Capture) -> float | None:
    """Median seconds from one optimizer step to the next, the first tenth left out as warm-up."""
    intervals = [step["interval_s"] for step in capture.of("step") if step["interval_s"] is not None]
    kept = intervals[int(len(intervals) * _WARM_UP_SHARE) :]
    return statistics.median(kept) if kept else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None

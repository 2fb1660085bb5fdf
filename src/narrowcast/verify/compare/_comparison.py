"""``compare``: run a script in FP32 and in mixed precision by turns, and compare."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import FileError, ScaleCollapseError, ScriptError, UnsupportedError, few
from narrowcast.machine import best_format
from narrowcast.observe.capture import (
    COMPARISON,
    RUN,
    Capture,
    CaptureWriter,
    ComparisonCapture,
    discard_captures,
    make_run_folder,
    read_capture,
    read_comparison,
    start_event,
)
from narrowcast.policy import as_policy
from narrowcast.verify.certificate import FAIL
from narrowcast.verify.compare._results import certify_script, compare_outputs, no_certificate
from narrowcast.verify.compare._runs import (
    MEMORY,
    TENSORS,
    TIMED,
    ScriptRuns,
    ScriptSettings,
    in_short,
    last_line,
    read_result,
)

# The optimizer's state exists from the first step on, and counts in the next backward.
_STEPS_FOR_MEMORY = 3


class ComparisonSettings(ScriptSettings, frozen=True, kw_only=True):
    """What to compare.

    Attributes:
        steps: optimizer steps after which a run is ended; 0: it ends by itself.
        repeats: number of seeds, each run in both formats.
        at_step: optimizer steps in mixed precision before gradients are compared.
        options: the command-line options, shown on the page.
    """

    steps: int = 200
    repeats: int = 1
    at_step: int = 0
    options: tuple[str, ...] = ()


def stays_in_fp32(policy: str) -> str | None:
    """Return why ``policy`` changes nothing on this machine; None if it does."""
    wanted = as_policy(policy)
    if wanted.compute == "fp32" and wanted.is_plain:
        return "the policy is fp32"
    if wanted.compute != "auto" or not wanted.is_plain or torch.cuda.is_available():
        return None
    choice = best_format("cpu")
    return choice.because if choice.format == "fp32" else None


def compare(
    settings: ComparisonSettings, *, progress: Callable[[str], None] = lambda _: None
) -> ComparisonCapture:
    """Run the script in FP32 and in mixed precision by turns, and compare gradients or outputs.

    Everything is written to ``settings.folder`` as it happens. ``progress`` gets short messages.

    Raises:
        ScriptError: the script failed; the message has its last lines on stderr.
        UnsupportedError: a run read what an earlier one had written, or the script uses mixed precision
            itself, so that both runs would be the same.
        FileError: the folder cannot be written.
    """
    folder = make_run_folder("compare", asked=settings.folder)
    discard_captures(folder)
    with CaptureWriter(folder / COMPARISON) as writer:
        runs = ScriptRuns(settings, progress=progress)
        _Comparison(settings, runs, writer).run()
    return read_comparison(folder)


@dataclass(slots=True)
class _Comparison:
    """One comparison while it runs.

    Attributes:
        spawns: whether the script trains in processes that it starts itself.
    """

    settings: ComparisonSettings
    runs: ScriptRuns
    writer: CaptureWriter
    captures: dict[str, list[Capture]] = field(default_factory=lambda: {"fp32": [], "mixed": []})
    spawns: bool = False

    def run(self) -> None:
        started, settings = time.perf_counter(), self.settings
        asked = {
            name: getattr(settings, name) for name in ("loss_scale", "seed", "steps", "repeats", "at_step")
        }
        options = list(settings.options)
        self.writer.write(
            start_event(settings.target, settings.policy, kind="compare", options=options, **asked)
        )
        try:
            for format_, repeat in by_turns(settings.repeats):
                self._time(format_, repeat)
            self._note_how_runs_ended()
            self._count_tensors()
            if self._trains():
                self._write("certificate", **self._certificate())
            else:
                self._write("output", **compare_outputs(self.runs))
        except ScaleCollapseError as error:
            # Training that cannot go on in mixed precision is a result of the comparison.
            failed = self._no_certificate(f"Training in mixed precision came to a stop. {error}")
            self._write("certificate", **failed | {"verdict": FAIL})
        finally:
            for folder in self.runs.folders:  # its tensors may be as large as the model
                shutil.rmtree(folder / TENSORS, ignore_errors=True)
            self._note_written_files()
        self._write("finished", wall_s=time.perf_counter() - started)

    def _write(self, event: str, **fields: Any) -> None:
        self.writer.write({"event": event, **fields})

    def _note_written_files(self) -> None:
        """Note files that the script wrote outside of its run's folder, which every run overwrites."""
        written = sorted(path for path in self.runs.earlier if os.path.exists(path))
        if written:
            text = "the script wrote files outside of its run's folder, over what was there: "
            self._write("note", text=text + few(written, 5))

    # ---- runs that are timed

    def _time(self, format_: str, repeat: int) -> None:
        name = f"{format_}-{len(self.captures[format_]) + 1}"
        run = {"name": name, "format": format_, "seed": self.settings.seed + repeat}
        self._write("run", **run, capture=f"{name}/{RUN}", last_line="", ended=False)
        try:
            folder = self.runs.start(name, format_, TIMED, seed_shift=repeat, steps=self.settings.steps)
        except ScriptError:
            collapsed = (read_result(self.runs.folders[-1]) or {}).get("collapsed")
            if collapsed is None:
                raise
            raise ScaleCollapseError(collapsed) from None
        try:
            path = _trained_capture(folder)
            capture = read_capture(path)
        except FileError as error:
            raise ScriptError(f"{name} left no capture, so there is nothing to compare: {error}") from error
        _check_comparable(capture)
        self.captures[format_].append(capture)
        self.spawns |= path.name != RUN
        self._write("run", **run, capture=f"{name}/{path.name}", last_line=last_line(folder), ended=True)

    def _note_how_runs_ended(self) -> None:
        first = self.captures["fp32"][0].totals()
        if first["stopped"]:
            ended = f"{self.settings.steps} {'optimizer steps' if first['steps'] else 'calls of its modules'}"
            self._write("note", text=f"each run was ended after {ended}; --steps 0 runs the whole script")

    def _all(self) -> list[Capture]:
        return [*self.captures["fp32"], *self.captures["mixed"]]

    def _trains(self) -> bool:
        return any(c.totals()["backwards"] or c.of("loss") or c.of("step") for c in self._all())

    # ---- tensor memory

    def _count_tensors(self) -> None:
        """Count tensor bytes in a short run of each format; on CUDA the allocator counts in every run."""
        if any(capture.totals()["peak_tensor_bytes"] is not None for capture in self._all()):
            return
        steps = min(self.settings.steps or _STEPS_FOR_MEMORY, _STEPS_FOR_MEMORY)
        for format_ in ("fp32", "mixed"):
            reason = "the run that counts tensors was cut short"
            found: dict[str, Any] | None = None
            try:
                folder = self.runs.start(f"memory-{format_}", format_, MEMORY, steps=steps)
                found = read_result(folder)
            except ScriptError as error:
                reason = f"the run that counts tensors failed: {in_short(error)}"
            self._write("memory", format=format_, **found or {"peak_tensor_bytes": None, "reason": reason})

    # ---- gradients

    def _certificate(self) -> dict[str, Any]:
        if not self.spawns:
            return certify_script(self.runs, format=self._format(), at_step=self.settings.at_step)
        return self._no_certificate(
            "The script trains in processes that it starts itself, where updates cannot be held back: use "
            "narrowcast.certify on its model."
        )

    def _no_certificate(self, why: str) -> dict[str, Any]:
        return no_certificate(self.settings.policy, self._format(), self.settings.at_step, why)

    def _format(self) -> str:
        devices = [d["format"] for capture in self.captures["mixed"] for d in capture.of("device")]
        return ", ".join(dict.fromkeys(devices)) or self.settings.policy


def _check_comparable(capture: Capture) -> None:
    """Refuse a run that does in mixed precision what it does in FP32, or nothing."""
    left_alone = capture.totals()["aside"]
    if left_alone is not None:
        raise UnsupportedError(
            f"{left_alone}, so its FP32 and its mixed run would be the same. Compare it without that (most "
            "scripts have an option for it), or trust its own"
        )
    if not any(map(capture.of, ("forward", "loss", "step", "device"))):
        raise UnsupportedError(
            "the script called no module with parameters and went backward from nothing, so there is nothing "
            "to compare"
        )


def by_turns(repeats: int) -> Iterator[tuple[str, int]]:
    """Yield format and repeat of each timed run, so that a machine that gets slower slows both formats alike.

    FP32, mixed, mixed, FP32 for one seed; with more seeds a pair for each, in alternating order.
    """
    for repeat in range(max(repeats, 2)):
        for format_ in ("fp32", "mixed") if repeat % 2 == 0 else ("mixed", "fp32"):
            yield format_, repeat if repeats > 1 else 0


def _trained_capture(folder: Path) -> Path:
    """Return the capture of the run, or of its first spawned process that took a step if it took none."""
    own = folder / RUN
    if read_capture(own).of("step"):
        return own
    spawned = sorted(folder.glob("capture-process*.jsonl"))
    return next((path for path in spawned if read_capture(path).of("step")), own)

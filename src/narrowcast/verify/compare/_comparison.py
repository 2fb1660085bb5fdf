"""``compare``: run a script in FP32 and in mixed precision by turns, and compare."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import FileError, ScaleCollapseError, ScriptError, UnsupportedError
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
    SETTINGS,
    TENSORS,
    TIMED,
    ScriptRuns,
    ScriptSettings,
    in_short,
    last_line,
    read_result,
)

_FILES_NAMED = 5
# The optimizer's state exists from the first step on, and counts in the next backward.
_STEPS_FOR_MEMORY = 3
_OF_A_RUN = re.compile(r"(fp32|mixed)-\d+|(memory|outputs)-(fp32|mixed)|gradients-(reference|mixed|exact)")
"""Names of folders of runs."""

_CUT_SHORT = {"peak_tensor_bytes": None, "reason": "the run that counts tensors was cut short"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings(ScriptSettings):
    """What to compare.

    Attributes:
        loss_scale: of the mixed runs, as on the command line; None: as ``run`` decides.
        steps: optimizer steps after which a run is ended; 0: it ends by itself.
        repeats: number of seeds, each run in both formats.
        at_step: optimizer steps in mixed precision before gradients are compared.
        options: the command-line options, shown on the page.
    """

    loss_scale: str | None = None
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

    Everything is written to ``settings.folder`` as it happens. Results of an earlier comparison there are
    deleted first, so that two are never mixed.

    Args:
        settings: what to run, and how.
        progress: called with short messages now and then.

    Raises:
        ScriptError: the script failed; the message has its last lines on stderr.
        UnsupportedError: a run read what an earlier one had written, or the script uses mixed precision
            itself, so that both runs would be the same.
        FileError: the folder cannot be written.
    """
    folder = make_run_folder("compare", asked=settings.folder)
    _discard_earlier(folder)
    with CaptureWriter(folder / COMPARISON) as writer:
        runs = ScriptRuns(settings, loss_scale=settings.loss_scale, progress=progress)
        _Comparison(settings, runs, writer).run()
    return read_comparison(folder)


@dataclass(slots=True)
class _Comparison:
    """One comparison while it runs."""

    settings: ComparisonSettings
    runs: ScriptRuns
    writer: CaptureWriter
    captures: dict[str, list[tuple[str, Capture]]] = field(default_factory=lambda: {"fp32": [], "mixed": []})

    def run(self) -> None:
        started = time.perf_counter()
        settings = self.settings
        self.writer.write(
            start_event(
                settings.target,
                settings.policy,
                kind="compare",
                loss_scale=settings.loss_scale,
                seed=settings.seed,
                steps=settings.steps,
                repeats=settings.repeats,
                at_step=settings.at_step,
                options=list(settings.options),
            )
        )
        try:
            self._measure()
        except ScaleCollapseError as error:
            # Training that cannot go on in mixed precision is a result of the comparison.
            why = f"Training in mixed precision came to a stop. {error}"
            failed = no_certificate(settings.policy, self._format(), settings.at_step, why)
            self.writer.write({"event": "certificate", **failed, "verdict": FAIL})
        finally:
            self._drop_tensors()
            self._note_written_files()
        self.writer.write({"event": "finished", "wall_s": time.perf_counter() - started})

    def _measure(self) -> None:
        for format_, repeat in by_turns(self.settings.repeats):
            self._time(format_, repeat)
        self._note_how_runs_ended()
        self._count_tensors()
        if self._trains():
            self._certify()
        else:
            self.writer.write({"event": "output", **compare_outputs(self.runs)})

    def _note_written_files(self) -> None:
        """Note files that the script wrote outside of its run's folder, as it does in a run of its own."""
        written = sorted(path for path in self.runs.earlier if os.path.exists(path))
        if written:
            more = f" and {len(written) - _FILES_NAMED} more" if len(written) > _FILES_NAMED else ""
            self._note(
                f"the script wrote files outside of its run's folder, over what was there: "
                f"{', '.join(written[:_FILES_NAMED])}{more}"
            )

    # ---- runs that are timed

    def _time(self, format_: str, repeat: int) -> None:
        name = f"{format_}-{len(self.captures[format_]) + 1}"
        self._write_run(name, format_, repeat, RUN, last_line="", ended=False)
        try:
            folder = self.runs.start(name, format_, TIMED, repeat=repeat, steps=self.settings.steps)
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
        aside = capture.totals()["aside"]
        if aside is not None:
            raise UnsupportedError(
                f"{aside}, so its FP32 and its mixed run would be the same. Compare it without that (most "
                "scripts have an option for it), or trust its own"
            )
        if not any(map(capture.of, ("forward", "loss", "step", "device"))):
            raise UnsupportedError(
                "the script called no module with parameters and went backward from nothing, so there is "
                "nothing to compare"
            )
        self.captures[format_].append((path.name, capture))
        self._write_run(name, format_, repeat, path.name, last_line=last_line(folder), ended=True)

    def _write_run(self, name: str, format_: str, repeat: int, capture: str, **more: Any) -> None:
        self.writer.write(
            {
                "event": "run",
                "name": name,
                "format": format_,
                "seed": self.settings.seed + repeat,
                "capture": f"{name}/{capture}",
                **more,
            }
        )

    def _note_how_runs_ended(self) -> None:
        first = self.captures["fp32"][0][1].totals()
        if first["stopped"]:
            what = "optimizer steps" if first["steps"] else "calls of its modules"
            self._note(
                f"each run was ended after {self.settings.steps} {what}; --steps 0 runs the whole script"
            )

    def _trains(self) -> bool:
        every = [capture for runs in self.captures.values() for _, capture in runs]
        return any(c.totals()["backwards"] or c.of("loss") or c.of("step") for c in every)

    # ---- tensor memory

    def _count_tensors(self) -> None:
        """Count tensor bytes in a short run of each format; on CUDA the allocator counts in every run."""
        known = [c.totals()["peak_tensor_bytes"] for runs in self.captures.values() for _, c in runs]
        if any(peak is not None for peak in known):
            return
        asked = self.settings.steps
        steps = min(asked, _STEPS_FOR_MEMORY) if asked else _STEPS_FOR_MEMORY
        for format_ in ("fp32", "mixed"):
            peak, reason = None, None
            try:
                folder = self.runs.start(f"memory-{format_}", format_, MEMORY, steps=steps)
                found = read_result(folder) or _CUT_SHORT
                peak, reason = found["peak_tensor_bytes"], found["reason"]
            except ScriptError as error:
                reason = f"the run that counts tensors failed: {in_short(error)}"
            self.writer.write(
                {"event": "memory", "format": format_, "peak_tensor_bytes": peak, "reason": reason}
            )

    # ---- gradients

    def _certify(self) -> None:
        settings, format_ = self.settings, self._format()
        if self.captures["fp32"][0][0] == RUN:
            certificate = certify_script(self.runs, format=format_, at_step=settings.at_step)
        else:
            certificate = no_certificate(
                settings.policy,
                format_,
                settings.at_step,
                "The script trains in processes that it starts itself, where updates cannot be held back: "
                "use narrowcast.certify on its model.",
            )
        self.writer.write({"event": "certificate", **certificate})

    def _format(self) -> str:
        devices = [d["format"] for _, capture in self.captures["mixed"] for d in capture.of("device")]
        return ", ".join(dict.fromkeys(devices)) or self.settings.policy

    def _note(self, text: str) -> None:
        self.writer.write({"event": "note", "text": text})

    def _drop_tensors(self) -> None:
        """Delete the tensors of probes, which may be as large as the model."""
        for run in self.runs.folders:
            shutil.rmtree(run / TENSORS, ignore_errors=True)


def by_turns(repeats: int) -> Iterator[tuple[str, int]]:
    """Yield format and repeat of each timed run, so that a machine that gets slower slows both formats alike.

    FP32, mixed, mixed, FP32 for one seed; with more seeds a pair for each, in alternating order.
    """
    for repeat in range(max(repeats, 2)):
        pair = ("fp32", "mixed") if repeat % 2 == 0 else ("mixed", "fp32")
        for format_ in pair:
            yield format_, repeat if repeats > 1 else 0


def _trained_capture(folder: Path) -> Path:
    """Return the capture of the run, or of its first spawned process that took a step if it took none."""
    own = folder / RUN
    if read_capture(own).of("step"):
        return own
    spawned = sorted(folder.glob("capture-process*.jsonl"))
    return next((path for path in spawned if read_capture(path).of("step")), own)


def _discard_earlier(folder: Path) -> None:
    """Delete the runs of an earlier comparison in ``folder``, and nothing else in it."""
    discard_captures(folder)
    for settings in folder.glob(f"*/{SETTINGS}"):
        run = settings.parent
        if not _OF_A_RUN.fullmatch(run.name) or run.is_symlink():
            continue
        try:
            shutil.rmtree(run)
        except OSError as error:
            raise FileError(
                f"cannot delete what an earlier comparison left, {run}: {error.strerror}"
            ) from error

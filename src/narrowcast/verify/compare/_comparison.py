"""``compare``: run a script in FP32 and in mixed precision, and compare."""

from __future__ import annotations

import functools
import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from narrowcast.attach import OUTPUTS, folder_of_one
from narrowcast.errors import FileError, ScaleCollapseError, ScriptError, UnsupportedError, few
from narrowcast.machine import best_format, slow_formats
from narrowcast.observe.capture import (
    COMPARISON,
    FEWEST_PAIRS,
    LEAST_GAIN,
    RUN,
    Capture,
    CaptureWriter,
    ComparisonCapture,
    discard_captures,
    kind_of,
    make_run_folder,
    read_capture,
    read_comparison,
    speedup_of,
    start_event,
    times_s,
    took_turns,
    worth_it,
)
from narrowcast.policy import as_policy
from narrowcast.verify._certificate import FAIL
from narrowcast.verify._reasons import Reason, from_profiles, not_looked_for
from narrowcast.verify._sums import FEWEST_BATCHES
from narrowcast.verify.compare._results import certify_script, compare_outputs, no_certificate
from narrowcast.verify.compare._runs import (
    LITTLE_MEMORY,
    MEMORY,
    MOVES,
    TENSORS,
    LiveRun,
    Purpose,
    ScriptRuns,
    ScriptSettings,
    collapsed,
    in_short,
    last_line,
    read_result,
    take_turns,
)

# The optimizer's state exists from the first step on, and counts in the next backward.
_STEPS_FOR_MEMORY = 3
_SLOW_STEP_S = 2.0
# Runs that are not timed, and how many steps of each format they take: 3 for memory, 7 for gradients.
_ASIDE, _ASIDE_STEPS = 5, 10
# The last step at which gradients are compared, and in a script that is too short for two later ones.
_LATEST_STEP, _EARLY_STEP = 24, 8
_MANY_STEPS_S = 0.1  # where a step takes longer, three dozen more would take the place of timed ones
# Steps of a profile, and seconds after which its phases end, each with the step that goes on then.
_PROFILE_STEPS, _PROFILE_S = 7, 1.5
_WITH_END = 1.15  # a process takes this times its startup to start and end
_FEWEST_STEPS = 10
_LEAST_S = 25.0
_TIMES_THE_PAIR = 1.42  # 1.5 times what both runs take alone, which is about 5 % less than in turns
_LEAST_MIXED_S = 15.0
_IN_PROCESSES = "since the script computes in processes that it starts itself, which are not profiled"


class ComparisonSettings(ScriptSettings, frozen=True, kw_only=True):
    """What to compare.

    Attributes:
        steps: optimizer steps after which a run is ended; 0: it ends by itself.
        repeats: number of seeds, each run in both formats.
        at_step: the only step at which gradients are compared; None: the first, and two later ones.
        time_limit_s: for all runs, to which the second pair of timed ones is shortened; 0: no limit; None:
            25 s, or 1.42 times the first pair if that is longer.
        min_speedup: below which mixed precision is not worth it; None: any speedup is.
        options: the command-line options, shown on the page.
    """

    steps: int = 200
    repeats: int = 1
    at_step: int | None = None
    min_speedup: float | None = None
    time_limit_s: float | None = None
    options: tuple[str, ...] = ()


def stays_in_fp32(policy: str) -> str | None:
    """Return why ``policy`` changes nothing on this machine; None if it does."""
    wanted = as_policy(policy)
    if wanted.compute == "fp32" and wanted.is_plain:
        return "the policy is fp32"
    if wanted.compute != "auto" or not wanted.is_plain or torch.accelerator.is_available():
        return None
    choice = best_format("cpu")
    return choice.because if choice.format == "fp32" else None


def compared_instead(policy: str) -> str | None:
    """Return the narrow format to compare where ``auto`` is fp32; None: ``policy`` itself."""
    # fp16 needs loss scales, and its convolutions may take hundreds of times as long on a CPU.
    return "bf16" if as_policy(policy).compute == "auto" and stays_in_fp32(policy) else None


def slow_here(policy: str) -> list[str]:
    """Return a sentence for each format of ``policy`` that is slow on this machine, if it has only a CPU."""
    wanted = as_policy(policy)
    if torch.accelerator.is_available():
        return []
    compute = best_format("cpu").format if wanted.compute == "auto" else wanted.compute
    return slow_formats([compute, *(rule.compute for rule in wanted.rules)], "cpu")


def compare(
    settings: ComparisonSettings, *, progress: Callable[[str], None] = lambda _: None
) -> ComparisonCapture:
    """Run the script in FP32 and in mixed precision, and compare gradients or outputs.

    Everything is written to ``settings.folder`` as it happens. ``progress`` gets short messages.

    Raises:
        ScriptError: the script failed; the message has its last lines on stderr.
        UnsupportedError: the script uses mixed precision itself, so that both runs would be the same.
        FileError: the folder cannot be written.
    """
    folder = make_run_folder("compare", asked=settings.folder)
    discard_captures(folder)
    with CaptureWriter(folder / COMPARISON) as writer:
        runs = ScriptRuns(settings, progress=progress)
        _Comparison(settings, runs, writer).run()
    if writer.error is not None:
        raise FileError(f"the capture {writer.path} is incomplete: {writer.error.strerror}")
    return read_comparison(folder)


class _Spent(NamedTuple):
    """What a timed run took, without pauses: until its first step, from there on, and for how many steps."""

    startup_s: float
    stepping_s: float
    steps: int


@dataclass(slots=True)
class _Comparison:
    """One comparison while it runs.

    Attributes:
        spawns: whether the script trains in processes that it starts itself.
        spent: what each timed run took.
        began: when, by ``time.monotonic``.
        memory: the most that a timed run claimed, in thousandths of what there is.
        changes_files: whether one changed files of the user before a pause.
    """

    settings: ComparisonSettings
    runs: ScriptRuns
    writer: CaptureWriter
    captures: dict[str, list[Capture]] = field(default_factory=lambda: {"fp32": [], "mixed": []})
    spawns: bool = False
    spent: list[_Spent] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    memory: int = 0
    changes_files: bool = False

    def run(self) -> None:
        settings = self.settings
        names = ("loss_scale", "seed", "steps", "repeats", "at_step", "min_speedup")
        asked = {name: getattr(settings, name) for name in names}
        options = list(settings.options)
        start = start_event(settings.target, settings.policy, kind="compare", options=options, **asked)
        self.writer.write(start)
        if settings.fp32_because:
            text = f"auto computes in fp32 here, since {settings.fp32_because}"
            self._write("note", text=f"{text}; {settings.policy} was compared")
        try:
            why_alone = self._time_all()
            first = self.captures["fp32"][0].totals()
            if first["stopped"]:
                ended = f"{settings.steps} {'optimizer steps' if first['steps'] else 'calls of its modules'}"
                self._write("note", text=f"each run was ended after {ended}; --steps 0 runs the whole script")
            if why_alone is not None:
                self._write("note", text=f"timed one after the other, at least in part, since {why_alone}")
            self._count_tensors()
            if any(c.totals()["backwards"] or c.of("loss") or c.of("step") for c in self._all()):
                for certificate in self._certificates():
                    self._write("certificate", **certificate)
            else:
                self._write("output", **compare_outputs(self.runs))
            self._explain_speed()
        except ScaleCollapseError as error:
            # Training that cannot go on in mixed precision is a result of the comparison.
            failed = self._no_certificate(f"Training in mixed precision came to a stop. {error}")
            self._write("certificate", **failed | {"verdict": FAIL, "is_lost": True})
        except ScriptError as error:
            self._write("note", text=in_short(error))
            raise
        finally:
            self.runs.close()
            for folder in self.runs.folders:  # its tensors may be as large as the model
                shutil.rmtree(folder / TENSORS, ignore_errors=True)
            if self.runs.written:
                text = (
                    f'what each run wrote is in the folder "{OUTPUTS}" of that run, and files are as before '
                    f"(but for those of other programs and native code): {few(sorted(self.runs.written), 5)}"
                )
                self._write("note", text=text)
        self._write("finished", wall_s=time.monotonic() - self.began)

    def _write(self, event: str, **fields: Any) -> None:
        self.writer.write({"event": event, **fields})

    # ---- runs that are timed

    def _time_all(self) -> str | None:
        """Time all pairs of runs; return why the steps of one did not take turns, if so.

        Two pairs, or one a seed; of one seed three if steps took no turns, since the medians of two runs, one
        after the other, do not show how far equal ones differ.
        """
        alone: list[str | None] = []
        pairs = max(self.settings.repeats, 2)
        while len(alone) < pairs:
            self.runs.expected = 2 * pairs + _ASIDE
            steps = self.settings.steps
            if alone and self.settings.repeats == 1:
                fit = self._steps_that_fit(pairs - len(alone))
                if fit is None:
                    self.runs.expected = 2 * len(alone) + _ASIDE
                    self._note_pairs_left_out(len(alone))
                    break
                steps = fit
            repeat = len(alone) if self.settings.repeats > 1 else 0
            alone.append(self._time_pair(formats_of_pair(len(alone)), repeat, steps))
            if self.settings.repeats == 1 and not self._took_turns():
                pairs = FEWEST_PAIRS
            # One with exact sums takes twice its memory, and two at a time would see each other's files.
            little = self.memory < LITTLE_MEMORY and not self.changes_files
            self.runs.beside = not any(alone) and little
            self.runs.ends = self.began + max(self._limit_s(self._pair_s()), 3 * sum(self.spent[0][:2]))
        return next(filter(None, alone), None)

    def _took_turns(self) -> bool:
        return took_turns(self.captures["fp32"], self.captures["mixed"], kind_of(self._all()))

    def _note_pairs_left_out(self, pairs: int) -> None:
        if self._took_turns():
            text = "timed in one pair of runs, to keep to the time limit, so that the interval is within one "
            text += "run; --time-limit 0 times two pairs"
        else:
            text = f"timed in {pairs} of {FEWEST_PAIRS} pairs of runs, to keep to the time limit; "
            text += "--time-limit 0 times all"
        self._write("note", text=text)

    def _limit_s(self, pair_s: float) -> float:
        return self.settings.time_limit_s or max(_LEAST_S, _TIMES_THE_PAIR * pair_s)

    def _pair_s(self) -> float:
        return sum(run.startup_s + run.stepping_s for run in self.spent[:2])

    def _steps_that_fit(self, pairs: int) -> int | None:
        """Return after how many steps to end the runs of ``pairs`` more; 0: never; None: too few fit."""
        asked = self.settings.steps
        if self.settings.time_limit_s == 0:
            return asked
        first = self.spent[:2]
        pair_s = sum(run.stepping_s / run.steps for run in first)
        # Of the timed runs, those aside, and this process.
        starts = 2 * pairs + 1 + _ASIDE - 2 * self.runs.beside
        # The three runs that keep gradients train up to the last step of those; two go at a time.
        at_steps = self._at_steps()
        held_steps = FEWEST_BATCHES * (len(at_steps) - 1)
        aside_s = (_ASIDE_STEPS + 1.5 * (at_steps[-1] + held_steps)) * pair_s
        if self._too_slow() and not self.spawns:
            aside_s += self._profile_s()
        aside_s += starts * _WITH_END * sum(run.startup_s for run in first) / 2
        spent_s = sum(run.startup_s + run.stepping_s for run in self.spent)
        left_s = self._limit_s(self._pair_s()) - spent_s - aside_s
        fit, most = int(max(left_s, 0.0) / pairs / max(pair_s, 1e-6)), max(run.steps for run in first)
        if left_s <= 0 or fit < min(_FEWEST_STEPS, most):
            return None
        return fit if fit < most else asked

    def _time_pair(self, formats: Sequence[str], repeat: int, steps: int) -> str | None:
        """Make a run of each format; return why their steps did not take turns, if so."""

        def begin(format_: str) -> LiveRun:
            name = f"{format_}-{len(self.captures[format_]) + 1}"
            run = {"name": name, "format": format_, "seed": self.settings.seed + repeat}
            self._write("run", **run, capture=f"{name}/{RUN}", last_line="", ended=False)
            return self.runs.begin(name, format_, Purpose.TIMED, seed_shift=repeat, steps=steps)

        ended = functools.partial(self._ended, seed=self.settings.seed + repeat)
        with folder_of_one(self.runs.progress):
            return take_turns(formats, begin, ended, steps=steps, limit_s=self._limit_of_run_s)

    def _limit_of_run_s(self, run: LiveRun, first: LiveRun) -> float:
        if (steps := self.settings.steps) and not self.spent:  # progress, as if the script took them all
            each = (one.startup_s + one.stepping_s * steps / max(one.steps, 1) for one in (run, first))
            self.runs.ends = self.began + self._limit_s(sum(each))
        if self.settings.time_limit_s == 0 or (run.format == "fp32" and not self.settings.fp32_because):
            return math.inf
        if self.settings.fp32_because:
            return _LEAST_MIXED_S  # both: even FP32 may be slow there
        return max(_LEAST_MIXED_S, 2 * (sum(self.spent[0][:2]) if self.spent else first.active_s))

    def _ended(self, run: LiveRun, *, seed: int) -> None:
        try:
            folder = run.checked()
        except ScriptError:
            why = collapsed(run.folder)
            if why is None:
                raise
            raise ScaleCollapseError(why) from None
        try:
            path = _trained_capture(folder)
            capture = read_capture(path)
        except FileError as error:
            raise ScriptError(
                f"{run.name} left no capture, so there is nothing to compare: {error}"
            ) from error
        _check_comparable(capture)
        self.memory = max(self.memory, run.numbers[MEMORY])
        self.changes_files |= run.changes_files
        self.captures[run.format].append(capture)
        self.spawns |= path.name != RUN
        totals = capture.totals()
        reached = len(capture.of("step")) or totals["backwards"] or totals["forwards"]
        # The steps of a process that the script starts are in its capture alone.
        stepping_s = run.stepping_s if run.steps else sum(times_s(capture, kind_of([capture])))
        self.spent.append(_Spent(run.active_s - stepping_s, stepping_s, max(reached, 1)))
        cut = bool(totals["stopped"]) and (not self.settings.steps or reached < self.settings.steps)
        if cut:
            text = f"{run.name} was ended after {reached} steps, to keep to the time limit (--time-limit)"
            self._write("note", text=text)
        found = {"capture": f"{run.name}/{path.name}", "last_line": last_line(folder), "cut": cut}
        self._write("run", name=run.name, format=run.format, seed=seed, **found, ended=True)

    def _all(self) -> list[Capture]:
        return [*self.captures["fp32"], *self.captures["mixed"]]

    # ---- tensor memory

    def _count_tensors(self) -> None:
        """Count tensor bytes in a short run of each format; on CUDA the allocator counts in every run."""
        if any(capture.totals()["peak_tensor_bytes"] is not None for capture in self._all()):
            return
        slowest_s = max(self._times_s("mixed"), default=0.0)
        fewest = _STEPS_FOR_MEMORY - (slowest_s > _SLOW_STEP_S) - (slowest_s > 5 * _SLOW_STEP_S)
        steps = min(self.settings.steps or fewest, fewest)
        self.runs.ahead("memory-mixed", "mixed", Purpose.MEMORY, steps=steps)
        for format_ in ("fp32", "mixed"):
            reason = "the run that counts tensors was cut short"
            found: dict[str, Any] | None = None
            try:
                folder = self.runs.start(f"memory-{format_}", format_, Purpose.MEMORY, steps=steps)
                found = read_result(folder)
            except ScriptError as error:
                reason = f"the run that counts tensors failed: {in_short(error)}"
            self._write("memory", format=format_, **found or {"peak_tensor_bytes": None, "reason": reason})

    # ---- speed

    def _too_slow(self) -> float | None:
        """Return the speedup if mixed precision is certainly not worth it, else None."""
        found = speedup_of(self.captures["fp32"], self.captures["mixed"], kind_of(self._all()))
        return found[0] if found and worth_it(found, self.settings.min_speedup) == "no" else None

    def _times_s(self, format_: str) -> list[float]:
        kind = kind_of(self._all())
        return [step_s for one in self.captures[format_] for step_s in times_s(one, kind)]

    def _profile_s(self) -> float:
        """Return about how long the two runs take that profile a few steps."""
        first = self.spent[:2]
        pair_s = sum(run.stepping_s / run.steps for run in first)
        steps_s = min(_PROFILE_STEPS * pair_s, 2 * (_PROFILE_S + pair_s))
        return steps_s + _WITH_END * sum(run.startup_s for run in first)

    def _explain_speed(self) -> None:
        """Say why mixed precision is not worth it, if so: from profiles of the script, if there is time."""
        if not self._too_slow():
            return
        if self.spawns:
            reason = Reason("unknown", f"the reason was not looked for, {_IN_PROCESSES}")
        elif self.settings.time_limit_s != 0 and time.monotonic() + self._profile_s() > self.runs.ends:
            reason = not_looked_for(self.settings, "to keep to the time limit")
        else:
            reason = self._profiled()
        self._write("not_worth_it", cause=reason.cause, reason=reason.text, share=reason.share)

    def _profiled(self) -> Reason:
        found = {}
        self.runs.expected += 2
        for name in ("fp32", "mixed"):
            try:
                result = read_result(self.runs.start(f"profile-{name}", name, Purpose.SHARES))
            except ScriptError as error:
                return Reason("unknown", f"the reason was not found, as a run failed: {in_short(error)}")
            if result is None or None in (result["profile"], result["plain"]):
                why = (result or {}).get("problem") or "the script ended before enough steps were profiled"
                return Reason("unknown", f"the reason was not found: {why}")
            plain = {f"plain_{field}": value for field, value in result["plain"].items()}
            found[name] = result["profile"] | plain
        least = self.settings.min_speedup or LEAST_GAIN
        reason = from_profiles(found["fp32"], found["mixed"], self._format(), least_gain=least)
        if reason is not None:
            return reason
        speedup = found["fp32"]["plain_step_s"] / found["mixed"]["plain_step_s"]
        why = f"in the runs that were profiled a step was {speedup:.2f}x faster"
        return Reason("unknown", f"the reason was not found: {why}")

    # ---- gradients

    def _certificates(self) -> list[dict[str, Any]]:
        """Return the certificate of each step at which gradients are compared."""
        if not self.spawns:
            return certify_script(self.runs, format=self._format(), at_steps=self._at_steps())
        why = "The script trains in processes that it starts itself, where updates cannot be held back: use "
        return [self._no_certificate(f"{why}narrowcast.certify on its model.")]

    def _at_steps(self) -> list[int]:
        """Return the steps at which gradients are compared, in their order.

        Where training begins, errors may be larger than later, so two later steps follow, or one in a short
        or slow script. The runs take more steps than those: batches whose updates are held back, and moves.
        """
        if self.settings.at_step is not None:
            return [self.settings.at_step]
        first = self.captures["fp32"][0].totals()
        taken = first["steps"] + first["skipped_steps"]
        ends_by_itself = not first["stopped"]
        latest = min(_LATEST_STEP, taken // 4)
        if ends_by_itself:
            latest = min(latest, taken - _steps_besides(3))
        is_slow = statistics.median(self._times_s("fp32") or [0.0]) > _MANY_STEPS_S
        if latest >= _EARLY_STEP and not is_slow:
            return [0, latest // 3, latest]
        latest = min(_EARLY_STEP, taken // 2)
        if ends_by_itself:
            latest = min(latest, taken - _steps_besides(2))
        return [0, latest] if latest >= _EARLY_STEP // 2 else [0]

    def _no_certificate(self, why: str) -> dict[str, Any]:
        fields = {"policy": self.settings.policy, "at_step": self.settings.at_step or 0}
        return no_certificate(why, format=self._format(), **fields)

    def _format(self) -> str:
        devices = [d["format"] for capture in self.captures["mixed"] for d in capture.of("device")]
        return ", ".join(dict.fromkeys(devices)) or self.settings.policy


def _steps_besides(compared: int) -> int:
    """Return how many steps a script needs besides the training up to the last of ``compared`` steps."""
    return compared * FEWEST_BATCHES + MOVES


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


def formats_of_pair(number: int) -> tuple[str, str]:
    """Return the formats of a pair of timed runs in their order: AB, BA, AB, so that drift is even."""
    return ("fp32", "mixed") if number % 2 == 0 else ("mixed", "fp32")


def _trained_capture(folder: Path) -> Path:
    """Return the capture of the run, or of its first spawned process that took a step if it took none."""
    own = folder / RUN
    if read_capture(own).of("step"):
        return own
    spawned = sorted(folder.glob("capture-process*.jsonl"))
    return next((path for path in spawned if read_capture(path).of("step")), own)

"""``compare``: run a script in FP32 and in mixed precision, and compare."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.capture import (
    COMPARISON,
    Capture,
    CaptureWriter,
    ComparisonCapture,
    discard_captures,
    make_run_folder,
    read_comparison,
    start_event,
)
from narrowcast.errors import FileError, ScaleCollapseError, ScriptError, few
from narrowcast.machine import best_format, slow_formats
from narrowcast.policy import as_policy
from narrowcast.scripts import OUTPUTS
from narrowcast.verify._reasons import Reason, TimedProfile, from_profiles, not_looked_for
from narrowcast.verify.certificate._certificate import FAIL
from narrowcast.verify.certificate._sums import FEWEST_BATCHES
from narrowcast.verify.compare._results import certify_script, compare_outputs, no_certificate
from narrowcast.verify.compare._timing import TimedPairs, TimingSettings, has_low_rules
from narrowcast.verify.runs._runs import (
    MOVES,
    TENSORS,
    Purpose,
    ScriptRuns,
    in_short,
    read_result,
)

# Steps of a run that counts tensor bytes. The optimizer's state exists from the first step on, and counts in
# the next backward.
_STEPS_FOR_MEMORY = 3
# If a step takes longer, such a run takes one step fewer, and two fewer from five times as long on.
_SLOW_STEP_S = 2.0
# ``_UNTIMED_RUNS``: two runs for memory, one in each format; three for gradients, one in each format and one
# by exact sums.
# ``_UNTIMED_STEPS``: how many steps these runs take in each format, however far training goes: 3 for memory
# and 7 for gradients (FEWEST_BATCHES and MOVES). The single step by exact sums is not counted.
_UNTIMED_RUNS, _UNTIMED_STEPS = 5, 10
# The latest step at which gradients are compared, and that of a script with room for one later step only.
_LATEST_STEP, _EARLY_STEP = 24, 8
# If an FP32 step takes longer, gradients are not compared at ``_LATEST_STEP``. That takes three dozen more
# steps, which would leave too little time for timed ones.
_QUICK_STEP_S = 0.1
# A profile ends after so many steps, or after so many seconds if its steps are slow: these are the sums over
# its two phases (``SHARES_PHASES``). A phase whose time is over goes on to the end of the current step.
_PROFILE_STEPS, _PROFILE_S = 7, 1.5
_PROFILE_SHARE = 0.3  # of the time limit; what takes longer is for narrowcast doctor
_IN_PROCESSES = "since the script computes in processes that it starts itself, which are not profiled"


class ComparisonSettings(TimingSettings, frozen=True, kw_only=True):
    """What to compare.

    Attributes:
        at_step: the only step at which gradients are compared; None: the first, and up to two later ones.
        options: the command-line options, shown on the page.
    """

    at_step: int | None = None
    options: tuple[str, ...] = ()


def stays_in_fp32(policy: str) -> str | None:
    """Return why ``policy`` changes nothing on this machine; None if it does."""
    wanted = as_policy(policy)
    if has_low_rules(wanted):
        return None
    if wanted.compute == "fp32":
        return "the policy is fp32"
    if wanted.compute != "auto" or torch.accelerator.is_available():
        return None
    choice = best_format("cpu")
    if choice.format != "fp32":
        return None
    return choice.because


def compared_instead(policy: str) -> str | None:
    """Return the narrow format to compare where ``auto`` is fp32; None: ``policy`` itself."""
    wanted = as_policy(policy)
    if wanted.compute != "auto" or not wanted.is_plain or not stays_in_fp32(policy):
        return None
    # fp16 needs loss scales, and its convolutions may take hundreds of times as long on a CPU.
    return "bf16"


def _auto_format() -> str:
    """Return the format that ``auto`` chooses on this machine."""
    accelerator = None
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
    return best_format("cpu" if accelerator is None else accelerator.type).format


def slow_here(policy: str) -> list[str]:
    """Return a sentence for each format of ``policy`` that is slow on this machine, if it has only a CPU."""
    wanted = as_policy(policy)
    if torch.accelerator.is_available():
        return []
    compute = wanted.compute
    if compute == "auto":
        compute = best_format("cpu").format
    return slow_formats([compute, *(rule.compute for rule in wanted.rules)], "cpu")


def compare_script(
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


class _Comparison:
    """One comparison while it runs."""

    def __init__(self, settings: ComparisonSettings, runs: ScriptRuns, writer: CaptureWriter) -> None:
        self.settings = settings
        self.runs = runs
        self.writer = writer
        self.timed = TimedPairs(
            settings, runs, writer.write, untimed_runs=_UNTIMED_RUNS, untimed_s=self._untimed_s
        )

    def run(self) -> None:
        settings = self.settings
        start = start_event(
            settings.target,
            settings.policy,
            kind="compare",
            options=list(settings.options),
            loss_scale=settings.loss_scale,
            seed=settings.seed,
            steps=settings.steps,
            repeats=settings.repeats,
            at_step=settings.at_step,
            min_speedup=settings.min_speedup,
            safe_format=_auto_format(),
        )
        self.writer.write(start)
        if settings.fp32_because:
            text = f"auto computes in fp32 here, since {settings.fp32_because}"
            self._write("note", text=f"{text}; {settings.policy} was compared")
        try:
            self.timed.time_all()
            totals = self.timed.captures["fp32"][0].totals()
            # A run that the time limit ended earlier has a note of its own.
            reached_steps = 0 < settings.steps <= self.timed.spent[0].steps
            if totals["stopped"] and reached_steps:
                unit = "optimizer steps" if totals["steps"] else "calls of its modules"
                ended = f"each run was ended after {settings.steps} {unit}"
                self._write("note", text=f"{ended}; --steps 0 runs the whole script")
            self._explain_speed()
            self._count_tensors()
            if self.timed.kind() == "training":
                for certificate in self._certificates():
                    self._write("certificate", **certificate)
            else:
                forwards = self.timed.captures["fp32"][0].of("forward")
                modules = len({forward.get("module", 0) for forward in forwards})
                self._write("output", **compare_outputs(self.runs, modules=modules))
        except ScaleCollapseError as error:
            # Training that cannot go on in mixed precision is a result of the comparison.
            failed = self._no_certificate(f"Training in mixed precision came to a stop. {error}")
            failed |= {"verdict": FAIL, "is_lost": True}
            self._write("certificate", **failed)
        except ScriptError as error:
            self._write("note", text=in_short(error))
            raise
        finally:
            self.runs.close()
            # Kept tensors may be many times as large as the model.
            for folder in self.runs.folders:
                shutil.rmtree(folder / TENSORS, ignore_errors=True)
            if self.runs.written:
                text = (
                    f'what each run wrote is in the folder "{OUTPUTS}" of that run, and files are as before '
                    f"(but for those of other programs and native code): {few(sorted(self.runs.written), 5)}"
                )
                self._write("note", text=text)
        self._write("finished", wall_s=time.monotonic() - self.timed.began)

    def _write(self, event: str, **fields: Any) -> None:
        self.writer.write({"event": event, **fields})

    def _untimed_s(self) -> float:
        """Return about how long the untimed runs take, and the end of this process."""
        steps_s = self._untimed_steps_s()
        if self.settings.fp32_because:
            steps_s = self._untimed_slow_steps_s()

        # Each run also has to start and to end, which takes half of what a pair of runs takes for that. The
        # end of this process counts as one more start. Two runs, one for memory and one for gradients, may
        # start beside another one (``ScriptRuns.ahead``), and so take no time of their own for it.
        starts = 1 + _UNTIMED_RUNS
        if self.runs.beside:
            starts -= 2
        untimed_s = steps_s + starts * self.timed.pair_besides_s() / 2
        if self.timed.is_too_slow() and not self.timed.spawns:
            untimed_s += self._profile_s()
        return untimed_s

    def _untimed_steps_s(self) -> float:
        """Return about how long the steps of untimed runs take, where the format is not slow.

        The three runs that keep gradients train up to the last compared step. All untimed steps are taken to
        be three times as long as timed ones, for exact sums, counted tensors and written gradients.
        """
        # ``step_s`` is the time of two steps, one in each format. ``steps`` counts such pairs of steps. The
        # first term is already a number of steps in each format. In the second, each of the three runs that
        # keep gradients takes a step: three steps, or 1.5 pairs.
        at_steps = self._at_steps()
        held_steps = FEWEST_BATCHES * (len(at_steps) - 1)
        steps = _UNTIMED_STEPS + 1.5 * (at_steps[-1] + held_steps)
        return 3 * steps * self.timed.step_s()

    def _untimed_slow_steps_s(self) -> float:
        """Return about how long the steps of untimed runs take, where ``auto`` is fp32.

        Training up to the compared steps is in FP32 there. Steps in FP32 are taken to be three times as long
        as timed ones, as above. Those in mixed precision are not: they are slow by themselves.
        """
        at_steps = self._at_steps()
        held_steps = FEWEST_BATCHES * len(at_steps)
        memory_steps = self._steps_for_memory()
        mixed_steps = memory_steps + held_steps + MOVES
        # Three runs train up to the last compared step, and two of them hold steps back in FP32.
        fp32_steps = memory_steps + 3 * at_steps[-1] + 2 * held_steps + MOVES
        return mixed_steps * self.timed.step_s_of("mixed") + 3 * fp32_steps * self.timed.step_s_of("fp32")

    # ---- tensor memory

    def _count_tensors(self) -> None:
        """Count tensor bytes in a short run of each format; on CUDA the allocator counts in every run."""
        if any(capture.totals()["peak_tensor_bytes"] is not None for capture in self.timed.all_captures()):
            return
        steps = self._steps_for_memory()
        # Calls of the model before training, as by a parametrization when it is made, are no steps.
        more = {"steps": steps, "is_training": self.timed.kind() == "training"}
        self.runs.ahead("memory-mixed", "mixed", Purpose.MEMORY, **more)
        for format_ in ("fp32", "mixed"):
            reason = "the run that counts tensors was cut short"
            counted: dict[str, Any] | None = None
            try:
                folder = self.runs.start(f"memory-{format_}", format_, Purpose.MEMORY, **more)
                counted = read_result(folder)
            except ScriptError as error:
                reason = f"the run that counts tensors failed: {in_short(error)}"
            if not counted:
                counted = {"peak_tensor_bytes": None, "reason": reason}
            self._write("memory", format=format_, **counted)

    def _steps_for_memory(self) -> int:
        """Return how many steps each of the two runs takes that count tensors."""
        steps = _STEPS_FOR_MEMORY
        # Tensors are counted at each operator, which makes slow steps much slower.
        slowest_s = max(self.timed.step_times("mixed"), default=0.0)
        if slowest_s > _SLOW_STEP_S:
            steps -= 1
        if slowest_s > 5 * _SLOW_STEP_S:
            steps -= 1
        if self.settings.steps:
            steps = min(self.settings.steps, steps)
        return steps

    # ---- speed

    def _profile_s(self) -> float:
        """Return about how long the two runs take that profile a few steps."""
        step_s = self.timed.step_s()  # in both formats together
        # If time ends the phases, each of the two runs takes ``_PROFILE_S``, and up to one step more in each
        # of its two phases. That is two steps in each format, or ``2 * step_s``.
        by_time_s = 2 * _PROFILE_S + 2 * step_s
        steps_s = min(_PROFILE_STEPS * step_s, by_time_s)
        return steps_s + self.timed.pair_besides_s()

    def _explain_speed(self) -> None:
        """Say why mixed precision is not worth it, if so: from profiles of the script, if there is time."""
        if not self.timed.is_too_slow():
            return
        if self.timed.spawns:
            reason = Reason("unknown", f"the reason was not looked for, {_IN_PROCESSES}")
        elif self.settings.time_limit_s != 0 and self._profile_s() > _PROFILE_SHARE * self.timed.limit_s():
            reason = not_looked_for(self.settings, "to keep to the time limit")
        else:
            reason = self._profiled()
        self._write("not_worth_it", cause=reason.cause, reason=reason.text, share=reason.share)

    def _profiled(self) -> Reason:
        profiles: dict[str, TimedProfile] = {}
        self.runs.expected += 2
        for name in ("fp32", "mixed"):
            try:
                result = read_result(self.runs.start(f"profile-{name}", name, Purpose.SHARES))
            except ScriptError as error:
                return Reason("unknown", f"the reason was not found, as a run failed: {in_short(error)}")
            if result is None or result["profile"] is None:
                why = "the script ended before enough steps were profiled"
                if result is not None and result["problem"]:
                    why = result["problem"]
                return Reason("unknown", f"the reason was not found: {why}")
            plain = self.timed.plain_times(name, result["profile"])
            profiles[name] = TimedProfile.of(result["profile"] | plain)
        return from_profiles(profiles["fp32"], profiles["mixed"], self.timed.format())

    # ---- gradients

    def _certificates(self) -> list[dict[str, Any]]:
        """Return the certificate of each step at which gradients are compared."""
        if not self.timed.spawns:
            return certify_script(self.runs, format=self.timed.format(), at_steps=self._at_steps())
        why = (
            "The script trains in processes that it starts itself, where updates cannot be held back: use "
            "narrowcast.certify on its model."
        )
        return [self._no_certificate(why)]

    def _at_steps(self) -> list[int]:
        """Return the steps at which gradients are compared, in their order.

        Where training begins, errors may be larger than later, so two later steps follow, or one in a short
        or slow script, or none in a very short one. The script must have still more steps, for batches whose
        updates are held back, and for moves.
        """
        if self.settings.at_step is not None:
            return [self.settings.at_step]
        totals = self.timed.captures["fp32"][0].totals()
        taken = totals["steps"] + totals["skipped_steps"]
        ends_by_itself = not totals["stopped"]
        latest = min(_LATEST_STEP, taken // 4)
        is_slow = statistics.median(self.timed.step_times("fp32") or [0.0]) > _QUICK_STEP_S
        each = _steps_of_an_iteration(self.timed.captures["fp32"][0])
        are_left = not ends_by_itself or taken - latest >= each * _steps_besides(compared_steps=3)
        if latest >= _EARLY_STEP and not is_slow and are_left:
            return [0, latest // 3, latest]

        # One later step, in the first half of the steps taken. A script that ends by itself has no further
        # steps, so some have to be left. One that was stopped has more steps than were counted.
        latest = min(_EARLY_STEP, taken // 2)
        if ends_by_itself:
            latest = min(latest, taken - each * _steps_besides(compared_steps=2))
        if latest >= _EARLY_STEP // 2:
            return [0, latest]
        return [0]

    def _no_certificate(self, why: str) -> dict[str, Any]:
        fields = {"policy": self.settings.policy, "at_step": self.settings.at_step or 0}
        return no_certificate(why, format=self.timed.format(), **fields)


def _steps_of_an_iteration(capture: Capture) -> int:
    """Return how many steps all optimizers take for each of the one that steps the least, as two in a GAN."""
    latest: dict[int, int] = {}
    most = 1
    for place, step in enumerate(capture.of("step")):
        most = max(most, place - latest.get(step["optimizer"], place - 1))
        latest[step["optimizer"]] = place
    return most


def _steps_besides(compared_steps: int) -> int:
    """Return how many steps a script needs besides those up to the last compared one.

    These are the steps whose updates are held back, and those that show how far the weights move.
    """
    return compared_steps * FEWEST_BATCHES + MOVES

"""The numbers of a comparison, from captures alone: ``--json`` prints them, table and page show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from narrowcast.capture import (
    RUN,
    Capture,
    ComparisonCapture,
    TimedRun,
    is_busy,
    json_ready,
    kind_of,
    median_of_runs,
    speedup_of,
    times_of_runs,
    took_turns,
    used_by_others,
    why_no_speedup,
    worth_it,
)
from narrowcast.report._right import (
    CANNOT_TELL,
    NOT_JUDGED,
    decisive_certificate,
    judge_gradients,
    judge_training,
    next_for_right,
    next_for_speed,
)
from narrowcast.report._statistics import (
    NOT_FINITE,
    SAME_FOR_ALL_SEEDS,
    FinalLosses,
    calls_per_step,
    doubts,
    far_apart,
    final_losses,
    formats_of,
    judge_losses,
    judged_sites,
    losses_of,
    many_skipped,
    mean,
    steps_by_site,
)
from narrowcast.report._text import beside_others, measured_speed, percent_change, speed_text

_NOTHING_TRAINED = "mixed precision skipped every step, so nothing was trained"
_NOTHING_RAN = "no module with parameters was called in a run that ended"
_SCHEMA = 1
# Verdicts on losses.
_WORST_FIRST = ("fail", "cannot tell", "not judged", "pass")
_TIMES = ("step_time_s_median", "step_time_s_interval", "forward_time_s_median", "forward_time_s_interval")
# With less than this share of FP32's tensor memory, a "no" to "worth it" mentions what is saved.
_LESS_MEMORY = 0.95
# A note explains the speedup if it differs by more than this factor from the ratio of the medians shown.
_ALIKE = 1.05


def summary(comparison: ComparisonCapture, *, report: str | None = None) -> dict[str, Any]:
    """Return everything that a comparison found, as JSON-ready values; docs/compare.md explains the fields.

    None stands for a number that cannot be had, and ``reasons`` says why, by the number's path. NaN and
    infinities are the strings ``"nan"``, ``"inf"`` and ``"-inf"``.

    The runs that each number comes from:

    - times, peaks and ``calls_per_step``: all runs of a format; times leave out the warm-up
    - ``steps``, ``skipped_steps`` (of all optimizers), ``final_scale``, ``stopped``, ``wall_s``: first run
    - ``final_loss``, by call site: the seeds that both formats ran
    - ``peak_tensor_bytes``: of CUDA's allocator; on a CPU a short run of its own, which counts live tensors
    - ``loss``: the worst call site that is judged; ``loss.sites`` has all
    - ``certificate``: the step whose gradients decide; ``certificate.steps`` has all

    Args:
        comparison: what ``read_comparison`` returned; one that was killed gives what it has.
        report: path of its page, where there is one.
    """
    kind = kind_of(captures_of(comparison.runs))
    fp32, mixed = _Side(comparison, "fp32", kind), _Side(comparison, "mixed", kind)
    # The difference between the formats is that of the same seeds.
    fp32.numbers["final_loss"] = _means_of_seeds(fp32.final_losses, mixed.final_losses)
    mixed.numbers["final_loss"] = _means_of_seeds(mixed.final_losses, fp32.final_losses)
    ratio, ratio_reasons = _ratios(fp32, mixed, kind)
    by_others = _used_by_others(comparison)
    # Where nothing was measured at all, that is the reason, however busy the machine was.
    is_disturbed = is_busy(by_others) and ratio["speedup"] is not None
    if is_disturbed:
        # Equal runs differ by more than their spread shows, as the formats are slowed unequally.
        ratio["speedup_interval"] = None
        ratio_reasons["speedup_interval"] = "other programs used the CPUs"

    checks = {
        "certificate": _certificate(comparison, kind),
        "output": _output(comparison, kind),
        "loss": _loss(fp32, mixed, kind),
    }

    # A note on gradients that fail where training begins and no longer do later.
    early: str | None = None
    if kind is None:
        right = f"cannot tell: {_NOTHING_RAN}"
    elif not _is_finite(fp32, checks["loss"]):
        # Whatever came of it in mixed precision, as steps that were all skipped.
        right = f"cannot tell: losses: {NOT_FINITE}"
    elif _never_steps(fp32, mixed):
        right = f"no: {_NOTHING_TRAINED}"
    elif kind == "inference":
        right = _of_outputs(checks["output"])
    else:
        right, early = _of_training(comparison, checks, mixed)
    worth = _worth_it(ratio, ratio_reasons, comparison, by_others)

    start = comparison.own.start
    formats = mixed.numbers["format"] or ""
    was_stopped = bool(fp32.numbers["stopped"])
    was_cut = any(run.cut for run in (*fp32.runs[:1], *mixed.runs[:1]))
    # The capture of such a script is that of one of its processes.
    spawns = any(Path(event["capture"]).name != RUN for event in comparison.own.of("run"))
    next_commands = {
        "right": next_for_right(
            right,
            start,
            kind=kind,
            formats=formats,
            was_stopped=was_stopped,
            was_cut=was_cut,
            steps=fp32.numbers["steps"] or 0,
            script_first=kind is None or _is_for_the_script(right, checks),
            spawns=spawns,
        ),
        "worth_it": next_for_speed(
            worth,
            start,
            was_stopped=was_stopped,
            was_cut=was_cut,
            is_busy=is_disturbed,
            script_first=fp32.time is None,
            spawns=spawns,
        ),
    }

    notes = _notes(comparison)
    if early is not None:
        notes.append(early)
    notes += _of_turns(ratio["speedup"], fp32, mixed, kind)
    notes += doubts(fp32.whole, mixed.whole)

    result: dict[str, Any] = json_ready(
        {
            "schema": _SCHEMA,
            "fp32": fp32.numbers,
            "mixed": mixed.numbers | {"policy": start["policy"]},
            **ratio,
            **checks,
            "verdict": {"right": right, "worth_it": worth},
            "next": next_commands,
            "cpu_used_by_others": by_others,
            "kind": kind,
            "finished": comparison.finished,
            "report": report,
            "notes": notes,
            "reasons": fp32.reasons | mixed.reasons | ratio_reasons | _why_unchecked(checks, kind),
            "seed": start["seed"],
            "folder": str(comparison.folder),
            "settings": mixed.last_facts("settings") or fp32.last_facts("settings"),
            "versions": mixed.last_facts("versions") or fp32.last_facts("versions"),
        }
    )
    return result


def _is_for_the_script(right: str, checks: Mapping[str, Any]) -> bool:
    """Return whether the answer ``right`` names what to change in the script, whatever the policy."""
    certificate, output = checks["certificate"], checks["output"]
    # Nothing to compare with, or no other losses by more seeds.
    if right == f"cannot tell: losses: {NOT_FINITE}" or (SAME_FOR_ALL_SEEDS in right and "losses" in right):
        return True
    if output is not None:
        return bool(output.get("script_first", False))
    return certificate is not None and certificate["script_first"] and certificate["reason"] in right


def captures_of(runs: Iterable[TimedRun]) -> list[Capture]:
    return [run.capture for run in runs]


def whole_runs(comparison: ComparisonCapture) -> list[TimedRun]:
    """Return the runs whose losses count.

    If the comparison was killed, a run without an end was killed with it, and did less than the others. In a
    finished comparison such a run may have done all of its work.
    """
    return [run for run in comparison.runs if comparison.finished or run.capture.end is not None]


# ---- the numbers of one format


class _Side:
    """The runs of one format, their numbers, and why some are missing."""

    def __init__(self, comparison: ComparisonCapture, name: str, kind: str | None) -> None:
        self.name = name
        self.runs = [run for run in comparison.runs if run.format == name]
        self.captures = captures_of(self.runs)
        self.whole = [run for run in whole_runs(comparison) if run.format == name]
        fp32 = captures_of(run for run in comparison.runs if run.format == "fp32")
        self.time = median_of_runs(times_of_runs(self.captures, kind, like=fp32))
        # The losses of the runs of both formats: if one that was ended early is used, all are cut to the
        # shortest.
        self.losses = losses_of(comparison.runs)
        self.final_losses = final_losses(self.whole, self.losses, name)
        self._totals = [capture.totals() for capture in self.captures]
        # The run that counts tensors, if it was made.
        self._counted: dict[str, Any] = {
            "peak_tensor_bytes": None,
            "reason": "the run that counts tensors was not made",
        }
        for event in comparison.own.of("memory"):
            if event["format"] == name:
                self._counted = event
        self.numbers = self._numbers(kind)
        self.reasons = self._why_missing(kind)

    def _numbers(self, kind: str | None) -> dict[str, Any]:
        # A script that trains has times of steps, one that only computes of forward calls.
        numbers: dict[str, Any] = dict.fromkeys(_TIMES)
        if self.time is not None:
            unit = "forward" if kind == "inference" else "step"
            numbers[f"{unit}_time_s_median"] = self.time.median_s
            numbers[f"{unit}_time_s_interval"] = self.time.interval_s

        # Counts are of the first run: others may have ended early.
        for key in ("steps", "skipped_steps", "final_scale", "wall_s"):
            numbers[key] = self._of_first(key)
        numbers["peak_tensor_bytes"] = self._peak_tensor_bytes()
        numbers["peak_resident_bytes"] = max(self._known("peak_resident_bytes"), default=None)
        numbers["final_loss"] = {}
        numbers["calls_per_step"] = calls_per_step(self.runs)
        numbers["format"] = formats_of(self.captures) or None
        numbers["last_line"] = None
        if self.runs:
            numbers["last_line"] = self.runs[0].last_line
        numbers["stopped"] = self._of_first("stopped")
        numbers["runs"] = [run.name for run in self.runs]
        return numbers

    def _of_first(self, key: str) -> Any:
        """Return a number of the totals of the first run; None if there is no run."""
        return self._totals[0][key] if self._totals else None

    def _known(self, key: str) -> list[Any]:
        """Return a number of the totals of each run that has it."""
        return [totals[key] for totals in self._totals if totals[key] is not None]

    def _peak_tensor_bytes(self) -> int | None:
        """Return the peak of CUDA's allocator, or else of the run that counts tensors."""
        of_allocator = self._known("peak_tensor_bytes")
        if of_allocator:
            return int(max(of_allocator))
        counted: int | None = self._counted["peak_tensor_bytes"]
        return counted

    def last_facts(self, key: str) -> dict[str, Any]:
        """Return the settings or versions of the last run that recorded them; empty if none did."""
        for totals in reversed(self._totals):
            if totals[key]:
                facts: dict[str, Any] = totals[key]
                return facts
        return {}

    def losses_at(self, site: str) -> list[list[float]]:
        """Return the losses of each whole run at a call site."""
        of_runs = []
        for run in self.whole:
            if run.name in self.losses:
                of_runs.append(self.losses[run.name].get(site, []))
        return of_runs

    def _why_missing(self, kind: str | None) -> dict[str, str]:
        """Return the reason for each missing number, by its path."""
        no_step, no_forward = "no torch.optim.Optimizer stepped", "no module was called"
        no_time = no_calls = no_step
        if kind == "training":
            no_forward = "the script trains: see the step time"
            if self.numbers["steps"]:
                no_time = "it takes two steps of one optimizer to time one"
                no_calls = "no run that ended called a module"
        reasons: dict[str, str] = {
            "step_time_s_median": no_time,
            "step_time_s_interval": no_time,
            "calls_per_step": no_calls,
            "forward_time_s_median": no_forward,
            "forward_time_s_interval": no_forward,
            "final_scale": "losses were not scaled",
            "format": "no module with parameters was called",
            "peak_tensor_bytes": self._counted["reason"] or "",
        }
        # Without a run all numbers are missing for one reason.
        if not self.runs:
            reasons = dict.fromkeys(self.numbers, "no run of this format came to its end")
        missing = {}
        for key, value in self.numbers.items():
            if value is None:
                missing[f"{self.name}.{key}"] = reasons.get(key, "the run was cut short")
        return missing


def _ratios(fp32: _Side, mixed: _Side, kind: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return mixed precision against FP32, and the reason for each missing number."""
    ratios: dict[str, Any] = {"speedup": None, "speedup_interval": None}
    reasons: dict[str, str] = {}
    timed = speedup_of(fp32.captures, mixed.captures, kind)
    if timed is None:
        why = why_no_speedup(fp32.captures, mixed.captures, kind)
        reasons |= {"speedup": why, "speedup_interval": why}
    else:
        speedup, low, high = timed
        ratios = {"speedup": speedup, "speedup_interval": [low, high]}

    for name, key in (("memory_ratio", "peak_tensor_bytes"), ("process_memory_ratio", "peak_resident_bytes")):
        fp32_bytes, mixed_bytes = fp32.numbers[key], mixed.numbers[key]
        if fp32_bytes and mixed_bytes is not None:
            ratios[name] = mixed_bytes / fp32_bytes
        else:
            ratios[name] = None
            reasons[name] = "one of the two is missing"
    return ratios, reasons


# ---- losses


def _means_of_seeds(own: FinalLosses, other: FinalLosses) -> dict[str, float]:
    """Return the mean final loss of each call site, over the seeds that both formats ran."""
    means = {}
    for site, by_seed in own.items():
        common = _seeds_of_both(by_seed, other.get(site, {}))
        # Without such a seed, the mean is over the seeds of this format, so that its losses are shown too.
        seeds = common or by_seed
        means[site] = mean([by_seed[seed] for seed in seeds])
    return means


def _seeds_of_both(fp32: Mapping[int, float], mixed: Mapping[int, float]) -> list[int]:
    return [seed for seed in fp32 if seed in mixed]


def _loss(fp32: _Side, mixed: _Side, kind: str | None) -> dict[str, Any] | None:
    """Judge the losses by the worst of the call sites that are judged."""
    if kind == "inference":
        return None
    captures = captures_of([*fp32.whole, *mixed.whole])
    steps, judged = steps_by_site(captures), judged_sites(captures)
    verdicts, sites = {}, {}
    for site, fp32_losses in fp32.final_losses.items():
        mixed_losses = mixed.final_losses.get(site, {})
        seeds = _seeds_of_both(fp32_losses, mixed_losses)
        verdict = judge_losses([(fp32_losses[seed], mixed_losses[seed]) for seed in seeds])
        # Losses that are far apart need no other seeds.
        far = far_apart(fp32.losses_at(site), mixed.losses_at(site))
        if far is not None and verdict.verdict in (CANNOT_TELL, NOT_JUDGED):
            verdict = replace(verdict, verdict="fail", reason=far)
        verdicts[site] = verdict
        more = {"seeds": seeds, "steps": steps[site], "judged": site in judged}
        sites[site] = asdict(verdict) | more

    candidates = [site for site in judged if site in sites]
    if not candidates:
        nothing = {"seeds": [], "steps": 0, "judged": False}
        return {"site": None, **asdict(judge_losses([])), **nothing, "sites": sites}
    worst = min(candidates, key=lambda site: _WORST_FIRST.index(verdicts[site].verdict))
    return {"site": worst, **sites[worst], "sites": sites}


# ---- the two answers


def _of_outputs(output: Any) -> str:
    """Return whether mixed precision is right for a script that only computes."""
    if output["verdict"] == "pass":
        return "yes"
    answer = output["verdict"]
    if answer == "fail":
        answer = "no"
    return f"{answer}: outputs: {output['reason']}"


def _of_training(
    comparison: ComparisonCapture, checks: Mapping[str, Any], mixed: _Side
) -> tuple[str, str | None]:
    """Return whether mixed precision is right for a training, and a note on a failure at its start alone."""
    certificate, loss = checks["certificate"], checks["loss"]
    gradients = judge_gradients(comparison.own.of("certificate") or [certificate])
    # Where many steps were skipped, gradients alone cannot pass.
    losses = loss["verdict"]
    if losses == NOT_JUDGED and many_skipped(mixed.whole):
        losses = CANNOT_TELL
    return judge_training(gradients, losses, loss["reason"]), gradients.early


def _is_finite(fp32: _Side, loss: Mapping[str, Any] | None) -> bool:
    """Return whether every loss that is judged is finite in FP32 itself."""
    if loss is None:
        return True
    for site, of_site in loss["sites"].items():
        if of_site["judged"] and not all(map(math.isfinite, fp32.final_losses[site].values())):
            return False
    return True


def _never_steps(fp32: _Side, mixed: _Side) -> bool:
    """Return whether mixed runs skipped all their steps, which trains nothing, where FP32 took some."""
    taken = skipped = 0
    for capture in mixed.captures:
        # A run that was killed may have been about to find its loss scale: it does not count.
        if capture.end is not None:
            taken += capture.end["steps"]
            skipped += capture.end["skipped_steps"]
    fp32_taken = sum(capture.totals()["steps"] for capture in fp32.captures)
    return skipped > 0 and not taken and fp32_taken > 0


def _worth_it(
    ratio: Mapping[str, Any], reasons: Mapping[str, str], comparison: ComparisonCapture, by_others: float
) -> str:
    """Judge the speedup, and say why it is not worth it."""
    if ratio["speedup"] is None:
        return f"cannot tell: {reasons['speedup']}"
    if ratio["speedup_interval"] is None:
        return f"cannot tell: {beside_others(ratio['speedup'], by_others)}"
    asked: float | None = comparison.own.start.get("min_speedup")
    verdict = worth_it([ratio["speedup"], *ratio["speedup_interval"]], asked, by_others)
    answer = f"{verdict}: {measured_speed(ratio)}"
    if verdict == "cannot tell" and asked is not None:
        answer += f"; {asked:g}x was asked for"
    if verdict == "no":
        memory_ratio = ratio["memory_ratio"]
        if memory_ratio and memory_ratio < _LESS_MEMORY:
            answer += f", with {percent_change(memory_ratio)} tensor memory"
        why = comparison.own.last("not_worth_it")
        if why is not None:
            answer += f": {why['reason']}"
    return answer


def _used_by_others(comparison: ComparisonCapture) -> float:
    shares = [event["share"] for event in comparison.own.of("busy")]
    return used_by_others(shares, captures_of(comparison.runs))


# ---- what was judged beside losses


def _certificate(comparison: ComparisonCapture, kind: str | None) -> dict[str, Any] | None:
    """Return the certificate of a script that trains; without one, its fields and the reason."""
    if kind == "inference":
        return None
    certificates = comparison.own.of("certificate")
    if certificates:
        # Only captures where it is true have this field.
        not_noted = {"script_first": False}
        certificate = not_noted | dict(decisive_certificate(certificates))
        del certificate["event"]
    else:
        absent = dict.fromkeys(("error_over_noise", "relative_error", "cosine", "worst_parameter"))
        reason = "the comparison ended before the gradients were compared"
        if comparison.finished:
            reason = "no backward was seen in its runs"
        certificate = absent | {
            "parameters": [],
            "is_lost": False,
            "script_first": False,
            "verdict": "cannot tell",
            "reason": reason,
        }
    shown = ("at_step", "verdict", "error_over_noise", "error_over_noise_interval", "is_lost")
    steps = []
    for event in certificates:
        steps.append({key: event[key] for key in shown})
    return certificate | {"steps": steps}


def _output(comparison: ComparisonCapture, kind: str | None) -> dict[str, Any] | None:
    if kind == "training":
        return None
    event = comparison.own.last("output")
    if event is None:
        absent = {"relative_error": None, "sqnr_db": None, "calls": 0}
        reason = "the outputs of the two formats were not compared"
        return absent | {"verdict": "cannot tell", "reason": reason}
    output = dict(event)
    del output["event"]
    return output


def _why_unchecked(checks: Mapping[str, Any], kind: str | None) -> dict[str, str]:
    """Return why checks were not made, and why they lack numbers."""
    reasons = {}
    if kind is None:
        reasons["kind"] = _NOTHING_RAN
    not_made = "the script does not train"
    if kind == "training":
        not_made = "the script trains: see the gradients"
    for name, check in checks.items():
        if check is None:
            reasons[name] = not_made
            continue
        numbers = dict(check)
        for key, value in (check.get("worst_parameter") or {}).items():
            numbers[f"worst_parameter.{key}"] = value
        for key, value in numbers.items():
            if value is None:
                reasons[f"{name}.{key}"] = check["reason"]
        # The reason of the verdict does not say why these are missing.
        if f"{name}.loss_scale" in reasons and check["relative_error"] is not None:
            reasons[f"{name}.loss_scale"] = "losses were not scaled"
        if f"{name}.times_fp32" in reasons:
            reasons[f"{name}.times_fp32"] = (
                "only told where seeds show no spread and all losses are above ten times FP32's"
            )
        if f"{name}.seed_spread" in reasons and check["difference"] is not None:
            reasons[f"{name}.seed_spread"] = (
                "fewer than three seeds have no spread, nor have those that change nothing"
            )
    return reasons


# ---- notes


def _notes(comparison: ComparisonCapture) -> list[str]:
    """List the notes of the comparison and its mixed runs, each once."""
    notes = comparison.own.of("note")
    for run in comparison.runs:
        if run.format == "mixed":
            notes += run.capture.of("note")
    return list(dict.fromkeys(note["text"] for note in notes))


def _of_turns(speedup: float | None, fp32: _Side, mixed: _Side, kind: str | None) -> list[str]:
    """Say why the speedup is not the ratio of the medians shown with it, if the two clearly differ."""
    if speedup is None or fp32.time is None or mixed.time is None:
        return []
    of_medians = fp32.time.median_s / mixed.time.median_s
    if 1 / _ALIKE < speedup / of_medians < _ALIKE or not took_turns(fp32.captures, mixed.captures, kind):
        return []
    medians = speed_text(of_medians)
    return [f"{speed_text(speedup)} comes from steps that took turns; the medians alone would say {medians}"]

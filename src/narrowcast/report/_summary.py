"""The numbers of a comparison and of a run, from captures alone: ``--json`` prints them, pages show them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from narrowcast.observe.capture import (
    Capture,
    ComparisonCapture,
    TimedRun,
    json_ready,
    kind_of,
    median_of_runs,
    speedup_of,
    times_of_runs,
    times_s,
    took_turns,
    why_no_speedup,
    worth_it,
)
from narrowcast.report._right import judge_gradients, judge_training, next_for_right, next_for_speed
from narrowcast.report._statistics import (
    calls_per_step,
    doubts,
    far_apart,
    final_loss,
    judge_losses,
    judged_sites,
    many_skipped,
    mean,
    steps_by_site,
)
from narrowcast.report._text import measured_speed, percent_change, plural, site_name, speed_text

NOTHING_TRAINED = "mixed precision skipped every step, so nothing was trained"
_SCHEMA = 1
_WORST_FIRST = ("fail", "cannot tell", "pass")
_JUDGED = {"certificate": "gradients", "output": "outputs", "loss": "losses"}
_RATIOS = ("speedup", "speedup_interval", "memory_ratio", "process_memory_ratio")
_LESS_MEMORY = 0.95
_ALIKE = 1.05


def summary(comparison: ComparisonCapture, *, report: str | None = None) -> dict[str, Any]:
    """Return everything that a comparison found, as JSON-ready values.

    ``schema`` is the version of these fields. None for a number that cannot be had; ``reasons`` says why, by
    the number's path. NaN and infinities are the strings ``"nan"``, ``"inf"`` and ``"-inf"``. Times are in
    seconds, sizes in bytes.

    ``fp32`` and ``mixed``: step_time_s_median and step_time_s_interval (between steps of the optimizer that
    stepped first, the first tenth of each run, at least one, left out), forward_time_s_median and
    forward_time_s_interval (of a script that only computes), steps and skipped_steps (of all optimizers of
    the first run), final_scale, peak_tensor_bytes (CUDA's allocator; on a CPU the live tensors of a
    separate short run), peak_resident_bytes (of the process), final_loss (by call site of ``backward``, the
    mean of the last tenth of its losses, over the seeds that both formats ran), calls_per_step (of all
    modules), wall_s, format, last_line, stopped (by ``--steps`` or a time limit), runs; ``mixed`` has policy
    too.
    ``speedup`` and ``speedup_interval`` (95 %): FP32 time over mixed time; ``memory_ratio`` and
    ``process_memory_ratio``: mixed peak_tensor_bytes and peak_resident_bytes over those of FP32.
    ``certificate`` (of the latest step that was judged; ``steps`` has all), ``output`` (of a script that
    only computes) and ``loss`` each have a verdict and a reason. ``loss`` is of the worst call site that is
    judged: that with the most steps, and those that take turns with it; ``loss.sites`` has all, with steps,
    seeds and judged. ``verdict`` has ``right``, by the gradients and losses or by the outputs, unless mixed
    precision skipped every step, and ``worth_it``, by the speedup; each is ``"yes"``, ``"no: ..."`` or
    ``"cannot tell: ..."``, and ``next`` has a command for each that is not yes. Then kind, finished, notes,
    seed, folder, settings, versions and report.

    Args:
        comparison: what ``read_comparison`` returned; one that was killed gives what it has.
        report: path of its page, where there is one.
    """
    kind = kind_of([run.capture for run in comparison.runs])
    fp32, mixed = (_Side(comparison, name, kind) for name in ("fp32", "mixed"))
    ratio, ratio_reasons = _ratio(fp32, mixed, kind)
    certificate = _certificate(comparison, kind)
    output = _output(comparison, kind)
    loss = _loss(fp32, mixed, kind)
    fp32.numbers["final_loss"] = _means_of_seeds(fp32, mixed)
    mixed.numbers["final_loss"] = _means_of_seeds(mixed, fp32)
    finite = _is_finite(fp32, loss)
    checks = {"certificate": certificate, "output": output, "loss": loss}
    by_default = loss is not None and few_seeds(loss) and finite and not many_skipped(mixed.whole)
    early = None
    if _never_steps(fp32, mixed):
        right = f"no: {NOTHING_TRAINED}"
    elif certificate is not None and output is None:
        gradients = judge_gradients(comparison.own.of("certificate") or [certificate])
        right, early = judge_training(gradients, loss, few_seeds=by_default), gradients.early
    else:
        right = _right({name: check for name, check in checks.items() if check})
    worth_it = _worth_it(ratio, ratio_reasons, comparison)
    start, formats = comparison.own.start, mixed.numbers["format"] or ""
    was_stopped = bool(fp32.numbers["stopped"])
    result: dict[str, Any] = json_ready(
        {
            "schema": _SCHEMA,
            "fp32": fp32.numbers,
            "mixed": mixed.numbers | {"policy": comparison.own.start["policy"]},
            **ratio,
            **checks,
            "verdict": {"right": right, "worth_it": worth_it},
            "next": {
                "right": next_for_right(right, start, kind=kind, formats=formats, was_stopped=was_stopped),
                "worth_it": next_for_speed(worth_it, start, was_stopped=was_stopped),
            },
            "kind": kind,
            "finished": comparison.finished,
            "report": report,
            "notes": [
                *_notes(comparison),
                *([early] if early else []),
                *_of_blocks(ratio["speedup"], fp32, mixed, kind),
                *_other_losses(loss),
                *doubts(fp32.whole, mixed.whole, kind),
            ],
            "reasons": {**fp32.reasons, **mixed.reasons, **ratio_reasons, **_why_unchecked(checks, kind)},
            "seed": comparison.own.start["seed"],
            "folder": str(comparison.folder),
            "settings": mixed.last_facts("settings") or fp32.last_facts("settings"),
            "versions": mixed.last_facts("versions") or fp32.last_facts("versions"),
        }
    )
    return result


def _of_blocks(speedup: float | None, fp32: _Side, mixed: _Side, kind: str | None) -> list[str]:
    """Say why the speedup is not that of the medians beside it, where one would notice."""
    if speedup is None or fp32.time is None or mixed.time is None:
        return []
    captures = [[run.capture for run in side.runs] for side in (fp32, mixed)]
    if not took_turns(captures[0], captures[1], kind):
        return []
    of_medians = fp32.time.median_s / mixed.time.median_s
    if 1 / _ALIKE < speedup / of_medians < _ALIKE:
        return []
    alone = speed_text(of_medians)
    return [f"{speed_text(speedup)} comes from steps that took turns; the medians alone would say {alone}"]


def _other_losses(loss: Mapping[str, Any] | None) -> list[str]:
    """Name each loss that is not judged, since another phase of the script has more steps."""
    if loss is None or loss["site"] is None:
        return []
    steps = {site: of_site["steps"] for site, of_site in loss["sites"].items()}
    most = max(steps, key=steps.__getitem__)
    more = f"that at {site_name(most)} has more ({steps[most]})"
    return [
        f"the loss at {site_name(site)} ({plural(steps[site], 'step')}) is not judged, since {more}"
        for site, of_site in loss["sites"].items()
        if not of_site["judged"]
    ]


class _Side:
    """The runs of one format, their numbers, and why some are missing."""

    def __init__(self, comparison: ComparisonCapture, name: str, kind: str | None) -> None:
        self.name = name
        self.runs = [run for run in comparison.runs if run.format == name]
        self._totals = totals = [run.capture.totals() for run in self.runs]
        first = totals[0] if totals else {}
        # A run that was cut short with the comparison did other work; one without an end may be complete.
        self.whole = [run for run in self.runs if comparison.finished or run.capture.end is not None]
        self.time = median_of_runs(times_of_runs([run.capture for run in self.runs], kind))
        self.losses = {run.name: losses for run, losses in losses_of(comparison.runs) if run.format == name}
        self.final_losses = final_losses(self.whole, comparison.runs)
        formats = {device["format"]: None for run in self.runs for device in run.capture.of("device")}
        resident = [t["peak_resident_bytes"] for t in totals if t["peak_resident_bytes"] is not None]
        peak, no_peak = self._peak_tensor_bytes(comparison)
        walls = [t["wall_s"] for t in totals if t["wall_s"] is not None]
        none: dict[str, Any] = dict.fromkeys(("median", "interval"))
        times = self.time and {"median": self.time.median_s, "interval": self.time.interval_s}
        step, forward = (none, times or none) if kind == "inference" else (times or none, none)
        self.numbers: dict[str, Any] = {
            **{f"step_time_s_{name}": value for name, value in step.items()},
            **{f"forward_time_s_{name}": value for name, value in forward.items()},
            "steps": first.get("steps"),
            "skipped_steps": first.get("skipped_steps"),
            "final_scale": first.get("final_scale"),
            "peak_tensor_bytes": peak,
            "peak_resident_bytes": max(resident, default=None),
            "final_loss": {},
            "calls_per_step": calls_per_step(self.runs),
            "wall_s": statistics.median(walls) if walls else None,
            "format": ", ".join(formats) or None,
            "last_line": self.runs[0].last_line if self.runs else None,
            "stopped": first.get("stopped"),
            "runs": [run.name for run in self.runs],
        }
        self.reasons = self._why_missing(kind, no_peak)

    def last_facts(self, key: str) -> dict[str, Any]:
        """Return the settings or versions of the last run that recorded them; empty if none did."""
        return next((totals[key] for totals in reversed(self._totals) if totals[key]), {})

    def _peak_tensor_bytes(self, comparison: ComparisonCapture) -> tuple[int | None, str]:
        """Return the peak of CUDA's allocator or of the run that counts tensors, or why there is none."""
        known = [t["peak_tensor_bytes"] for t in self._totals if t["peak_tensor_bytes"] is not None]
        counted = [event for event in comparison.own.of("memory") if event["format"] == self.name]
        if known:
            return int(max(known)), ""
        if not counted:
            return None, "the run that counts tensors was not made"
        return counted[-1]["peak_tensor_bytes"], counted[-1]["reason"] or ""

    def _why_missing(self, kind: str | None, no_peak: str) -> dict[str, str]:
        """Return the reason for each missing number, by its path."""
        trains = kind == "training"
        no_step = "it takes two steps of the first optimizer to time one"
        if not trains or not self.numbers["steps"]:
            no_step = "no torch.optim.Optimizer stepped"
        reasons = {
            "step_time_s": no_step,
            "calls_per_step": no_step,
            "forward_time_s": "the script trains: see the step time" if trains else "no module was called",
            "final_scale": "losses were not scaled",
            "format": "no module with parameters was called",
            "peak_tensor_bytes": no_peak,
        }
        found = {}
        for key in [key for key, value in self.numbers.items() if value is None]:
            why = reasons.get(key.removesuffix("_median").removesuffix("_interval"), "the run was cut short")
            found[f"{self.name}.{key}"] = why if self.runs else "no run of this format came to its end"
        return found


def _ratio(fp32: _Side, mixed: _Side, kind: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return mixed precision against FP32, and the reason for each missing number."""
    numbers: dict[str, Any] = dict.fromkeys(_RATIOS)
    captures = [[run.capture for run in side.runs] for side in (fp32, mixed)]
    if found := speedup_of(captures[0], captures[1], kind):
        numbers["speedup"], *numbers["speedup_interval"] = found
    for name, key in (("memory_ratio", "peak_tensor_bytes"), ("process_memory_ratio", "peak_resident_bytes")):
        over, under = mixed.numbers[key], fp32.numbers[key]
        numbers[name] = over / under if over is not None and under else None
    missing = [key for key, value in numbers.items() if value is None]
    no_speedup = why_no_speedup(captures[0], captures[1], kind)
    return numbers, {
        key: no_speedup if key.startswith("speedup") else "one of the two is missing" for key in missing
    }


def few_seeds(loss: Mapping[str, Any]) -> bool:
    """Return whether the losses were not judged for want of seeds alone."""
    return loss["verdict"] == "cannot tell" and loss["seed_spread"] is loss["times_fp32"] is None


def _right(judged: Mapping[str, Mapping[str, Any]]) -> str:
    """Return ``"yes"``, or the worst verdict with its reasons."""
    worst = min(
        (check["verdict"] for check in judged.values()), key=_WORST_FIRST.index, default="cannot tell"
    )
    if worst == "pass":
        return "yes"
    why = [f"{_JUDGED[name]}: {c['reason']}" for name, c in judged.items() if c["verdict"] == worst]
    return f"{'no' if worst == 'fail' else worst}: {'; '.join(why) or 'nothing was judged'}"


def _worth_it(ratio: Mapping[str, Any], reasons: Mapping[str, str], comparison: ComparisonCapture) -> str:
    """Judge the speedup, and say why it is not worth it."""
    if ratio["speedup"] is None:
        return f"cannot tell: {reasons['speedup']}"
    asked: float | None = comparison.own.start.get("min_speedup")
    verdict = worth_it([ratio["speedup"], *ratio["speedup_interval"]], asked)
    measured = measured_speed(ratio)
    if verdict == "yes":
        return f"yes: {measured}"
    if verdict == "cannot tell":
        return f"cannot tell: {measured}" + ("" if asked is None else f"; {asked:g}x was asked for")
    why = comparison.own.last("not_worth_it") or {"reason": None}
    less = ratio["memory_ratio"]
    memory = f", with {percent_change(less)} tensor memory" if less and less < _LESS_MEMORY else ""
    return f"no: {measured}{memory}" + (f": {why['reason']}" if why["reason"] else "")


def _losses(capture: Capture) -> dict[str, list[float]]:
    """Return the losses of a run by call site."""
    found: dict[str, list[float]] = defaultdict(list)
    for loss in capture.of("loss"):
        found[loss["site"]].append(loss["value"])
    return found


def losses_of(runs: Sequence[TimedRun]) -> list[tuple[TimedRun, dict[str, list[float]]]]:
    """Return each run's losses by call site, as far as all runs went that were not ended early.

    A run that was ended early has none, unless every run of its format and seed was; then all end there.
    """
    whole = {(run.format, run.seed) for run in runs if not run.cut}
    kept = [run for run in runs if not run.cut or (run.format, run.seed) not in whole]
    found = [(run, _losses(run.capture)) for run in kept]
    if any(run.cut for run in kept):
        fewest: dict[str, int] = {}
        for _, losses in found:
            for site, values in losses.items():
                fewest[site] = min(len(values), fewest.get(site, len(values)))
        found = [(run, {at: values[: fewest[at]] for at, values in of.items()}) for run, of in found]
    return found


def final_losses(runs: Sequence[TimedRun], among: Sequence[TimedRun]) -> dict[str, dict[int, float]]:
    """Final losses by call site and seed; runs of one seed count once, by their mean."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    names = {run.name for run in runs}
    for run, losses in losses_of(among):
        for site, values in losses.items() if run.name in names else ():
            found[site][run.seed].append(final_loss(values))
    return {site: {seed: mean(values) for seed, values in by_seed.items()} for site, by_seed in found.items()}


def _means_of_seeds(side: _Side, other: _Side) -> dict[str, float]:
    """Return the mean final loss of each call site, over the seeds of the verdict: those of both formats."""
    means = {}
    for site, by_seed in side.final_losses.items():
        common = [seed for seed in by_seed if seed in other.final_losses.get(site, {})]
        # A loss that only one format has is shown too.
        means[site] = mean([by_seed[seed] for seed in common or by_seed])
    return means


def _is_finite(fp32: _Side, loss: Mapping[str, Any] | None) -> bool:
    """Return whether every loss that is judged is finite in FP32 itself."""
    sites = loss["sites"] if loss else {}
    judged = [site for site, of_site in sites.items() if of_site["judged"]]
    return all(math.isfinite(value) for site in judged for value in fp32.final_losses[site].values())


def _loss(fp32: _Side, mixed: _Side, kind: str | None) -> dict[str, Any] | None:
    """Judge the losses by the worst of the call sites that are judged."""
    if kind == "inference":
        return None
    whole = [run.capture for run in (*fp32.whole, *mixed.whole)]
    steps, judged = steps_by_site(whole), judged_sites(whole)
    verdicts, seeds = {}, {}
    values = [[side.losses[r.name] for r in side.whole if r.name in side.losses] for side in (fp32, mixed)]
    for site, by_seed in fp32.final_losses.items():
        other = mixed.final_losses.get(site, {})
        seeds[site] = [seed for seed in by_seed if seed in other]
        verdicts[site] = judge_losses([(by_seed[seed], other[seed]) for seed in seeds[site]])
        far = far_apart(*([of_run.get(site, []) for of_run in side] for side in values))
        if far and verdicts[site].verdict == "cannot tell":
            verdicts[site] = replace(verdicts[site], verdict="fail", reason=far)
    sites = {}
    for site, verdict in verdicts.items():
        sites[site] = asdict(verdict) | {
            "seeds": seeds[site],
            "steps": steps[site],
            "judged": site in judged,
        }
    candidates = [site for site in judged if site in sites]
    if not candidates:
        return {
            "site": None,
            **asdict(judge_losses([])),
            "seeds": [],
            "steps": 0,
            "judged": False,
            "sites": sites,
        }
    # A loss that is not finite has no difference; it counts for more than one of too few seeds.
    worst = min(
        candidates,
        key=lambda at: (
            _WORST_FIRST.index(verdicts[at].verdict),
            verdicts[at].difference is not None and verdicts[at].times_fp32 is None,
        ),
    )
    return {"site": worst, **sites[worst], "sites": sites}


def _never_steps(fp32: _Side, mixed: _Side) -> bool:
    """Return whether mixed runs skipped all their steps, which trains nothing, where FP32 took some.

    A run that was killed may have been about to find its loss scale: it does not count.
    """
    ended = [run.capture.totals() for run in mixed.runs if run.capture.end is not None]
    taken, skipped = (sum(totals[key] for totals in ended) for key in ("steps", "skipped_steps"))
    return skipped > 0 and not taken and any(run.capture.totals()["steps"] for run in fp32.runs)


def _certificate(comparison: ComparisonCapture, kind: str | None) -> dict[str, Any] | None:
    """Return the certificate of a script that trains, or the reason for which there is none."""
    if kind == "inference":
        return None
    numbers = dict.fromkeys(("error_over_noise", "relative_error", "cosine", "worst_parameter"))
    reason = "the comparison ended before the gradients were compared"
    if comparison.finished:
        reason = "no backward was seen in its runs"
    found = _event(comparison, "certificate", numbers | {"parameters": [], "is_lost": False}, reason)
    return found | {"steps": [_of_step(event) for event in comparison.own.of("certificate")]}


def _of_step(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a certificate beside those of other steps."""
    return {
        "at_step": certificate["at_step"],
        "verdict": certificate["verdict"],
        "error_over_noise": certificate["error_over_noise"],
        "error_over_noise_interval": certificate.get("error_over_noise_interval"),
        "is_lost": certificate.get("is_lost", certificate["verdict"] == "fail"),
    }


def _output(comparison: ComparisonCapture, kind: str | None) -> dict[str, Any] | None:
    if kind == "training":
        return None
    numbers = {"relative_error": None, "sqnr_db": None, "calls": 0}
    return _event(comparison, "output", numbers, "the outputs of the two formats were not compared")


def _event(comparison: ComparisonCapture, name: str, absent: dict[str, Any], reason: str) -> dict[str, Any]:
    event = comparison.own.last(name)
    if event is None:
        return {**absent, "verdict": "cannot tell", "reason": reason}
    return {key: value for key, value in event.items() if key != "event"}


def _why_unchecked(checks: Mapping[str, Any], kind: str | None) -> dict[str, str]:
    """Return why checks were not made, and why they lack numbers."""
    absent = "the script trains: see the gradients" if kind == "training" else "the script does not train"
    reasons = {} if kind is not None else {"kind": "no module with parameters was called in a run that ended"}
    for name, check in checks.items():
        if check is None:
            reasons[name] = absent
            continue
        numbers = check | {f"worst_parameter.{k}": v for k, v in (check.get("worst_parameter") or {}).items()}
        reasons |= {f"{name}.{key}": check["reason"] for key, value in numbers.items() if value is None}
        if f"{name}.loss_scale" in reasons and check["relative_error"] is not None:
            reasons[f"{name}.loss_scale"] = "losses were not scaled"
    return reasons


def _notes(comparison: ComparisonCapture) -> list[str]:
    """List the notes of the comparison and its mixed runs, each once."""
    mixed = [run.capture for run in comparison.runs if run.format == "mixed"]
    return list(dict.fromkeys(n["text"] for capture in [comparison.own, *mixed] for n in capture.of("note")))


def run_summary(capture: Capture) -> dict[str, Any]:
    """Return what a run did, as JSON-ready values; None for what is not known, NaN and infinities as strings.

    argv, policy, ended (False: killed, or still going on), step_time_s_median, totals (as the ``end`` event
    has them), devices (device_type, format, because), losses (by call site: count, first, last, final, the
    last being the mean of the last tenth, and not_finite, a count) and notes.
    """
    spread = median_of_runs([times_s(capture, "training")])
    totals = capture.totals()
    found: dict[str, Any] = json_ready(
        {
            "argv": capture.start["argv"],
            "policy": capture.start["policy"],
            "ended": capture.end is not None,
            "step_time_s_median": None if spread is None else spread.median_s,
            "totals": {key: value for key, value in totals.items() if key != "event"},
            "devices": [
                {key: device[key] for key in ("device_type", "format", "because")}
                for device in capture.of("device")
            ],
            "losses": {
                site: {
                    "count": len(values),
                    "first": values[0],
                    "last": values[-1],
                    "final": final_loss(values),
                    "not_finite": sum(not math.isfinite(value) for value in values),
                }
                for site, values in _losses(capture).items()
            },
            "notes": [note["text"] for note in capture.of("note")],
        }
    )
    return found

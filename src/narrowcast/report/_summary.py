"""The numbers of a comparison and of a run, from captures alone: ``--json`` prints them, pages show them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from narrowcast.observe.capture import Capture, ComparisonCapture, TimedRun, json_ready
from narrowcast.report._statistics import (
    Spread,
    doubts,
    final_loss,
    forward_times_s,
    judge_losses,
    mean,
    median_of_runs,
    step_times_s,
)

_WORST_FIRST = ("fail", "cannot tell", "pass")


def summary(comparison: ComparisonCapture, *, report: str | None = None) -> dict[str, Any]:
    """Return everything that a comparison found, as JSON-ready values.

    None for a number that cannot be had; ``reasons`` says why, by the number's path. NaN and infinities are
    the strings ``"nan"``, ``"inf"`` and ``"-inf"``. Times are in seconds, sizes in bytes.

    ``fp32`` and ``mixed``: step_time_s_median and step_time_s_interval (between steps of the optimizer that
    stepped first, the first tenth of each run, at least one, left out), forward_time_s_median and
    forward_time_s_interval (of a script that only computes), steps and skipped_steps (of all optimizers of
    the first run), final_scale, peak_tensor_bytes (CUDA's allocator; on a CPU the live tensors of a
    separate short run), peak_resident_bytes (of the process), final_loss (by call site, the mean of the
    last tenth), wall_s, format, last_line, runs; ``mixed`` has policy too. ``ratio``: speed and
    speed_interval (FP32 time over mixed time), peak_tensor_bytes and peak_resident_bytes (mixed over FP32).
    ``certificate``, ``output`` (of a script that only computes) and ``loss`` each have a verdict and a
    reason; ``verdict`` is that of the gradients or outputs, unless the losses fail or mixed precision
    skipped every step. Then kind, finished, notes, seed, folder, settings, versions and report.

    Args:
        comparison: what ``read_comparison`` returned; one that was killed gives what it has.
        report: path of its page, where there is one.
    """
    kind = _kind(comparison.runs)
    fp32, mixed = (_Side(comparison, name, kind) for name in ("fp32", "mixed"))
    ratio, ratio_reasons = _ratio(fp32, mixed, kind)
    certificate = _certificate(comparison, kind)
    output = _output(comparison, kind)
    loss = _loss(fp32, mixed, kind)
    checks = {"certificate": certificate, "output": output, "loss": loss}
    result = {
        "fp32": fp32.numbers,
        "mixed": mixed.numbers | {"policy": comparison.own.start["policy"]},
        "ratio": ratio,
        **checks,
        "verdict": "fail" if _never_steps(fp32, mixed) else _overall(certificate, output, loss),
        "kind": kind,
        "finished": comparison.finished,
        "report": report,
        "notes": [*_notes(comparison), *doubts(fp32.runs, mixed.runs, kind)],
        "reasons": {**fp32.reasons, **mixed.reasons, **ratio_reasons, **_why_unchecked(checks, kind)},
        "seed": comparison.own.start["seed"],
        "folder": str(comparison.folder),
        "settings": mixed.last_facts("settings") or fp32.last_facts("settings"),
        "versions": mixed.last_facts("versions") or fp32.last_facts("versions"),
    }
    ready: dict[str, Any] = json_ready(result)
    return ready


def empty_summary(reason: str) -> dict[str, Any]:
    """Return the same keys for a comparison that was not run, since mixed precision would change nothing."""
    absent = ("fp32", "mixed", "ratio", "certificate", "output", "loss", "kind", "report", "seed", "folder")
    return {
        **dict.fromkeys(absent),
        "verdict": "pass",
        "finished": True,
        "notes": [],
        "settings": {},
        "versions": {},
        "reason": reason,
        "reasons": dict.fromkeys(absent, reason),
    }


class _Side:
    """The runs of one format, their numbers, and why some are missing."""

    def __init__(self, comparison: ComparisonCapture, name: str, kind: str | None) -> None:
        self.name = name
        self.runs = [run for run in comparison.runs if run.format == name]
        self._totals = totals = [run.capture.totals() for run in self.runs]
        first = totals[0] if totals else {}
        self.step_time = median_of_runs([step_times_s(run.capture.of("step")) for run in self.runs])
        self.forward_time = median_of_runs([forward_times_s(run.capture.of("forward")) for run in self.runs])
        self.final_losses = final_losses(self.runs)
        formats = {device["format"]: None for run in self.runs for device in run.capture.of("device")}
        resident = [t["peak_resident_bytes"] for t in totals if t["peak_resident_bytes"] is not None]
        peak, no_peak = self._peak_tensor_bytes(comparison)
        walls = [t["wall_s"] for t in totals if t["wall_s"] is not None]
        self.numbers: dict[str, Any] = {
            **_spread_fields("step_time_s", self.step_time),
            **_spread_fields("forward_time_s", self.forward_time if kind == "inference" else None),
            "steps": first.get("steps"),
            "skipped_steps": first.get("skipped_steps"),
            "final_scale": first.get("final_scale"),
            "peak_tensor_bytes": peak,
            "peak_resident_bytes": max(resident, default=None),
            "final_loss": {site: next(iter(seeds.values())) for site, seeds in self.final_losses.items()},
            "wall_s": statistics.median(walls) if walls else None,
            "format": ", ".join(formats) or None,
            "last_line": self.runs[0].last_line if self.runs else None,
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
    # The forward calls of a script that trains are not its steps.
    timed = "forward_time" if kind == "inference" else "step_time"
    speed, interval = _speed(getattr(fp32, timed), getattr(mixed, timed))
    numbers: dict[str, Any] = {"speed": speed, "speed_interval": interval}
    for key in ("peak_tensor_bytes", "peak_resident_bytes"):
        over, under = mixed.numbers[key], fp32.numbers[key]
        numbers[key] = over / under if over is not None and under else None
    why = {"speed": "a time is missing", "speed_interval": "a time is missing"}
    missing = [key for key, value in numbers.items() if value is None]
    return numbers, {f"ratio.{key}": why.get(key, "one of the two is missing") for key in missing}


def _speed(fp32: Spread | None, mixed: Spread | None) -> tuple[float | None, list[float] | None]:
    if fp32 is None or mixed is None or mixed.interval_s[0] <= 0:
        return None, None
    (low, high), (mixed_low, mixed_high) = fp32.interval_s, mixed.interval_s
    return fp32.median_s / mixed.median_s, [low / mixed_high, high / mixed_low]


def _spread_fields(name: str, spread: Spread | None) -> dict[str, Any]:
    return {
        f"{name}_median": None if spread is None else spread.median_s,
        f"{name}_interval": None if spread is None else list(spread.interval_s),
    }


def _kind(runs: Sequence[TimedRun]) -> str | None:
    """``"training"`` where a run went backward, ``"inference"`` where modules were only called."""
    if any(run.capture.of("loss") or run.capture.totals()["backwards"] for run in runs):
        return "training"
    if any(run.capture.of("step") for run in runs):
        return "training"
    return "inference" if any(run.capture.of("forward") for run in runs) else None


def final_losses(runs: Sequence[TimedRun]) -> dict[str, dict[int, float]]:
    """Final losses by call site and seed; runs of one seed count once, by their mean."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_site: dict[str, list[float]] = defaultdict(list)
        for loss in run.capture.of("loss"):
            by_site[loss["site"]].append(loss["value"])
        for site, values in by_site.items():
            found[site][run.seed].append(final_loss(values))
    return {site: {seed: mean(values) for seed, values in by_seed.items()} for site, by_seed in found.items()}


def _loss(fp32: _Side, mixed: _Side, kind: str | None) -> dict[str, Any] | None:
    """Judge the losses by the worst call site."""
    if kind == "inference":
        return None
    sites = {}
    for site, by_seed in fp32.final_losses.items():
        other = mixed.final_losses.get(site, {})
        sites[site] = judge_losses([(by_seed[seed], other[seed]) for seed in by_seed if seed in other])
    if not sites:
        return {"site": None, **asdict(judge_losses([])), "sites": {}}
    worst = min(sites, key=lambda site: _WORST_FIRST.index(sites[site].verdict))
    return {
        "site": worst,
        **asdict(sites[worst]),
        "sites": {site: asdict(verdict) for site, verdict in sites.items()},
    }


def _never_steps(fp32: _Side, mixed: _Side) -> bool:
    """Return whether mixed runs skipped all their steps, which trains nothing, where FP32 took some.

    A run that was killed may have been about to find its loss scale: it does not count.
    """
    ended = [run.capture.totals() for run in mixed.runs if run.capture.end is not None]
    taken, skipped = (sum(totals[key] for totals in ended) for key in ("steps", "skipped_steps"))
    return skipped > 0 and not taken and any(run.capture.totals()["steps"] for run in fp32.runs)


def _overall(*parts: dict[str, Any] | None) -> str:
    """Return the worst verdict; losses of fewer than three seeds count only if they fail."""
    certificate, output, loss = parts
    verdicts = [part["verdict"] for part in (certificate, output) if part is not None]
    if loss is not None and (loss["verdict"] == "fail" or loss["seed_spread"] is not None):
        verdicts.append(loss["verdict"])
    return min(verdicts, key=_WORST_FIRST.index, default="cannot tell")


def _certificate(comparison: ComparisonCapture, kind: str | None) -> dict[str, Any] | None:
    """Return the certificate of a script that trains, or the reason for which there is none."""
    if kind == "inference":
        return None
    numbers = dict.fromkeys(("error_over_noise", "relative_error", "cosine", "worst_parameter"))
    reason = "the comparison ended before the gradients were compared"
    if comparison.finished:
        reason = "no backward was seen in its runs"
    return _event(comparison, "certificate", numbers | {"parameters": []}, reason)


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
    losses: dict[str, list[float]] = defaultdict(list)
    for loss in capture.of("loss"):
        losses[loss["site"]].append(loss["value"])
    spread = median_of_runs([step_times_s(capture.of("step"))])
    totals = capture.totals()
    found: dict[str, Any] = {
        "argv": capture.start["argv"],
        "policy": capture.start["policy"],
        "ended": capture.end is not None,
        "step_time_s_median": None if spread is None else spread.median_s,
        "totals": {key: value for key, value in totals.items() if key != "event"},
        "devices": [
            {key: device[key] for key in ("device_type", "format", "because")}
            for device in capture.of("device")
        ],
        "losses": {site: _of_site(values) for site, values in losses.items()},
        "notes": [note["text"] for note in capture.of("note")],
    }
    ready: dict[str, Any] = json_ready(found)
    return ready


def _of_site(values: list[float]) -> dict[str, Any]:
    return {
        "count": len(values),
        "first": values[0],
        "last": values[-1],
        "final": final_loss(values),
        "not_finite": sum(not math.isfinite(value) for value in values),
    }

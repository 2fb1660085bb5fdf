"""A capture as one HTML file that works offline: it fetches nothing, and nothing from a capture is trusted.

Two defences stand between what a script wrote and the reader of the page: every value is escaped where it is
inserted, and the page's own security policy loads nothing and runs no script.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.observe.capture import (
    OUTPUT_LIMIT,
    PARAMETER_LIMIT,
    TOTAL_LIMIT,
    Capture,
    ComparisonCapture,
    TimedRun,
    times_of_runs,
)
from narrowcast.report._explain import explain_panel
from narrowcast.report._figures import (
    NO_SEED,
    DrawnError,
    Figure,
    error_figure,
    loss_figures,
    run_name,
    time_figure,
)
from narrowcast.report._render import html_page
from narrowcast.report._summary import captures_of, final_losses, losses_of, summary
from narrowcast.report._table import NAMES, checks, exemption, rows, total_exemption, what_a_loss_is
from narrowcast.report._text import number, plural, shortened, signed, site_name

_LONGEST_FACT = 400
_MOST_LINES = 60
_MOST_PARAMETERS = 200
_MOST_EXEMPT = 3
_UNITS = {"inference": "forward calls"}


def comparison_page(comparison: ComparisonCapture) -> str:
    """Render the page of a comparison, whole or cut short."""
    found, start, runs = summary(comparison), comparison.own.start, comparison.runs
    times = times_of_runs(captures_of(runs), found["kind"])
    judged = checks(found)
    site = found["loss"]["site"] if found["loss"] else None
    losses, more_sites = loss_figures(runs, first=site)
    error = _error(found)

    # What proves the answer: losses if the answer goes by them alone.
    why = found["verdict"]["right"]
    by_losses = error is None or ("losses:" in why and "gradients:" not in why)
    proof = error
    if by_losses:
        proof = losses[0] if losses else None

    return html_page(
        "comparison.html",
        title=_script(start["argv"]),
        command=_command("compare", start),
        start=start,
        finished=comparison.own.last("finished"),
        found=found,
        error=error,
        rows=rows(found),
        what_a_loss_is=what_a_loss_is(found),
        checks=judged,
        loss_check=next((check for check in judged if check.name == "loss"), None),
        names=NAMES,
        made={side: sum(run.format == side for run in runs) for side in NAMES},
        cut=[run_name(run) for run in runs if run.capture.end is None],
        losses=losses,
        more_sites=more_sites,
        figures={"right": proof, "times": time_figure(runs, times, _UNITS.get(found["kind"], "steps"))},
        by_seed=_by_seed(runs),
        parameters=_parameters(found["certificate"]) if found["certificate"] else None,
        facts=_facts(captures_of(runs)),
        runs=_run_rows(runs, times),
        more_runs=max(0, len(runs) - _MOST_LINES),
        notes=found["notes"],
    )


def run_page(capture: Capture, folder: Path) -> str:
    """Render the page of a single run, whole or cut short; what explain found of it is in ``folder``."""
    formats = {device["format"] for device in capture.of("device")}
    side = "fp32" if formats <= {"fp32"} else "mixed"
    run = TimedRun(name="run", format=side, seed=NO_SEED, last_line="", capture=capture)
    kind = "training" if capture.of("step") or capture.of("loss") else "inference"
    panel = explain_panel(folder)
    verb = "run" if panel is None else "explain"
    # Losses and times of the few, slowed steps that explain watches mean nothing.
    shown = [run] if panel is None else []
    losses, more_sites = loss_figures(shown)
    times = times_of_runs(captures_of(shown), kind)

    start = {key: str(capture.start.get(key)) for key in ("policy", "loss_scale", "seed")}
    return html_page(
        "run.html",
        title=_script(capture.start["argv"]),
        verb=verb,
        command=_command(verb, capture.start),
        start=start | {"started": capture.start["started"]},
        ended=capture.end is not None,
        totals=capture.totals(),
        devices=capture.of("device")[:8],
        losses=losses,
        more_sites=more_sites,
        figures={"times": time_figure(shown, times, _UNITS.get(kind, "steps"))},
        panel=panel,
        facts=_facts([capture]),
        notes=[note["text"] for note in capture.of("note")],
    )


def _script(argv: Sequence[str]) -> str:
    if not argv:
        return "a script"
    return shortened(argv[0].replace("\\", "/").rsplit("/", 1)[-1], 60)


def _command(verb: str, start: Mapping[str, Any]) -> str:
    """Return the command as typed, quoted for a shell; options at their defaults are left out."""
    words = shlex.join([*start.get("options", ()), *start["argv"]])
    return shortened(f"narrowcast {verb} {words}", _LONGEST_FACT)


def _by_seed(runs: Sequence[TimedRun]) -> list[tuple[str, ...]]:
    """Return final losses of each seed: call site, seed, FP32, mixed, difference."""
    losses = losses_of(runs)
    fp32 = final_losses([run for run in runs if run.format == "fp32"], losses)
    mixed = final_losses([run for run in runs if run.format == "mixed"], losses)
    lines: list[tuple[str, ...]] = []
    for site in dict.fromkeys([*fp32, *mixed]):
        fp32_losses, mixed_losses = fp32.get(site, {}), mixed.get(site, {})
        for seed in sorted({*fp32_losses, *mixed_losses}):
            before, after = fp32_losses.get(seed), mixed_losses.get(seed)
            difference = None if before is None or after is None else after - before
            lines.append((site_name(site), str(seed), number(before), number(after), signed(difference)))
    return lines[:_MOST_LINES]


def _run_rows(runs: Sequence[TimedRun], times: Sequence[Sequence[float]]) -> list[tuple[Any, ...]]:
    """Return each run with its totals and the median of its times, as many as a page shows."""
    lines = []
    for run, of_run in list(zip(runs, times, strict=True))[:_MOST_LINES]:
        median_s = statistics.median(of_run) if of_run else None
        lines.append((run, run.capture.totals(), median_s))
    return lines


def _facts(captures: Iterable[Capture]) -> list[tuple[str, str]]:
    """Return devices, versions and settings of the runs, each once with every value that it had."""
    values: dict[str, dict[str, None]] = {}
    for capture in captures:
        for device in capture.of("device"):
            text = f"{device['device_type']}: {device['format']} ({device['because']})"
            values.setdefault("device", {})[text] = None
        totals = capture.totals()
        for name, value in totals["versions"].items():
            values.setdefault(name, {})[str(value)] = None
        for name, value in totals["settings"].items():
            values.setdefault(f"setting {name}", {})[str(value)] = None
    return [
        (shortened(name, 60), shortened("; ".join(texts), _LONGEST_FACT)) for name, texts in values.items()
    ]


# ---- gradients and outputs


def _error(found: Mapping[str, Any]) -> Figure | None:
    """Draw the errors that the verdict goes by against their limits; None: none was measured."""
    output, certificate = found["output"], found["certificate"]
    if output:
        total = DrawnError(value=output["relative_error"])
        return error_figure("outputs", "relative_error", total, (), (OUTPUT_LIMIT,))
    return _error_of_gradients(certificate) if certificate else None


def _error_of_gradients(certificate: Mapping[str, Any]) -> Figure | None:
    key, limits = "error_over_noise", (TOTAL_LIMIT, PARAMETER_LIMIT)
    if certificate[key] is None:
        # Without noise the limits depend on why there is none: the reason says them.
        key, limits = "relative_error", ()
    why_total = total_exemption(certificate)
    total = DrawnError(value=certificate[key], state="kept" if why_total is None else "exempt")

    single, exempt = [], []
    for parameter in certificate["parameters"]:
        if not parameter["judged"]:
            continue
        state = "lost" if parameter["lost"] else "kept"
        why = exemption(parameter, certificate) if limits else None
        if why is not None:
            state = "exempt"
            exempt.append(f"{shortened(parameter['name'])}, {why}")
        single.append(DrawnError(value=parameter[key], state=state))
    if len(exempt) > _MOST_EXEMPT:
        more = plural(len(exempt) - _MOST_EXEMPT, "more parameter")
        exempt = [*exempt[:_MOST_EXEMPT], f"and {more}"]
    return error_figure("gradients", key, total, single, limits, total_exempt=why_total, exempt=exempt)


def _parameters(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a certificate (of a summary: NaN and infinities are text), worst first."""
    judged, others = [], []
    for parameter in certificate["parameters"]:
        if parameter["judged"]:
            judged.append(parameter | {"exempt": exemption(parameter, certificate)})
        else:
            others.append(parameter)
    judged.sort(key=_badness, reverse=True)
    return {
        "judged": judged[:_MOST_PARAMETERS],
        "others": others[:_MOST_PARAMETERS],
        "more_judged": max(0, len(judged) - _MOST_PARAMETERS),
        "more_others": max(0, len(others) - _MOST_PARAMETERS),
        "limit": PARAMETER_LIMIT,
        "lost": sum(parameter["lost"] for parameter in judged),
    }


def _badness(parameter: Mapping[str, Any]) -> float:
    if parameter["error_over_noise"] is None:
        return -1.0
    value = float(parameter["error_over_noise"])
    return math.inf if math.isnan(value) else value

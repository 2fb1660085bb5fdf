"""A capture as one HTML file that works offline: it fetches nothing, and nothing from a capture is trusted.

Two defences stand between what a script wrote and the reader of the page: every value is escaped where it is
inserted, and the page's own security policy loads nothing and runs no script.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.capture import (
    PARAMETER_LIMIT,
    Capture,
    ComparisonCapture,
    TimedRun,
    kind_of,
    median_of_runs,
    times_of_runs,
)
from narrowcast.report._explain import explain_panel
from narrowcast.report._figures import (
    NO_SEED,
    Figure,
    gradient_figure,
    loss_figures,
    output_figure,
    run_name,
    speedup_figure,
)
from narrowcast.report._render import html_page
from narrowcast.report._statistics import final_losses, formats_of, losses_of
from narrowcast.report._summary import captures_of, summary, whole_runs
from narrowcast.report._table import NAMES, checks, exemption, rows, what_a_loss_is
from narrowcast.report._text import number, shortened, signed, site_name

_LONGEST_FACT = 400
_MOST_PARAMETERS = 200
_MOST_DEVICES = 8


def comparison_page(comparison: ComparisonCapture) -> str:
    """Render the page of a comparison, whole or cut short."""
    found, start, runs = summary(comparison), comparison.own.start, comparison.runs
    certificate = found["certificate"]
    judged = {check.name: check for check in checks(found)}
    judged_site = None
    if found["loss"]:
        judged_site = found["loss"]["site"]
    losses, more_sites = loss_figures(runs, first=judged_site)
    error = _error_figure(found)
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
        names=NAMES,
        made=Counter(run.format for run in runs),
        cut=[run_name(run) for run in runs if run.capture.end is None],
        losses=losses,
        more_sites=more_sites,
        figures={
            "right": _proof(found, error, losses),
            "worth_it": speedup_figure(found, start.get("min_speedup")),
        },
        by_seed=_by_seed(comparison),
        parameters=certificate and _parameters(certificate),
        facts=_facts(captures_of(runs)),
        runs=_run_rows(runs, found["kind"]),
        notes=found["notes"],
    )


def run_page(capture: Capture, folder: Path) -> str:
    """Render the page of a single run, whole or cut short, with what explain kept of it in ``folder``."""
    panel = explain_panel(folder)
    verb = "run" if panel is None else "explain"
    losses: list[Figure] = []
    more_sites = 0
    # explain watches only a few steps, whose losses mean nothing.
    if panel is None:
        side = "fp32" if formats_of([capture]) in ("", "fp32") else "mixed"
        run = TimedRun(name="run", format=side, seed=NO_SEED, last_line="", capture=capture)
        losses, more_sites = loss_figures([run])
    spread = median_of_runs(times_of_runs([capture], kind_of([capture])))
    return html_page(
        "run.html",
        title=_script(capture.start["argv"]),
        verb=verb,
        command=_command(verb, capture.start),
        start={"loss_scale": None, "seed": None} | capture.start,
        ended=capture.end is not None,
        totals=capture.totals(),
        devices=capture.of("device")[:_MOST_DEVICES],
        losses=losses,
        more_sites=more_sites,
        median_s=None if spread is None else spread.median_s,
        panel=panel,
        facts=_facts([capture]),
        notes=[note["text"] for note in capture.of("note")],
    )


def _error_figure(found: Mapping[str, Any]) -> Figure | None:
    if found["output"]:
        return output_figure(found["output"])
    if found["certificate"]:
        return gradient_figure(found["certificate"])
    return None


def _proof(found: Mapping[str, Any], error: Figure | None, losses: Sequence[Figure]) -> Figure | None:
    """Return the figure beside "Is it right?": the errors, or a loss if the answer is about losses alone."""
    why = found["verdict"]["right"]
    # The answer is text such as "no: losses: ..." or "no: gradients: ...; losses: ...".
    by_losses = "losses:" in why and "gradients:" not in why
    if error is not None and not by_losses:
        return error
    return losses[0] if losses else None


def _script(argv: Sequence[str]) -> str:
    if not argv:
        return "a script"
    return shortened(argv[0].replace("\\", "/").rsplit("/", 1)[-1], 60)


def _command(verb: str, start: Mapping[str, Any]) -> str:
    """Return the command, quoted for a shell.

    A comparison keeps the options that differ from their defaults. Captures of run and explain keep no
    options, and the file of the module in place of ``-m module``.
    """
    words = shlex.join([*start.get("options", ()), *start["argv"]])
    return shortened(f"narrowcast {verb} {words}", _LONGEST_FACT)


def _by_seed(comparison: ComparisonCapture) -> list[tuple[str, ...]]:
    """Return a line for each call site and seed: site, seed, final loss in FP32 and in mixed, difference."""
    whole, losses = whole_runs(comparison), losses_of(comparison.runs)
    fp32, mixed = final_losses(whole, losses, "fp32"), final_losses(whole, losses, "mixed")
    lines: list[tuple[str, ...]] = []
    for site in dict.fromkeys([*fp32, *mixed]):
        fp32_losses, mixed_losses = fp32.get(site, {}), mixed.get(site, {})
        for seed in sorted({*fp32_losses, *mixed_losses}):
            before, after = fp32_losses.get(seed), mixed_losses.get(seed)
            difference = None
            if before is not None and after is not None:
                difference = after - before
            lines.append((site_name(site), str(seed), number(before), number(after), signed(difference)))
    return lines


def _run_rows(runs: Sequence[TimedRun], kind: str | None) -> list[tuple[Any, ...]]:
    """Return each run with its totals and the median of its times."""
    lines = []
    for run, times in zip(runs, times_of_runs(captures_of(runs), kind), strict=True):
        spread = median_of_runs([times])
        median_s = None if spread is None else spread.median_s
        lines.append((run, run.capture.totals(), median_s))
    return lines


def _facts(captures: Iterable[Capture]) -> list[tuple[str, str]]:
    """Return devices, versions and settings of the runs, each once with every value that it had."""
    # The inner dicts are ordered sets.
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
    facts = []
    for name, texts in values.items():
        facts.append((shortened(name, 60), shortened("; ".join(texts), _LONGEST_FACT)))
    return facts


def _parameters(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a certificate, worst first.

    The certificate is that of a summary, in which NaN and infinities are text.
    """
    judged, others = [], []
    for parameter in certificate["parameters"]:
        if parameter["judged"]:
            judged.append(parameter | {"exempt": exemption(parameter, certificate)})
        else:
            others.append(parameter)
    judged.sort(key=_badness, reverse=True)
    lost = [parameter for parameter in judged if parameter["lost"]]
    return {
        "judged": judged[:_MOST_PARAMETERS],
        "others": others[:_MOST_PARAMETERS],
        "more_judged": max(0, len(judged) - _MOST_PARAMETERS),
        "more_others": max(0, len(others) - _MOST_PARAMETERS),
        "limit": PARAMETER_LIMIT,
        "lost": len(lost),
    }


def _badness(parameter: Mapping[str, Any]) -> float:
    if parameter["error_over_noise"] is None:
        return -1.0
    value = float(parameter["error_over_noise"])
    # NaN would not be sorted.
    return math.inf if math.isnan(value) else value

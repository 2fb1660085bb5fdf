"""A capture as one HTML file that works offline: it fetches nothing, and nothing from a capture is trusted.

Two defences stand between what a script wrote and the reader of the page: every value is escaped where it is
inserted, and the page's own security policy loads nothing and runs only the script whose hash it names.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast._files import replacing
from narrowcast.errors import FileError
from narrowcast.observe.capture import (
    OUTPUT_LIMIT,
    PAGE,
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
    error_axis,
    error_figure,
    held_error,
    loss_figures,
    run_name,
    scale_figure,
    time_figure,
)
from narrowcast.report._files import Found, Pictures, pictures
from narrowcast.report._render import html_page
from narrowcast.report._summary import final_losses, summary
from narrowcast.report._table import NAMES, checks, exemption, rows, total_exemption, what_a_loss_is
from narrowcast.report._text import number, plural, shortened, signed, site_name

_LONGEST_FACT = 400
_MOST_FACTS = 120
_MOST_LINES = 60
_MOST_PARAMETERS = 200
_MOST_EXEMPT = 3


def comparison_page(comparison: ComparisonCapture) -> str:
    """Render the page of a comparison, whole or cut short; pictures are read from its runs' folders."""
    found, start, runs = summary(comparison), comparison.own.start, comparison.runs
    of_loss = found["loss"] or {"site": None}
    losses, more_sites = loss_figures(runs, first=of_loss["site"])
    judged, times = checks(found), times_of_runs([run.capture for run in runs], found["kind"])
    what = "forward calls" if found["kind"] == "inference" else "steps"
    error = _error(found)
    why = found["verdict"]["right"]
    by_losses = error is None or ("losses:" in why and "gradients:" not in why)
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
        figures={
            "right": next(iter(losses), None) if by_losses else error,
            "times": time_figure(runs, times, what),
            "scale": scale_figure(runs),
        },
        by_seed=_by_seed(runs),
        parameters=_parameters(found["certificate"]) if found["certificate"] else None,
        panel=explain_panel(comparison.folder),
        pictures=_pictures(comparison),
        facts=_facts([run.capture for run in runs]),
        runs=[
            (run, run.capture.totals(), statistics.median(of_run) if of_run else None)
            for run, of_run in list(zip(runs, times, strict=True))[:_MOST_LINES]
        ],
        more_runs=max(0, len(runs) - _MOST_LINES),
        notes=found["notes"],
    )


def run_page(capture: Capture, folder: Path) -> str:
    """Render the page of a single run, whole or cut short; its pictures are in ``folder``."""
    formats = {device["format"] for device in capture.of("device")}
    side = "fp32" if formats <= {"fp32"} else "mixed"
    run = TimedRun(name="run", format=side, seed=NO_SEED, last_line="", capture=capture)
    panel = explain_panel(folder)
    verb = "run" if panel is None else "explain"
    kind = "training" if capture.of("step") or capture.of("loss") else "inference"
    # Losses and times of the few, slowed steps that explain watches mean nothing.
    shown = [run] if panel is None else []
    losses, more_sites = loss_figures(shown)
    what = "steps" if kind == "training" else "forward calls"
    times = time_figure(shown, times_of_runs([one.capture for one in shown], kind), what)
    return html_page(
        "run.html",
        title=_script(capture.start["argv"]),
        verb=verb,
        command=_command(verb, capture.start),
        start={key: str(capture.start.get(key)) for key in ("policy", "loss_scale", "seed")}
        | {"started": capture.start["started"]},
        ended=capture.end is not None,
        totals=capture.totals(),
        devices=capture.of("device")[:8],
        losses=losses,
        more_sites=more_sites,
        figures={"times": times, "scale": scale_figure(shown)},
        panel=panel,
        pictures=pictures([("the run", folder)], folder),
        facts=_facts([capture]),
        notes=[note["text"] for note in capture.of("note")],
    )


def save_page(found: Found, path: Path | None = None) -> Path:
    """Write the page of what ``find_capture`` returned, whole or not at all; return its path.

    Without ``path`` it is ``report.html`` beside the capture. Raises ``FileError`` if it cannot be written.
    """
    if isinstance(found, ComparisonCapture):
        page, folder = comparison_page(found), found.folder
    else:
        page, folder = run_page(found[0], found[1].parent), found[1].parent
    try:
        return write_page(page, folder / PAGE if path is None else path)
    except FileError as error:
        raise FileError(
            f"{error}; to write it elsewhere: narrowcast report {folder} --output FILE"
        ) from error


def write_page(page: str, path: Path) -> Path:
    """Write a page whole or not at all; return its path. Raises ``FileError`` if it cannot be written."""
    try:
        with replacing(path) as file:
            file.write(page.encode())
    except OSError as error:
        raise FileError(f"cannot write the page {path}: {error.strerror}") from error
    return path


def _error(found: Mapping[str, Any]) -> Figure | None:
    """Draw the errors that the verdict goes by against their limits; None: none was measured."""
    output, certificate = found["output"], found["certificate"]
    if output:
        total = DrawnError(value=output["relative_error"])
        return error_figure("outputs", "relative_error", total, (), (OUTPUT_LIMIT,))
    if not certificate:
        return None
    key = "relative_error" if certificate["error_over_noise"] is None else "error_over_noise"
    # Without noise the limits depend on why there is none: the reason says them.
    limits = (TOTAL_LIMIT, PARAMETER_LIMIT) if key == "error_over_noise" else ()
    of_total = total_exemption(certificate)
    total = DrawnError(value=certificate[key], state="exempt" if of_total else "kept")
    single, of_single = [], []
    for parameter in certificate["parameters"]:
        if not parameter["judged"]:
            continue
        state = "lost" if parameter["lost"] else "kept"
        exempt = exemption(parameter, certificate) if limits else None
        if exempt is not None:
            state = "exempt"
            of_single.append(f"{shortened(parameter['name'])}, {exempt}")
        single.append(DrawnError(value=parameter[key], state=state))
    if len(of_single) > _MOST_EXEMPT:
        of_single[_MOST_EXEMPT:] = [f"and {plural(len(of_single) - _MOST_EXEMPT, 'more parameter')}"]
    return error_figure("gradients", key, total, single, limits, total_exempt=of_total, exempt=of_single)


def _script(argv: Sequence[str]) -> str:
    return shortened(argv[0].replace("\\", "/").rsplit("/", 1)[-1], 60) if argv else "a script"


def _command(verb: str, start: Mapping[str, Any]) -> str:
    """The command as typed, quoted for a shell; options at their defaults are left out."""
    options = start.get("options")
    known = options if isinstance(options, list) and all(isinstance(word, str) for word in options) else []
    return shortened(f"narrowcast {verb} {shlex.join([*known, *start['argv']][:200])}", _LONGEST_FACT)


def _by_seed(runs: Sequence[TimedRun]) -> list[tuple[str, ...]]:
    """Final losses of each seed: call site, seed, FP32, mixed, difference."""
    fp32, mixed = (final_losses([run for run in runs if run.format == key], runs) for key in NAMES)
    lines: list[tuple[str, ...]] = []
    for site in dict.fromkeys([*fp32, *mixed]):
        of_site = fp32.get(site, {}), mixed.get(site, {})
        for seed in sorted({*of_site[0], *of_site[1]}):
            one, other = (losses.get(seed) for losses in of_site)
            difference = None if one is None or other is None else other - one
            lines.append((site_name(site), str(seed), number(one), number(other), signed(difference)))
    return lines[:_MOST_LINES]


def _pictures(comparison: ComparisonCapture) -> Pictures:
    """Read the pictures of the first run of each format, which have the same seed."""
    first = {event["format"]: event for event in reversed(comparison.own.of("run"))}
    chosen = [(name, first[side]) for side, name in NAMES.items() if side in first]
    folders = [(f"{name}, seed {run['seed']}", Path(run["capture"]).parent) for name, run in chosen]
    return pictures([(name, comparison.folder / path) for name, path in folders], comparison.folder)


def _facts(captures: Sequence[Capture]) -> list[tuple[str, str]]:
    """Devices, versions and settings of the runs, each once with every value that it had."""
    values: dict[str, dict[str, None]] = {}
    for capture in captures:
        totals = capture.totals()
        for device in capture.of("device"):
            text = f"{device['device_type']}: {device['format']} ({device['because']})"
            values.setdefault("device", {})[text] = None
        for prefix, key in (("", "versions"), ("setting ", "settings")):
            for name, value in totals[key].items():
                values.setdefault(f"{prefix}{name}", {})[str(value)] = None
    facts = list(values.items())[:_MOST_FACTS]
    return [(shortened(name, 60), shortened("; ".join(texts), _LONGEST_FACT)) for name, texts in facts]


def _parameters(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """List the parameters of a certificate (of a summary: NaN and infinities are text), worst first.

    Those that were judged have ``at``, a position in percent on a logarithmic axis (None: no number).
    """
    judged = sorted((p for p in certificate["parameters"] if p["judged"]), key=_badness, reverse=True)
    others = [p for p in certificate["parameters"] if not p["judged"]]
    places = [_on_axis(parameter) for parameter in judged]
    axis = error_axis(place for place in places if place is not None)
    return {
        "judged": [
            parameter
            | {
                "at": None if place is None else round(100 * axis.at(place), 2),
                "exempt": exemption(parameter, certificate),
            }
            for parameter, place in zip(judged[:_MOST_PARAMETERS], places, strict=False)
        ],
        "others": others[:_MOST_PARAMETERS],
        "more_judged": max(0, len(judged) - _MOST_PARAMETERS),
        "more_others": max(0, len(others) - _MOST_PARAMETERS),
        "ticks": axis.ticks(),
        "limit": PARAMETER_LIMIT,
        "limit_at": round(100 * axis.at(PARAMETER_LIMIT), 2),
        "lost": sum(parameter["lost"] for parameter in judged),
    }


def _badness(parameter: Mapping[str, Any]) -> float:
    value = float(-1.0 if parameter["error_over_noise"] is None else parameter["error_over_noise"])
    return math.inf if math.isnan(value) else value


def _on_axis(parameter: Mapping[str, Any]) -> float | None:
    """Error over noise, held within the axis."""
    if parameter["error_over_noise"] is None:
        return None
    return held_error(_badness(parameter))

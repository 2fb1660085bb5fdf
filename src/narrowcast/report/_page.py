"""A capture as one HTML file that works offline: nothing is fetched, and nothing from a capture is trusted.

Two walls stand between what a script wrote and whoever opens the page: every value is escaped where it is put
in, and the page's own security policy lets run only the scripts whose hashes it names, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from narrowcast.observe.capture import Capture, ComparisonCapture, TimedRun
from narrowcast.report import _provenance
from narrowcast.report._explain_panel import panel_of
from narrowcast.report._gradients import dots
from narrowcast.report._loss_plots import loss_plots
from narrowcast.report._pictures import Pictures, pictures
from narrowcast.report._plots import NO_SEED, Plot, run_name
from narrowcast.report._printable import printable
from narrowcast.report._rows import (
    ONE_LIMIT,
    UNKNOWN,
    Check,
    checks,
    count,
    is_open,
    mebibytes,
    number,
    percent,
    rows,
    seconds,
    shortened,
    signed,
    times,
)
from narrowcast.report._run_plots import scale_plot, time_plot
from narrowcast.report._statistics import final_loss, forward_times_s, step_times_s
from narrowcast.report._summary import summary

_MOST_NOTES = 40
_LONGEST_NOTE = 2_000
_MOST_RUNS = 60
# A step of thirty years is no measurement, and an axis that reaches it shows nothing else.
_LONGEST_S = 1e9
_SIGNS = {"pass": "\u2713", "fail": "\u2717", "cannot tell": "?"}
_CLASSES = {"pass": "pass", "fail": "fail", "cannot tell": "unsure"}


def comparison_page(comparison: ComparisonCapture) -> str:
    """The page of a comparison, whole or cut short.

    Args:
        comparison: what ``read_comparison`` returned; pictures are read from its runs' folders.
    """
    found = summary(comparison)
    kind, runs = found["kind"], comparison.runs
    losses, more_sites = loss_plots(runs)
    plots = [*losses, _times(runs, kind), scale_plot(runs)]
    found_rows = rows(found)
    return _render(
        "comparison.html",
        plots,
        title=_script(comparison.own.start["argv"]),
        command=_provenance.command("compare", comparison.own.start),
        found=found,
        verdict=found["verdict"],
        sentence=_sentence(found),
        alerts=_alerts(comparison),
        rows=found_rows,
        missing=_missing(found_rows, found["reasons"]),
        checks=checks(found),
        losses=losses,
        more_sites=more_sites,
        by_seed=_by_seed(runs) if losses else [],
        many_sites=sum(plot.name.startswith("plot-loss") for plot in losses) > 1,
        dots=dots(found["certificate"]) if found["certificate"] else None,
        panel=panel_of(comparison.folder),
        pictures=_pairs(comparison),
        facts=_provenance.of_comparison(comparison),
        runs=[_run_row(run) for run in runs[:_MOST_RUNS]],
        more_runs=max(0, len(runs) - _MOST_RUNS),
        notes=_shown_notes(found["notes"]),
    )


def run_page(capture: Capture, folder: Path) -> str:
    """The page of a single run, whole or cut short.

    Args:
        capture: what ``read_capture`` returned.
        folder: of the run, where its pictures are.
    """
    formats = {device["format"] for device in capture.of("device")}
    side = "fp32" if formats <= {"fp32"} else "mixed"
    run = TimedRun(name="run", format=side, seed=NO_SEED, last_line="", capture=capture)
    panel = panel_of(folder)
    verb = "run" if panel is None else "explain"
    # Of a run that was watched, a few slowed steps: neither its losses nor its times say anything.
    losses, more_sites = loss_plots([run]) if panel is None else ([], 0)
    trains = bool(capture.of("step") or capture.of("loss"))
    totals = capture.totals()
    return _render(
        "run.html",
        [] if panel else [*losses, _times([run], "training" if trains else "inference"), scale_plot([run])],
        title=_script(capture.start["argv"]),
        verb=verb,
        command=_provenance.command(verb, capture.start),
        ended=capture.end is not None,
        totals=totals,
        rows=_run_rows(capture),
        losses=losses,
        more_sites=more_sites,
        panel=panel,
        pictures=pictures([("the run", folder)], folder),
        facts=_provenance.of_run(capture, verb),
        notes=_shown_notes([note["text"] for note in capture.of("note")]),
    )


def _render(template: str, plots: Sequence[Plot | None], **values: Any) -> str:
    from plotly.offline import get_plotlyjs

    plotly, own = get_plotlyjs(), _text("page.js")
    drawn = [plot for plot in plots if plot is not None]
    # Pictures come as data; styles are the page's own and plotly's; nothing may be fetched or sent.
    scripts = [_hash(own), *([_hash(plotly)] if drawn else [])]
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; base-uri 'none'; "
        f"form-action 'none'; script-src {' '.join(scripts)}"
    )
    page: str = (
        _templates()
        .get_template(template)
        .render(
            plotly=plotly if drawn else None,
            own=own,
            style=_text("page.css"),
            policy=policy,
            plots={plot.name: plot for plot in drawn},
            drawn=[plot.drawn() for plot in drawn],
            signs=_SIGNS,
            classes=_CLASSES,
            unknown=UNKNOWN,
            limit=ONE_LIMIT,
            **values,
        )
    )
    return page


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        # Whatever is put in: control characters, and those that turn a line around, are spelled out.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["shortened"] = shortened
    environment.filters["number"] = number
    environment.filters["as_is"] = _as_is
    return environment


def _as_is(text: str) -> Any:
    """The page's own scripts and style, which are no one else's words."""
    from markupsafe import Markup

    return Markup(text)


@cache
def _text(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


@cache
def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _script(argv: Sequence[str]) -> str:
    return shortened(argv[0].replace("\\", "/").rsplit("/", 1)[-1], 60) if argv else "a script"


def _sentence(found: Mapping[str, Any]) -> str:
    """The verdict in one sentence."""
    name = shortened(found["mixed"]["format"] or "mixed precision", 20)
    against = {check.name: check for check in checks(found)}
    decisive = [check for check in against.values() if check.verdict == found["verdict"]]
    because = " ".join(f"{check.name.capitalize()}: {_decided(check)}." for check in decisive)
    loss = against.get("loss")
    if found["verdict"] == "pass" and loss is not None and loss.verdict != "pass":
        untold = f"Whether its losses end where FP32's do was not asked: {_decided(loss)}."
        gain = _gain(found["ratio"])
        return f"Mixed precision ({name}) has the gradients of FP32 here{gain}. {because} {untold}"
    if found["verdict"] == "pass":
        return f"Mixed precision ({name}) does here what FP32 does{_gain(found['ratio'])}. {because}"
    if found["verdict"] == "fail":
        return f"Mixed precision ({name}) is wrong here. {because}"
    because = because or "Nothing was judged."
    return f"It cannot be told whether mixed precision ({name}) is right here. {because}"


def _gain(ratio: Mapping[str, Any]) -> str:
    """What it gains, where that is known: never without its cost."""
    speed, memory = times(ratio["speed"], "faster", "slower"), percent(ratio["peak_tensor_bytes"])
    said = [f"is {speed.replace('the same', 'as fast')}"] if speed else []
    if speed and is_open(ratio):
        low, high = (f"{float(bound):.2f}x" for bound in ratio["speed_interval"])
        said = [f"may be faster or slower ({low} to {high} the speed)"]
    said += [f"takes {memory} tensor memory"] if memory else []
    return f", {' and '.join(said)}" if said else ""


def _decided(check: Check) -> str:
    """Why, in the first sentence of it; the rest stands beside the numbers."""
    said = shortened(check.reason.partition(". ")[0], 300)
    return (said or (check.numbers[0] if check.numbers else check.verdict)).rstrip(".")


def _alerts(comparison: ComparisonCapture) -> list[str]:
    """What a person must know before anything else: what of the comparison is missing."""
    found = []
    made = {side: sum(run.format == side for run in comparison.runs) for side in ("fp32", "mixed")}
    if not comparison.finished:
        found.append(
            f"This comparison did not come to its end (it was killed, or is still going on). It has "
            f"{made['fp32']} FP32 and {made['mixed']} mixed runs of {comparison.own.start['repeats']} each; "
            "what follows is what they tell."
        )
    cut = [run_name(run) for run in comparison.runs if run.capture.end is None]
    if cut:
        more = f" and {len(cut) - 8} more" if len(cut) > 8 else ""
        found.append(f"Cut short, with the numbers that they had: {', '.join(cut[:8])}{more}.")
    return found


def _missing(found_rows: Sequence[Any], reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each missing number and why; those whose row has a dash first, the others by their JSON path."""
    said = [
        (f"{row.name}", reason)
        for row in found_rows
        if UNKNOWN in (row.fp32, row.mixed)
        for reason in row.reasons
    ]
    return said + [(path, why) for path, why in reasons.items() if not path.endswith("_interval")]


def _times(runs: Sequence[TimedRun], kind: str | None) -> Plot | None:
    if kind == "inference":
        times_s = [forward_times_s(run.capture.of("forward")) for run in runs]
    else:
        times_s = [step_times_s(run.capture.of("step")) for run in runs]
    kept = [[time for time in times if time < _LONGEST_S] for times in times_s]
    return time_plot(runs, kept, "forward calls" if kind == "inference" else "steps")


def _by_seed(runs: Sequence[TimedRun]) -> list[tuple[str, str, str, str, str]]:
    """Final losses of each seed that ran in both formats: site, seed, FP32, mixed, difference."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for run in runs:
        by_site: dict[str, list[float]] = {}
        for loss in run.capture.of("loss"):
            by_site.setdefault(loss["site"], []).append(loss["value"])
        for site, values in by_site.items():
            found.setdefault((site, run.seed), {})[run.format] = final_loss(values)
    lines = []
    for (site, seed), sides in sorted(found.items(), key=lambda item: item[0])[:_MOST_RUNS]:
        fp32, mixed = sides.get("fp32"), sides.get("mixed")
        difference = None if fp32 is None or mixed is None else mixed - fp32
        place = shortened(site.replace("\\", "/").rsplit("/", 1)[-1])
        lines.append((place, str(seed), number(fp32), number(mixed), signed(difference)))
    return lines


def _pairs(comparison: ComparisonCapture) -> Pictures:
    """Pictures of the first run of each format, of one seed where there is such a pair."""
    events = comparison.own.of("run")
    first = {side: [event for event in events if event["format"] == side] for side in ("fp32", "mixed")}
    seeds = {event["seed"] for event in first["fp32"]} & {event["seed"] for event in first["mixed"]}
    chosen = []
    for side, name in (("fp32", "FP32"), ("mixed", "mixed")):
        same = [event for event in first[side] if event["seed"] == min(seeds, default=event["seed"])]
        chosen += [
            (f"{name}, seed {event['seed']}", (comparison.folder / event["capture"]).parent)
            for event in same[:1]
        ]
    return pictures(chosen, comparison.folder)


def _run_row(run: TimedRun) -> tuple[str, ...]:
    totals = run.capture.totals()
    ended = "cut short" if run.capture.end is None else f"exit code {totals['exit_code']}"
    return (
        shortened(run.name, 24),
        {"fp32": "FP32", "mixed": "mixed"}[run.format],
        str(run.seed),
        count(totals["steps"]),
        count(totals["skipped_steps"]),
        seconds(totals["wall_s"]),
        "stopped as asked" if totals["stopped"] else ended,
        shortened(run.last_line, 200) or "(it printed nothing)",
    )


def _run_rows(capture: Capture) -> list[tuple[str, str]]:
    totals = capture.totals()
    places = [f"{d['format']} on {d['device_type']}" for d in capture.of("device")]
    scale = totals["final_scale"]
    return [
        ("computed in", shortened("; ".join(places[:8]) or "nothing ran in mixed precision", 200)),
        ("optimizer steps", count(totals["steps"])),
        ("skipped steps", count(totals["skipped_steps"])),
        ("loss scale at the end", "off" if scale is None else number(scale)),
        ("peak tensor memory", mebibytes(totals["peak_tensor_bytes"])),
        ("peak process memory", mebibytes(totals["peak_resident_bytes"])),
        ("wall time", seconds(totals["wall_s"])),
    ]


def _shown_notes(notes: Sequence[str]) -> list[str]:
    shown = [shortened(note, _LONGEST_NOTE) for note in notes[:_MOST_NOTES]]
    more = len(notes) - len(shown)
    return shown + ([f"and {more} more notes, in the capture"] if more else [])

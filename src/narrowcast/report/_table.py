"""What a terminal shows: the table of a comparison, and the lines that end a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.observe.capture import ENOUGH_ELEMENTS, PARAMETER_LIMIT, TOTAL_LIMIT, Capture
from narrowcast.report._render import terminal_text
from narrowcast.report._summary import NOTHING_TRAINED, few_seeds
from narrowcast.report._text import (
    UNKNOWN,
    count,
    decibels,
    mebibytes,
    milliseconds,
    number,
    percent_change,
    plural,
    seconds,
    short,
    shortened,
    signed,
    site_name,
    speed_interval,
    speed_text,
    table,
    three_digits,
    wrapped,
)

NAMES = {"fp32": "FP32", "mixed": "mixed"}
_NAMES_OF_FORMATS = ("auto", "bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a comparison; ``-`` for a missing number, with ``reasons`` where the number matters."""

    name: str
    fp32: str
    mixed: str
    change: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was judged; ``verdict`` is that of the summary, or ``"not judged"``."""

    name: str
    verdict: str
    numbers: tuple[str, ...]
    reason: str


def rows(summary: Mapping[str, Any]) -> list[Row]:
    """List the numbers of a comparison: FP32, mixed precision, and how mixed precision changes them."""
    kind = summary["kind"]
    timed = "forward_time_s" if kind == "inference" else "step_time_s"
    median = f"{timed.removesuffix('_time_s')} time, median"
    alone = max(len(summary[side]["runs"]) for side in NAMES) == 1
    interval = "  95 % in one run" if alone else "  95 % interval"
    tensors, process = (percent_change(summary[name]) for name in ("memory_ratio", "process_memory_ratio"))
    found = [
        _row(summary, f"{timed}_median", median, milliseconds, _speedup(summary)),
        _row(summary, f"{timed}_interval", interval, _interval, speed_interval(summary)),
        _row(summary, "peak_tensor_bytes", "peak tensor memory", mebibytes, tensors),
        _row(summary, "peak_resident_bytes", "peak process memory", mebibytes, process),
        *_loss_rows(summary),
    ]
    # Times are of all runs, these numbers of the first one.
    first = ", first run" if max(len(summary[side]["runs"]) for side in NAMES) > 1 else ""
    # Zeros of a script that only computes would look as if something were missing.
    if kind != "inference":
        found.append(_row(summary, "steps", f"optimizer steps{first}", count))
        found.append(_row(summary, "skipped_steps", f"skipped steps{first}", count))
    found.append(_row(summary, "final_scale", f"final loss scale{first}", number))
    found.append(_row(summary, "wall_s", "wall time", seconds))
    always = (median, "peak tensor memory", "peak process memory") if kind else ()
    empty = ((UNKNOWN, UNKNOWN), ("", ""))
    return [row for row in found if row.name in always or (row.fp32, row.mixed) not in empty]


def checks(summary: Mapping[str, Any]) -> list[Check]:
    """List what was judged: gradients and losses of a script that trains, outputs of one that computes.

    If mixed precision skipped every step, that comes first.
    """
    found = []
    if NOTHING_TRAINED in summary["verdict"]["right"]:
        skipped = (f"{count(summary['mixed']['skipped_steps'])} skipped, 0 taken",)
        found.append(Check(name="steps", verdict="fail", numbers=skipped, reason=NOTHING_TRAINED))
    certificate, output, loss = summary["certificate"], summary["output"], summary["loss"]
    if certificate is not None:
        found.append(_check("gradients", certificate, _gradient_numbers(certificate)))
    if output is not None:
        numbers = [
            f"relative error {short(output['relative_error'])}",
            f"SQNR {decibels(output['sqnr_db'])}",
            f"{output['calls']} calls",
        ]
        found.append(_check("output", output, numbers))
    if loss is not None:
        numbers = [
            f"difference {signed(loss['difference'])}",
            f"spread of seeds {short(loss['seed_spread'])}",
        ]
        judged = sum(of_site["judged"] for of_site in loss["sites"].values())
        if judged > 1:
            numbers.append(f"worst of {judged} losses: {site_name(loss['site'])}")
        elif len(loss["sites"]) > 1:
            numbers.append(f"at {site_name(loss['site'])}")
        check = _check("loss", loss, numbers)
        found.append(replace(check, verdict="not judged") if few_seeds(loss) else check)
    return found


def _gradient_numbers(certificate: Mapping[str, Any]) -> list[str]:
    """Format the errors of gradients with their limits, and why one beyond its limit does not count."""
    key = "relative_error" if certificate["error_over_noise"] is None else "error_over_noise"
    limit = f" (limit {TOTAL_LIMIT:g})" if key == "error_over_noise" else ""
    if why := total_exemption(certificate):
        limit = f" (beyond {TOTAL_LIMIT:g}, not counted: {why})"
    numbers = [f"{key.replace('_', ' ')} {short(certificate[key])}{limit}"]
    worst = certificate["worst_parameter"]
    if worst is not None:
        of_worst = [one for one in certificate["parameters"] if one["name"] == worst["name"]]
        exempt = exemption(of_worst[0], certificate) if of_worst else None
        why = f" (beyond {PARAMETER_LIMIT:g}, not counted: {exempt})" if exempt else ""
        numbers.append(f"worst {short(worst[key])} in {shortened(worst['name'])}{why}")
    if len(certificate.get("steps", ())) > 1:
        numbers.append(f"by step: {_by_step(certificate['steps'])}")
    return numbers


def total_exemption(certificate: Mapping[str, Any]) -> str | None:
    """Return why gradients pass although their error over noise is beyond the limit; None: it is not."""
    ratio, relative = certificate["error_over_noise"], certificate["relative_error"]
    if ratio is None or float(ratio) < TOTAL_LIMIT or certificate["verdict"] != "pass":
        return None
    return f"rounding alone makes a relative error of {short(relative)}"


def exemption(parameter: Mapping[str, Any], certificate: Mapping[str, Any]) -> str | None:
    """Return why a parameter whose error over noise is beyond its limit is not lost; None: it is not so."""
    ratio, relative = parameter["error_over_noise"], parameter["relative_error"]
    if ratio is None or not parameter["judged"] or parameter["lost"] or not float(ratio) > PARAMETER_LIMIT:
        return None
    if certificate.get("minibatches", 1) == 1:
        # The larger one of noise and gradient is the yardstick.
        return f"small beside its own gradient: relative error {short(relative)}"
    if math.prod(parameter["shape"]) < ENOUGH_ELEMENTS:
        return f"fewer than {ENOUGH_ELEMENTS} elements"
    return f"its interval reaches below {PARAMETER_LIMIT:g}"


def _by_step(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the error over noise of each step at which gradients were compared, as "0.0109 at 0"."""
    return "; ".join(f"{short(one['error_over_noise'])} at {one['at_step']}" for one in steps)


def comparison_table(summary: Mapping[str, Any], *, color: bool = False) -> str:
    """Format the result of ``narrowcast compare`` as a table of at most 79 columns.

    A missing number is ``-``, with the reason below the table.
    """
    found, mixed = rows(summary), summary["mixed"]
    head = ["", "FP32", f"mixed, {shortened(mixed['format'] or UNKNOWN, 20)}", "change"]
    return terminal_text(
        "comparison.txt",
        color=color,
        found=summary,
        policy="" if mixed["policy"] in _NAMES_OF_FORMATS else mixed["policy"],
        rows=found,
        what_a_loss_is=what_a_loss_is(summary),
        checks=checks(summary),
        table=table(head, [(row.name, row.fp32, row.mixed, row.change) for row in found], left=(0, 3)),
    )


def _speedup(summary: Mapping[str, Any]) -> str:
    """Format the speedup, with a question mark if either format may be the faster one."""
    if summary["speedup"] is None:
        return ""
    low, high = map(float, summary["speedup_interval"] or (1, 1))
    return speed_text(summary["speedup"]) + ("?" if low < 1 < high else "")


def _interval(interval_s: Sequence[float | str] | None) -> str:
    if interval_s is None:
        return ""
    low, high = (three_digits(float(bound) * 1e3) for bound in interval_s)
    return f"{low} to {high} ms"


def _check(name: str, part: Mapping[str, Any], numbers: Sequence[str]) -> Check:
    known = tuple(words for words in numbers if not words.endswith(f" {UNKNOWN}"))
    return Check(name=name, verdict=part["verdict"], numbers=known, reason=part["reason"] or "")


def _row(
    summary: Mapping[str, Any], key: str, name: str, show: Callable[[Any], str], change: str = ""
) -> Row:
    fp32, mixed = (show(summary[side][key]) for side in NAMES)
    worth_a_reason = key.endswith(("_time_s_median", "_bytes")) and UNKNOWN in (fp32, mixed)
    reasons = _reasons(summary, key) if worth_a_reason and summary["kind"] else ()
    return Row(name=name, fp32=fp32, mixed=mixed, change=change, reasons=reasons)


def _reasons(summary: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return why a number is missing, with the format if only one of them lacks it."""
    why = {side: summary["reasons"].get(f"{side}.{key}") for side in NAMES}
    if why["fp32"] == why["mixed"]:
        return () if why["fp32"] is None else (why["fp32"],)
    return tuple(f"{NAMES[side]}: {text}" for side, text in why.items() if text is not None)


def _loss_rows(summary: Mapping[str, Any]) -> list[Row]:
    """List the final loss of each call site, those that are judged first."""
    losses = [summary[side]["final_loss"] for side in NAMES]
    of_sites = (summary["loss"] or {"sites": {}})["sites"]
    judged = [site for site, of_site in of_sites.items() if of_site["judged"]]
    sites = list(dict.fromkeys([*judged, *losses[0], *losses[1]]))
    found = []
    for site in sites:
        of_site = of_sites.get(site, {})
        name = "final loss" if len(sites) == 1 else f"final loss, {site_name(site)}"
        if len(sites) == 1 and of_site.get("seeds"):
            name += f" ({plural(len(of_site['seeds']), 'seed')})"
        fp32, mixed = (number(side.get(site)) for side in losses)
        change = "the same" if of_site.get("difference") == 0 and fp32 == mixed else ""
        if judged and site not in judged:
            change = "not judged"
        found.append(Row(name=name, fp32=fp32, mixed=mixed, change=change))
    return found


def what_a_loss_is(summary: Mapping[str, Any]) -> str:
    """Say what the rows of final losses are; empty where there are none."""
    if not summary["fp32"]["final_loss"] and not summary["mixed"]["final_loss"]:
        return ""
    seeds = len((summary["loss"] or {"seeds": []})["seeds"])
    over = f", over the same {seeds} seeds in both formats" if seeds > 1 else ""
    return f"final loss: mean of what was passed to backward() in the last tenth of steps{over}"


def run_block(capture: Capture, *, capture_path: str | None = None, with_told: bool = True) -> str:
    """Format the end of a run in a few lines: format, steps, skipped steps, final scale, and notes.

    Lines have at most 79 columns, but the path of the capture stays whole. A run that was killed gets the
    numbers of the steps that it took. ``with_told=False`` leaves out notes that were shown before training.
    """
    totals = capture.totals()
    by = _policy_words(capture)
    places = []
    for device in capture.of("device"):
        why = "" if by and device["because"] == "as asked" else f" ({device['because']})"
        places.append(f"{device['format']} on {device['device_type']}{why}")
    left_alone = totals["left_alone"] is not None
    nothing = "left to the script's own mixed precision" if left_alone else "nothing ran in mixed precision"
    if totals.get("elsewhere"):
        nothing += " in this process"
    where = "; ".join(places) + (by if places else "")
    lines = [wrapped(f"narrowcast: {where or nothing}", then="  ", whole_words=True)]
    if totals["skipped_steps"] and not totals["steps"]:
        warning = f"NOTHING WAS TRAINED: all {totals['skipped_steps']} optimizer steps were skipped"
        lines.insert(0, f"narrowcast: WARNING: {warning}")
    scale, steps, wall_s = totals["final_scale"], totals["steps"], totals["wall_s"]
    numbers = [
        f"{plural(steps, 'optimizer step')}{' before that' if left_alone else ''}",
        f"{totals['skipped_steps']} skipped",
        "loss scale off" if scale is None else f"final loss scale {scale:g}",
        *([] if wall_s is None else [f"{wall_s:.1f} s"]),
    ]
    lines.append(f"  {', '.join(numbers)}")
    if capture.end is None:
        lines.append("  note: the capture has no end: the run was killed or is still going on")
    notes = [note["text"] for note in capture.of("note") if with_told or not note.get("told")]
    for text in notes + _losses_not_finite(capture):
        lines.append(wrapped(f"note: {text}", "  ", " " * 8, whole_words=True))
    if capture_path:
        lines.append(f"  capture: {capture_path}")
    return "\n".join(lines)


def _policy_words(capture: Capture) -> str:
    """Name the policy where it is more than a format: ``, by my.toml (4 rules)``."""
    policy, rules = capture.start.get("policy", ""), capture.start.get("rules", 0)
    if not rules and not policy.endswith(".toml") and "/" not in policy:
        return ""
    return f", by {policy} ({plural(rules, 'rule')})"


def _losses_not_finite(capture: Capture) -> list[str]:
    """Note each call site whose last loss is not finite: since when, and what to try."""
    found = []
    for site in dict.fromkeys(loss["site"] for loss in capture.of("loss")):
        losses = [loss for loss in capture.of("loss") if loss["site"] == site]
        if math.isfinite(losses[-1]["value"]):
            continue
        finite = [n for n, loss in enumerate(losses) if math.isfinite(loss["value"])]
        first = losses[finite[-1] + 1 if finite else 0]
        found.append(
            f"the loss at {site} is {first['value']} from backward {first['backward']} on: "
            "try --policy fp32 to see whether FP32 has it too"
        )
    return found

"""The table of a comparison, as a terminal and a page show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.capture import ENOUGH_ELEMENTS, PARAMETER_LIMIT, TOTAL_LIMIT
from narrowcast.report._render import terminal_text
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
    worth_a_reason: bool = False  # shown, with the reason, even if neither format has the number


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was judged; ``verdict`` is that of the summary, or ``"not judged"``."""

    name: str
    verdict: str
    numbers: tuple[str, ...]
    reason: str


def comparison_table(summary: Mapping[str, Any], *, color: bool = False) -> str:
    """Format the result of ``narrowcast compare`` as a table of at most 79 columns.

    A missing number is ``-``, with the reason below the table.
    """
    mixed = summary["mixed"]
    head = ["", "FP32", f"mixed, {shortened(mixed['format'] or UNKNOWN, 20)}", "change"]
    shown = rows(summary)
    return terminal_text(
        "comparison.txt",
        color=color,
        found=summary,
        policy="" if mixed["policy"] in _NAMES_OF_FORMATS else mixed["policy"],
        rows=shown,
        what_a_loss_is=what_a_loss_is(summary),
        checks=checks(summary),
        table=table(head, [(row.name, row.fp32, row.mixed, row.change) for row in shown], left=(0, 3)),
    )


# ---- rows


def rows(summary: Mapping[str, Any]) -> list[Row]:
    """List the numbers of a comparison: FP32, mixed precision, and how mixed precision changes them."""
    kind = summary["kind"]
    unit = "forward" if kind == "inference" else "step"
    interval, first = "  95 % in one run", ""
    if len(summary["fp32"]["runs"]) > 1 or len(summary["mixed"]["runs"]) > 1:
        # The times are those of all runs, the counts those of the first one.
        interval, first = "  95 % interval", ", first run"
    tensors = percent_change(summary["memory_ratio"])
    process = percent_change(summary["process_memory_ratio"])
    all_rows = [
        _row(summary, f"{unit}_time_s_median", f"{unit} time, median", milliseconds, _speedup(summary)),
        _row(summary, f"{unit}_time_s_interval", interval, _interval, speed_interval(summary)),
        _row(summary, "peak_tensor_bytes", "peak tensor memory", mebibytes, tensors),
        _row(summary, "peak_resident_bytes", "peak process memory", mebibytes, process),
        *_loss_rows(summary),
    ]

    # A script that only computes takes no steps. Its zeros would look as if something were missing.
    if kind != "inference":
        all_rows.append(_row(summary, "steps", f"optimizer steps{first}", count))
        all_rows.append(_row(summary, "skipped_steps", f"skipped steps{first}", count))
    all_rows.append(_row(summary, "final_scale", f"final loss scale{first}", number))
    all_rows.append(_row(summary, "wall_s", f"wall time{first}", seconds))

    # A number that neither format has is left out, unless its absence needs a reason.
    shown = []
    for row in all_rows:
        is_empty = (row.fp32, row.mixed) in ((UNKNOWN, UNKNOWN), ("", ""))
        if not is_empty or (kind and row.worth_a_reason):
            shown.append(row)
    return shown


def _row(
    summary: Mapping[str, Any], key: str, name: str, show: Callable[[Any], str], change: str = ""
) -> Row:
    fp32, mixed = show(summary["fp32"][key]), show(summary["mixed"][key])
    worth_a_reason = key.endswith(("_time_s_median", "_bytes"))
    reasons: tuple[str, ...] = ()
    if worth_a_reason and summary["kind"] and UNKNOWN in (fp32, mixed):
        reasons = _reasons(summary, key)
    return Row(
        name=name, fp32=fp32, mixed=mixed, change=change, reasons=reasons, worth_a_reason=worth_a_reason
    )


def _reasons(summary: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return why a number is missing, with the format if only one of them lacks it."""
    fp32, mixed = summary["reasons"].get(f"fp32.{key}"), summary["reasons"].get(f"mixed.{key}")
    if fp32 is not None and fp32 == mixed:
        return (fp32,)
    reasons = []
    for side, reason in (("fp32", fp32), ("mixed", mixed)):
        if reason is not None:
            reasons.append(f"{NAMES[side]}: {reason}")
    return tuple(reasons)


def _speedup(summary: Mapping[str, Any]) -> str:
    """Format the speedup, with a question mark if either format may be the faster one."""
    if summary["speedup"] is None:
        return ""
    text = speed_text(summary["speedup"])
    if summary["speedup_interval"] is None:
        return f"{text}?"
    low, high = summary["speedup_interval"]
    return f"{text}?" if low < 1 < high else text


def _interval(interval_s: Sequence[float] | None) -> str:
    if interval_s is None:
        return ""
    low, high = interval_s
    return f"{three_digits(low * 1e3)} to {three_digits(high * 1e3)} ms"


def _loss_rows(summary: Mapping[str, Any]) -> list[Row]:
    """List the final loss of each call site, those that are judged first."""
    fp32_losses, mixed_losses = summary["fp32"]["final_loss"], summary["mixed"]["final_loss"]
    of_sites = summary["loss"]["sites"] if summary["loss"] else {}
    judged = [site for site, of_site in of_sites.items() if of_site["judged"]]
    sites = list(dict.fromkeys([*judged, *fp32_losses, *mixed_losses]))
    loss_rows = []
    for site in sites:
        of_site = of_sites.get(site, {})
        name = "final loss"
        if len(sites) > 1:
            name += f", {site_name(site)}"
        elif of_site.get("seeds"):
            name += f" ({plural(len(of_site['seeds']), 'seed')})"
        fp32, mixed = number(fp32_losses.get(site)), number(mixed_losses.get(site))
        change = ""
        if judged and site not in judged:
            change = "not judged"
        elif of_site.get("difference") == 0 and fp32 == mixed:
            change = "the same"
        loss_rows.append(Row(name=name, fp32=fp32, mixed=mixed, change=change))
    return loss_rows


def what_a_loss_is(summary: Mapping[str, Any]) -> str:
    """Say what the rows of final losses are; empty where there are none."""
    if not summary["fp32"]["final_loss"] and not summary["mixed"]["final_loss"]:
        return ""
    text = "final loss: mean of what was passed to backward() in the last tenth of steps"
    if summary["loss"] and len(summary["loss"]["seeds"]) > 1:
        text += f", over the same {len(summary['loss']['seeds'])} seeds in both formats"
    return text


# ---- what was judged


def checks(summary: Mapping[str, Any]) -> list[Check]:
    """List what was judged: gradients and losses of a script that trains, outputs of one that computes."""
    judged = []
    certificate, output, loss = summary["certificate"], summary["output"], summary["loss"]
    if certificate is not None:
        judged.append(_check("gradients", certificate, _gradient_numbers(certificate)))
    if output is not None:
        numbers = [
            f"relative error {short(output['relative_error'])}",
            f"SQNR {decibels(output['sqnr_db'])}",
            f"{output['calls']} calls",
        ]
        judged.append(_check("output", output, numbers))
    if loss is not None:
        judged.append(_check("loss", loss, _loss_numbers(loss)))
    return judged


def _check(name: str, part: Mapping[str, Any], numbers: Sequence[str]) -> Check:
    # A missing number is left out. The reason says why it is missing.
    known = tuple(words for words in numbers if not words.endswith(f" {UNKNOWN}"))
    return Check(name=name, verdict=part["verdict"], numbers=known, reason=part["reason"] or "")


def _loss_numbers(loss: Mapping[str, Any]) -> list[str]:
    numbers = [
        f"difference {signed(loss['difference'])}",
        f"spread of seeds {short(loss['seed_spread'])}",
    ]
    judged = sum(of_site["judged"] for of_site in loss["sites"].values())
    if judged > 1:
        numbers.append(f"worst of {judged} losses: {site_name(loss['site'])}")
    elif len(loss["sites"]) > 1:
        numbers.append(f"at {site_name(loss['site'])}")
    return numbers


def _gradient_numbers(certificate: Mapping[str, Any]) -> list[str]:
    """Format the errors of gradients with their limits, and why one beyond its limit does not count."""
    key = "error_over_noise"
    limit = f" (limit {TOTAL_LIMIT:g})"
    if certificate[key] is None:
        # Without noise the limit depends on why there is none: the reason says it.
        key, limit = "relative_error", ""
    why = total_exemption(certificate)
    if why is not None:
        limit = f" (beyond {TOTAL_LIMIT:g}, not counted: {why})"
    numbers = [f"{key.replace('_', ' ')} {short(certificate[key])}{limit}"]

    worst = certificate["worst_parameter"]
    if worst is not None:
        text = f"worst {short(worst[key])} in {shortened(worst['name'])}"
        # The certificate keeps only the errors of the worst parameter. ``exemption`` needs the whole entry.
        for parameter in certificate["parameters"]:
            exempt = exemption(parameter, certificate)
            if exempt is not None and parameter["name"] == worst["name"]:
                text += f" (beyond {PARAMETER_LIMIT:g}, not counted: {exempt})"
        numbers.append(text)

    steps = certificate.get("steps", ())
    if len(steps) > 1:
        by_step = [f"{short(step['error_over_noise'])} at {step['at_step']}" for step in steps]
        numbers.append(f"by step: {'; '.join(by_step)}")
    return numbers


def total_exemption(certificate: Mapping[str, Any]) -> str | None:
    """Return why gradients pass although their error over noise is beyond the limit.

    None: it is within the limit, or they do not pass.
    """
    ratio = certificate["error_over_noise"]
    if ratio is None or float(ratio) < TOTAL_LIMIT or certificate["verdict"] != "pass":
        return None
    return f"rounding alone makes a relative error of {short(certificate['relative_error'])}"


def exemption(parameter: Mapping[str, Any], certificate: Mapping[str, Any]) -> str | None:
    """Return why a parameter is not lost although its error over noise is beyond the limit.

    None: it is within the limit, or lost, or not judged.
    """
    if not parameter["judged"] or parameter["lost"]:
        return None
    ratio = parameter["error_over_noise"]
    # NaN is above no limit.
    if ratio is None or not float(ratio) > PARAMETER_LIMIT:
        return None
    if certificate.get("minibatches", 1) == 1:
        # For one minibatch the error is judged against the noise or the gradient, whichever is larger.
        return f"small beside its own gradient: relative error {short(parameter['relative_error'])}"
    if math.prod(parameter["shape"]) < ENOUGH_ELEMENTS:
        return f"fewer than {ENOUGH_ELEMENTS} elements"
    return f"its interval reaches below {PARAMETER_LIMIT:g}"

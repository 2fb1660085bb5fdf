"""What the text table and the page both say of a comparison, row by row, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.report._printable import printable

UNKNOWN = "-"
LIMIT = 0.05
ONE_LIMIT = 0.25
"""Error over noise, and the relative error of outputs, up to which mixed precision passes."""

_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; ``-`` for a number that cannot be had, and ``reasons`` where it matters why."""

    name: str
    fp32: str
    mixed: str
    mixed_is: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was judged: ``verdict`` is ``"pass"``, ``"fail"`` or ``"cannot tell"``."""

    name: str
    verdict: str
    numbers: tuple[str, ...]
    reason: str


def rows(summary: Mapping[str, Any]) -> list[Row]:
    """The table of a comparison: FP32, mixed precision, and what mixed precision is against FP32."""
    ratio, kind = summary["ratio"], summary["kind"]
    speed = times(ratio["speed"], "faster", "slower")
    if is_open(ratio) and speed.startswith(tuple("0123456789")):
        speed += "?"
    timed = "forward_time_s" if kind == "inference" else "step_time_s"
    found = [
        _row(
            summary, f"{timed}_median", f"{timed.removesuffix('_time_s')} time, median", milliseconds, speed
        ),
        _interval_row(summary, f"{timed}_interval"),
        _row(
            summary, "peak_tensor_bytes", "peak tensor memory", mebibytes, percent(ratio["peak_tensor_bytes"])
        ),
        _row(
            summary,
            "peak_resident_bytes",
            "peak process memory",
            mebibytes,
            percent(ratio["peak_resident_bytes"]),
        ),
        *_loss_rows(summary),
        *_step_rows(summary),
        _row(summary, "final_scale", "final loss scale", number),
        _row(summary, "wall_s", "wall time", seconds),
    ]
    worth_a_dash = {f"{timed}_median", "peak_tensor_bytes", "peak_resident_bytes"} if kind else set()
    return [
        replace(row, reasons=_reasons(summary, key) if key in worth_a_dash else ())
        for key, row in found
        if key in worth_a_dash or (row.fp32, row.mixed) not in ((UNKNOWN, UNKNOWN), ("", ""))
    ]


def checks(summary: Mapping[str, Any]) -> list[Check]:
    """What was judged: gradients and losses of a script that trains, outputs of one that computes.

    That mixed precision took no step at all is said first, and only then.
    """
    found = _no_steps(summary)
    certificate, output, loss = summary["certificate"], summary["output"], summary["loss"]
    if certificate is not None:
        said = [f"error over noise {short(certificate['error_over_noise'])} (limit {LIMIT:g})"]
        if certificate["error_over_noise"] is None:
            said = [f"relative error {short(certificate['relative_error'])}"]
        worst = certificate["worst_parameter"]
        if worst is not None:
            by = "relative_error" if certificate["error_over_noise"] is None else "error_over_noise"
            said.append(f"worst {short(worst[by])} in {shortened(worst['name'])}")
        found.append(_check("gradients", certificate, said))
    if output is not None:
        said = [
            f"relative error {short(output['relative_error'])}",
            f"SQNR {decibels(output['sqnr_db'])}",
            f"{output['calls']} calls",
        ]
        found.append(_check("output", output, said))
    if loss is not None:
        said = [f"difference {signed(loss['difference'])}", f"spread of seeds {short(loss['seed_spread'])}"]
        if len(loss["sites"]) > 1:
            said.append(f"worst of {len(loss['sites'])} losses: {site_name(loss['site'])}")
        found.append(_check("loss", loss, said))
    return found


def _no_steps(summary: Mapping[str, Any]) -> list[Check]:
    fp32, mixed = summary["fp32"] or {}, summary["mixed"] or {}
    skipped = mixed.get("skipped_steps")
    if summary["verdict"] != "fail" or not (fp32.get("steps") and skipped) or mixed.get("steps"):
        return []
    reason = "every step in mixed precision was skipped, so nothing was trained"
    return [
        Check(name="steps", verdict="fail", numbers=(f"{count(skipped)} skipped, 0 taken",), reason=reason)
    ]


def _check(name: str, part: Mapping[str, Any], said: Sequence[str]) -> Check:
    known = tuple(words for words in said if not words.endswith(f" {UNKNOWN}"))
    return Check(name=name, verdict=part["verdict"], numbers=known, reason=part["reason"] or "")


def _row(
    summary: Mapping[str, Any], key: str, name: str, show: Callable[[Any], str], mixed_is: str = ""
) -> tuple[str, Row]:
    fp32, mixed = show(summary["fp32"][key]), show(summary["mixed"][key])
    return key, Row(name=name, fp32=fp32, mixed=mixed, mixed_is=mixed_is)


def _reasons(summary: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Why a number is missing; each once, with the format where only one of them lacks it."""
    why = {side: summary["reasons"].get(f"{side}.{key}") for side in ("fp32", "mixed")}
    if why["fp32"] == why["mixed"]:
        return () if why["fp32"] is None else (why["fp32"],)
    names = {"fp32": "FP32", "mixed": "mixed"}
    return tuple(f"{names[side]}: {text}" for side, text in why.items() if text is not None)


def _interval_row(summary: Mapping[str, Any], key: str) -> tuple[str, Row]:
    """The interval in the direction of the median beside it: of what is slower, how many times slower."""
    ratio = summary["ratio"]
    bounds = [float(bound) for bound in ratio["speed_interval"] or ()]
    slower = ratio["speed"] is not None and float(ratio["speed"]) < 1 and not is_open(ratio)
    if slower and all(bound > 0 for bound in bounds):
        bounds = [1 / bound for bound in reversed(bounds)]
    said = " to ".join(f"{_plain(bound, 2)}x" for bound in bounds)
    sides = [_interval(summary[side][key]) for side in ("fp32", "mixed")]
    return key, Row(name="  its interval", fp32=sides[0], mixed=sides[1], mixed_is=said)


def _interval(interval_s: Sequence[float | str] | None) -> str:
    if interval_s is None:
        return ""
    low, high = (_three_digits(float(bound) * 1e3) for bound in interval_s)
    return f"{low} to {high} ms"


def _step_rows(summary: Mapping[str, Any]) -> list[tuple[str, Row]]:
    """None for a script that only computes: zeros would say that something is missing."""
    if summary["kind"] == "inference":
        return []
    return [
        _row(summary, "steps", "optimizer steps", count),
        _row(summary, "skipped_steps", "skipped steps", count),
    ]


def _loss_rows(summary: Mapping[str, Any]) -> list[tuple[str, Row]]:
    losses = [summary[side]["final_loss"] for side in ("fp32", "mixed")]
    sites = list(dict.fromkeys([*losses[0], *losses[1]]))
    found = []
    for site in sites:
        name = "final loss" if len(sites) == 1 else f"final loss, {site_name(site)}"
        fp32, mixed = (number(side.get(site)) for side in losses)
        of_site = (summary["loss"] or {"sites": {}})["sites"].get(site, {})
        said = "the same" if of_site.get("difference") == 0 and fp32 == mixed else ""
        found.append(("final_loss", Row(name=name, fp32=fp32, mixed=mixed, mixed_is=said)))
    return found


def site_name(site: str | None) -> str:
    """The last part of a path and the line: what a person calls a place in a script."""
    return UNKNOWN if site is None else shortened(site.replace("\\", "/").rsplit("/", 1)[-1])


def shortened(text: str, longest: int = _LONGEST_NAME) -> str:
    """``text`` made safe to show, with its middle left out where it is longer than ``longest``."""
    # Cut before as well: a character may become six.
    shown = printable(text if len(text) <= 2 * longest else f"{text[:longest]}...{text[-longest:]}")
    if len(shown) <= longest:
        return shown
    half = (longest - 3) // 2
    return f"{shown[:half]}...{shown[-half:]}"


def count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def seconds(value: float | str | None) -> str:
    return UNKNOWN if value is None else f"{_plain(float(value), 1)} s"


def milliseconds(value: float | str | None) -> str:
    return UNKNOWN if value is None else f"{_three_digits(float(value) * 1e3)} ms"


def mebibytes(value: int | None) -> str:
    if value is None:
        return UNKNOWN
    mib = value / 2**20
    return f"{mib:.1f} MiB" if mib < 9.95 else f"{_plain(mib, 0)} MiB"


def number(value: float | str | None, digits: int = 5) -> str:
    """So many digits; NaN and infinities, which come as text, in words."""
    return UNKNOWN if value is None else f"{float(value):.{digits}g}"


def short(value: float | str | None) -> str:
    """Three digits: more would claim a precision that an error does not have."""
    return number(value, 3)


def signed(value: float | str | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{float(value):+.3g}" if math.isfinite(float(value)) else short(value)


def decibels(value: float | str | None) -> str:
    return UNKNOWN if value is None else f"{float(value):.4g} dB"


def times(value: float | str | None, more: str, less: str) -> str:
    """A ratio of times in words; nothing for one that is not finite and above zero."""
    ratio = math.nan if value is None else float(value)
    if not 0 < ratio < math.inf:
        return ""
    if abs(ratio - 1) < 0.005:
        return "the same"
    return f"{_plain(ratio, 2)}x {more}" if ratio >= 1 else f"{_plain(1 / ratio, 2)}x {less}"


def is_open(ratio: Mapping[str, Any]) -> bool:
    """Whether which format is faster cannot be told: 1 lies within the interval of the ratio."""
    interval = ratio["speed_interval"]
    return bool(interval) and float(interval[0]) < 1 < float(interval[1])


def percent(value: float | str | None) -> str:
    """A ratio of sizes in words; nothing for one that is not finite."""
    ratio = math.nan if value is None else float(value)
    if not math.isfinite(ratio):
        return ""
    change = (ratio - 1) * 100
    return (
        "the same" if abs(change) < 0.5 else f"{_plain(abs(change), 0)} % {'more' if change > 0 else 'less'}"
    )


def _three_digits(value: float) -> str:
    """At least three digits of a time, and not more decimals than two where it is long."""
    return f"{value:.3g}" if value < 1 else _plain(value, 2 if value < 100 else 1)


def _plain(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if abs(value) < 1e9 else f"{value:.3g}"

"""Where the numbers of a page come from: command, versions, devices, settings, date."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from narrowcast.observe.capture import Capture, ComparisonCapture
from narrowcast.report._rows import count, number, seconds, shortened

_LONGEST = 400
_MOST_FACTS = 60

Facts = list[tuple[str, str]]


def of_comparison(comparison: ComparisonCapture) -> Facts:
    """What a comparison was made with, as names and words."""
    start = comparison.own.start
    captures = [run.capture for run in comparison.runs]
    finished = comparison.only("finished")
    steps = "the whole script" if start["steps"] == 0 else f"{start['steps']} each"
    return [
        ("command", command("compare", start)),
        ("started", when(start["started"])),
        ("took", seconds(finished["wall_s"]) if finished else "it did not end"),
        ("policy", shortened(start["policy"], _LONGEST)),
        ("loss scale", shortened(start["loss_scale"] or "as the policy has it", _LONGEST)),
        ("steps", steps),
        (
            "gradients compared",
            f"after {start['at_step']} steps" if start["at_step"] else "before the first step",
        ),
        ("repeats", count(start["repeats"])),
        ("first seed", count(start["seed"])),
        *_of_captures(captures),
    ]


def of_run(capture: Capture, verb: str = "run") -> Facts:
    """What a run was made with, as names and words."""
    start, totals = capture.start, capture.totals()
    return [
        ("command", command(verb, start)),
        ("started", when(start["started"])),
        ("took", seconds(totals["wall_s"]) if capture.end else "it did not end"),
        ("policy", shortened(start["policy"], _LONGEST)),
        ("loss scale", shortened(_word(start.get("loss_scale") or "as the policy has it"), _LONGEST)),
        ("seed", shortened(_word(start.get("seed")), _LONGEST)),
        *_of_captures([capture]),
    ]


def command(verb: str, start: Mapping[str, Any]) -> str:
    """What was typed, as a shell takes it; options that were left out are left out."""
    options = start.get("options")
    known = options if isinstance(options, list) and all(isinstance(word, str) for word in options) else []
    return shortened(f"narrowcast {verb} {shlex.join([*known, *start['argv']][:200])}", _LONGEST)


def when(started: float) -> str:
    """Seconds since 1970 as a date, in UTC."""
    try:
        return datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{number(started)} s since 1970"


def _of_captures(captures: Sequence[Capture]) -> Facts:
    places = [
        f"{d['device_type'][:200]}: {d['format'][:200]} ({d['because'][:1000]})"
        for capture in captures
        for d in capture.of("device")
    ]
    totals = [capture.totals() for capture in captures]
    return [
        *(("device", shortened(place, _LONGEST)) for place in list(dict.fromkeys(places))[:_MOST_FACTS]),
        *_facts("", [t["versions"] for t in totals]),
        *_facts("setting", [t["settings"] for t in totals]),
    ]


def _facts(what: str, found: Sequence[Mapping[str, Any]]) -> Facts:
    """Each name once, with each value that runs had."""
    values: dict[str, dict[str, None]] = {}
    for facts in found:
        for name, value in facts.items():
            values.setdefault(name, {})[_word(value)] = None
    return [
        (f"{what} {shortened(name, 60)}".strip(), shortened(", ".join(list(words)[:9]), _LONGEST))
        for name, words in list(values.items())[:_MOST_FACTS]
    ]


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) < 2**63:
        return str(value)
    if isinstance(value, int | float):
        try:
            return number(value)
        except OverflowError:
            return "more than a float can hold"
    if value is None:
        return "none"
    # What no schema knows may be nested so deep that Python cannot spell it.
    return value[:1000] if isinstance(value, str) else "no plain value"

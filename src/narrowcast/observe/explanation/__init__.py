"""What ``narrowcast explain`` found: read from a capture, and shown as a table without torch."""

from __future__ import annotations

import functools
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from narrowcast.errors import FileError
from narrowcast.observe.capture import Capture, read_capture

_HEADING = "\0"  # begins a heading in the text of the template
Line = tuple[str, bool]
"""Text, and whether it is a heading."""

WIDTH = 79
OUTSIDE, NOTHING, UNLISTED = "outside of modules", "-", "unlisted"
_NOT_IN_MODULES = {"backward": "backward", "optimizer": "optimizer"}
LAYER_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
"""A number that is a part of a path, as the 3 of ``blocks.3.norm``."""
_SCHEMA = 1
_PER_STEP = ("ops", "calls", "casts", "cast_bytes", "moved_bytes", "duration_s")
SILENT = ("view", "no floats")
"""Kinds of sites that compute nothing."""
_MOST_COSTLY = 5
_UNITS = ((2**60, "EiB"), (2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


# ---- numbers


def read_explanation(path: Path) -> Capture:
    """Read ``explain.jsonl``.

    Raises:
        FileError: it is missing, cannot be read, is of something else, or is incomplete.
    """
    capture = read_capture(path)
    if capture.start["kind"] != "explain":
        raise FileError(f"{path} is not the capture of narrowcast explain")
    if not capture.of("watched"):
        raise FileError(f"{path} was cut short: run narrowcast explain again")
    return capture


def explained(capture: Capture) -> dict[str, Any]:
    """Return what a capture of ``narrowcast explain`` shows.

    Returns:
        JSON-ready: ``schema``, ``target``, ``policy``, ``rules``, ``problem`` (a sentence if there are no
        numbers, else null), ``device``, ``format``, ``because`` (why that format), ``unit``, ``steps``,
        ``totals`` (of one step), ``sites``, ``unreached``, ``notes``, ``reasons`` (path of each number that
        is null -> why) and ``versions``. Times and bytes are of one step, shares are of all that was watched.
    """
    watched = capture.of("watched")[-1]
    steps, duration_s = max(1, watched["steps"]), watched["duration_s"]
    totals, reasons = _totals(watched, steps)
    sites = [
        _per_step(site, steps) | {"time_share": _share(site["duration_s"], duration_s)}
        for site in capture.of("site")
    ]
    if not duration_s and sites:
        reasons["sites[].time_share"] = "no time was measured"
    return {
        "schema": _SCHEMA,
        "target": list(capture.start["argv"]),
        "policy": capture.start["policy"],
        "problem": None if sites else "nothing that the script did was seen",
        "because": watched.get("because", "as asked"),
        **{name: watched[name] for name in ("rules", "device", "format", "unit", "steps", "complete")},
        "totals": totals,
        "sites": sites,
        "unreached": [_per_step(rule, steps) for rule in capture.of("unreached")],
        "notes": [note["text"] for note in capture.of("note")],
        "reasons": reasons,
        "versions": watched["versions"],
    }


def _per_step(event: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the fields of an event, sums divided by the number of steps."""
    fields = {name: value for name, value in event.items() if name != "event"}
    for name in fields.keys() & set(_PER_STEP):
        total = fields[name]
        whole = isinstance(total, int) and total % steps == 0
        fields[name] = total // steps if whole else total / steps
    return fields


def _totals(watched: dict[str, Any], steps: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the totals of one step, and why those that are None are."""
    totals = {name: value for name, value in _per_step(watched, steps).items() if name in _PER_STEP} | {
        "cast_share_of_ops": _share(watched["casts"], watched["ops"]),
        "cast_share_of_bytes": _share(watched["cast_bytes"], watched["moved_bytes"]),
        "cast_share_of_time": _share(watched["cast_s"], watched["duration_s"]),
        "product_share_of_time": _share(watched["product_s"], watched["duration_s"]),
        "narrow_share_of_product_time": _share(watched["narrow_product_s"], watched["product_s"]),
    }
    why = {"narrow_share_of_product_time": "no matmul took any time"}
    missing = {name: why.get(name, "nothing ran") for name, value in totals.items() if value is None}
    return totals, {f"totals.{name}": reason for name, reason in missing.items()}


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole else None


# ---- rows


class Columns(NamedTuple):
    """What is shown of calls of one operator; those that are alike are one row."""

    op: str  # with the operators around it: ``"einsum > bmm"``
    inputs: str  # formats
    computes: str  # ``""`` if nothing is cast
    outputs: str
    # The rule, ``"table"``, ``"unlisted"``, ``"asked"`` for a cast by the script, or ``"-"`` if autocast does
    # not decide.
    by: str


def columns_of(site: Mapping[str, Any]) -> Columns:
    """Return what is shown of a site."""
    by = site["rule"] or ("table" if site["listed"] else NOTHING)
    if by == NOTHING and site["because"].startswith("unlisted"):
        by = "asked" if site["kind"] == "cast" else UNLISTED
    return Columns(
        op=" > ".join([*site["within"], site["op"]]),
        inputs="+".join(site["inputs"]) or NOTHING,
        computes=site["computes"] or "",
        outputs="+".join(site["outputs"]) or NOTHING,
        by=by,
    )


@dataclass(slots=True, kw_only=True)
class _Group:
    """A module, or several whose paths differ in numbers alone: ``*`` stands for these."""

    name: str
    paths: int = 1
    # ``calls``, ``casts``, ``cast_bytes`` and ``duration_s`` of one step, in the order of calls
    rows: dict[Columns, Counter[str]] = field(default_factory=dict)


def _grouped(found: Mapping[str, Any], *, every: bool) -> list[_Group]:
    name_of = place_names(found)
    groups: dict[str, _Group] = {}
    for site in found["sites"]:
        if every or site["kind"] not in SILENT:
            name = _NOT_IN_MODULES.get(site["phase"]) or name_of(site) or OUTSIDE
            rows = groups.setdefault(name, _Group(name=name)).rows
            numbers = {name: site[name] for name in ("calls", "casts", "cast_bytes", "duration_s")}
            rows.setdefault(columns_of(site), Counter()).update(numbers)
    if every:
        return list(groups.values())
    layers: dict[Any, _Group] = {}
    for group in groups.values():
        pattern = LAYER_NUMBER.sub("*", group.name)
        first = layers.setdefault((pattern, *group.rows), group)
        if first is not group:
            first.name, first.paths = pattern, first.paths + 1
            for columns, numbers in group.rows.items():
                first.rows[columns].update(numbers)
    return list(layers.values())


def place_names(found: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that names the module of a site: its path, after its model's class if models differ.

    The name is empty outside of modules.
    """
    several = len({site["root"] for site in found["sites"] if site["root"]}) > 1

    def name_of(place: Mapping[str, Any]) -> str:
        root, path = place["root"], place["path"]
        return f"{root}.{path}" if several and path else path or root

    return name_of


# ---- lines


def explained_parts(found: Mapping[str, Any], *, every: bool = False) -> dict[str, Any]:
    """Return what text and page show of what ``explained`` returned, repeated layers together.

    ``every``: each layer alone, also what computes nothing.
    """
    uncalled = [rule["rule"] for rule in found["unreached"] if rule["reason"].endswith(" was not called")]
    unreached = [f"{r['rule']}: {r['reason']}" for r in found["unreached"] if r["rule"] not in uncalled]
    if uncalled:
        unreached.append(f"their operator was not called: {'; '.join(uncalled)}")
    reached = {site["rule"] for site in found["sites"]}
    groups = _grouped(found, every=every)
    return {
        "found": found,
        "groups": groups,
        "costly": _costly(groups),
        "rows": sum(len(group.rows) for group in groups),
        "reached": reached,
        "unreached": unreached,
    }


def _costly(groups: Iterable[_Group]) -> list[tuple[_Group, Columns, Counter[str]]]:
    """Return the rows that take most time, each with its group, the most costly first."""
    rows = [(group, columns, numbers) for group in groups for columns, numbers in group.rows.items()]
    rows.sort(key=lambda row: -row[2]["duration_s"])
    return rows[:_MOST_COSTLY]


def explained_lines(found: Mapping[str, Any], *, whole: bool = True, every: bool = False) -> list[Line]:
    """Return the text of ``explained_parts``: the rows that cost most, and with ``whole`` all others."""
    values = explained_parts(found, every=every) | {"whole": whole or every}
    lines = _template().render(values).rstrip("\n").split("\n")
    return [(line.removeprefix(_HEADING), line.startswith(_HEADING)) for line in lines]


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader  # slow to import

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes_text": bytes_text,
        "count_text": count_text,
        "cut": _cut,
        "heading": lambda text: "\n".join(f"{_HEADING}{line}" for line in text.split("\n")),
        "percent": percent,
        "share_of": lambda part, whole: percent(_share(part, whole)),
        "wrapped": lambda text, first="": "\n".join(wrapped(" ".join(text.split()), first=first)),
    }
    return environment.get_template("table.txt")


def _cut(text: str, longest: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 2]}.."


# ---- words


def count_text(count: float) -> str:
    """Format a number of calls: ``12``, ``1.5``, ``120k``, ``3e8``."""
    if count >= 1e5:
        power = len(f"{count:.0f}") - 1
        return f"{count / 10**power:.0f}e{power}" if power > 5 else f"{count / 1e3:.0f}k"
    if 0 < count < 0.01:
        return "<.01"
    return f"{count:.0f}" if count == int(count) or count >= 100 else f"{count:.2g}"


def bytes_text(count: float) -> str:
    """Format bytes in two digits or more: ``1.2 MiB``."""
    for factor, unit in _UNITS:
        if count >= factor:
            value = count / factor
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"


def percent(share: float | None) -> str:
    """Format ``12 %``, ``<1 %``; ``-`` for what is not known."""
    if share is None:
        return "-"
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def wrapped(text: str, *, first: str = "", then: str | None = None, whole_words: bool = False) -> list[str]:
    """Wrap ``text`` at 79 columns; numbers stay with ``%`` and ``x``; optionally words stay whole."""
    whole = text.replace(" %", "\u00a0%").replace(" x ", "\u00a0x\u00a0")
    lines = textwrap.wrap(
        whole,
        WIDTH,
        initial_indent=first,
        subsequent_indent=f"{first}  " if then is None else then,
        break_long_words=not whole_words,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines]

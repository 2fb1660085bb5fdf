"""What ``narrowcast explain`` found: read from a capture, and shown as a table without torch."""

from __future__ import annotations

import functools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from narrowcast.errors import FileError
from narrowcast.observe.capture import Capture, read_capture

_HEADING = "\0"  # begins a heading in the text of the template
Line = tuple[str, bool]
"""Text, and whether it is a heading."""

WIDTH = 79
OUTSIDE, NOTHING = "outside of modules", "-"
_NOT_IN_MODULES = {"backward": "backward", "optimizer": "optimizer"}
LAYER_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
"""A number that is a part of a path, as the 3 of ``blocks.3.norm``."""
# In a sentence, a number alone is not a part of a path.
_NUMBER_INSIDE = re.compile(r"(?<=\.)\d+(?=\.|\b)")
_SCHEMA = 1
_PER_STEP = ("ops", "calls", "count", "casts", "cast_bytes", "moved_bytes", "duration_s")
_SILENT = ("view", "no floats")
_MOST_ROWS = 60
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
        numbers, else null), ``device``, ``format``, ``unit``, ``steps``, ``totals`` (of one step), ``sites``,
        ``round_trips``, ``unreached``, ``notes``, ``reasons`` (path of each number that is null -> why) and
        ``versions``. Times and bytes are of one step, shares are of all that was watched.
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
        **{name: watched[name] for name in ("rules", "device", "format", "unit", "steps", "complete")},
        "totals": totals,
        "sites": sites,
        "round_trips": [_per_step(trip, steps) for trip in capture.of("round trip")],
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
    """What the table shows of calls of one operator; those that are alike are one row.

    Attributes:
        op: with the operator around it: ``"einsum > bmm"``.
        inputs, computes, outputs: formats; ``computes`` is ``""`` if nothing is cast.
        by: ``"table"``, ``"rule 2"``, ``"unlisted"``, ``"asked"`` for a cast by the script, or ``"-"`` if
            autocast does not decide.
    """

    op: str
    inputs: str
    computes: str
    outputs: str
    by: str


@dataclass(slots=True, kw_only=True)
class Group:
    """A module, or several whose paths differ in numbers alone, with its rows.

    Attributes:
        name: its path, ``*`` for numbers that differ; the class of the model for the model itself.
        paths: how many modules.
        rows: ``calls``, ``casts``, ``cast_bytes`` and ``duration_s`` of one step, in the order of calls.
    """

    name: str
    paths: int = 1
    rows: dict[Columns, Counter[str]] = field(default_factory=dict)


def grouped(found: Mapping[str, Any], *, every: bool = False) -> list[Group]:
    """Return the rows of a table.

    Args:
        found: what ``explained`` returned.
        every: each layer alone, also what computes nothing; else repeated layers together.
    """
    sites = [site for site in found["sites"] if every or site["kind"] not in _SILENT]
    several = has_several_models(found)
    rules = {rule: f"rule {number}" for number, rule in enumerate(rules_of(sites), start=1)}
    groups: dict[str, Group] = {}
    for site in sites:
        name = _NOT_IN_MODULES.get(site["phase"]) or place_name(site, several=several) or OUTSIDE
        rows = groups.setdefault(name, Group(name=name)).rows
        numbers = {name: site[name] for name in ("calls", "casts", "cast_bytes", "duration_s")}
        rows.setdefault(_columns(site, rules), Counter()).update(numbers)
    if every:
        return list(groups.values())
    layers: dict[Any, Group] = {}
    for group in groups.values():
        pattern = LAYER_NUMBER.sub("*", group.name)
        first = layers.setdefault((pattern, *group.rows), group)
        if first is not group:
            first.name, first.paths = pattern, first.paths + 1
            for columns, numbers in group.rows.items():
                first.rows[columns].update(numbers)
    return list(layers.values())


def _columns(site: Mapping[str, Any], rules: Mapping[str, str]) -> Columns:
    if site["rule"] is not None:
        by = rules[site["rule"]]
    elif site["phase"] in _NOT_IN_MODULES:
        by = NOTHING
    elif site["listed"]:
        by = "table"
    elif site["because"].startswith("unlisted"):
        by = "asked" if site["kind"] == "cast" else "unlisted"
    else:
        by = NOTHING
    return Columns(
        op=" > ".join([*site["within"][-1:], site["op"]]),
        inputs="+".join(site["inputs"]) or NOTHING,
        computes="fp8" if (site["computes"] or "").startswith("fp8") else site["computes"] or "",
        outputs="+".join(site["outputs"]) or NOTHING,
        by=by,
    )


def has_several_models(found: Mapping[str, Any]) -> bool:
    """Return whether paths need the class of their model to be told apart."""
    return len({site["root"] for site in found["sites"] if site["root"]}) > 1


def place_name(place: Mapping[str, Any], *, several: bool) -> str:
    """Return the path of a module, after its model's class if there are ``several``; empty outside."""
    root, path = place["root"], place["path"]
    return f"{root}.{path}" if several and path else path or root


def rules_of(sites: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the rules that decided about a site, in the order in which they did first."""
    return list(dict.fromkeys(site["rule"] for site in sites if site["rule"] is not None))


# ---- lines


def explained_lines(found: Mapping[str, Any], *, every: bool = False) -> list[Line]:
    """Return the lines of a table.

    Args:
        found: what ``explained`` returned.
        every: each layer alone, also what computes nothing; else repeated layers together.
    """
    groups = grouped(found, every=every)
    uncalled = [rule["rule"] for rule in found["unreached"] if rule["reason"].endswith(" was not called")]
    unreached = [f"{r['rule']}: {r['reason']}" for r in found["unreached"] if r["rule"] not in uncalled]
    if uncalled:
        unreached.append(f"their operator was not called: {'; '.join(uncalled)}")
    text = _template().render(
        found=found,
        left_out=0 if every else _shorten(groups),
        groups=groups,
        rules=rules_of(found["sites"]),
        round_trips=round_trips_in_words(found),
        unreached=unreached,
    )
    lines = text.rstrip("\n").split("\n")
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


def _shorten(groups: list[Group]) -> int:
    """Leave out the rows that took the least time if there are too many; return how many."""
    times = sorted((row["duration_s"] for group in groups for row in group.rows.values()), reverse=True)
    if len(times) <= _MOST_ROWS:
        return 0
    least = times[_MOST_ROWS - 1]
    for group in groups:
        group.rows = {columns: row for columns, row in group.rows.items() if row["duration_s"] >= least}
    groups[:] = [group for group in groups if group.rows]
    return len(times) - sum(len(group.rows) for group in groups)


def round_trips_in_words(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each round trip, repeated layers together, the most bytes first."""
    several = has_several_models(found)

    def called(place: Mapping[str, str]) -> str:
        name = place_name(place, several=several)
        if place["phase"] in _NOT_IN_MODULES:
            name = f"the {place['phase']}"
        return f"{place['op']} {f'in {name}' if name else OUTSIDE}"

    alike: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for trip in found["round_trips"]:
        words = f"{' > '.join(trip['formats'])}: {called(trip['first'])}, then {called(trip['second'])}"
        alike.setdefault(_NUMBER_INSIDE.sub("*", words), []).append((words, trip))
    sentences = []
    for pattern, same in alike.items():
        count, moved = (sum(trip[name] for _, trip in same) for name in ("count", "moved_bytes"))
        words = pattern if len(same) > 1 else same[0][0]
        times = f"{count_text(count)} time{'s' * (count != 1)}"
        sentences.append((moved, f"{words}: {times}, {bytes_text(moved)}"))
    return [sentence for _, sentence in sorted(sentences, key=lambda each: -each[0])]


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

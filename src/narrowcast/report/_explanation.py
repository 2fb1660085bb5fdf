"""What ``narrowcast explain`` found: read from a capture, as numbers and rows for its text and its page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from narrowcast.capture import Capture, read_capture
from narrowcast.errors import FileError

OUTSIDE, NOTHING, UNLISTED = "outside of modules", "-", "unlisted"
LAYER_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
"""A number that is a part of a path, as the 3 of ``blocks.3.norm``."""
SILENT = ("view", "no floats")
"""Kinds of sites that compute nothing."""

_SCHEMA = 1
# Phase -> the name of its group. Calls in these phases belong to no module; those in other phases are grouped
# by their module.
_NOT_IN_MODULES = {"backward": "backward", "optimizer": "optimizer"}
# Fields of events that are sums over all steps.
_PER_STEP = ("ops", "calls", "casts", "cast_bytes", "moved_bytes", "duration_s")
# Those of them that a row adds up.
_OF_A_ROW = ("calls", "casts", "cast_bytes", "duration_s")
_MOST_COSTLY = 5


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
        ``complete`` (false: the script ended within the first step), ``totals`` (of one step), ``sites``,
        ``unreached``, ``notes``, ``reasons`` (path of each number that is null -> why) and ``versions``.
        Counts, times and bytes are of one step, shares are of all that was watched.
    """
    watched = capture.of("watched")[-1]
    steps, duration_s = max(1, watched["steps"]), watched["duration_s"]
    totals, reasons = _totals(watched, steps)

    sites = []
    for event in capture.of("site"):
        sites.append(_per_step(event, steps) | {"time_share": share_of(event["duration_s"], duration_s)})
    if sites and not duration_s:
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
    fields = dict(event)
    del fields["event"]
    for name in fields.keys() & set(_PER_STEP):
        total = fields[name]
        # Counts stay whole numbers where every step had as many.
        if isinstance(total, int) and total % steps == 0:
            fields[name] = total // steps
        else:
            fields[name] = total / steps
    return fields


def _totals(watched: dict[str, Any], steps: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the totals of one step, and the reason for each that is None."""
    of_step = _per_step(watched, steps)
    totals = {name: of_step[name] for name in _PER_STEP if name in of_step}
    totals |= {
        "cast_share_of_ops": share_of(watched["casts"], watched["ops"]),
        "cast_share_of_bytes": share_of(watched["cast_bytes"], watched["moved_bytes"]),
        "cast_share_of_time": share_of(watched["cast_s"], watched["duration_s"]),
        "product_share_of_time": share_of(watched["product_s"], watched["duration_s"]),
        "narrow_share_of_product_time": share_of(watched["narrow_product_s"], watched["product_s"]),
    }
    reasons = {}
    for name, value in totals.items():
        if value is None:
            reasons[f"totals.{name}"] = "nothing ran"
    if totals["narrow_share_of_product_time"] is None:
        reasons["totals.narrow_share_of_product_time"] = "no matmul took any time"
    return totals, reasons


def share_of(part: float, whole: float) -> float | None:
    """Divide; None where nothing was measured."""
    if not whole:
        return None
    # Each time is a rounded sum of its own, so a part may be a little larger than the whole.
    return min(1.0, part / whole)


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
    return Columns(
        op=" > ".join([*site["within"], site["op"]]),
        inputs="+".join(site["inputs"]) or NOTHING,
        computes=site["computes"] or "",
        outputs="+".join(site["outputs"]) or NOTHING,
        by=_decided_by(site),
    )


def _decided_by(site: Mapping[str, Any]) -> str:
    if site["rule"]:
        return str(site["rule"])
    if site["listed"]:
        return "table"
    # Autocast does not decide the other calls, such as those in the backward pass or outside of every region.
    if not site["because"].startswith("unlisted"):
        return NOTHING
    # An unlisted cast runs because the script asks for it.
    return "asked" if site["kind"] == "cast" else UNLISTED


@dataclass(slots=True, kw_only=True)
class Group:
    """A module, or several whose paths differ in numbers alone: ``*`` stands for these in the name."""

    name: str
    paths: int = 1  # how many modules it stands for
    # In the order of calls; ``calls``, ``casts``, ``cast_bytes`` and ``duration_s`` are of one step.
    rows: dict[Columns, Counter[str]] = field(default_factory=dict)


Row = tuple[Group, Columns, "Counter[str]"]


def explained_parts(found: Mapping[str, Any], *, every: bool = False) -> dict[str, Any]:
    """Return what text and page show of ``found``, which ``explained`` returned; repeated layers together.

    With ``every`` each layer is alone, and calls that compute nothing are shown too.
    """
    groups = _groups_of_modules(found, every=every)
    if not every:
        groups = _layers_together(groups)
    return {
        "found": found,
        "groups": groups,
        "costly": _most_costly(groups),
        "rows": sum(len(group.rows) for group in groups),
        "reached": {site["rule"] for site in found["sites"]},
        "unreached": _unreached(found),
    }


def _groups_of_modules(found: Mapping[str, Any], *, every: bool) -> list[Group]:
    name_of = place_names(found)
    groups: dict[str, Group] = {}
    for site in found["sites"]:
        if site["kind"] in SILENT and not every:
            continue
        name = _NOT_IN_MODULES.get(site["phase"]) or name_of(site) or OUTSIDE
        group = groups.setdefault(name, Group(name=name))
        row = group.rows.setdefault(columns_of(site), Counter())
        for number in _OF_A_ROW:
            row[number] += site[number]
    return list(groups.values())


def _layers_together(groups: Iterable[Group]) -> list[Group]:
    """Make one group of modules that have the same rows, and paths that differ in numbers alone.

    The numbers of the others are added to the first group of each kind, which is changed in place.
    """
    layers: dict[Any, Group] = {}
    for group in groups:
        pattern = LAYER_NUMBER.sub("*", group.name)
        # The keys of ``rows`` are the columns: rows are the same if these are, whatever their numbers.
        first = layers.setdefault((pattern, *group.rows), group)
        if first is group:  # no group before it has this pattern and these rows
            continue
        first.name = pattern
        first.paths += 1
        for columns, numbers in group.rows.items():
            first.rows[columns].update(numbers)
    return list(layers.values())


def _most_costly(groups: Iterable[Group]) -> list[Row]:
    rows: list[Row] = []
    for group in groups:
        for columns, numbers in group.rows.items():
            rows.append((group, columns, numbers))
    rows.sort(key=lambda row: -row[2]["duration_s"])
    return rows[:_MOST_COSTLY]


def _unreached(found: Mapping[str, Any]) -> list[str]:
    """Say which rules no call reached; those whose operator was not called at all in one line."""
    sentences, uncalled = [], []
    for rule in found["unreached"]:
        if rule["reason"].endswith(" was not called"):
            uncalled.append(rule["rule"])
        else:
            sentences.append(f"{rule['rule']}: {rule['reason']}")
    if uncalled:
        sentences.append(f"their operator was not called: {'; '.join(uncalled)}")
    return sentences


def place_names(found: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that names the module of a site: its path, after its model's class if models differ.

    The name is empty outside of modules.
    """
    models = {site["root"] for site in found["sites"]} - {""}

    def name_of(site: Mapping[str, Any]) -> str:
        model, path = site["root"], site["path"]
        if path and len(models) > 1:
            return f"{model}.{path}"
        return str(path or model)

    return name_of


# ---- words


def count_text(count: float) -> str:
    """Format a number of calls: ``12``, ``1.5``, ``120k``, ``3e8``."""
    if count >= 1e6:
        return f"{count:.0e}".replace("e+0", "e").replace("e+", "e")
    if count >= 1e5:
        return f"{count / 1e3:.0f}k"
    if 0 < count < 0.01:
        return "<.01"
    # From 99.5 on, two digits would be written "1e+02".
    if count == int(count) or count >= 99.5:
        return f"{count:.0f}"
    return f"{count:.2g}"


def percent(share: float | None) -> str:
    """Format ``12 %``, ``<1 %``; ``-`` for what is not known."""
    if share is None:
        return "-"
    return "<1 %" if 0 < share <= 0.005 else f"{share * 100:.0f} %"

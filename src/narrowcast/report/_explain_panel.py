"""What ran in which format as a panel of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import FileError
from narrowcast.observe.capture import EXPLANATION
from narrowcast.observe.explanation import (
    Group,
    OpRow,
    count_text,
    explained,
    grouped,
    odd_shapes_in_words,
    percent,
    read_explanation,
    round_trips_in_words,
    rules_of,
    size_text,
)
from narrowcast.report._text import shortened, when

_MOST_SITES = 3_000
_MOST_LISTED = 40
_LONGEST = 120
_BY = {
    "table": "PyTorch's table",
    "unlisted": "unlisted",
    "asked": "asked for",
    "-": "no say",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What the template puts in; every text is escaped there.

    Attributes:
        problem: why there is nothing else; empty where there is.
        sentence: what was watched.
        tiles: name and value of each total.
        groups: of the table; those of ``more`` are folded.
        more: backward, the optimizer, and what ran outside of modules.
        every: each site on its own; ``left_out`` of them are in the capture only.
        rules: number and text of each rule that decided.
        trips, shapes, unreached, notes: sentences.
    """

    problem: str = ""
    sentence: str = ""
    tiles: tuple[tuple[str, str], ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    more: tuple[dict[str, Any], ...] = ()
    every: tuple[dict[str, Any], ...] = ()
    left_out: int = 0
    rules: tuple[tuple[str, str], ...] = ()
    trips: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def panel_of(folder: Path) -> Panel | None:
    """The panel of the capture of ``narrowcast explain`` in ``folder``; None where there is none."""
    try:
        if not (folder / EXPLANATION).is_file():
            return None
        capture = read_explanation(folder / EXPLANATION)
        return panel(explained(capture), started=when(capture.start["started"]))
    except (FileError, OSError) as error:
        return Panel(problem=shortened(str(error), 400))


def panel(found: Mapping[str, Any], *, started: str) -> Panel:
    """The panel of what ``observe.explained`` returned, of a script that was ``started`` then.

    In the folder of a comparison it is of another run, which the date tells.
    """
    if found["problem"] is not None:
        return Panel(problem=found["problem"])
    unit, totals = found["unit"], found["totals"]
    names = {rule: f"rule {number}" for number, rule in enumerate(rules_of(found["sites"]), start=1)}
    rows = grouped(found)
    longest = max((row.time_share or 0.0 for group in rows for row in group.rows), default=0.0) or 1.0
    groups = [_shown(group, longest) for group in rows]
    sites = grouped(found, every=True)
    kept, left_out = _first(sites, _MOST_SITES)
    folded = ("backward", "optimizer", "outside of modules")
    return Panel(
        sentence=(
            f"{found['format']} on {found['device']}, by the policy {shortened(found['policy'], 60)}; "
            f"{found['steps']} {unit}{'s' * (found['steps'] != 1)} watched, "
            f"from {started} on. Numbers are of one {unit}."
        ),
        tiles=(
            ("casts, of all operations", percent(totals["cast_share_of_ops"])),
            ("casts, of all bytes moved", percent(totals["cast_share_of_bytes"])),
            ("casts, of the time", percent(totals["cast_share_of_time"])),
            ("products, of the time", percent(totals["product_share_of_time"])),
            ("product time narrower than fp32", percent(totals["narrow_share_of_product_time"])),
        ),
        groups=tuple(group for group in groups if group["name"] not in folded),
        more=tuple(group for group in groups if group["name"] in folded),
        every=tuple(_shown(group, longest) for group in kept),
        left_out=left_out,
        rules=tuple((number, shortened(rule, 400)) for rule, number in names.items()),
        trips=_listed(round_trips_in_words(found), _trip),
        shapes=_listed(odd_shapes_in_words(found), _shape),
        unreached=_listed(found["unreached"], lambda rule: f"{rule['rule']}: {rule['reason']}"),
        notes=tuple(shortened(note, 2_000) for note in found["notes"][:_MOST_LISTED]),
    )


def _first(groups: Sequence[Group], most: int) -> tuple[list[Group], int]:
    """Groups with at most so many rows together, and how many rows more there are."""
    kept, count = [], 0
    for group in groups:
        if count + len(group.rows) > most:
            break
        kept.append(group)
        count += len(group.rows)
    return kept, sum(len(group.rows) for group in groups) - count


def _shown(group: Group, longest: float) -> dict[str, Any]:
    times = f" \u00d7 {group.paths}" if group.paths > 1 else ""
    share = sum(row.time_share or 0.0 for row in group.rows)
    return {
        "name": shortened(group.name, _LONGEST),
        "times": times,
        "rows": [_row(row, longest) for row in group.rows],
        "time": percent(share),
        "count": len(group.rows),
    }


def _row(row: OpRow, longest: float) -> dict[str, Any]:
    return {
        "op": shortened(row.op, _LONGEST),
        "calls": count_text(row.calls),
        "inputs": shortened(row.inputs, 40),
        "computes": shortened(row.computes, 20),
        "outputs": shortened(row.outputs, 40),
        "by": _BY.get(row.by, row.by),
        "casts": f"{size_text(row.cast_bytes)}" if row.casts else "",
        "time": percent(row.time_share),
        "share": round(100 * min(1.0, (row.time_share or 0.0) / longest), 2),
    }


def _listed(found: Sequence[Mapping[str, Any]], sentence: Any) -> tuple[str, ...]:
    said = [shortened(sentence(one), 400) for one in found[:_MOST_LISTED]]
    more = len(found) - len(said)
    return (*said, *([f"and {more} more, in the capture"] if more else []))


def _trip(trip: Mapping[str, Any]) -> str:
    return f"{trip['words']}; {count_text(trip['count'])} \u00d7, {size_text(trip['moved_bytes'])}"


def _shape(shape: Mapping[str, Any]) -> str:
    return f"{percent(shape['product_time_share'])} of the product time: {shape['words']}"

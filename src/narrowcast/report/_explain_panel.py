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
    bytes_text,
    count_text,
    explained,
    grouped,
    percent,
    read_explanation,
    round_trips_in_words,
    rules_of,
)
from narrowcast.report._text import shortened, when

_MOST_SITES = 3_000
_MOST_LISTED = 40
_LONGEST = 120
_BY = {"table": "PyTorch's table", "asked": "asked for", "-": "not decided"}
_FOLDED = ("backward", "optimizer", "outside of modules")
_TILES = {
    "cast_share_of_ops": "casts, of all operations",
    "cast_share_of_bytes": "casts, of all bytes moved",
    "cast_share_of_time": "casts, of the time",
    "product_share_of_time": "products, of the time",
    "narrow_share_of_product_time": "product time narrower than fp32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What the template shows; it escapes every text.

    Attributes:
        problem: why there is nothing else, or empty.
        sentence: what was watched.
        tiles: name and value of each total.
        groups: of the table; those of ``more`` are folded.
        more: backward, the optimizer, and what ran outside of modules.
        every: each site on its own; ``left_out`` more are in the capture only.
        rules: number and text of each rule that decided.
        trips, unreached, notes: sentences.
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
    unreached: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def panel_of(folder: Path) -> Panel | None:
    """Return the panel of the capture of ``narrowcast explain`` in ``folder``, or None."""
    try:
        if not (folder / EXPLANATION).is_file():
            return None
        capture = read_explanation(folder / EXPLANATION)
    except (FileError, OSError) as error:
        return Panel(problem=shortened(str(error), 400))
    found = explained(capture)
    if found["problem"] is not None:
        return Panel(problem=found["problem"])
    rows = grouped(found)
    longest = max((row.time_share or 0.0 for group in rows for row in group.rows), default=0.0) or 1.0
    groups = [_shown(group, longest) for group in rows]
    every = grouped(found, every=True)
    while sum(len(group.rows) for group in every) > _MOST_SITES:
        every.pop()
    rules = [(f"rule {n}", shortened(rule, 400)) for n, rule in enumerate(rules_of(found["sites"]), start=1)]
    # In the folder of a comparison it is of another run: the date tells.
    sentence = (
        f"{found['format']} on {found['device']}, by the policy {shortened(found['policy'], 60)}; "
        f"{found['steps']} {found['unit']}{'s' * (found['steps'] != 1)} watched, "
        f"from {when(capture.start['started'])} on. Numbers are of one {found['unit']}."
    )
    return Panel(
        sentence=sentence,
        tiles=tuple((words, percent(found["totals"][name])) for name, words in _TILES.items()),
        groups=tuple(group for group in groups if group["name"] not in _FOLDED),
        more=tuple(group for group in groups if group["name"] in _FOLDED),
        every=tuple(_shown(group, longest) for group in every),
        left_out=len(found["sites"]) - sum(len(group.rows) for group in every),
        rules=tuple(rules),
        trips=_listed(round_trips_in_words(found)),
        unreached=_listed([f"{rule['rule']}: {rule['reason']}" for rule in found["unreached"]]),
        notes=tuple(shortened(note, 2_000) for note in found["notes"][:_MOST_LISTED]),
    )


def _shown(group: Group, longest: float) -> dict[str, Any]:
    rows: list[Mapping[str, Any]] = [
        {
            "op": shortened(row.op, _LONGEST),
            "calls": count_text(row.calls),
            "inputs": shortened(row.inputs, 40),
            "computes": shortened(row.computes, 20),
            "outputs": shortened(row.outputs, 40),
            "by": _BY.get(row.by, row.by),
            "casts": bytes_text(row.cast_bytes) if row.casts else "",
            "time": percent(row.time_share),
            "share": round(100 * min(1.0, (row.time_share or 0.0) / longest), 2),
        }
        for row in group.rows
    ]
    return {
        "name": shortened(group.name, _LONGEST),
        "times": f" \u00d7 {group.paths}" if group.paths > 1 else "",
        "rows": rows,
        "time": percent(sum(row.time_share or 0.0 for row in group.rows)),
    }


def _listed(sentences: Sequence[str]) -> tuple[str, ...]:
    said = [shortened(sentence.strip(), 400) for sentence in sentences[:_MOST_LISTED]]
    more = len(sentences) - len(said)
    return (*said, *([f"and {more} more, in the capture"] if more else []))

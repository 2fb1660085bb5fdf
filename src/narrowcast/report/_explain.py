"""What ``narrowcast explain`` shows: its text, its part of a page, and where two policies or locks differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.capture import EXPLANATION
from narrowcast.errors import FileError
from narrowcast.report._explanation import (
    LAYER_NUMBER,
    OUTSIDE,
    explained,
    explained_parts,
    read_explanation,
)
from narrowcast.report._lock import Difference, Lock, facts_changed
from narrowcast.report._render import terminal_text
from narrowcast.report._text import shortened

_MOST_DIFFERENCES = 40
_MOST_LINES = 400


def explain_text(
    found: Mapping[str, Any], *, whole: bool = False, every: bool = False, color: bool = False
) -> str:
    """Return what ``narrowcast explain`` found in lines of at most 79 columns.

    Shows the rows that cost most, with ``whole`` all rows. With ``every``, repeated layers have rows of their
    own, and calls that compute nothing are shown too.
    """
    parts = explained_parts(found, every=every)
    return terminal_text("explain.txt", color=color, whole=whole or every, **parts)


def explain_panel(folder: Path) -> dict[str, Any] | None:
    """Return what a page shows of the capture of ``narrowcast explain`` in ``folder``, or None without one.

    ``problem`` says why there are no numbers. ``lines`` and ``costly`` are lines of a table: group, columns
    and numbers. A heading has only the group. ``more_lines`` counts the lines that are left out.
    """
    path = folder / EXPLANATION
    if not path.is_file():
        return None
    try:
        capture = read_explanation(path)
    except FileError as error:
        return {"problem": shortened(str(error), 400)}
    found = explained(capture)
    parts = explained_parts(found)

    costly: list[tuple[Any, ...]] = []
    for group, columns, numbers in parts["costly"]:
        costly += [(group, None, None), (group, columns, numbers)]
    lines: list[tuple[Any, ...]] = []
    for group in parts["groups"]:
        lines.append((group, None, None))
        for columns, numbers in group.rows.items():
            lines.append((group, columns, numbers))
    return parts | {
        "problem": found["problem"],
        "started": capture.start["started"],
        "costly": costly,
        "lines": lines[:_MOST_LINES],
        "more_lines": max(0, len(lines) - _MOST_LINES),
    }


# ---- differences


def policies_text(
    first: Mapping[str, Any], second: Mapping[str, Any], found: Sequence[Difference], *, every: bool = False
) -> str:
    """Return where two policies decide differently about a script, and what each costs."""
    names = (first["policy"], second["policy"])
    width = max(map(len, names))
    return terminal_text(
        "policies.txt",
        target=first["target"],
        policies=names,
        costs=[(first["policy"].ljust(width), first), (second["policy"].ljust(width), second)],
        **_difference_values(found, names, every=every),
    )


def check_text(before: Lock, after: Lock, found: Sequence[Difference], path: str, *, every: bool) -> str:
    """Return where the decisions differ from those in the lock file ``path``."""
    return terminal_text(
        "check.txt",
        path=path,
        before=before,
        around=facts_changed(before, after),
        **_difference_values(found, ("locked", "now"), every=every),
    )


def _difference_values(found: Sequence[Difference], sides: tuple[str, str], *, every: bool) -> dict[str, Any]:
    """Return what the template of differences shows, repeated layers together unless ``every``."""
    together: dict[tuple[Any, ...], list[Difference]] = {}
    for difference in found:
        place = difference.module
        if not every:
            place = LAYER_NUMBER.sub("*", place)
        words = (_words(difference.before), _words(difference.after))
        together.setdefault((place, difference.op, words), []).append(difference)

    # Pad both names to one width, so that the text after them is aligned.
    width = max(map(len, sides))
    sides = (sides[0].ljust(width), sides[1].ljust(width))
    groups = []
    for (place, op, words), same in together.items():
        where = same[0].module or OUTSIDE
        if len(same) > 1:
            where = f"{place}  x {len(same)}"
        before, after = zip(sides, words, strict=True)
        groups.append({"where": where, "op": op, "sides": (before, after)})
    most = len(groups) if every else _MOST_DIFFERENCES
    return {"count": len(found), "groups": groups[:most], "left_out": max(0, len(groups) - most)}


def _words(decided: Iterable[Any]) -> tuple[str, ...]:
    return tuple(site.words for site in decided) or ("not called",)

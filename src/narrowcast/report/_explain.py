"""What ``narrowcast explain`` says: what ran in which format, by which rule, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from narrowcast.observe.explanation import count_text, explained_lines, percent, size_text, wrapped
from narrowcast.report._explain_differences import Difference, differences_text
from narrowcast.report._explain_lock import Lock, facts_changed
from narrowcast.report._text import printable

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def explain_text(found: Mapping[str, Any], *, every: bool = False, color: bool = False) -> str:
    """The result of ``narrowcast explain`` in lines of at most 79 columns.

    Args:
        found: what ``observe.explained`` or ``verify.explain_script`` returned.
        every: each site alone, instead of repeated layers together.
        color: whether to use bold type.
    """
    lines = [(printable(text), heading) for text, heading in explained_lines(found, every=every)]
    return "\n".join(f"{_BOLD}{text}{_PLAIN}" if heading and color else text for text, heading in lines)


def policies_text(
    one: Mapping[str, Any], other: Mapping[str, Any], found: Sequence[Difference], *, every: bool = False
) -> str:
    """Where two policies decide otherwise about a script, and what either costs."""
    names = [printable(each["policy"]) for each in (one, other)]
    target = printable(" ".join(one["target"]))
    if found:
        what = f"differ about {len(found)} operator{'s' * (len(found) != 1)} in its modules"
    else:
        what = "decide the same about every operator that it called"
    lines = wrapped(f"{target}: the policies {names[0]} and {names[1]} {what}.")
    if found:
        lines += ["", differences_text(found, *names, every=every), ""]
    width = max(map(len, names))
    for name, each in zip(names, (one, other), strict=True):
        totals = each["totals"]
        lines += wrapped(
            f"{name:<{width}}  {count_text(totals['casts'])} casts a {each['unit']}, "
            f"{size_text(totals['cast_bytes'])}; {percent(totals['narrow_share_of_product_time'])} of the "
            "product time narrower than fp32"
        )
    return "\n".join(lines)


def check_text(before: Lock, after: Lock, found: Sequence[Difference], path: str, *, every: bool) -> str:
    """What became of the decisions in a lock file."""
    around = facts_changed(before, after)
    name = printable(path)
    said = f" ({'; '.join(around)})" if around else ""
    if not found:
        return "\n".join(wrapped(f"{name}: all {len(before.sites)} decisions are as they were{said}."))
    count = f"{len(found)} decision{'s' * (len(found) != 1)}"
    lines = wrapped(f"{name}: {count} differ{'s' * (len(found) == 1)}{said}.")
    lines += ["", differences_text(found, "locked", "now", every=every), ""]
    lines += wrapped("If this is meant: write the lock anew with narrowcast explain --lock.")
    return "\n".join(lines)

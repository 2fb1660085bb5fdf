"""Unified diffs of long files: ``difflib`` between lines that stand once in both, which cannot be mistaken.

``difflib`` alone takes minutes where thousands of lines are alike.
Source: Bram Cohen's patience diff, https://bramcohen.livejournal.com/73318.html
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import Match, SequenceMatcher

_CONTEXT = 3


def unified_diff(before: Sequence[str], after: Sequence[str], path: str) -> Iterator[str]:
    """The lines of a unified diff, as ``difflib.unified_diff`` with ``path`` for both names.

    Args:
        before, after: lines with their ends.
    """
    groups = list(_Anchored(before, after).get_grouped_opcodes(_CONTEXT))
    if groups:
        yield f"--- {path}\n"
        yield f"+++ {path}\n"
    for group in groups:
        old, new = (group[0][1], group[-1][2]), (group[0][3], group[-1][4])
        yield f"@@ -{_range(*old)} +{_range(*new)} @@\n"
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                yield from (f" {line}" for line in before[old_start:old_end])
                continue
            yield from (f"-{line}" for line in before[old_start:old_end])
            yield from (f"+{line}" for line in after[new_start:new_end])


def _range(start: int, end: int) -> str:
    """As POSIX has it: from 1, and an empty one at the line before."""
    length = end - start
    if length == 1:
        return str(start + 1)
    return f"{start + bool(length)},{length}"


class _Anchored(SequenceMatcher[str]):
    """What matches is looked for between lines that stand once in both texts, and in the same order."""

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__(None, (), ())
        self.a, self.b = before, after

    def get_matching_blocks(self) -> list[Match]:
        found: list[Match] = []
        old = new = 0
        for old_end, new_end in [*_anchors(self.a, self.b), (len(self.a), len(self.b))]:
            between = SequenceMatcher(None, self.a[old:old_end], self.b[new:new_end], autojunk=False)
            for match in between.get_matching_blocks()[:-1]:
                found.append(Match(old + match.a, new + match.b, match.size))
            found.append(Match(old_end, new_end, 1))
            old, new = old_end + 1, new_end + 1
        return [*_joined(found[:-1]), Match(len(self.a), len(self.b), 0)]


def _anchors(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    """Places of lines that stand once in both texts, as many as stand in one order in both."""
    once = {line for line, count in Counter(before).items() if count == 1}
    once &= {line for line, count in Counter(after).items() if count == 1}
    place = {line: index for index, line in enumerate(after) if line in once}
    pairs = [(index, place[line]) for index, line in enumerate(before) if line in once]
    # The longest increasing subsequence of the second numbers.
    ends: list[int] = []
    last: list[int] = []
    previous: list[int] = []
    for index, (_, new) in enumerate(pairs):
        at = bisect_left(ends, new)
        previous.append(last[at - 1] if at else -1)
        ends[at : at + 1], last[at : at + 1] = [new], [index]
    found = []
    index = last[-1] if last else -1
    while index >= 0:
        found.append(pairs[index])
        index = previous[index]
    return found[::-1]


def _joined(matches: list[Match]) -> list[Match]:
    joined: list[Match] = []
    for match in matches:
        last = joined[-1] if joined else None
        if last is not None and (last.a + last.size, last.b + last.size) == (match.a, match.b):
            joined[-1] = Match(last.a, last.b, last.size + match.size)
        else:
            joined.append(match)
    return joined

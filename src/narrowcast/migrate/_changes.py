"""What a rewriting wants: pieces of text replaced, and what a person is told of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowcast.migrate._source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found in a file, and what became of it.

    Attributes:
        path: of the file, as it was named.
        line: in the file as it was read, from 1.
        column: from 1, in characters.
        rule: short name of what was looked for, as ``"apex"`` or ``"clip-before-unscale"``.
        message: what is there, why it matters, and what to do where it is left alone.
        fixed: whether the change mends it; False: the lines are as they were.
    """

    path: str
    line: int
    column: int
    rule: str
    message: str
    fixed: bool

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        state = "changed" if self.fixed else "left alone"
        return f"{self.path}:{self.line}:{self.column}: {self.rule}: {state}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One file after its migration.

    Attributes:
        text: as it should be; the text that was read where nothing changes.
        findings: in the order of their lines.
    """

    text: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replace the characters from ``start`` to ``end`` of a text; an insertion where the two are equal.

    Insertions at one place stand in the order in which they were asked for.
    """

    start: int
    end: int
    text: str = field(compare=False)


@dataclass(slots=True)
class Changes:
    """The edits of one stage, and its findings at offsets of the text that the stage was given.

    Attributes:
        made: what the edits make, where the stage has parsed it.
    """

    edits: list[Edit] = field(default_factory=list)
    found: list[tuple[int, str, str, bool]] = field(default_factory=list)
    made: Source | None = None

    def replace(self, span: tuple[int, int], text: str) -> None:
        """Put ``text`` where ``span`` is."""
        self.edits.append(Edit(*span, text))

    def insert(self, at: int, text: str) -> None:
        """Put ``text`` before the character ``at``."""
        self.edits.append(Edit(at, at, text))

    def tell(self, at: int, rule: str, message: str, *, fixed: bool) -> None:
        """A finding about the character ``at``."""
        self.found.append((at, rule, message, fixed))

    def add(self, other: Changes) -> None:
        """Take over what another part of the stage wants."""
        self.edits += other.edits
        self.found += other.found


class Applied:
    """A text with edits made to it, and the way back from its offsets to those of the text before.

    Edits that replace overlapping pieces are a fault of the stage: ValueError.
    """

    def __init__(self, text: str, edits: Iterable[Edit]) -> None:
        pieces: list[str] = []
        self._new: list[int] = [0]
        self._old: list[int] = [0]
        at = length = 0
        for edit in sorted(edits):  # stable: insertions at one place keep their order
            if edit.start < at:
                raise ValueError(f"two edits overlap at character {edit.start}: {edit.text!r}")
            pieces += [text[at : edit.start], edit.text]
            length += edit.start - at
            self._mark(length, edit.start)
            length += len(edit.text)
            self._mark(length, edit.end)
            at = edit.end
        self.text = "".join([*pieces, text[at:]])

    def _mark(self, new: int, old: int) -> None:
        self._new.append(new)
        self._old.append(old)

    def origin(self, offset: int) -> int:
        """Where a character of the new text comes from; for an inserted one where it was inserted."""
        index = bisect_right(self._new, offset) - 1
        gone_on = self._old[index] + offset - self._new[index]
        return min(gone_on, self._old[index + 1]) if index + 1 < len(self._old) else gone_on


def origin(trail: Sequence[Applied], offset: int) -> int:
    """The offset in the first text of a row of changed ones."""
    for applied in reversed(trail):
        offset = applied.origin(offset)
    return offset

"""Edits of a text, findings about it, and helpers that add, move and remove statements and imports."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from narrowcast.migrate.source._tree import Source

Target = Literal["torch", "narrowcast"]
"""What to migrate to: ``torch.amp``, or ``nc.autocast`` and ``nc.GradScaler``."""

_INDENTATION = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found in a file, and whether it was changed.

    Attributes:
        path: of the file, as it was given.
        line, column: in the file as it was read, from 1, in characters.
        rule: short name of what was looked for, as ``"apex"`` or ``"clip-before-unscale"``.
        message: what was found and why it matters; if it was not changed, also what to write instead.
        fixed: whether the code was changed.
    """

    path: str
    line: int
    column: int
    rule: str
    message: str
    fixed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The text of one file after its migration, and the findings in the order of their lines."""

    text: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replace the characters from ``start`` to ``end``; an insertion if the two are equal.

    Insertions at one place keep the order in which they were requested.
    """

    start: int
    end: int
    text: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Report:
    """A finding of one stage, at an offset in the text that the stage was given."""

    offset: int
    rule: str
    message: str
    fixed: bool


@dataclass(slots=True)
class Changes:
    """The edits of one stage, and what it reports."""

    edits: list[Edit] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def replace(self, span: tuple[int, int], text: str) -> None:
        """Replace the characters of ``span``, two offsets as of ``Source.span``, by ``text``."""
        self.edits.append(Edit(*span, text))

    def insert(self, at: int, text: str) -> None:
        """Put ``text`` before the character ``at``."""
        self.edits.append(Edit(at, at, text))

    def report(self, at: int, rule: str, message: str, *, fixed: bool) -> None:
        """Add a finding about the character ``at``."""
        self.reports.append(Report(at, rule, message, fixed))


class Applied:
    """A text with edits made to it, which maps its offsets back to those of the text before.

    Raises:
        ValueError: two edits overlap.
    """

    def __init__(self, text: str, edits: Iterable[Edit]) -> None:
        pieces: list[str] = []
        # Pairs of offsets in the new text and in the old one, both rising: the ends of every edit.
        self._marks = [(0, 0)]
        old = new = 0
        for edit in sorted(edits):  # stable: insertions at one place keep their order
            if edit.start < old:
                raise ValueError(f"two edits overlap at character {edit.start}: {edit.text!r}")
            pieces += [text[old : edit.start], edit.text]
            new += edit.start - old
            self._marks.append((new, edit.start))
            new += len(edit.text)
            self._marks.append((new, edit.end))
            old = edit.end
        pieces.append(text[old:])
        self.text = "".join(pieces)

    def origin(self, offset: int) -> int:
        """Return the old offset of a character of the new text; for inserted text, where it was inserted."""
        # Each edit has two marks, its begin and its end. Between two edits both texts are the same: add the
        # distance from the mark before the character.
        next_mark = bisect_right(self._marks, offset, key=lambda mark: mark[0])
        new, old = self._marks[next_mark - 1]
        place = old + offset - new

        # Inside the text of an edit, which may be longer than what it replaced: stop at the end of that.
        if next_mark < len(self._marks):
            _, next_old = self._marks[next_mark]
            place = min(place, next_old)
        return place


def origin(trail: Sequence[Applied], offset: int) -> int:
    """Map an offset in the last of several texts, each edited from the previous one, to the first text."""
    for applied in reversed(trail):
        offset = applied.origin(offset)
    return offset


# ---- statements


def remove(source: Source, changes: Changes, statements: Sequence[ast.stmt]) -> None:
    """Remove statements with their lines.

    A statement that shares its line with another is replaced by ``pass``. A suite that would be empty keeps
    one ``pass``.
    """
    filled: list[list[ast.stmt]] = []  # suites that have got a ``pass``
    for statement in statements:
        suite = source.suite(statement)
        is_emptied = all(other in statements for other in suite)
        needs_pass = is_emptied and suite is not source.tree.body and suite not in filled
        if needs_pass or not source.stands_alone(statement):
            changes.replace(source.span(statement), "pass")
            filled.append(suite)
        else:
            changes.replace(source.span_of_lines(statement), "")


def wrap(source: Source, changes: Changes, first: ast.stmt, last: ast.stmt, header: str) -> None:
    """Put ``header`` before the statements from ``first`` to ``last``, and indent them under it."""
    begin = _begin_of_lines(source, first)
    _, end = source.span_of_lines(last)
    changes.insert(begin, f"{source.indent(first)}{header}{source.newline}")
    step = _indentation(source)
    for start in _movable_lines(source, begin, end):
        changes.insert(start, step)


def _begin_of_lines(source: Source, statement: ast.stmt) -> int:
    """Return the offset where the lines of a statement begin, with those of its decorators."""
    decorators = getattr(statement, "decorator_list", [])
    first = decorators[0] if decorators else statement
    return source.span_of_lines(first)[0]


def _indentation(source: Source) -> str:
    """Return one step of indentation, as the file has it."""
    for node in source.nodes:
        if not isinstance(node, ast.If | ast.For | ast.With | ast.FunctionDef | ast.ClassDef):
            continue
        outer, inner = source.indent(node), source.indent(node.body[0])
        if not is_one_line(source, node) and inner.startswith(outer) and inner != outer:
            return inner[len(outer) :]
    return _INDENTATION


def unwrap(source: Source, changes: Changes, statement: ast.With) -> None:
    """Remove the header of a ``with``, and move its body, which is on lines of its own, to the left."""
    whole_begin, _ = source.span_of_lines(statement)
    begin, end = source.span_of_lines(statement.body[0], statement.body[-1])

    # Comments right above the body stay.
    first_kept, _ = source.line_of(begin)
    while source.line_start(first_kept - 1) > whole_begin and _is_comment(source, first_kept - 1):
        first_kept -= 1
    begin = source.line_start(first_kept)

    outer, inner = source.indent(statement), source.indent(statement.body[0])
    changes.replace((whole_begin, begin), "")
    for start in _movable_lines(source, begin, end):
        # A line that continues another may stand further left.
        if source.text.startswith(inner, start):
            changes.replace((start, start + len(inner)), outer)


def _is_comment(source: Source, line: int) -> bool:
    return source.text[source.line_start(line) :].lstrip().startswith("#")


def _movable_lines(source: Source, begin: int, end: int) -> list[int]:
    """Return the starts of the lines to indent: not those of blank lines, nor of lines inside a string."""
    first, _ = source.line_of(begin)
    last, _ = source.line_of(end - 1)
    in_strings = _lines_in_strings(source)
    movable = []
    for line in range(first, last + 1):
        start = source.line_start(line)
        is_blank = not source.text[start : source.line_end(line)].strip(" \t\f\r\n")
        if not is_blank and line not in in_strings:
            movable.append(start)
    return movable


def _lines_in_strings(source: Source) -> set[int]:
    """Return the lines that begin inside a string."""
    lines: set[int] = set()
    for node in source.nodes:
        if not isinstance(node, ast.Constant | ast.JoinedStr) or node.end_lineno in (None, node.lineno):
            continue
        # Adjacent one-line strings in brackets are one node too, and their lines may move.
        code = source.code(node)
        if '"""' in code or "'''" in code or "\\\n" in code or "\\\r" in code:
            lines |= set(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    return lines


def is_one_line(
    source: Source, statement: ast.If | ast.For | ast.With | ast.FunctionDef | ast.ClassDef
) -> bool:
    """Return whether the suite of a compound statement begins on the line on which its header ends."""
    first = statement.body[0]
    line_begins = source.span_of_lines(first)[0]
    return bool(source.text[line_begins : source.start(first)].strip())


def between_statements(source: Source, statement: ast.stmt) -> str:
    """Return the text to write between two statements that replace ``statement``."""
    return source.newline + source.indent(statement) if source.stands_alone(statement) else "; "


def insert_before(source: Source, changes: Changes, statement: ast.stmt, code: str) -> None:
    """Insert a line before a statement and its decorators, indented as it is."""
    changes.insert(_begin_of_lines(source, statement), source.indent(statement) + code + source.newline)


def insert_after(source: Source, changes: Changes, statement: ast.stmt, code: str) -> None:
    """Insert a line after a statement, indented as it is."""
    end = source.span_of_lines(statement)[1]
    line = source.indent(statement) + code
    is_ended = source.text[:end].endswith(("\n", "\r"))
    changes.insert(end, line + source.newline if is_ended else source.newline + line)


# ---- imports


def require_import(source: Source, changes: Changes, name: str, module: str) -> None:
    """Import ``module`` as ``name`` after the imports at the top of the file, unless that is done already."""
    if reaches(source, name, module):
        return
    line = f"import {module}" if name == module else f"import {module} as {name}"
    line += source.newline
    # Each rewritten use asks for its import; one line serves all of them.
    if any(edit.text == line for edit in changes.edits):
        return
    at = _after_first_imports(source)
    # The import comes before other code that is inserted there, since that code may use it.
    changes.edits.insert(0, Edit(at, at, line))


def reaches(source: Source, name: str, module: str) -> bool:
    """Return whether ``name`` is ``module`` at module level."""
    for imported in source.imports:
        if imported.statement not in source.tree.body:
            continue  # an import in a function or a try may not be run
        # "import torch.nn" binds torch too.
        is_parent = name == module and imported.full.startswith(f"{module}.")
        is_same = imported.full == module or is_parent
        if is_same and imported.name == name:
            return True
    return False


def _after_first_imports(source: Source) -> int:
    """Return the start of the line after the docstring and the imports at the top of the file."""
    last: ast.stmt | None = None
    for statement in source.tree.body:
        is_docstring = last is None and is_bare_constant(statement)
        if not is_docstring and not isinstance(statement, ast.Import | ast.ImportFrom):
            break
        last = statement
    if last is not None:
        # Other code behind the last import, on its line, may use the new one, which then comes before that
        # line. Otherwise it comes after it: a docstring or a __future__ import on the line must stay first.
        begin, end = source.span_of_lines(last)
        behind = source.text[source.span(last)[1] : end].strip()
        return end if behind[:1] in ("", "#") else begin
    # A file may begin with "#!" and its encoding.
    for start in source.line_starts:
        if not source.text.startswith("#", start):
            return start
    return len(source.text)


def is_bare_constant(statement: ast.stmt) -> bool:
    """Return whether a statement is a constant alone, as a docstring is."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)

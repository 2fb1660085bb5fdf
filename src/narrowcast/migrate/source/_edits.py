"""Edits of a text, findings about it, and the statements and imports that edits add, move and remove."""

from __future__ import annotations

import ast
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from narrowcast.migrate.source._tree import Source, walk

Target = Literal["torch", "narrowcast"]
"""What to migrate to: ``torch.amp``, or ``nc.autocast`` and ``nc.GradScaler``."""

_UNIT = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found in a file, and whether it was changed.

    Attributes:
        path: of the file, as it was given.
        line, column: in the file as it was read, from 1, in characters.
        rule: short name of what was looked for, as ``"apex"`` or ``"clip-before-unscale"``.
        message: what is there, why it matters, and what to write where it is left alone.
        fixed: whether the lines were changed; False: they are as they were.
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


@dataclass(slots=True)
class Changes:
    """The edits of one stage, and its findings: offset, rule, message, and whether it was changed."""

    edits: list[Edit] = field(default_factory=list)
    found: list[tuple[int, str, str, bool]] = field(default_factory=list)

    def replace(self, span: tuple[int, int], text: str) -> None:
        """Put ``text`` in place of ``span``."""
        self.edits.append(Edit(*span, text))

    def insert(self, at: int, text: str) -> None:
        """Put ``text`` before the character ``at``."""
        self.edits.append(Edit(at, at, text))

    def report(self, at: int, rule: str, message: str, *, fixed: bool) -> None:
        """Add a finding about the character ``at``."""
        self.found.append((at, rule, message, fixed))

    def add(self, other: Changes) -> None:
        """Add the edits and findings of ``other``."""
        self.edits += other.edits
        self.found += other.found


class Applied:
    """A text with edits made to it, which maps its offsets back to those of the text before.

    Raises:
        ValueError: two edits overlap.
    """

    def __init__(self, text: str, edits: Iterable[Edit]) -> None:
        pieces: list[str] = []
        self._marks = [(0, 0)]  # offsets in the new text, rising, and in the old one
        at = length = 0
        for edit in sorted(edits):  # stable: insertions at one place keep their order
            if edit.start < at:
                raise ValueError(f"two edits overlap at character {edit.start}: {edit.text!r}")
            pieces += [text[at : edit.start], edit.text]
            length += edit.start - at
            self._marks.append((length, edit.start))
            length += len(edit.text)
            self._marks.append((length, edit.end))
            at = edit.end
        self.text = "".join([*pieces, text[at:]])

    def origin(self, offset: int) -> int:
        """Return the old offset of a character; for an inserted one the place of the insertion."""
        after = bisect_right(self._marks, offset, key=lambda mark: mark[0])
        new, old = self._marks[after - 1]
        return min([old + offset - new, *(before for _, before in self._marks[after : after + 1])])


def origin(trail: Sequence[Applied], offset: int) -> int:
    """Return the offset in the first of a sequence of texts, each made from the one before."""
    for applied in reversed(trail):
        offset = applied.origin(offset)
    return offset


def remove(source: Source, changes: Changes, statements: Iterable[ast.stmt]) -> None:
    """Remove statements with their lines; ``pass`` stays where a suite would be empty."""
    gone = list(statements)
    ids = {id(statement) for statement in gone}
    filled: set[int] = set()
    for statement in gone:
        suite = source.suite(statement)
        at_top = isinstance(source.parents[statement], ast.Module)
        empty = all(id(one) in ids for one in suite) and not at_top
        if not source.stands_alone(statement) or (empty and id(suite) not in filled):
            changes.replace(source.span(statement), "pass")
        else:
            begin, end = source.lines(statement)
            if statement is suite[0] and not at_top:
                end = _after_blank_lines(source, end)
            changes.replace((begin, end), "")
        filled.add(id(suite))


def _after_blank_lines(source: Source, at: int) -> int:
    line = source.line_of(at)[0]
    while line < len(source.starts) and not source.text[at : source.starts[line]].strip():
        at = source.starts[line]
        line += 1
    return at


def wrap(source: Source, changes: Changes, first: ast.stmt, last: ast.stmt, header: str) -> None:
    """Put ``header`` before the statements from ``first`` to ``last``, and indent them under it."""
    begin, end = source.lines(first, last)
    changes.insert(begin, f"{source.indent(first)}{header}{source.newline}")
    for start in _line_starts(source, begin, end):
        changes.insert(start, _unit(source))


def _unit(source: Source) -> str:
    """Return one step of indentation, as the file has it."""
    for node in source.nodes:
        if isinstance(node, ast.If | ast.For | ast.With | ast.FunctionDef | ast.ClassDef):
            outer, inner = source.indent(node), source.indent(node.body[0])
            if node.body[0].lineno > node.lineno and inner.startswith(outer) and inner != outer:
                return inner[len(outer) :]
    return _UNIT


def unwrap(source: Source, changes: Changes, statement: ast.stmt, body: Sequence[ast.stmt]) -> None:
    """Replace ``statement`` by one of its suites, which stands on lines of its own."""
    whole, (begin, end) = source.lines(statement), source.lines(body[0], body[-1])
    line = source.line_of(begin)[0] - 1
    while source.starts[line - 1] > whole[0] and source.text[source.starts[line - 1] :].lstrip()[:1] == "#":
        line -= 1  # comments right above the suite stay
    begin = source.starts[line]
    outer, inner = source.indent(statement), source.indent(body[0])
    changes.replace((whole[0], begin), "")
    for start in _line_starts(source, begin, end):
        if source.text[start : start + len(inner)] == inner:
            changes.replace((start, start + len(inner)), outer)
    changes.replace((end, whole[1]), "")


def _line_starts(source: Source, begin: int, end: int) -> list[int]:
    """Return the starts of the lines that may be indented: no blank ones, none inside a string."""
    first, last = bisect_left(source.starts, begin), bisect_left(source.starts, end)
    fixed = _lines_in_strings(source, first + 1, last + 1)
    return [
        start
        for line, start in enumerate(source.starts[first:last], first + 1)
        if line not in fixed and source.text[start:end].lstrip(" \t\f")[:1] not in ("", "\r", "\n")
    ]


def _lines_in_strings(source: Source, first: int, last: int) -> set[int]:
    """Return the lines that begin inside a string."""
    fixed: set[int] = set()
    for node in source.nodes:
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno < end and first <= end <= last:
            code = source.code(node)
            # Strings side by side in brackets are one node, and their lines may move.
            if '"""' in code or "'''" in code or "\\\n" in code or "\\\r" in code:
                fixed |= set(range(node.lineno + 1, end + 1))
    return fixed


def is_one_line(statement: ast.stmt) -> bool:
    """Return whether the suite of a compound statement stands on the line of its header."""
    body: list[ast.stmt] = getattr(statement, "body", [])
    return bool(body) and body[0].lineno == statement.lineno


def between_statements(source: Source, statement: ast.stmt) -> str:
    """Return what separates two statements that take the place of ``statement``."""
    return source.newline + source.indent(statement) if source.stands_alone(statement) else "; "


def insert_before(source: Source, changes: Changes, statement: ast.stmt, code: str) -> None:
    """Insert a line before a statement, indented as it is."""
    changes.insert(source.lines(statement)[0], source.indent(statement) + code + source.newline)


def insert_after(source: Source, changes: Changes, statement: ast.stmt, code: str) -> None:
    """Insert a line after a statement, indented as it is."""
    end = source.lines(statement)[1]
    line = source.indent(statement) + code
    ended = source.text[:end].endswith(("\n", "\r"))
    changes.insert(end, line + source.newline if ended else source.newline + line)


def require_import(source: Source, changes: Changes, name: str, module: str) -> None:
    """Import ``module`` as ``name`` after the imports at the top of the file, unless that is done already."""
    if not reaches(source, name, module):
        line = f"import {module}" if name == module else f"import {module} as {name}"
        at = after_imports(source)
        changes.edits.insert(0, Edit(at, at, line + source.newline))


def reaches(source: Source, name: str, full: str) -> bool:
    """Return whether ``name`` is the imported ``full`` at module level."""
    for one in source.imports:
        same = one.full in (full, f"{full}.{name}") or (name == full and one.full.startswith(f"{full}."))
        if same and one.name == name and one.statement in source.tree.body:
            return True
    return False


def after_imports(source: Source, *, tried: bool = False) -> int:
    """Return the start of the line after the imports and the docstring at the top of the file.

    ``tried``: after all imports of the module before its first function, class or loop, those in ``try`` and
    ``if`` too.
    """
    last: ast.stmt | None = None
    for statement in source.tree.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if (
            isinstance(statement, ast.Import | ast.ImportFrom)
            or (last is None and is_text)
            or (tried and isinstance(statement, ast.Try | ast.If) and _only_imports(statement))
        ):
            last = statement
        elif not tried or isinstance(
            statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.For | ast.While
        ):
            break
    if last is not None:
        # Code on the line of an import may need what is inserted.
        return source.lines(last)[1 if source.stands_alone(last) else 0]
    # A file may begin with "#!" and its encoding.
    return next((at for at in source.starts if source.text[at : at + 1] != "#"), len(source.text))


def _only_imports(statement: ast.Try | ast.If) -> bool:
    imports = any(isinstance(one, ast.Import | ast.ImportFrom) for one in walk(statement))
    return imports and not any(isinstance(one, ast.Call) for body in statement.body for one in walk(body))

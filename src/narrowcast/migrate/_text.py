"""Edits that several rewritings make: statements removed and moved, names imported."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from narrowcast.migrate._changes import Changes, Edit
from narrowcast.migrate._fragments import movable_lines
from narrowcast.migrate._source import Source
from narrowcast.migrate._walk import walk

_UNIT = "    "


def remove(source: Source, changes: Changes, statements: Iterable[ast.stmt]) -> None:
    """Take statements out, each with its lines; ``pass`` stands where nothing else is left of a suite."""
    gone = list(statements)
    ids = {id(statement) for statement in gone}
    filled: set[int] = set()
    for statement in gone:
        suite = source.suite(statement)
        empty = all(id(one) in ids for one in suite) and not isinstance(source.parents[statement], ast.Module)
        fills = empty and id(suite) not in filled
        if not source.stands_alone(statement):
            changes.replace(source.span(statement), "pass")
        elif fills:
            changes.replace((_begin(source, statement), source.span(statement)[1]), "pass")
        else:
            begin, end = source.lines(statement)
            if statement is suite[0] and not isinstance(source.parents[statement], ast.Module):
                end = _after_blanks(source, end)
            changes.replace((begin, end), "")
        filled.add(id(suite))


def _after_blanks(source: Source, at: int) -> int:
    """The start of the next line that is not blank."""
    line = source.line_of(at)[0]
    while line < len(source.starts) and not source.text[at : source.starts[line]].strip():
        at = source.starts[line]
        line += 1
    return at


def _begin(source: Source, statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", ())
    return source.start(decorators[0]) - 1 if decorators else source.start(statement)


def unit(source: Source) -> str:
    """One step of indentation, as the file has it."""
    for node in source.nodes:
        if isinstance(node, ast.If | ast.For | ast.With | ast.FunctionDef | ast.ClassDef):
            outer, inner = source.indent(node), source.indent(node.body[0])
            if node.body[0].lineno > node.lineno and inner.startswith(outer) and inner != outer:
                return inner[len(outer) :]
    return _UNIT


def wrap(source: Source, changes: Changes, statements: Sequence[ast.stmt], header: str) -> None:
    """Put ``header`` before statements of one suite and indent them under it."""
    begin, end = source.lines(statements[0], statements[-1])
    indent = source.indent(statements[0])
    changes.insert(begin, f"{indent}{header}{source.newline}")
    for start in _line_starts(source, begin, end):
        changes.insert(start, unit(source))


def unwrap(source: Source, changes: Changes, statement: ast.With | ast.If, body: Sequence[ast.stmt]) -> None:
    """Put a suite of ``statement`` in the place of the whole: the rest goes, the suite moves to the left.

    The suite stands on lines of its own.
    """
    whole, (begin, end) = source.lines(statement), source.lines(body[0], body[-1])
    begin = _comments_before(source, begin, whole[0])
    outer, inner = source.indent(statement), source.indent(body[0])
    changes.replace((whole[0], begin), "")
    for start in _line_starts(source, begin, end):
        old = source.text[start : start + len(inner)]
        if old == inner:
            changes.replace((start, start + len(inner)), outer)
    changes.replace((end, whole[1]), "")


def _comments_before(source: Source, begin: int, limit: int) -> int:
    """Where the comments begin that stand right above a line."""
    at = source.line_of(begin)[0] - 1
    while at > 0 and source.starts[at - 1] > limit:
        line = source.text[source.starts[at - 1] : source.starts[at]]
        if not line.strip().startswith("#"):
            break
        at -= 1
    return source.starts[at]


def _line_starts(source: Source, begin: int, end: int) -> list[int]:
    """The starts of the lines of a suite that may be indented otherwise: no blank ones, none in a string."""
    starts = source.starts[bisect_left(source.starts, begin) : bisect_left(source.starts, end)]
    movable = movable_lines(source.text[begin:end])
    return [
        start
        for start, moves in zip(starts, movable, strict=False)
        if moves and source.text[start : start + 200].split("\n")[0].split("\r")[0].strip()
    ]


def one_line(source: Source, statement: ast.stmt) -> bool:
    """Whether the suite of a compound statement stands on the line of its header."""
    body = getattr(statement, "body", None)
    return body is not None and bool(body) and body[0].lineno == statement.lineno


def import_line(source: Source, line: str) -> Edit:
    """An import at the level of the module, after the imports that the file begins with."""
    at = after_imports(source)
    return Edit(at, at, line + source.newline)


def reaches(source: Source, name: str, full: str) -> bool:
    """Whether ``name`` is the imported ``full`` at the level of the module, and nothing else anywhere."""
    bound = [one for one in source.imports if one.name == name]
    at_top = any(one.scope is source.tree and one.full in (full, f"{full}.{name}") for one in bound)
    dotted = any(
        one.scope is source.tree and one.full.startswith(f"{full}.") and name == full for one in bound
    )
    return at_top or dotted


def module_line(source: Source) -> int:
    """The start of the line where the module's own code begins: after its imports, those in ``try`` too."""
    last: ast.stmt | None = None
    for statement in source.tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.For | ast.While):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom) or (
            isinstance(statement, ast.Try | ast.If)
            and any(isinstance(one, ast.Import | ast.ImportFrom) for one in walk(statement))
            and not any(isinstance(call, ast.Call) for one in statement.body for call in walk(one))
        ):
            last = statement
    return after_imports(source) if last is None else source.lines(last)[1]


def after_imports(source: Source) -> int:
    """The start of the line after the imports that the file begins with, its docstring at least."""
    last: ast.stmt | None = None
    for statement in source.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom) or (last is None and _is_text(statement)):
            last = statement
        else:
            break
    if last is None:
        return _after_comments(source)
    # What shares the line of an import may need what is put here.
    return source.lines(last)[1 if source.stands_alone(last) else 0]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _after_comments(source: Source) -> int:
    """The start of the first line that is no comment: a file may begin with ``#!`` and its encoding."""
    for start in source.starts:
        if source.text[start : start + 1] != "#":
            return start
    return len(source.text)


def insert_before(
    source: Source, changes: Changes, statement: ast.stmt, code: str, indent: str | None = None
) -> None:
    """Put lines of code before a statement, indented as it is, or otherwise where it is moved too."""
    indent = source.indent(statement) if indent is None else indent
    lines = "".join(f"{indent}{line}{source.newline}" for line in code.splitlines())
    changes.insert(source.lines(statement)[0], lines)


def insert_after(source: Source, changes: Changes, statement: ast.stmt, code: str) -> None:
    """Put lines of code after a statement, indented as it is."""
    indent = source.indent(statement)
    end = source.lines(statement)[1]
    if end == len(source.text) and not source.text.endswith(("\n", "\r")):
        changes.insert(end, "".join(f"{source.newline}{indent}{line}" for line in code.splitlines()))
        return
    changes.insert(end, "".join(f"{indent}{line}{source.newline}" for line in code.splitlines()))

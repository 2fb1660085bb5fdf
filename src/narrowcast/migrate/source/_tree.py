"""A parsed Python file: its text, its syntax tree, and where in the text each node stands.

Rewriting is done with Python's own ``ast`` and edits of the text, so that everything else in a file stays
byte for byte. LibCST keeps formatting too, but takes ten times as long.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

NEWLINE = re.compile(r"\r\n?|\n")
Function = ast.FunctionDef | ast.AsyncFunctionDef
ImportStatement = ast.Import | ast.ImportFrom
# Fields that hold statements. Handlers and match cases count as statements too.
_SUITES = ("body", "orelse", "finalbody", "handlers", "cases")
# Stands for whatever binds a name to something that is not imported.
_NOT_IMPORTED = "?"


@dataclass(frozen=True, slots=True)
class Reference:
    """A use of an imported name, with the attributes taken of it.

    Attributes:
        node: the whole expression, as ``amp.scale_loss``.
        full: its full name, as ``"apex.amp.scale_loss"``.
        name: the first name of the expression.
    """

    node: ast.expr
    full: str
    name: str


@dataclass(frozen=True, slots=True)
class Imported:
    """One name of an import statement.

    Attributes:
        full: what is imported, as ``"apex.amp"``; ``"apex.*"`` for a star.
        name: the name that is bound.
    """

    statement: ImportStatement
    alias: ast.alias
    full: str
    name: str


class Names:
    """What each name of a file is bound to, in all of its scopes together.

    A name that is bound more than once is known only if all imports agree and nothing else binds it. A
    binding to None, True or False, as after a failed import, does not count.
    """

    def __init__(self, parents: dict[ast.AST, ast.AST]) -> None:
        self._bound: dict[str, set[str]] = defaultdict(set)
        for node, parent in parents.items():
            for name, full in _bindings_of(node):
                # The look-up in a defaultdict makes an entry for the name. A flag needs one too, without a
                # binding in it, since taken() returns all names that have an entry.
                bound = self._bound[name]
                if full != _NOT_IMPORTED or not _sets_flag(parent):
                    bound.add(full)

    def full(self, node: ast.AST) -> str | None:
        """Return the full dotted name of a name or of its attributes; None if anything but imports binds it.

        ``autocast`` after ``from torch.cuda.amp import autocast`` is ``"torch.cuda.amp.autocast"``.
        """
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or not self.is_only_imported(node.id):
            return None
        (imported,) = self._bound[node.id]
        return ".".join([imported, *attributes])

    def is_only_imported(self, name: str) -> bool:
        """Return whether a name is bound by an import, and by nothing else."""
        bound = self._bound.get(name, set())
        return len(bound) == 1 and _NOT_IMPORTED not in bound

    def taken(self) -> set[str]:
        """Return every name that is bound somewhere in the file."""
        return set(self._bound)


def _bindings_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that ``node`` itself binds, each with the full name of its import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                yield alias.asname, alias.name
            else:
                # "import torch.cuda.amp" binds torch.
                package = alias.name.partition(".")[0]
                yield package, package
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, _module_of(node) + alias.name
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, _NOT_IMPORTED
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id, _NOT_IMPORTED
    elif isinstance(node, ast.arg):
        yield node.arg, _NOT_IMPORTED
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name, _NOT_IMPORTED
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest, _NOT_IMPORTED


def _module_of(statement: ast.ImportFrom) -> str:
    """Return what stands before an imported name, with its dot."""
    return f"{'.' * statement.level}{statement.module or ''}."


def _sets_flag(statement: ast.AST) -> bool:
    """Return whether a statement assigns None, True or False."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Constant):
        return False
    return statement.value.value is None or isinstance(statement.value.value, bool)


class Source:
    """One parsed file; its text has its own line ends, and no byte order mark.

    Raises:
        SyntaxError: the text does not parse.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        try:
            # Parsing warns about invalid escapes, which a migration does not report.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(text)
        except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deep
            raise SyntaxError(str(error) or "nested too deep") from None
        self.line_starts = [0]
        for line_end in NEWLINE.finditer(text):
            self.line_starts.append(line_end.end())
        self._is_ascii = text.isascii()

    # ---- the tree

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                parents[child] = node
        return parents

    @cached_property
    def names(self) -> Names:
        """What imported names stand for."""
        return Names(self.parents)

    @cached_property
    def nodes(self) -> list[ast.expr | ast.stmt]:
        """All statements and expressions, in the order of the text."""
        placed = [node for node in self.parents if isinstance(node, ast.expr | ast.stmt)]
        return sorted(placed, key=lambda node: (node.lineno, node.col_offset))

    @cached_property
    def all_calls(self) -> list[ast.Call]:
        """All calls, in the order of the text."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def references(self) -> list[Reference]:
        """Each use of something imported, in the order of the text."""
        references = []
        for node in self.nodes:
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
                continue
            # Take the longest chain of attributes: apex.amp.scale_loss, and not apex alone.
            whole: ast.expr = node
            outer = self.parents[node]
            while isinstance(outer, ast.Attribute):
                whole = outer
                outer = self.parents[outer]
            full = self.names.full(whole)
            if full is not None:
                references.append(Reference(whole, full, node.id))
        return references

    def uses_of(self, *full_names: str) -> list[Reference]:
        """Return the uses of these full names, in the order of the text."""
        return [reference for reference in self.references if reference.full in full_names]

    @cached_property
    def imports(self) -> list[Imported]:
        """Each imported name, in the order of the text."""
        imports = []
        for node in self.nodes:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for alias in node.names:
                if isinstance(node, ast.Import):
                    full = alias.name
                    bound = alias.asname or alias.name.partition(".")[0]
                else:
                    full = _module_of(node) + alias.name
                    bound = alias.asname or alias.name
                imports.append(Imported(node, alias, full, bound))
        return imports

    @cached_property
    def exported(self) -> set[str]:
        """Names that other files may import from here: those in ``__all__``, and ``import name as name``."""
        names = set()
        for imported in self.imports:
            if imported.alias.name == imported.alias.asname:
                names.add(imported.name)
        for node in self.nodes:
            if not isinstance(node, ast.Name) or node.id != "__all__":
                continue
            for part in ast.walk(self.statement(node)):
                if isinstance(part, ast.Constant):
                    names.add(str(part.value))
        return names

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that holds ``node``."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around ``node``, innermost first, the module last."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: ast.AST) -> Function | None:
        """Return the innermost function around ``node``; None at module or class level."""
        for outer in self.around(node):
            if isinstance(outer, Function):
                return outer
            if isinstance(outer, ast.ClassDef):
                return None
        return None

    def call_of(self, node: ast.AST) -> ast.Call | None:
        """Return the call whose function is ``node``."""
        parent = self.parents[node]
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    def suite(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements in which ``statement`` stands."""
        for suite in suites_of(self.parents[statement]):
            if statement in suite:
                return suite
        raise ValueError(f"line {statement.lineno} stands in no suite")

    # ---- the text

    @cached_property
    def newline(self) -> str:
        """The line end of the first line; ``"\\n"`` for a file without one."""
        match = NEWLINE.search(self.text)
        return match[0] if match else "\n"

    def offset(self, line: int, column: int) -> int:
        """Return the place in ``text`` of a line and column as ``ast`` counts them.

        Lines count from 1, columns from 0, in bytes of UTF-8. The place is an offset in characters.
        """
        start = self.line_start(line)
        if self._is_ascii:
            return start + column
        end = self.line_end(line)
        return start + len(self.text[start:end].encode()[:column].decode(errors="ignore"))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets where ``node`` begins and ends in the text, without its decorators."""
        return self.start(node), self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def start(self, node: ast.AST) -> int:
        """Return the offset where ``node`` begins in the text."""
        return self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def code(self, node: ast.AST) -> str:
        """Return ``node`` as it is written, without its decorators."""
        begin, end = self.span(node)
        return self.text[begin:end]

    def line_of(self, offset: int) -> tuple[int, int]:
        """Return line and column of a character, both from 1."""
        line = bisect_right(self.line_starts, offset)
        return line, offset - self.line_start(line) + 1

    def span_of_lines(self, first: ast.AST, last: ast.AST | None = None) -> tuple[int, int]:
        """Return the offsets where the lines of ``first`` begin, and where those of ``last`` end."""
        end = (last or first).end_lineno  # type: ignore[attr-defined]
        begin = self.line_start(first.lineno)  # type: ignore[attr-defined]
        return begin, self.line_end(end)

    def line_start(self, line: int) -> int:
        """Return the offset of the first character of a line (from 1)."""
        return self.line_starts[line - 1]

    def line_end(self, line: int) -> int:
        """Return the offset just past a line (from 1), its line end included."""
        return self.line_starts[line] if line < len(self.line_starts) else len(self.text)

    def indent(self, node: ast.AST) -> str:
        """Return the indentation of the line where ``node`` begins."""
        line = self.text[self.span_of_lines(node)[0] : self.start(node)]
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Return whether no other statement shares a line with ``statement``; a comment may follow it."""
        begin, end = self.span_of_lines(statement)
        before = self.text[begin : self.start(statement)]
        after = self.text[self.span(statement)[1] : end].strip()
        return not before.strip() and after[:1] in ("", "#")


def suites_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements inside a compound statement."""
    if isinstance(node, ast.expr):  # a lambda has a body too
        return
    for name in _SUITES:
        suite: list[ast.stmt] | None = getattr(node, name, None)
        if suite:
            yield suite


def called_name(call: ast.Call) -> str:
    """Return the last part of the name that is called; an empty string for other callees."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return method_of(call)


def method_of(call: ast.AST) -> str:
    """Return ``"step"`` for a call ``optimizer.step()``; an empty string for other nodes."""
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return call.func.attr
    return ""


def receiver_of(call: ast.AST) -> ast.expr:
    """Return ``optimizer`` of a call ``optimizer.step()``."""
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    return call.func.value


def argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """Return an argument by its position or its name; None if it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[place] if place < len(call.args) else None


def is_plain(call: ast.Call) -> bool:
    """Return whether each argument is written out: no ``*args`` and no ``**kwargs``."""
    for value in call.args:
        if isinstance(value, ast.Starred):
            return False
    return all(keyword.arg is not None for keyword in call.keywords)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Return whether ``node`` is a constant of this value and this very type: ``1`` is not ``True``."""
    return isinstance(node, ast.Constant) and node.value == value and type(node.value) is type(value)

"""A file of Python as it is looked at: its text, its syntax tree, and where in the text a node stands.

Python's own parser finds, in a second for 50,000 lines, where LibCST with its metadata needs half a minute or
more; LibCST rewrites the few statements that change (``_fragments.py``). What changes is a piece of text, so
that all else stays as it is, byte for byte.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from narrowcast.migrate._names import Names
from narrowcast.migrate._walk import children, walk

_NEWLINE = re.compile(r"\r\n?|\n")
_SUITES = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True, slots=True)
class Reference:
    """A place where something imported is used: a name, with the attributes taken of it.

    Attributes:
        node: the whole, as ``amp.scale_loss``.
        full: what it stands for, as ``"apex.amp.scale_loss"``.
        name: the name at its beginning.
        scope: the scope that binds the name.
    """

    node: ast.expr
    full: str
    name: str
    scope: ast.AST


@dataclass(frozen=True, slots=True)
class Imported:
    """One name of an import statement.

    Attributes:
        full: what is imported, as ``"apex.amp"``; ``"apex.*"`` for a star.
        name: the name that is bound.
        scope: where it is bound.
    """

    statement: ast.Import | ast.ImportFrom
    full: str
    name: str
    scope: ast.AST


class Source:
    """One parsed file.

    Attributes:
        path: as it was named.
        text: with its own line ends, without a byte order mark.
        tree: by Python's parser.
        names: what imported names stand for, by scope.

    Raises:
        SyntaxError: it does not parse.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(text)
        except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deep
            raise SyntaxError(str(error) or "nested too deep") from None
        self.starts = [0, *(match.end() for match in _NEWLINE.finditer(text))]
        self._ascii = text.isascii()

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in walk(self.tree) for child in children(node)}

    @cached_property
    def names(self) -> Names:
        """What imported names stand for, by scope."""
        return Names(self.tree, self.parents)

    @cached_property
    def nodes(self) -> list[ast.expr | ast.stmt]:
        """All statements and expressions, in the order of their places."""
        found = [node for node in self.parents if isinstance(node, ast.expr | ast.stmt)]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    @cached_property
    def references(self) -> list[Reference]:
        """Each use of something imported, in the order of their places."""
        found = []
        for node in self.nodes:
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
                continue
            owner = self.names.owner(node)
            top: ast.expr = node
            while isinstance(outer := self.parents.get(top), ast.Attribute):
                top = outer
            if owner is not None and (full := self.names.full(top)) is not None:
                found.append(Reference(top, full, node.id, owner))
        return found

    @cached_property
    def imports(self) -> list[Imported]:
        """Each imported name: its statement, its full name (``.*`` for a star), the name bound, the scope."""
        found = []
        for node in self.nodes:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for alias in node.names:
                plain = isinstance(node, ast.Import)
                bound = alias.asname or (alias.name.partition(".")[0] if plain else alias.name)
                before = "" if isinstance(node, ast.Import) else f"{'.' * node.level}{node.module or ''}."
                scope = self.names.scope_of_import(node, bound)
                found.append(Imported(node, f"{before}{alias.name}", bound, scope))
        return found

    @cached_property
    def exported(self) -> set[str]:
        """Names that other files may import from here: those in ``__all__``, and ``import name as name``."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.name for alias in node.names if alias.name == alias.asname}
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets):
                    found |= {str(one.value) for one in walk(node.value) if isinstance(one, ast.Constant)}
        return found

    @cached_property
    def newline(self) -> str:
        """The line end of the first line; of a file without one that of Unix."""
        match = _NEWLINE.search(self.text)
        return match[0] if match else "\n"

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Each call of something imported, with its full name."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and (name := self.names.full(node.func)):
                yield node, name

    def offset(self, line: int, column: int) -> int:
        """The character at a line from 1 and a column in bytes of UTF-8 from 0, as a syntax tree has it."""
        start = self.starts[line - 1]
        if self._ascii:
            return start + column
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return start + len(self.text[start:end].encode()[:column].decode(errors="ignore"))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where ``node`` begins and ends in the text, decorators left out."""
        return self.start(node), self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def start(self, node: ast.AST) -> int:
        """Where ``node`` begins in the text."""
        return self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def code(self, node: ast.AST) -> str:
        """The text of ``node``, as it is."""
        return self.text[slice(*self.span(node))]

    def line_of(self, offset: int) -> tuple[int, int]:
        """Line and column of a character, both from 1."""
        line = bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def lines(self, first: ast.AST, last: ast.AST | None = None) -> tuple[int, int]:
        """From the start of the line where ``first`` begins to the end of that where ``last`` does."""
        end = (last or first).end_lineno  # type: ignore[attr-defined]
        begin = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))])  # type: ignore[attr-defined]
        return self.starts[begin - 1], self.starts[end] if end < len(self.starts) else len(self.text)

    def indent(self, node: ast.AST) -> str:
        """The blanks before ``node`` on its line, if it is the first there; else those of that line."""
        start = self.starts[node.lineno - 1]  # type: ignore[attr-defined]
        line = self.text[start : self.start(node)]
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Whether no other statement shares a line with it; a comment may follow."""
        begin, end = self.lines(statement)
        before, after = self.text[begin : self.start(statement)], self.text[self.span(statement)[1] : end]
        return not before.strip() and after.strip()[:1] in ("", "#")

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds ``node``."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around ``node``, innermost first, the module last."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The function whose body holds ``node``; None at the level of the module or of a class."""
        for outer in self.around(node):
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
                return outer
            if isinstance(outer, ast.ClassDef):
                return None
        return None

    def between(self, first: ast.stmt, last: ast.stmt) -> list[ast.stmt]:
        """The statements of one suite from ``first`` to ``last``."""
        suite = self.suite(first)
        places = [index for index, one in enumerate(suite) if one is first or one is last]
        return suite[places[0] : places[-1] + 1]

    def suite(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements among which ``statement`` stands."""
        if id(statement) not in self._suites:
            raise ValueError("a statement that stands in no suite")
        return self._suites[id(statement)]

    @cached_property
    def _suites(self) -> dict[int, list[ast.stmt]]:
        """The suite of each statement by its ``id``: to look for it in that of a long module takes long."""
        found: dict[int, list[ast.stmt]] = {}
        for node in walk(self.tree):
            for name in () if isinstance(node, ast.expr) else _SUITES:
                suite: list[ast.stmt] = getattr(node, name, [])
                found.update({id(one): suite for one in suite})
        return found

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

NEWLINE = re.compile(r"\r\n?|\n")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_SUITES = ("body", "orelse", "finalbody", "handlers", "cases")
# What binds a name to something that is not imported.
_OTHER = "?"
# Contexts and operators have no place in the text, and are a third of all nodes.
_PLACELESS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def children(node: ast.AST) -> Sequence[ast.AST]:
    """Return the nodes directly inside ``node``, in their order; kept with the node for the next walk."""
    known: Sequence[ast.AST] | None = node.__dict__.get("_children")
    if known is None:
        found = ast.iter_child_nodes(node)
        known = node.__dict__["_children"] = [one for one in found if not isinstance(one, _PLACELESS)]
    return known


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and everything in it, outer nodes first."""
    waiting = [node]
    for one in waiting:
        waiting += children(one)
        yield one


class Names:
    """What each name of a file is bound to, wherever that is.

    A name that is bound more than once is known only if all imports agree and nothing else binds it. A
    binding to None, True or False, as after a failed import, does not count.
    """

    def __init__(self, parents: dict[ast.AST, ast.AST]) -> None:
        self._bound: dict[str, set[str]] = defaultdict(set)
        for node, parent in parents.items():
            value = parent.value if isinstance(parent, ast.Assign) else None
            is_flag = isinstance(value, ast.Constant) and (
                value.value is None or isinstance(value.value, bool)
            )
            for name, full in bindings_of(node):
                self._bound[name] |= set() if is_flag and full == _OTHER else {full}

    def full(self, node: ast.AST) -> str | None:
        """Return the full dotted name of a name or of its attributes; None if it is not only imported.

        ``autocast`` after ``from torch.cuda.amp import autocast`` is ``"torch.cuda.amp.autocast"``.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or not self.is_only(node.id):
            return None
        return ".".join([*self._bound[node.id], *reversed(parts)])

    def is_only(self, name: str) -> bool:
        """Return whether a name is bound by an import, and by nothing else."""
        bound = self._bound.get(name, set())
        return len(bound) == 1 and _OTHER not in bound

    def taken(self) -> set[str]:
        """Return every name that is bound somewhere in the file."""
        return set(self._bound)


def bindings_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that ``node`` itself binds, each with the full name of its import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (first, first)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}"
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, _OTHER
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id, _OTHER
    elif isinstance(node, ast.arg):
        yield node.arg, _OTHER
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name, _OTHER


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

    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    full: str
    name: str


class Source:
    """One parsed file; its text has its own line ends, and no byte order mark.

    Raises:
        SyntaxError: the text does not parse.
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
        self.starts = [0, *(match.end() for match in NEWLINE.finditer(text))]
        self._ascii = text.isascii()

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in walk(self.tree) for child in children(node)}

    @cached_property
    def names(self) -> Names:
        """What imported names stand for."""
        return Names(self.parents)

    @cached_property
    def nodes(self) -> list[ast.expr | ast.stmt]:
        """All statements and expressions, in the order of the text."""
        found = [node for node in self.parents if isinstance(node, ast.expr | ast.stmt)]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    @cached_property
    def all_calls(self) -> list[ast.Call]:
        """All calls, in the order of the text."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def references(self) -> list[Reference]:
        """Each use of something imported, in the order of the text."""
        found = []
        for node in self.nodes:
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
                continue
            top: ast.expr = node
            while isinstance(outer := self.parents.get(top), ast.Attribute):
                top = outer
            if (full := self.names.full(top)) is not None:
                found.append(Reference(top, full, node.id))
        return found

    @cached_property
    def imports(self) -> list[Imported]:
        """Each imported name, in the order of the text."""
        found = []
        for node in self.nodes:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for alias in node.names:
                plain = isinstance(node, ast.Import)
                bound = alias.asname or (alias.name.partition(".")[0] if plain else alias.name)
                before = "" if isinstance(node, ast.Import) else f"{'.' * node.level}{node.module or ''}."
                found.append(Imported(node, alias, f"{before}{alias.name}", bound))
        return found

    @cached_property
    def exported(self) -> set[str]:
        """Names that other files may import from here: those in ``__all__``, and ``import name as name``."""
        found = {one.name for one in self.imports if one.alias.name == one.alias.asname}
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets):
                    found |= {str(one.value) for one in walk(node.value) if isinstance(one, ast.Constant)}
        return found

    @cached_property
    def newline(self) -> str:
        """The line end of the first line; ``"\\n"`` for a file without one."""
        match = NEWLINE.search(self.text)
        return match[0] if match else "\n"

    def offset(self, line: int, column: int) -> int:
        """Return the character at a line (from 1) and a column (from 0, in bytes of UTF-8, as in ``ast``)."""
        start = self.starts[line - 1]
        if self._ascii:
            return start + column
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return start + len(self.text[start:end].encode()[:column].decode(errors="ignore"))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where ``node`` begins and ends in the text, without its decorators."""
        return self.start(node), self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def start(self, node: ast.AST) -> int:
        """Return where ``node`` begins in the text."""
        return self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def code(self, node: ast.AST) -> str:
        """Return the text of ``node``."""
        return self.text[slice(*self.span(node))]

    def line_of(self, offset: int) -> tuple[int, int]:
        """Return line and column of a character, both from 1."""
        line = bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def lines(self, first: ast.AST, last: ast.AST | None = None) -> tuple[int, int]:
        """Return the span of whole lines from ``first``, decorators included, to the end of ``last``."""
        end = (last or first).end_lineno  # type: ignore[attr-defined]
        begin = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))])  # type: ignore[attr-defined]
        return self.starts[begin - 1], self.starts[end] if end < len(self.starts) else len(self.text)

    def indent(self, node: ast.AST) -> str:
        """Return the indentation of the line where ``node`` begins."""
        start = self.starts[node.lineno - 1]  # type: ignore[attr-defined]
        line = self.text[start : self.start(node)]
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Return whether no other statement shares a line with ``statement``; a comment may follow it."""
        begin, end = self.lines(statement)
        before, after = self.text[begin : self.start(statement)], self.text[self.span(statement)[1] : end]
        return not before.strip() and after.strip()[:1] in ("", "#")

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

    def sets_gradient(self, node: ast.AST) -> bool:
        """Return whether a gradient is assigned, other than to None."""
        if not isinstance(node, ast.Attribute) or node.attr != "grad" or isinstance(node.ctx, ast.Load):
            return False
        parent = self.parents[node]
        return not (isinstance(parent, ast.Assign) and is_constant(parent.value, None))

    def suite(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements in which ``statement`` stands."""
        return self._suites[id(statement)]

    @cached_property
    def _suites(self) -> dict[int, list[ast.stmt]]:
        # By id: searching the suite of a module with thousands of statements is slow.
        found: dict[int, list[ast.stmt]] = {}
        for node in walk(self.tree):
            for suite in suites_of(node):
                found.update({id(one): suite for one in suite})
        return found


def suites_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the suites of a compound statement; handlers and match cases count as statements."""
    for name in () if isinstance(node, ast.expr) else _SUITES:
        suite: list[ast.stmt] | None = getattr(node, name, None)
        if suite:
            yield suite


def method_of(call: ast.AST) -> str:
    """Return ``"step"`` for a call ``optimizer.step()``; an empty string for other nodes."""
    named = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    return call.func.attr if named else ""  # type: ignore[attr-defined]


def receiver_of(call: ast.Call) -> ast.expr:
    """Return ``optimizer`` of a call ``optimizer.step()``."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.value


def argument(call: ast.Call, place: int | None, name: str) -> ast.expr | None:
    """Return an argument by its position or its name; None if it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if place is not None and place < len(call.args):
        return call.args[place]
    return None


def is_plain(call: ast.Call) -> bool:
    """Return whether each argument is written out: no ``*args`` and no ``**kwargs``."""
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    return not starred and all(keyword.arg is not None for keyword in call.keywords)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Return whether ``node`` is this constant."""
    return isinstance(node, ast.Constant) and node.value == value and type(node.value) is type(value)


def listed(node: ast.expr | None) -> Sequence[ast.expr]:
    """Return the elements of a list or tuple, or the expression alone; nothing for None."""
    if node is None or is_constant(node, None):
        return []
    return node.elts if isinstance(node, ast.List | ast.Tuple) else [node]

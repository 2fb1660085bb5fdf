"""Single statements rewritten with LibCST, which keeps their comments and line breaks."""

from __future__ import annotations

import re
from collections.abc import Iterable

import libcst as cst
from libcst.metadata import CodePosition, MetadataWrapper, PositionProvider

# Without one of these no string goes on in the next line, and nothing has to be parsed.
_MAY_GO_ON = re.compile(r"\"\"\"|\'\'\'|\\[\r\n]")
_NEWLINE = re.compile(r"\r\n?|\n")


def dotted(name: str) -> cst.Attribute | cst.Name:
    """``"torch.amp"`` as an expression."""
    first, *rest = name.split(".")
    node: cst.Attribute | cst.Name = cst.Name(first)
    for part in rest:
        node = cst.Attribute(node, cst.Name(part))
    return node


def without_names(text: str, names: Iterable[str]) -> str | None:
    """The import statement ``text`` without these of the names that it imports; None where none is left."""
    statement = _import(text)
    if isinstance(statement.names, cst.ImportStar):
        return text
    gone = set(names)
    kept = [alias for alias in statement.names if alias.evaluated_name not in gone]
    if not kept:
        return None
    if len(kept) == len(statement.names):
        return text
    if kept[-1] is not statement.names[-1]:
        # The last of a list in brackets may have a comma, which keeps the line break before the bracket.
        kept[-1] = kept[-1].with_changes(comma=statement.names[-1].comma)
    return _code(statement.with_changes(names=kept), text)


def from_module(text: str, module: str) -> str:
    """The statement ``from x import ...`` with another module."""
    return _code(_import(text).with_changes(module=dotted(module), relative=()), text)


def only_names(text: str, names: Iterable[str]) -> list[tuple[str, str | None]]:
    """Of an import statement these of its names, each with the name that it is imported as."""
    statement = _import(text)
    if isinstance(statement.names, cst.ImportStar):
        return []
    wanted = set(names)
    return [
        (alias.evaluated_name, alias.evaluated_alias)
        for alias in statement.names
        if alias.evaluated_name in wanted
    ]


def movable_lines(text: str) -> list[bool]:
    """For each line of a suite whether its indentation may change: not in the middle of a string.

    ``text`` is whole lines of statements.
    """
    if not _MAY_GO_ON.search(text):
        return [True] * (len(_NEWLINE.findall(text)) + 2)
    indented = text[:1] in (" ", "\t", "\f")
    module = cst.parse_module(f"if 1:\n{text}" if indented else text)
    places = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    movable = [True] * (len(module.code.splitlines()) + 2)
    for node, place in places.items():
        if isinstance(node, cst.SimpleString | cst.FormattedString):
            _hold(movable, place.start, place.end)
    return movable[1:] if indented else movable


def _hold(movable: list[bool], start: CodePosition, end: CodePosition) -> None:
    for line in range(start.line, end.line):
        movable[line] = False


def _import(text: str) -> cst.Import | cst.ImportFrom:
    line = cst.parse_statement(text)
    assert isinstance(line, cst.SimpleStatementLine)
    (statement,) = line.body
    assert isinstance(statement, cst.Import | cst.ImportFrom)
    return statement


def _code(node: cst.CSTNode, text: str) -> str:
    # Line ends that are the module's own are not kept in the statement.
    return cst.Module(body=(), default_newline="\r\n" if "\r\n" in text else "\n").code_for_node(node)

"""What stands in a node of a syntax tree, kept with it: stages walk over the same trees again and again.

Contexts and operators, a third of the nodes, are left out: they have no place in the text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

_PLACELESS = ("ctx", "op", "ops")
_NONE: tuple[ast.AST, ...] = ()


def children(node: ast.AST) -> Sequence[ast.AST]:
    """The nodes right inside ``node``, in their order."""
    kept = node.__dict__
    known: Sequence[ast.AST] | None = kept.get("_children")
    if known is None:
        found: list[ast.AST] = []
        for name in node._fields:
            value = kept.get(name)
            if isinstance(value, list) and name not in _PLACELESS:
                found += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and name not in _PLACELESS:
                found.append(value)
        known = kept["_children"] = found or _NONE
    return known


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and all that stands in it, what is further out first."""
    waiting = [node]
    for one in waiting:
        waiting += children(one)
        yield one

"""Walk over a syntax tree, and what imported names stand for: ``amp`` is ``apex.amp``."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence

# What binds a name to something that is not imported.
_OTHER = "?"
# Contexts and operators have no place in the text, and are a third of all nodes.
_PLACELESS = ("ctx", "op", "ops")


def children(node: ast.AST) -> Sequence[ast.AST]:
    """Return the nodes directly inside ``node``, in their order; kept with the node for the next walk."""
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
        known = kept["_children"] = found
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
            for name, full in _bindings_of(node):
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


def _bindings_of(node: ast.AST) -> Iterator[tuple[str, str]]:
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

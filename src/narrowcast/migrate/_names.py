"""What an imported name stands for at the place where it is used: ``amp`` is ``apex.amp``."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

Scope = ast.AST
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.Module, ast.ClassDef, *_FUNCTIONS, *_COMPREHENSIONS)
_OTHER = "?"


class Names:
    """The bindings of each scope of one module.

    A name that is bound more than once in its scope is known only where every import agrees; that it is also
    set to None or a truth value, as where an import failed, does not count.
    """

    def __init__(self, tree: ast.Module, parents: dict[ast.AST, ast.AST]) -> None:
        self._parents = parents
        self._bound: dict[Scope, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._global: dict[Scope, set[str]] = defaultdict(set)
        self._tree = tree
        nodes = list(parents)
        for node in nodes:
            if isinstance(node, ast.Global | ast.Nonlocal):
                self._global[self._scope(node)].update(node.names)
        for node in nodes:
            self._bind(node)

    def full(self, node: ast.AST) -> str | None:
        """The full dotted name of what ``node`` (a name or attributes of one) stands for, if imported.

        ``autocast`` after ``from torch.cuda.amp import autocast`` is ``"torch.cuda.amp.autocast"``. None for
        what is computed, and where a name may be something else too.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        bound = self.bindings(node)
        if len(bound) != 1 or _OTHER in bound:
            return None
        return ".".join([*bound, *reversed(parts)])

    def bindings(self, name: ast.Name) -> set[str]:
        """All that a name may stand for: full names of imports, and ``"?"`` for anything else."""
        owner = self.owner(name)
        return set() if owner is None else self._bound[owner][name.id]

    def owner(self, name: ast.Name) -> Scope | None:
        """The scope that binds ``name`` where it stands; None for a builtin or what is not bound."""
        scope: ast.AST | None = self._scope(name)
        innermost = True
        while scope is not None:
            if name.id in self._global[scope]:
                scope = self._tree
            # The names of a class are seen in its own body alone.
            if (innermost or not isinstance(scope, ast.ClassDef)) and name.id in self._bound[scope]:
                return scope
            innermost = False
            scope = None if scope is self._tree else self._scope(scope)
        return None

    def bound(self, scope: Scope, name: str) -> set[str]:
        """All that a name is bound to in one scope."""
        return self._bound[scope][name]

    def scope_of_import(self, statement: ast.AST, name: str) -> Scope:
        """The scope in which an import statement binds ``name``."""
        scope = self._scope(statement)
        return self._tree if name in self._global[scope] else scope

    def taken(self) -> set[str]:
        """Every name that is bound somewhere in the module."""
        return {name for scope in self._bound.values() for name in scope}

    def scopes_of(self, name: str) -> int:
        """In how many scopes a name is bound."""
        return sum(name in scope for scope in self._bound.values())

    def reaches(self, name: str, full: str, at: ast.AST) -> bool:
        """Whether ``name``, written where ``at`` stands, is the imported ``full``."""
        probe = ast.Name(name, ast.Load())
        self._parents[probe] = at
        try:
            return self.bindings(probe) == {full}
        finally:
            del self._parents[probe]

    def _scope(self, node: ast.AST) -> Scope:
        """The scope in which ``node`` is evaluated; a decorator, default or base outside what it is for."""
        inner = node
        while inner in self._parents:
            outer = self._parents[inner]
            if isinstance(outer, _SCOPES) and not self._outside(outer, inner):
                return outer
            inner = outer
        return self._tree

    @staticmethod
    def _outside(outer: ast.AST, inner: ast.AST) -> bool:
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return inner in outer.decorator_list or inner is outer.returns
        if isinstance(outer, ast.ClassDef):
            return inner in outer.decorator_list or inner in outer.bases or inner in outer.keywords
        return False

    def _bind(self, node: ast.AST) -> None:
        for name, full in _bindings_of(node):
            scope = self._scope(node)
            while isinstance(scope, _COMPREHENSIONS) and isinstance(node, ast.Name) and self._walrus(node):
                scope = self._scope(scope)
            if name in self._global[scope]:
                scope = self._tree
            if full is not None:
                self._bound[scope][name].add(full)
            elif not self._is_nothing(node):
                self._bound[scope][name].add(_OTHER)
            else:
                self._bound[scope][name].update(())

    def _walrus(self, node: ast.Name) -> bool:
        return isinstance(self._parents.get(node), ast.NamedExpr)

    def _is_nothing(self, node: ast.AST) -> bool:
        """Whether a name is set to None, True or False here, as beside an import that may fail."""
        parent = self._parents.get(node)
        value = getattr(parent, "value", None) if isinstance(parent, ast.Assign) else None
        return isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, bool))


def _bindings_of(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """The names that ``node`` itself binds, each with the full name that it is imported from, or None."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (first, first)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            module = "." * node.level + (node.module or "")
            yield alias.asname or alias.name, f"{module}.{alias.name}"
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, None
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id, None
    elif isinstance(node, ast.arg):
        yield node.arg, None
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name, None
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest, None

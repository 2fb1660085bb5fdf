"""What a call of a function of the script comes to: which scalers it may touch, and whether it clips."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cached_property

from narrowcast.migrate._mistakes_names import Script, method, text_of, within
from narrowcast.migrate._walk import walk

CLIPPING = re.compile(r"torch\.nn\.utils\.(clip_grad\.)?clip_grad_(norm_?|value_)$|timm\.utils\..*clip_grad$")

# What a scale that is read out may go into without a gradient being divided by it.
_SHOWS = {"add_scalar", "append", "debug", "info", "log", "print", "put_scalar", "set_postfix", "write"}


def divides(script: Script, function: ast.AST) -> bool:
    """Whether a function reads the scale for more than to show or compare it, as to unscale by hand."""
    inside = list(walk(function))
    read = [
        node for node in inside if isinstance(node, ast.Attribute) and node.attr in ("get_scale", "_scale")
    ]
    for node in read:
        outer = script.parents[node]
        if not _is_shown(script, inside, outer if isinstance(outer, ast.Call) else node):
            return True
    return False


def _is_shown(script: Script, inside: list[ast.AST], node: ast.AST) -> bool:
    outer = script.parents[node]
    if isinstance(outer, (ast.Compare, ast.FormattedValue, ast.Expr, ast.Dict)):
        return True
    if isinstance(outer, ast.Assign) and all(isinstance(one, ast.Name) for one in outer.targets):
        names = {text_of(one) for one in outer.targets}
        used = (one for one in inside if isinstance(one, ast.Name) and one.id in names)
        return all(isinstance(one.ctx, ast.Store) or _is_shown(script, inside, one) for one in used)
    call = script.parents[outer] if isinstance(outer, ast.keyword) else outer
    return isinstance(call, ast.Call) and text_of(call.func).rpartition(".")[2] in _SHOWS


class Reach:
    """The functions of one script, by their names."""

    def __init__(self, script: Script) -> None:
        self._script = script

    @cached_property
    def _touching(self) -> dict[str, set[str]]:
        """Name of a function of this file -> the scalers that it, or what it calls here, mentions."""
        mentions: dict[str, set[str]] = {}
        calls: dict[str, set[str]] = {}
        for function in self._script.functions():
            if isinstance(function, ast.Module):
                continue
            inside = list(walk(function))
            texts = {
                text_of(node) for node in inside if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
            }
            mentions.setdefault(function.name, set()).update(set(self._script.scalers) & texts)
            calls.setdefault(function.name, set()).update(
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                for node in inside
                if isinstance(node, ast.Call)
            )
        changed = True
        while changed:
            changed = False
            for name, callees in calls.items():
                more = set().union(*(mentions.get(callee, set()) for callee in callees)) - mentions[name]
                changed = changed or bool(more)
                mentions[name] |= more
        return mentions

    @cached_property
    def _own_attributes(self) -> set[str]:
        return {
            text.removeprefix("self.") for text, _ in self._script.assignments if text.startswith("self.")
        }

    def may_touch(self, call: ast.Call) -> set[str]:
        """The scalers that an unknown call may scale, unscale, step or update with."""
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        parts = (inner for value in given for inner in within(value))
        texts = {text_of(one) for one in parts if isinstance(one, (ast.Name, ast.Attribute, ast.Subscript))}
        touched = {
            text for text in self._script.scalers if {text, text.rpartition(".")[0]} & (texts - {"self"})
        }
        owned = {text for text in self._script.scalers if text.startswith("self.")}
        if "self" in texts:
            touched |= owned
        if isinstance(call.func, ast.Name):
            return touched | self._touching.get(call.func.id, set())
        used = method(call)
        if used is None:
            return touched
        receiver, name = used
        touched |= {text for text in self._script.scalers if text.rpartition(".")[0] == receiver != "self"}
        if receiver in ("self", "super()") and name not in self._own_attributes:
            return touched | self._touching.get(name, owned)
        # A method of an object of a class of this file, unless its name is one of torch's too.
        return touched | (self._touching.get(name, set()) if receiver not in self._script.scalers else set())

    @cached_property
    def _clipping(self) -> dict[str, ast.Call]:
        """Name of a function here that touches no scaler -> what it clips first, however it is called."""
        found: dict[str, ast.Call] = {}
        names = Counter(f.name for f in self._script.functions() if not isinstance(f, ast.Module))
        for function in self._script.functions():
            if isinstance(function, ast.Module) or names[function.name] > 1:
                continue
            for statement in function.body:
                if (
                    isinstance(statement, (ast.Expr, ast.Assign, ast.Return))
                    and not self._touching[function.name]
                ):
                    for node in within(statement):
                        if isinstance(node, ast.Call) and CLIPPING.match(self._script.called(node) or ""):
                            found.setdefault(function.name, node)
        return found

    def clipped_by(self, call: ast.Call) -> ast.Call | None:
        """The clipping that a call of a function or method of this file comes to."""
        if isinstance(call.func, ast.Name):
            return self._clipping.get(call.func.id)
        used = method(call)
        return self._clipping.get(used[1]) if used and used[0] == "self" else None

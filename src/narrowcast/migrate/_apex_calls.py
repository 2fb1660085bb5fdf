"""Which functions of a file call which, by name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._source import Source

_SCHEDULER = re.compile("sched", re.IGNORECASE)


class Calls:
    """The functions of one file, those of classes too, and where they are called."""

    def __init__(self, source: Source, flow: Flow) -> None:
        self._source = source
        self._flow = flow

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions and methods of the file by name."""
        found: dict[str, list[Function]] = defaultdict(list)
        for node in self._source.nodes:
            if isinstance(node, Function):
                found[node.name].append(node)
        return found

    @cached_property
    def by_name(self) -> dict[str, list[ast.Call]]:
        """The calls of each name that a function of the file has, in the order of their places."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for node in self._source.nodes:
            if isinstance(node, ast.Call) and (name := name_of(node)) in self.functions:
                if isinstance(node.func, ast.Attribute) and not self._may_be_own(node.func.value):
                    continue
                found[name].append(node)
        return found

    def _may_be_own(self, receiver: ast.expr) -> bool:
        """Whether a method may be one of this file: not of a model, an optimizer or a scheduler of torch.

        A scheduler often comes as an argument, and then only its name tells. It is none of torch's where a
        class of this file is named so too, or makes it.
        """
        flow = self._flow
        if flow.is_optimizer(receiver) or flow.looks_like_optimizer(receiver) or flow.is_model(receiver):
            return False
        code = self._source.code(receiver)
        made_by = {getattr(one.func, "id", "") for one in flow.made.get(code, ())}
        own = any(_SCHEDULER.search(name) or name in made_by for name in flow.classes)
        return own or not _SCHEDULER.search(code)

    def reaching(self, nodes: Iterable[ast.AST]) -> set[str]:
        """The names of functions in which one of ``nodes`` stands, or that call such a function."""
        found: set[str] = set()
        waiting = [one for node in nodes for one in self.around(node)]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [one for call in self.by_name[name] for one in self.around(call)]
        return found

    def around(self, node: ast.AST) -> list[str]:
        """The names of the functions around a node."""
        return [one.name for one in self._source.around(node) if isinstance(one, Function)]


def name_of(call: ast.Call) -> str:
    """The last part of what a call calls."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")

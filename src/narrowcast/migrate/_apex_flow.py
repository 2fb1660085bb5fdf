"""Which expressions of a file hold the models and the optimizers that apex was given."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from narrowcast.migrate._source import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
Held = tuple[str, str]
"""The class around (or ""), for what begins with ``self``, and the text of the expression."""

# Methods of a model that compute nothing with its weights.
_NO_FORWARD = re.compile(
    r"(train|eval|zero_grad|(named_)?(parameters|modules|children|buffers)|(load_)?state_dict|load|save|to|cuda"
    r"|cpu|half|float|double|bfloat16|apply|register|requires|no_sync|get|set|update|add|share|clip|print|size"
    r"|num|count|is|has|freeze|init|reset)(_|$)"
)
_WRAPPERS = (
    "DistributedDataParallel",
    "DDP",
    "DataParallel",
    "DP",
    "convert_syncbn_model",
    "to",
    "cuda",
    "train",
)


@dataclass
class Flow:
    """Texts that stand for models and for optimizers, followed through assignments and calls in the file."""

    source: Source
    models: set[Held] = field(default_factory=set)
    optimizers: set[Held] = field(default_factory=set)

    @cached_property
    def made(self) -> dict[str, list[ast.Call]]:
        """The calls with arguments whose value a variable is given, by its text."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for node in self.source.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
                for target in node.targets:
                    found[self.source.code(target)].append(node.value)
        return found

    def held(self, node: ast.AST, text: str | None = None) -> Held:
        """What an expression is called here, with its class if it belongs to one."""
        text = self.source.code(node) if text is None else text
        owner = class_around(self.source, node) if text.startswith(("self.", "cls.")) else None
        return (owner.name if owner is not None else "", text)

    def follow(self) -> None:
        """Add what models and optimizers are called elsewhere in the file."""
        calls = [node for node in self.source.nodes if isinstance(node, ast.Call)]
        assigns = [node for node in self.source.nodes if isinstance(node, ast.Assign)]
        functions = _functions(self.source)
        while True:
            before = len(self.models) + len(self.optimizers)
            for assign in assigns:
                self._through_assignment(assign)
            for call in calls:
                for argument, parameter in _parameters(self.source, call, functions):
                    for known in (self.models, self.optimizers):
                        if self.held(argument) in known:
                            known.add(("", parameter))
            if len(self.models) + len(self.optimizers) == before:
                return

    def _through_assignment(self, assign: ast.Assign) -> None:
        value: ast.expr = assign.value
        if isinstance(value, ast.Call):
            name = self.source.code(value.func).rpartition(".")[2]
            if name in _WRAPPERS and value.args:
                value = value.args[0]
        for target in assign.targets:
            if isinstance(target, ast.Name | ast.Attribute) and isinstance(value, ast.Name | ast.Attribute):
                for known in (self.models, self.optimizers):
                    if self.held(value) in known:
                        known.add(self.held(target))

    def is_forward(self, call: ast.Call) -> bool:
        """Whether a call computes with a model that apex was given."""
        func = call.func
        if self.is_model(func):
            return True
        parts = []
        while isinstance(func, ast.Attribute):
            parts.append(func.attr)
            func = func.value
            if self.is_model(func):
                used = not isinstance(self.source.parents[call], ast.Expr)
                return used and not _NO_FORWARD.match(parts[0])
        return False

    def is_model(self, node: ast.AST) -> bool:
        """Whether an expression is a model."""
        return isinstance(node, ast.Name | ast.Attribute) and self.held(node) in self.models

    def is_optimizer(self, node: ast.AST) -> bool:
        """Whether an expression is an optimizer."""
        return (
            isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and self.held(node) in self.optimizers
        )


def class_around(source: Source, node: ast.AST) -> ast.ClassDef | None:
    """The class in which ``node`` stands."""
    return next((outer for outer in source.around(node) if isinstance(outer, ast.ClassDef)), None)


def outermost_function(source: Source, node: ast.AST) -> Function | None:
    """The function of the module or of a class in which ``node`` stands, closures left out."""
    found = [outer for outer in source.around(node) if isinstance(outer, Function)]
    return found[-1] if found else None


def _functions(source: Source) -> dict[str, Function]:
    """The functions of the file by name, those of a class as ``self.name`` too."""
    return {node.name: node for node in source.nodes if isinstance(node, Function)}


def _parameters(
    source: Source, call: ast.Call, functions: dict[str, Function]
) -> Iterator[tuple[ast.expr, str]]:
    """The arguments of a call of a function of this file, each with the parameter that it becomes."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    method = isinstance(call.func, ast.Attribute)
    if isinstance(call.func, ast.Attribute) and source.code(call.func.value) in ("self", "cls"):
        name = call.func.attr
    function = functions.get(name)
    if function is None:
        return
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if method and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    for argument, parameter in zip(call.args, names, strict=False):
        if isinstance(argument, ast.Starred):
            return
        yield argument, parameter
    for keyword in call.keywords:
        if keyword.arg in names or keyword.arg in {one.arg for one in function.args.kwonlyargs}:
            yield keyword.value, str(keyword.arg)

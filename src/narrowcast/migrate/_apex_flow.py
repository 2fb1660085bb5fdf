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
_OPTIMIZER = re.compile(r"(?<![a-z])opt(im(izers?)?)?(?![a-z])|optim", re.IGNORECASE)
_WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel", "DP", "convert_syncbn_model")
# Methods of a model that return it.
_SAME = ("to", "cuda", "cpu", "train", "eval")


@dataclass
class Flow:
    """Texts that stand for models and for optimizers, followed through assignments and calls in the file.

    Attributes:
        handed: what each optimizer's text was given by, where it is a parameter or another name for one.
    """

    source: Source
    models: set[Held] = field(default_factory=set)
    optimizers: set[Held] = field(default_factory=set)
    handed: dict[Held, set[Held]] = field(default_factory=lambda: defaultdict(set))

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
        return (self._first_of(owner) if owner is not None else "", text)

    def _first_of(self, owner: ast.ClassDef) -> str:
        """The class of this file that a class goes back to: its attributes are those of that one."""
        names = {owner.name}
        while True:
            bases = (getattr(base, "id", "") for base in owner.bases)
            base = next((name for name in bases if name in self.classes and name not in names), None)
            if base is None:
                return owner.name
            owner = self.classes[base]
            names.add(base)

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the file by name."""
        return {node.name: node for node in self.source.nodes if isinstance(node, ast.ClassDef)}

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
                    self._pass_on(self.held(argument), ("", parameter))
            if len(self.models) + len(self.optimizers) == before:
                return

    def _through_assignment(self, assign: ast.Assign) -> None:
        value: ast.expr = assign.value
        if isinstance(value, ast.Call):
            name = self.source.code(value.func).rpartition(".")[2]
            if name in _SAME and isinstance(value.func, ast.Attribute):
                value = value.func.value
            elif name in _WRAPPERS and value.args:
                value = value.args[0]
        for target in assign.targets:
            if isinstance(target, ast.Name | ast.Attribute) and isinstance(value, ast.Name | ast.Attribute):
                self._pass_on(self.held(value), self.held(target))

    def _pass_on(self, value: Held, name: Held) -> None:
        """``name`` stands for what ``value`` does."""
        if value in self.models:
            self.models.add(name)
        if value in self.optimizers:
            self.optimizers.add(name)
            if name != value:
                self.handed[name].add(value)

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

    def looks_like_optimizer(self, node: ast.AST) -> bool:
        """Whether an expression is an optimizer, of apex or not: made as one, or named so."""
        code = self.source.code(node)
        made = self.made.get(code, [])
        return bool(_OPTIMIZER.search(code)) or any(
            (self.source.names.full(one.func) or "").startswith("torch.optim.")
            and "lr_scheduler" not in self.source.code(one.func)
            for one in made
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

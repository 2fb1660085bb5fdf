"""Collect the edits for the apex part of one file, and find the names of its models.

A file is rewritten as a whole or left alone. Code that is not in a canonical shape is refused, with its line
and what to write instead.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property

from narrowcast.migrate.source._edits import Changes, Target
from narrowcast.migrate.source._tree import Function, Reference, Source, listed, receiver_of, walk

RULE = "apex"
AUTOCAST: dict[Target, str] = {"torch": "torch.autocast", "narrowcast": "nc.autocast"}
SCALER: dict[Target, str] = {"torch": "torch.amp.GradScaler", "narrowcast": "nc.GradScaler"}

# Methods of a model that compute nothing with its weights.
_NO_FORWARD = re.compile(
    r"(train|eval|zero_grad|(named_)?(parameters|modules|children|buffers)|(load_)?state_dict|load|save|to|cuda"
    r"|cpu|half|float|double|bfloat16|apply|register|requires|no_sync|get|set|update|add|share|clip|print|size"
    r"|num|count|is|has|freeze|init|reset)(_|$)"
)
_WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel", "DP", "convert_syncbn_model")
# Methods of a model that return it.
_SAME = ("to", "cuda", "cpu", "train", "eval")


@dataclass
class Plan:
    """The edits for the apex part of one file, and the reasons to refuse them.

    Attributes:
        device: the device type as an expression.
        refused: offsets and reasons to leave the apex part of the file alone.
        done: expressions that were rewritten, by ``id``.
        gone: statements to remove.
        needs_torch: whether the new text uses the name ``torch``.
    """

    source: Source
    target: Target
    device: str = '"cuda"'
    changes: Changes = field(default_factory=Changes)
    refused: list[tuple[int, str]] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    gone: list[ast.stmt] = field(default_factory=list)
    needs_torch: bool = False

    def refuse(self, node: ast.AST, reason: str) -> None:
        """Leave the apex part of the file alone, for this reason."""
        self.refused.append((self.source.start(node), reason))

    def note(self, node: ast.AST, message: str) -> None:
        """Report what changed."""
        self.changes.report(self.source.start(node), RULE, message, fixed=True)

    def references(self, *names: str) -> list[Reference]:
        """Return the uses of these names of apex that are not yet rewritten."""
        wanted = {f"apex.{name}" for name in names}
        return [one for one in self.source.references if one.full in wanted and id(one.node) not in self.done]

    @cached_property
    def models(self) -> set[str]:
        """The texts of the models given to ``amp.initialize``.

        They are followed through assignments, wrappers such as DDP, and calls of functions in this file.
        Another object of the same name may be cast too, which is harmless: O1 casts everywhere.
        """
        held: set[str] = set()
        for reference in self.source.references:
            call = self.source.call_of(reference.node)
            if reference.full != "apex.amp.initialize" or call is None:
                continue
            values = call.args[:1] or [one.value for one in call.keywords if one.arg == "models"]
            held |= {self.source.code(one) for value in values for one in listed(value)}
            statement = self.source.statement(call)
            for target in statement.targets if isinstance(statement, ast.Assign) else ():
                pair = isinstance(target, ast.Tuple) and len(call.args) + len(call.keywords) > 1
                first = target.elts[0] if pair and isinstance(target, ast.Tuple) else target
                held |= {self.source.code(one) for one in listed(first)}
        before = -1
        while len(held) > before:
            before = len(held)
            for node in self.source.nodes:
                if isinstance(node, ast.Assign):
                    value = _unwrapped(node.value)
                    if isinstance(value, ast.Name | ast.Attribute) and self.source.code(value) in held:
                        held |= {self.source.code(target) for target in node.targets}
                elif isinstance(node, ast.Call):
                    held |= {name for one, name in self.parameters(node) if self.source.code(one) in held}
        return held

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions of the file by name, methods too."""
        found: dict[str, list[Function]] = {}
        for node in self.source.nodes:
            if isinstance(node, Function):
                found.setdefault(node.name, []).append(node)
        return found

    def parameters(self, call: ast.Call) -> list[tuple[ast.expr, str]]:
        """Return the arguments of a call of a function of this file, each with its parameter."""
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        functions = self.functions.get(name, [])
        if len(functions) != 1 or any(isinstance(one, ast.Starred) for one in call.args):
            return []
        given = functions[0].args
        names = [one.arg for one in (*given.posonlyargs, *given.args)]
        if isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"]):
            names = names[1:]
        known = {*names, *(one.arg for one in given.kwonlyargs)}
        return [
            *zip(call.args, names, strict=False),
            *((one.value, one.arg) for one in call.keywords if one.arg in known),
        ]

    def is_model(self, node: ast.AST) -> bool:
        """Return whether an expression is a model that was given to apex."""
        return isinstance(node, ast.Name | ast.Attribute) and self.source.code(node) in self.models

    def is_forward(self, call: ast.AST) -> bool:
        """Return whether a node is a call that computes with a model."""
        if not isinstance(call, ast.Call):
            return False
        func, first = call.func, ""
        while True:
            if self.is_model(func):
                used = not isinstance(self.source.parents[call], ast.Expr)
                return not first or (used and not _NO_FORWARD.match(first))
            if not isinstance(func, ast.Attribute):
                return False
            first, func = func.attr, func.value

    def calls_model(self, node: ast.AST) -> bool:
        """Return whether a model is called somewhere in ``node``."""
        return any(self.is_forward(one) for one in walk(node))


def _unwrapped(value: ast.expr) -> ast.expr:
    """Return ``model`` of ``DDP(model)`` and of ``model.to(device)``."""
    if isinstance(value, ast.Call):
        name = getattr(value.func, "attr", getattr(value.func, "id", ""))
        if name in _SAME and isinstance(value.func, ast.Attribute):
            return receiver_of(value)
        if name in _WRAPPERS and value.args:
            return value.args[0]
    return value


def outermost_function(source: Source, node: ast.AST) -> Function | None:
    """Return the outermost function around ``node``: of the module or of a class, not a closure."""
    found = [outer for outer in source.around(node) if isinstance(outer, Function)]
    return found[-1] if found else None


def is_apex(full: str) -> bool:
    """Return whether a full name belongs to apex."""
    return full == "apex" or full.startswith("apex.")


def device_type(source: Source) -> str:
    """Return the device type of a script for apex, as an expression.

    apex ran only on CUDA. The script uses another device only if it checks for CUDA, or names the CPU and no
    other device.
    """
    if "cuda.is_available" in source.text:
        return '"cuda" if torch.cuda.is_available() else "cpu"'
    names_cpu = re.search(r"""["']cpu["']""", source.text)
    return '"cpu"' if names_cpu and "cuda" not in source.text else '"cuda"'

"""Which statements look at gradients, by themselves or by what they call.

A call that is given a model, an optimizer or parameters may look at gradients, unless it is known not to; so
may a method of an object that was made with them. To unscale where that was not needed changes nothing.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._apex_steps import Blocks
from narrowcast.migrate._source import Source

_LOOKS = re.compile(r"(clip_grad_|clip_grad\b|grad_norm|\.grad\b|all_?reduce_?(grad|and)|synchronize\()")
_HARMLESS = re.compile(
    r"((named_)?(parameters|modules|children|buffers)|(zero_grad|step|(load_)?state_dict|train|eval|print|len|list"
    r"|tuple|set|dict|iter|next|zip|enumerate|filter|map|id|type|str|repr|int|float|bool|isinstance|hasattr|getattr"
    r"|super|chain|item|detach|tolist|numpy|cuda|cpu|to|requires_grad_?|set_requires_grad|toggle_grad|no_sync|register_\w+|backward"
    r"|(debug|info|warning|set_postfix|set_description|add_scalar|write|append|format|join|scale_loss|initialize)"
    r"|(get|set|adjust|update)_(last_)?(lr|learning_rate)|(save|evaluate|validate)\w*))$"
)
# Attributes that hold no parameters.
_PLAIN = re.compile(
    r"(training|config|cfg|device|dtype|name|defaults|epoch|shape|num_\w+|\w+_(size|dim|steps?))$"
)
_LISTS = ("param_groups", "params", "parameters", "named_parameters", "module")


class Lookers:
    """The statements and calls of a file that may look at gradients."""

    def __init__(self, source: Source, flow: Flow, blocks: Blocks, steps: list[ast.Call]) -> None:
        self._source = source
        self._flow = flow
        self._training = {id(source.function(node)) for node in (*(b.statement for b in blocks), *steps)}
        self._asked: dict[int, bool] = {}
        self._losses = {
            flow.held(one) for b in blocks for one in ast.walk(b.loss) if isinstance(one, ast.Name)
        }

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions and methods of the file by name."""
        found: dict[str, list[Function]] = defaultdict(list)
        for node in self._source.nodes:
            if isinstance(node, Function):
                found[node.name].append(node)
        return found

    @cached_property
    def trains(self) -> set[str]:
        """Names of functions that go backward or step, or call one that does."""
        found: set[str] = set()
        named = [node for group in self.functions.values() for node in group]
        grown = True
        while grown:
            more = {
                one.name
                for one in named
                if one.name not in found
                and (id(one) in self._training or any(name_of(c) in found for c in _calls(one)))
            }
            found |= more
            grown = bool(more)
        return found

    @cached_property
    def _holders(self) -> set[tuple[str, str]]:
        """What was made with a model, an optimizer or parameters, or runs through them."""
        found: set[tuple[str, str]] = set()
        pairs: list[tuple[ast.AST, ast.expr]] = []
        for node in self._source.nodes:
            if isinstance(node, ast.Assign):
                pairs += [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.For):
                pairs.append((node.target, node.iter))
            elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
                pairs += [(one.target, one.iter) for one in node.generators]
        grown = True
        while grown:
            grown = False
            for target, value in pairs:
                names = [one for one in ast.walk(target) if isinstance(one, ast.Name | ast.Attribute)]
                new = {self._flow.held(one) for one in names if isinstance(one.ctx, ast.Store)} - found
                if new & self._losses:
                    continue
                if new and not self._computes(value) and self._mentions(value, found):
                    found |= new
                    grown = True
        return found

    def _computes(self, value: ast.expr) -> bool:
        return any(isinstance(one, ast.Call) and self._flow.is_forward(one) for one in ast.walk(value))

    def _mentions(self, node: ast.AST, holders: set[tuple[str, str]]) -> bool:
        """Whether an expression hands a model, an optimizer or parameters on."""
        if isinstance(node, ast.Call):
            name = name_of(node)
            if name not in _LISTS and (self._flow.is_forward(node) or _reads_only(name)):
                return False
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return node.slice.value == "params" and self._mentions(node.value, holders)
        if isinstance(node, ast.Name | ast.Attribute):
            held = self._flow.held(node)
            if held in self._flow.models or held in self._flow.optimizers or held in holders:
                return True
            if isinstance(node, ast.Attribute) and not _PLAIN.match(node.attr):
                return self._mentions(node.value, holders)
            return False
        return any(self._mentions(child, holders) for child in ast.iter_child_nodes(node))

    def looks(self, statement: ast.stmt) -> str | None:
        """``"sure"`` or ``"may"``, where a statement itself looks at gradients, not one inside it."""
        if isinstance(statement, Function | ast.ClassDef):
            return None
        found = None
        for part in _headers(statement):
            text = self._source.code(part)
            if "master_params" in text:
                continue
            if _LOOKS.search(text):
                return "sure"
            for call in (node for node in ast.walk(part) if isinstance(node, ast.Call)):
                how = self._called(call)
                if how == "sure":
                    return how
                found = found or how
        return found

    def _called(self, call: ast.Call) -> str | None:
        """How a call looks at gradients."""
        name = name_of(call)
        own = self.functions.get(name, [])
        method = isinstance(call.func, ast.Attribute)
        at_self = isinstance(call.func, ast.Attribute) and self._source.code(call.func.value) in (
            "self",
            "cls",
        )
        if name in self.trains and own:
            return None
        harmless = _HARMLESS.match(name) or self._flow.is_forward(call)
        if own and (not method or at_self or not harmless) and any(self._body_looks(one) for one in own):
            return "sure"
        if harmless or (own and (not method or at_self)):
            return None
        return self._handed(call)

    def _handed(self, call: ast.Call) -> str | None:
        """How a call of what is not of this file looks at what it is handed, or was made with."""
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(self._mentions(one, self._holders) for one in given):
            return "may"
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        if self._mentions(receiver, self._holders):
            return "sure" if self._object_looks(call) else "may"
        return None

    def _body_looks(self, function: Function) -> bool:
        """Whether a function here looks at gradients; one that asks for masters unscales by itself."""
        known = self._asked.get(id(function))
        if known is not None:
            return known
        self._asked[id(function)] = False  # until the end, for one that calls itself
        if "master_params(" in self._source.code(function):
            return False
        inside = [one for one in ast.walk(function) if isinstance(one, ast.stmt) and one is not function]
        found = any(self.looks(one) is not None for one in inside)
        self._asked[id(function)] = found
        return found

    def _object_looks(self, call: ast.Call) -> bool:
        return not isinstance(call.func, ast.Attribute) and any(
            self._body_looks(one) for one in self.functions.get("__call__", [])
        )


def name_of(call: ast.Call) -> str:
    """The last part of what a call calls."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def _reads_only(name: str) -> bool:
    return name in ("state_dict", "len", "id", "type", "str", "repr", "isinstance", "print") or bool(
        re.match(r"get_(last_)?(lr|learning_rate)$", name)
    )


def _calls(function: Function) -> Iterator[ast.Call]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Call))


def _headers(statement: ast.stmt) -> Iterator[ast.AST]:
    """A simple statement, or the expressions that a compound one begins with."""
    if not hasattr(statement, "body") and not isinstance(statement, ast.Match):
        yield statement
        return
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr

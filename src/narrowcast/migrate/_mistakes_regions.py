"""Which autocast region a place runs in: regions that are kept, returned by helpers, and called into."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from narrowcast.migrate._mistakes_names import (
    OWN_REGIONS,
    TORCH_REGIONS,
    Script,
    ancestors,
    argument,
    is_false,
    method,
    text_of,
    values,
    within,
)

_FORMATS = {
    "torch.float16": "fp16",
    "torch.half": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float": "fp32",
}
_APEX = ("apex.", "narrowcast.apex")
_PROPERTIES = {"property", "functools.cached_property"}
_PLAIN_DECORATORS = {"staticmethod", "classmethod", *_PROPERTIES}
_NOTHING = {"nullcontext", "suppress"}
_CONDITIONS = (ast.If, ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.Match, ast.comprehension)
_LEAVING = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Opened:
    """What a context manager opens: a region of torch's or of narrowcast's, on or off.

    ``alone``: and nothing else with it.
    """

    kind: str
    on: bool
    alone: bool = True


class Regions:
    """The regions of one script, followed through its names, attributes and helpers."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._names = script.source.names
        # What is looked at already; of what is still looked at, as of a function that calls itself, nothing.
        self._trained: dict[ast.AST, set[str]] = {}
        self._managers: dict[ast.AST, Opened | None] = {}

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call that makes a region."""
        return [_whole(self._script, call) for call in self._script.calls if self._kind(call) is not None]

    def format(self, call: ast.Call) -> str | None:
        """The format of a region, the device's default included ("bf16"); None where it is computed."""
        old = (self._script.called(call) or "").split(".amp.")[0]
        device = {"torch.cuda": "cuda", "torch.cpu": "cpu"}.get(old)
        dtype = argument(call, 1, "dtype")
        if dtype is not None:
            return _FORMATS.get(self._script.qualified(dtype) or "")
        first = argument(call, 0, "device_type")
        if device is None and isinstance(first, ast.Constant):
            device = str(first.value)
        return {"cuda": "fp16", "cpu": "bf16"}.get(device or "")

    @cached_property
    def on_cpu_only(self) -> bool:
        """Whether every region and every scaler is one for the CPU, which nobody waits for."""
        devices = [argument(call, 0, "device_type") for call in self.calls if "cpu" not in text_of(call.func)]
        made = [call for calls in self._script.made_scalers.values() for call in calls]
        devices += [argument(call, 0, "device") for call in made]
        return bool(self.calls) and all(isinstance(d, ast.Constant) and d.value == "cpu" for d in devices)

    @cached_property
    def is_mixed(self) -> bool:
        """Whether the script trains in mixed precision: by a region, a scaler or apex."""
        apex = any(f"{name}.".startswith(_APEX) for name in self._script.imported)
        return bool(self.calls or self._script.scalers or apex)

    def around(self, node: ast.AST) -> tuple[Opened, ast.AST] | None:
        """The region that a node runs in, and its ``with`` or function; None outside and where it is off."""
        for outer in ancestors(self._script, node):
            managers: list[ast.expr] = []
            if isinstance(outer, (ast.With, ast.AsyncWith)):
                managers = [item.context_expr for item in reversed(outer.items)]
            elif isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                managers = outer.decorator_list
            for manager in managers:
                opened = self._opened(manager)
                if opened is not None:
                    return (opened, outer) if opened.on else None
        return None

    def trains(self, call: ast.Call) -> set[str]:
        """Whether a call is a "backward" or a "step", or certainly comes to one in a function here."""
        found = {"backward"} if self._script.is_backward(call) else set()
        if self._script.is_step(call):
            found.add("step")
        function = self._function(call.func)
        return found if function is None else found | self._trained_by(function)

    def _trained_by(self, function: _Function | ast.Lambda) -> set[str]:
        """What a function does to the weights, outside of regions and conditions in it."""
        if function not in self._trained:
            self._trained[function] = set()
            body = function.body if isinstance(function.body, list) else [function.body]
            inside = sorted(
                (one for part in body for one in within(part) if hasattr(one, "lineno")), key=_line
            )
            found = set()
            for node in inside:
                if isinstance(node, _LEAVING):
                    break
                if isinstance(node, ast.Call) and not self._is_apart(node):
                    found |= self.trains(node)
            self._trained[function] = found
        return self._trained[function]

    def _is_apart(self, node: ast.AST) -> bool:
        """Whether a node is reached under a condition only, or stands in a region, on or off."""
        for outer in ancestors(self._script, node):
            managers = outer.items if isinstance(outer, (ast.With, ast.AsyncWith)) else []
            if isinstance(outer, _CONDITIONS) or any(self._opened(one.context_expr) for one in managers):
                return True
        return False

    def _opened(self, node: ast.expr) -> Opened | None:
        """What an expression opens, if each thing that it may be is a region or opens nothing."""
        if node not in self._managers:
            self._managers[node] = None
            found = [self._one(value) for value in self._follow(node, frozenset())]
            regions = [one for one in found if one is not None and one.kind]
            if regions and None not in found:
                self._managers[node] = next((one for one in regions if one.on), regions[0])
        return self._managers[node]

    def _one(self, node: ast.AST) -> Opened | None:
        """What one expression opens; of kind "" where that is nothing, None where it is not known."""
        if isinstance(node, ast.Constant) and node.value is None:
            return Opened("", on=False)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            managers = {"contextlib.contextmanager", "contextlib.asynccontextmanager"}
            return self._generator(node) if self._decorators(node) & managers else None
        if not isinstance(node, ast.Call):
            return None
        kind = self._kind(node)
        if kind is not None:
            return Opened(kind, on=not self._is_off(node))
        return Opened("", on=False) if _last(node.func) in _NOTHING else None

    def _kind(self, call: ast.Call) -> str | None:
        """Whose region a call makes, a ``partial`` of one included: "torch", "narrowcast", or None."""
        name = self._script.called(_whole(self._script, call))
        if name in TORCH_REGIONS:
            return "torch"
        if name in OWN_REGIONS:
            return "narrowcast"
        used = method(call)
        return "narrowcast" if used and used[0] in self._script.steppers and used[1] == "autocast" else None

    def _is_off(self, call: ast.Call) -> bool:
        """Whether a region is made to be off."""
        whole = _whole(self._script, call)
        place = 0 if (self._script.called(whole) or "").endswith("pu.amp.autocast") else 2
        return is_false(argument(whole, place, "enabled"))

    def _generator(self, function: _Function) -> Opened | None:
        """What a function opens around its ``yield``."""
        for node in (inner for statement in function.body for inner in within(statement)):
            if isinstance(node, ast.Yield) and (around := self.around(node)) is not None:
                return Opened(around[0].kind, on=True, alone=False)
        return None

    def _follow(self, node: ast.expr, seen: frozenset[ast.AST]) -> Iterator[ast.AST]:
        """What an expression may be: names stand for what they are bound to, calls for what they return."""
        for value in values(node):
            if value in seen:
                yield value
                continue
            function = self._function(value.func if isinstance(value, ast.Call) else value)
            if isinstance(value, ast.Attribute) and not self._decorators(function) & _PROPERTIES:
                function = None
            if function is not None:
                yield from self._returned(function, seen | {value})
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                yield from self._called(value, value.func)
            elif isinstance(value, (ast.Name, ast.Attribute)) and (bound := self._bound_to(value)):
                for one in bound:
                    yield from self._follow(one, seen | {value})
            else:
                yield value

    def _called(self, call: ast.Call, name: ast.Name) -> Iterator[ast.AST]:
        """What a call of a name makes, where that is a ``partial`` or ``nullcontext``."""
        for one in self._bound_to(name) or [call]:
            if _last(one) in _NOTHING:
                yield ast.Constant(None)
            else:
                yield one if self._script.called(one) == "functools.partial" else call

    def _returned(self, function: ast.AST, seen: frozenset[ast.AST]) -> Iterator[ast.AST]:
        decorators = self._decorators(function)
        if isinstance(function, ast.Lambda):
            yield from self._follow(function.body, seen)
        elif not decorators <= _PLAIN_DECORATORS:
            yield function
        elif isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in within(statement):
                    if isinstance(node, ast.Return):
                        yield from self._follow(node.value or ast.Constant(None), seen)

    def _decorators(self, function: ast.AST | None) -> set[str]:
        listed = getattr(function, "decorator_list", ())
        return {self._names.full(one) or text_of(one) for one in listed}

    def _function(self, node: ast.expr) -> _Function | ast.Lambda | None:
        """The function of this file that a name or an attribute of ``self`` stands for."""
        if isinstance(node, ast.Name):
            found = self._defined[self._names.owner(node), node.id]
            bound = [] if found else self._bound_to(node)
            if len(bound) == 1 and isinstance(bound[0], ast.Lambda):
                return bound[0]
        elif isinstance(node, ast.Attribute) and text_of(node.value) == "self":
            found = self._defined[self._class_of(node), node.attr] or self._defined[None, node.attr]
        else:
            return None
        return found[0] if len(found) == 1 else None

    @cached_property
    def _defined(self) -> dict[tuple[ast.AST | None, str], list[_Function]]:
        """(scope, name) -> the functions; under None the methods of all classes."""
        found: dict[tuple[ast.AST | None, str], list[_Function]] = defaultdict(list)
        for node in self._script.functions():
            if not isinstance(node, ast.Module):
                scope = self._scope_of(node)
                found[scope, node.name].append(node)
                if isinstance(scope, ast.ClassDef):
                    found[None, node.name].append(node)
        return found

    def _bound_to(self, node: ast.Name | ast.Attribute) -> list[ast.expr]:
        """All that is assigned to a name in its scope, or to an attribute in its class; empty: not known."""
        scope = self._scope_of(node)
        if isinstance(node, ast.Name) and isinstance(
            scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        ):
            given = scope.args
            listed = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            if node.id in {one.arg for one in listed if one is not None}:
                return []
        return self._stored[scope, text_of(node)]

    @cached_property
    def _stored(self) -> dict[tuple[ast.AST | None, str], list[ast.expr]]:
        """(scope, text) -> what is bound to it; the name itself for what a loop, an import or others bind."""
        found: dict[tuple[ast.AST | None, str], list[ast.expr]] = defaultdict(list)
        for node in self._script.nodes:
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                parent = self._script.parents[node]
                value: ast.expr | None = node
                if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                    value = parent.value
                if value is not None:
                    found[self._scope_of(node), text_of(node)].append(value)
        return found

    def _scope_of(self, node: ast.AST) -> ast.AST | None:
        """The scope that binds a name or a function; the class in which an attribute is used."""
        if isinstance(node, ast.Name):
            return self._names.owner(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            outer = self._script.source.function(node)
            return outer or self._class_of(node) or self._script.tree
        return self._class_of(node)

    def _class_of(self, node: ast.AST) -> ast.ClassDef | None:
        around = self._script.source.around(node)
        return next((outer for outer in around if isinstance(outer, ast.ClassDef)), None)


def _whole(script: Script, call: ast.Call) -> ast.Call:
    """The call that a ``partial`` makes later, as far as it is known; any other call itself."""
    if script.called(call) != "functools.partial" or not call.args:
        return call
    return ast.Call(call.args[0], call.args[1:], call.keywords)


def _line(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _last(node: ast.AST) -> str:
    return text_of(node).rpartition(".")[2]

"""Which statements look at gradients, by themselves or by what they call.

A call that is given a model, an optimizer or parameters may look at gradients, unless it is known not to; so
may a method of an object that was made with them. To unscale where that was not needed changes nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cached_property

from narrowcast.migrate._apex_calls import Calls, name_of
from narrowcast.migrate._apex_flow import Flow, Function
from narrowcast.migrate._apex_steps import Blocks
from narrowcast.migrate._source import Source
from narrowcast.migrate._walk import children, walk

_LOOKS = re.compile(
    r"(?<!autograd)\.grad\b|(clip_grad\w*|grad_norm\w*|all_?reduce_?(grad|and)\w*|(?<!cuda\.)synchronize)\("
)
_CHANGES = re.compile(r"\.grad(\.data)?(\[[^]]*\])?\s*(([-+*/@]|//|\*\*)?=(?!=)|\.\w+_\()")
# To clear gradients, or to ask whether there are any, is not to look at them.
_CLEARS = re.compile(r"\.grad\s*(=\s*None|is (not )?None|(\.data)?\.(zero_|detach_)\(\))")
_HARMLESS = re.compile(
    r"((named_)?(parameters|modules|children|buffers)|(zero_grad|step|(load_)?state_dict|train|eval|print|len"
    r"|list|tuple|set|dict|iter|next|zip|enumerate|filter|map|id|type|str|repr|int|float|bool|isinstance"
    r"|hasattr|getattr|super|chain|item|detach|tolist|numpy|cuda|cpu|to|requires_grad_?|set_requires_grad"
    r"|toggle_grad|no_sync|register_\w+|backward"
    r"|(debug|info|warning|set_postfix|set_description|add_scalar|write|append|format|join|scale_loss"
    r"|initialize)|(get|set|adjust|update)_(last_)?(lr|learning_rate)|(save|evaluate|validate)\w*))$"
)
# Attributes that hold no parameters.
_PLAIN = re.compile(
    r"(training|config|cfg|device|dtype|name|defaults|epoch|shape|num_\w+|\w+_(size|dim|steps?))$"
)
# Methods that Python calls where an object is made.
_MAKING = ("__init__", "__new__")
# Modules that call nothing of a script's own.
_FOREIGN = (
    "torch",
    "numpy",
    "math",
    "time",
    "os",
    "sys",
    "json",
    "random",
    "tqdm",
    "logging",
    "gc",
    "datetime",
)
_LISTS = ("param_groups", "params", "parameters", "named_parameters", "module")


class Lookers:
    """The statements and calls of a file that may look at gradients."""

    def __init__(
        self, source: Source, flow: Flow, calls: Calls, blocks: Blocks, steps: Iterable[ast.Call]
    ) -> None:
        self._source = source
        self._flow = flow
        self._calls = calls
        self.scales = calls.reaching(block.statement for block in blocks)
        self.steps = calls.reaching(steps)
        self._asked: dict[int, bool] = {}
        self._changing: dict[int, bool] = {}
        self._losses = {flow.held(one) for b in blocks for one in walk(b.loss) if isinstance(one, ast.Name)}

    @cached_property
    def _sure(self) -> list[ast.expr | ast.stmt]:
        """The expressions that are looks at gradients themselves."""
        return [node for node in self._source.nodes if self._is_sure(node)]

    @cached_property
    def _looking(self) -> set[str]:
        """The names of functions that look at gradients and neither go backward nor step."""
        names: set[str] = set()
        waiting = [name for node in self._sure for name in self._calls.around(node)]
        while waiting:
            name = waiting.pop()
            if name not in names and name not in self.scales and name not in self.steps:
                names.add(name)
                waiting += [one for call in self._calls.by_name[name] for one in self._calls.around(call)]
        return names

    @cached_property
    def escapes(self) -> bool:
        """Whether what looks at gradients is handed on as a value: calls out of sight may be of it."""
        called = [call for name in self._looking for call in self._calls.by_name[name]]
        in_lambda = any(
            isinstance(outer, ast.Lambda)
            for node in (*self._sure, *called)
            for outer in self._source.around(node)
        )
        return in_lambda or any(self._is_handed_on(node) for node in self._source.nodes if self._looking)

    def out_of_sight(self) -> Iterator[ast.AST]:
        """What looks at gradients when Python comes to it, and not where it is called."""
        for name in self._looking:
            for function in self._calls.functions[name]:
                if name.startswith("__") and name not in (*_MAKING, "__call__"):
                    yield function
                elif any(isinstance(node, ast.Yield | ast.YieldFrom) for node in walk(function)):
                    for call in self._calls.by_name[name]:
                        if getattr(self._source.parents[call], "iter", None) is not call:
                            yield call

    @cached_property
    def _properties(self) -> set[str]:
        """Attributes that are computed by a method which looks at gradients."""
        return {
            name
            for name in self._looking
            for function in self._calls.functions[name]
            if any("property" in self._source.code(one) for one in function.decorator_list)
        }

    def decorated(self) -> Iterator[ast.expr]:
        """The decorators of functions that go backward or step which may look at gradients around that."""
        for name in self.scales | self.steps if self.escapes else ():
            for function in self._calls.functions[name]:
                for one in function.decorator_list:
                    if any(getattr(node, "id", None) in self._calls.functions for node in walk(one)):
                        yield one

    def _is_sure(self, node: ast.AST) -> bool:
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if not isinstance(node, ast.Name | ast.Attribute) or not _LOOKS.search(f".{name}("):
            return False
        return looks_at_gradients(self._source.code(self._source.statement(node)))

    def _is_handed_on(self, node: ast.AST) -> bool:
        """Whether a function is used as a value here, or is a method that only others call."""
        names = self._looking
        if isinstance(node, Function) and node.name in names:
            method = isinstance(self._source.parents[node], ast.ClassDef) and node.name not in _MAKING
            return bool(node.decorator_list) or (method and not self._calls.by_name[node.name])
        name = getattr(node, "id", None) or getattr(node, "attr", None)
        return (
            isinstance(node, ast.Name | ast.Attribute)
            and name in names
            and isinstance(node.ctx, ast.Load)
            and getattr(self._source.parents[node], "func", None) is not node
        )

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
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                # What an object is given it may hold.
                pairs += [(node.value.func, one) for one in self._given(node.value)]
            elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
                pairs += [(one.target, one.iter) for one in node.generators]
        grown = True
        while grown:
            grown = False
            for target, value in pairs:
                new = set(self._kept_in(target)) - found
                if new & self._losses:
                    continue
                if new and not self._computes(value) and self._mentions(value, found):
                    found |= new
                    grown = True
        return found

    def _given(self, call: ast.Call) -> list[ast.expr]:
        """What a method of an object that is no module gets."""
        if not isinstance(call.func, ast.Attribute) or self._source.names.full(call.func) is not None:
            return []
        return [*call.args, *(keyword.value for keyword in call.keywords)]

    def _kept_in(self, target: ast.AST) -> Iterator[tuple[str, str]]:
        """What holds a value that is stored in ``target``: of ``state["net"]`` the state too."""
        for one in walk(target):
            if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Store):
                yield self._flow.held(one)
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
            if isinstance(target, ast.Name | ast.Attribute) and not self._is_self(target):
                held = self._flow.held(target)
                if held not in self._flow.models and held not in self._flow.optimizers:
                    yield held

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in ("self", "cls")

    def _computes(self, value: ast.expr) -> bool:
        return any(isinstance(one, ast.Call) and self._flow.is_forward(one) for one in walk(value))

    def _mentions(self, node: ast.AST, holders: set[tuple[str, str]]) -> bool:
        """Whether an expression hands a model, an optimizer or parameters on."""
        if isinstance(node, ast.Name | ast.Attribute):
            return self._is_known(node, holders)
        if isinstance(node, ast.Call):
            name = name_of(node)
            if name not in _LISTS and (self._flow.is_forward(node) or _reads_only(name)):
                return False
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return node.slice.value == "params" and self._mentions(node.value, holders)
        return any(self._mentions(child, holders) for child in children(node))

    def _is_known(self, node: ast.Name | ast.Attribute, holders: set[tuple[str, str]]) -> bool:
        """Whether a name holds one of them; so do the objects whose methods hold them as ``self.x``."""
        known = (self._flow.models, self._flow.optimizers, holders)
        if self._is_self(node):
            owner, _ = self._flow.held(node, "self.")
            return any(of == owner for held in known for of, text in held if text.startswith("self."))
        if any(self._flow.held(node) in held for held in known):
            return True
        if not isinstance(node, ast.Attribute) or _PLAIN.match(node.attr) or self._is_self(node.value):
            return False
        return self._mentions(node.value, holders)

    def looks(self, statement: ast.stmt) -> str | None:
        """``"sure"`` or ``"may"``, where a statement itself looks at gradients, not one inside it."""
        if isinstance(statement, Function | ast.ClassDef):
            return None
        found = None
        for part in _headers(statement):
            text = self._source.code(part)
            if "master_params" in text:
                continue
            if looks_at_gradients(text):
                return "sure"
            for node in walk(part):
                how = None
                if isinstance(node, ast.Call):
                    how = self._called(node)
                elif isinstance(node, ast.Attribute) and node.attr in self._properties:
                    how = "sure"
                if how == "sure":
                    return how
                found = found or how
        return found

    def changes(self, statement: ast.stmt) -> bool:
        """Whether a statement itself changes gradients, or calls a function here that does."""
        if isinstance(statement, Function | ast.ClassDef):
            return False
        for part in _headers(statement):
            if _CHANGES.search(_CLEARS.sub("", self._source.code(part))):
                return True
            names = {name_of(node) for node in walk(part) if isinstance(node, ast.Call)}
            for name in names - self.scales - self.steps:
                if any(self._body_changes(one) for one in self._calls.functions.get(name, ())):
                    return True
        return False

    def _body_changes(self, function: Function) -> bool:
        known = self._changing.get(id(function))
        if known is None:
            self._changing[id(function)] = False
            inside = [one for one in walk(function) if isinstance(one, ast.stmt) and one is not function]
            known = self._changing[id(function)] = any(self.changes(one) for one in inside)
        return known

    def _called(self, call: ast.Call) -> str | None:
        """How a call looks at gradients."""
        name = name_of(call)
        own = self._calls.functions.get(name, [])
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        at_self = receiver is not None and self._is_self(receiver)
        known = receiver is not None and (
            self._flow.is_model(receiver) or self._flow.is_optimizer(receiver) or name == "backward"
        )
        if own and (name in self.scales or name in self.steps):
            return None
        if own and not known and any(self._body_looks(one) for one in own):
            return "sure"
        if _HARMLESS.match(name) or self._flow.is_forward(call) or (own and (receiver is None or at_self)):
            return None
        return self._handed(call) or ("may" if self.escapes and self._is_foreign(call) else None)

    def _is_foreign(self, call: ast.Call) -> bool:
        """Whether a call may come back to functions of this file."""
        if isinstance(call.func, ast.Name) and not self._source.names.bindings(call.func):
            return False  # a builtin
        return (self._source.names.full(call.func) or "").partition(".")[0] not in _FOREIGN

    def _handed(self, call: ast.Call) -> str | None:
        """How a call of what is not of this file looks at what it is handed, or was made with."""
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        return "may" if any(self._mentions(one, self._holders) for one in (*given, receiver)) else None

    def _body_looks(self, function: Function) -> bool:
        """Whether a function here looks at gradients; one that asks for masters unscales by itself."""
        known = self._asked.get(id(function))
        if known is not None:
            return known
        self._asked[id(function)] = False  # until the end, for one that calls itself
        if "master_params(" in self._source.code(function):
            return False
        inside = [one for one in walk(function) if isinstance(one, ast.stmt) and one is not function]
        found = any(self.looks(one) is not None for one in inside)
        self._asked[id(function)] = found
        return found


def looks_at_gradients(code: str) -> bool:
    """Whether code itself reads or changes gradients."""
    return bool(_LOOKS.search(_CLEARS.sub("", code)))


def _reads_only(name: str) -> bool:
    return name in ("state_dict", "len", "id", "type", "str", "repr", "isinstance", "print") or bool(
        re.match(r"get_(last_)?(lr|learning_rate)$", name)
    )


def _headers(statement: ast.stmt) -> Iterator[ast.AST]:
    """A simple statement, or the expressions that a compound one begins with."""
    if not hasattr(statement, "body") and not isinstance(statement, ast.Match):
        yield statement
        return
    for child in children(statement):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr

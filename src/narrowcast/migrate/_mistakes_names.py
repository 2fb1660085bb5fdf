"""Who is who in a script: its scalers, optimizers, schedulers and modules, by what is assigned and called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from narrowcast.migrate._source import Source
from narrowcast.migrate._walk import children

_TORCH_SCALERS = {
    "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler",
    "torch.cpu.amp.GradScaler",
    "torch.cuda.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    "apex.transformer.amp.GradScaler",
    "narrowcast.apex.transformer.amp.GradScaler",
}
_OWN_SCALERS = {"narrowcast.GradScaler", "narrowcast.gradients.GradScaler"}
TORCH_REGIONS = {
    "torch.autocast",
    "torch.amp.autocast",
    "torch.amp.autocast_mode.autocast",
    "torch.cpu.amp.autocast",
    "torch.cuda.amp.autocast",
    "torch.cuda.amp.autocast_mode.autocast",
}
OWN_REGIONS = {"narrowcast.autocast", "narrowcast.casting.autocast"}
_SCALER_METHODS = {
    "scale", "unscale_", "step", "update", "get_scale", "is_enabled", "state_dict", "load_state_dict",
    "get_growth_factor", "set_growth_factor", "get_backoff_factor", "set_backoff_factor",
    "get_growth_interval", "set_growth_interval", "clip_grad_norm_", "clip_grad_value_", "step_together",
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def within(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and what stands in it, bodies of functions, lambdas and classes inside it left out."""
    yield node
    for child in children(node):
        if not isinstance(child, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield from within(child)


def ancestors(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """What a node stands in, from inside out, up to its function or the script."""
    while node in script.parents:
        node = script.parents[node]
        yield node
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            return


def text_of(node: ast.AST) -> str:
    """The text of an expression in Python's own spelling, kept with the node."""
    kept = vars(node)
    text: str | None = kept.get("_text")
    if text is None:
        if isinstance(node, ast.Name):
            text = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute, ast.Call)):
            text = f"{text_of(node.value)}.{node.attr}"
        else:
            text = ast.unparse(node)
        kept["_text"] = text
    return text


def method(node: ast.AST) -> tuple[str, str] | None:
    """The receiver's text and the method's name of a call ``receiver.name(...)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return text_of(node.func.value), node.func.attr
    return None


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument by position or by name."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position < len(call.args) else None


def values(node: ast.expr | None) -> Iterator[ast.expr]:
    """What an expression may be: both sides of a condition, each part of ``or`` and ``and``."""
    if isinstance(node, ast.IfExp):
        yield from values(node.body)
        yield from values(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from values(value)
    elif node is not None:
        yield node


class Script:
    """A parsed script, and what its names stand for.

    A scaler and an optimizer are known by what was assigned to their text (``scaler``, ``self.scaler``), in
    whichever function; a scaler also by calls that only a scaler has.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tree = source.tree
        self.parents = source.parents
        self.nodes = source.nodes
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self._full: dict[ast.AST, str | None] = {}
        self._assigned: dict[str, str] = {}
        for target, value in self.assignments:
            known = source.names.full(value) if isinstance(value, ast.Attribute) else None
            if known is not None and known.startswith(("torch.", "narrowcast.")) and "." not in target:
                self._assigned.setdefault(target, known)

    @cached_property
    def imported(self) -> set[str]:
        """The modules that the file imports from, and what it imports."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= {f"{node.module}.{one.name}" for one in node.names}
        return found

    @cached_property
    def assignments(self) -> list[tuple[str, ast.expr]]:
        """Every text that something is assigned to, with what it may be."""
        found: list[tuple[str, ast.expr]] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        pairs = list(zip(target.elts, node.value.elts, strict=False))
                    found += [(text_of(one), value) for one, whole in pairs for value in values(whole)]
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                found += [(text_of(node.target), value) for value in values(node.value)]
        return found

    def qualified(self, node: ast.AST) -> str | None:
        """The full name that an expression has by the imports, or None."""
        if node not in self._full:
            full = self.source.names.full(node)
            if full is None and isinstance(node, ast.Name):
                full = self._assigned.get(node.id)
                # Imported from its new home, or else from its old one.
                homes = self.source.names.bindings(node)
                if homes and (homes <= _TORCH_SCALERS or homes <= TORCH_REGIONS):
                    full = min(homes)
            self._full[node] = full
        return self._full[node]

    def called(self, node: ast.AST) -> str | None:
        """The full name of what a call calls."""
        return self.qualified(node.func) if isinstance(node, ast.Call) else None

    @cached_property
    def used(self) -> dict[tuple[str, str], list[ast.Call]]:
        """(receiver, method) -> its calls."""
        found: dict[tuple[str, str], list[ast.Call]] = {}
        for call in self.calls:
            name = method(call)
            if name is not None:
                found.setdefault(name, []).append(call)
        return found

    @cached_property
    def scaling_functions(self) -> set[ast.AST]:
        """The functions, and the script itself, that call a method of a scaler."""
        calls = (call for (text, _), calls in self.used.items() if text in self.scalers for call in calls)
        return {self.source.function(call) or self.tree for call in calls}

    @cached_property
    def made_scalers(self) -> dict[str, list[ast.Call]]:
        """text -> the calls that make the scaler which it holds."""
        found: dict[str, list[ast.Call]] = {}
        for target, value in self.assignments:
            if isinstance(value, ast.Call) and self.called(value) in _TORCH_SCALERS | _OWN_SCALERS:
                found.setdefault(target, []).append(value)
        return found

    @cached_property
    def scalers(self) -> dict[str, str]:
        """text -> "torch", "narrowcast" or "either"; those that are off for good are left out."""
        found: dict[str, str] = {}
        for text, calls in self.made_scalers.items():
            kinds = {"narrowcast" if self.called(call) in _OWN_SCALERS else "torch" for call in calls}
            if not all(is_false(argument(call, 5, "enabled")) for call in calls):
                found[text] = kinds.pop() if len(kinds) == 1 else "either"
        mixed = any(name.split(".")[0] == "narrowcast" for name in self.imported)
        for name in self._scaling - self.made_scalers.keys():
            found.setdefault(name, "either" if mixed else "torch")
        return found

    @cached_property
    def _scaling(self) -> set[str]:
        """Texts that scale or unscale, and do nothing that torch's and narrowcast's scalers do not."""
        found = set()
        for call in self.calls:
            used = method(call)
            scaled = method(call.func.value) if used and isinstance(call.func, ast.Attribute) else None
            if used and used[1] == "unscale_":
                found.add(used[0])
            elif used and used[1] == "backward" and scaled and scaled[1] == "scale":
                found.add(scaled[0])
        classes = {node.name for node in self.nodes if isinstance(node, ast.ClassDef)}
        own = {t for t, v in self.assignments if isinstance(v, ast.Call) and text_of(v.func) in classes}
        foreign = {text for text, name in self.used if name not in _SCALER_METHODS and name[0] != "_"}
        return found - own - foreign

    @cached_property
    def optimizers(self) -> set[str]:
        """Texts of optimizers: made by torch.optim, stepped by a scaler, or both zeroed and stepped."""
        found = set()
        for target, value in self.assignments:
            name = self.called(value) or ""
            if name.startswith(("torch.optim.", "apex.optimizers.")) and ".lr_scheduler." not in name:
                found.add(target)
        used: dict[str, set[str]] = {}
        for call in self.calls:
            receiver = method(call)
            if receiver is None:
                continue
            used.setdefault(receiver[0], set()).add(receiver[1])
            if receiver[0] in self.scalers and receiver[1] in ("step", "unscale_") and call.args:
                found.add(text_of(call.args[0]))
        found |= {text for text, names in used.items() if {"zero_grad", "step"} <= names}
        return found - set(self.scalers) - set(self.steppers)

    @cached_property
    def scaled_optimizers(self) -> dict[str, set[str]]:
        """Optimizers that some scaler steps or unscales, with those scalers."""
        names = ("step", "unscale_", "clip_grad_norm_", "clip_grad_value_")
        found: dict[str, set[str]] = {}
        for call in self.calls:
            used = method(call)
            if used and used[0] in self.scalers and used[1] in names and call.args:
                found.setdefault(text_of(call.args[0]), set()).add(used[0])
        return found

    def optimizer_of(self, parameters: ast.expr | None) -> str | None:
        """The one optimizer that was made of the parameters of a module, as in ``model.parameters()``."""
        if parameters is None:
            return None
        text = text_of(parameters)
        made = self._made_of.get(text, set()) & self.optimizers
        return next(iter(made)) if len(made) == 1 and text.endswith(".parameters()") else None

    @cached_property
    def _made_of(self) -> dict[str, set[str]]:
        """First argument of a call -> what is assigned what it returns."""
        found: dict[str, set[str]] = {}
        for target, value in self.assignments:
            if isinstance(value, ast.Call) and value.args:
                found.setdefault(text_of(value.args[0]), set()).add(target)
        return found

    def never_unscales(self, scaler: str) -> bool:
        """Whether nothing that this file can see unscales the gradients of a scaler before it steps."""
        return scaler in self.made_scalers and scaler not in self.handed_out and not self._unscales

    @cached_property
    def _unscales(self) -> bool:
        return any(isinstance(node, ast.Attribute) and node.attr == "unscale_" for node in self.nodes)

    @cached_property
    def steppers(self) -> set[str]:
        """Texts that hold a ``narrowcast.Stepper``."""
        names = {"narrowcast.Stepper", "narrowcast.training.Stepper"}
        return {target for target, value in self.assignments if self.called(value) in names}

    @cached_property
    def schedulers(self) -> dict[str, str]:
        """Texts that hold a scheduler of torch, with the optimizer that each was made for."""
        return {
            target: text_of(value.args[0])
            for target, value in self.assignments
            if isinstance(value, ast.Call) and value.args
            if (self.called(value) or "").startswith("torch.optim.lr_scheduler.")
        }

    @cached_property
    def modules(self) -> set[str]:
        """Texts of modules that are trained: put into training mode, or an optimizer has their parameters."""
        found = set()
        for call in self.calls:
            used = method(call)
            if used and used[1] == "train" and not call.args:
                found.add(used[0])
            elif used and used[1] in ("parameters", "named_parameters"):
                outer = self.parents.get(call)
                if isinstance(outer, ast.Call) and (self.called(outer) or "").startswith("torch.optim."):
                    found.add(used[0])
        return found

    def is_backward(self, node: ast.AST) -> bool:
        """Whether a call goes backward from a loss."""
        used = method(node)
        if self.called(node) == "torch.autograd.backward":
            return True
        return used is not None and used[1] == "backward" and used[0] not in ("super()", "ctx")

    def is_step(self, node: ast.AST) -> bool:
        """Whether a call steps an optimizer, by a scaler or not."""
        used = method(node)
        return used is not None and used[1] == "step" and used[0] in self.optimizers | set(self.scalers)

    def functions(self) -> Iterator[ast.Module | ast.FunctionDef | ast.AsyncFunctionDef]:
        """Everything that has a body of its own: the script, and each function in it."""
        yield self.tree
        for node in self.nodes:
            if isinstance(node, _FUNCTIONS):
                yield node

    @cached_property
    def handed_out(self) -> set[str]:
        """Scalers that leave the file's sight: given to a call, returned or stored elsewhere."""
        found = set()
        for node in self.nodes:
            if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
                continue
            if not isinstance(node.ctx, ast.Load) or text_of(node) not in self.scalers:
                continue
            outer = self.parents[node]
            if not isinstance(
                outer, (ast.Attribute, ast.Compare, ast.If, ast.IfExp, ast.BoolOp, ast.UnaryOp)
            ):
                found.add(text_of(node))
        return found


def is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False

"""What one file shows of its scalers, its optimizers, and the conditions around them."""

from __future__ import annotations

import ast
import re

from narrowcast.migrate.source._tree import Function, Source, argument, is_constant, method_of, receiver_of

_AMP = re.compile(
    r"^(use|with|do|is|enable|enabled)?_*(amp|fp16|half|mixed|autocast|grad_?scaler|scaler|mixed_precision|"
    r"lr_scheduler|scheduler|sched)(_enabled|_on)?$",
    re.IGNORECASE,
)
_OPTIMIZER = re.compile(r"(?<![a-z])opt(im(izers?)?)?(?![a-z])|optim", re.IGNORECASE)
_SCALER = re.compile(r"scaler$", re.IGNORECASE)


class Scalers:
    """The scalers and optimizers of one file, and the values that conditions have with mixed precision."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for node in source.nodes:
            if isinstance(node, Function):
                self._functions.setdefault(node.name, []).append(node)
        self._made: dict[str, list[ast.expr]] = {}
        for node in source.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    for one, value in _pairs(target, node.value):
                        self._made.setdefault(source.code(one), []).append(value)
        # Attributes of self that are objects, such as a model: self.model.parameters().
        self._objects = {
            source.code(node.value)
            for node in source.nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
        }
        self._scalers = self._find_scalers()
        self._scaled_names = self._find_scaled_names()

    def _find_scalers(self) -> set[str]:
        """Return the texts of scalers: made as one and not disabled, or used as only a scaler is."""
        found = set()
        for text, values in self._made.items():
            if any(self._makes_scaler(value) for value in values):
                found.add(text)
        for call in self.source.all_calls:
            if method_of(call) in ("scale", "unscale_", "step") and len(call.args) == 1:
                text = self.source.code(receiver_of(call))
                # Handed over by name: self.scaler = scaler.
                made_here = any(isinstance(value, ast.Call) for value in self._made.get(text, []))
                if not made_here and _SCALER.search(text):
                    found.add(text)
        return found

    def _makes_scaler(self, value: ast.expr) -> bool:
        """Return whether a value is a new scaler that is not off for good, perhaps under a condition."""
        if isinstance(value, ast.IfExp):
            return self._makes_scaler(value.body) or self._makes_scaler(value.orelse)
        if not isinstance(value, ast.Call):
            return False
        name = self.source.names.full(value.func) or ""
        known = name.startswith(("torch.", "narrowcast.", "apex.")) and name.endswith("GradScaler")
        return known and not is_constant(argument(value, 5, "enabled"), False)

    def _find_scaled_names(self) -> dict[str, str]:
        """Return the names of scaled losses, each with its scaler: ``scaled = scaler.scale(loss)``."""
        found = {}
        for node in self.source.nodes:
            value = node.value if isinstance(node, ast.Assign) else getattr(node, "iter", None)
            if value is not None:
                value = self._chosen(value)
            if isinstance(value, ast.Call) and (scaler := self._scaler_of(value, "scale")):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[union-attr]
                found.update({self.source.code(target): scaler for target in targets})
        return found

    def _scaler_of(self, node: ast.AST, *methods: str) -> str | None:
        """Return the scaler on which one of these methods is called."""
        if method_of(node) not in methods:
            return None
        text = self.source.code(receiver_of(node))  # type: ignore[arg-type]
        return text if text in self._scalers else None

    def _is_optimizer(self, node: ast.expr) -> bool:
        code = self.source.code(node)
        made = [one.func for one in self._made.get(code, []) if isinstance(one, ast.Call)]
        names = [name for one in made if (name := self.source.names.full(one)) is not None]
        if names:
            return all(name.startswith("torch.optim.") and "lr_scheduler" not in name for name in names)
        return bool(_OPTIMIZER.search(code)) and "sched" not in code.lower()

    def optimizer_after(self, node: ast.AST) -> str:
        """Return the optimizer that steps next after ``node``, for the corrected line."""
        if method_of(node) == "step" and self._scaler_of(node, "step") is None:
            return self.source.code(receiver_of(node))  # type: ignore[arg-type]
        begin = self.source.start(node)
        for call in self.source.all_calls:
            if self._scaler_of(call, "step") and call.args and self.source.start(call) > begin:
                return self.source.code(call.args[0])
        return "optimizer"

    def _is_object(self, text: str) -> bool:
        """Return whether ``self.model`` is an attribute, such as a model or a loss, and not a method."""
        return text in self._made or text in self._objects

    def _stepped_texts(self) -> set[str]:
        """Return the texts of all optimizers that scalers of this file step or unscale."""
        calls = [call for call in self.source.all_calls if self._scaler_of(call, "step", "unscale_")]
        return {self.source.code(call.args[0]) for call in calls if call.args}

    def _assumed(self, test: ast.expr) -> bool | None:
        """Return the value of a condition where mixed precision is on; None if that does not decide it."""
        if isinstance(test, ast.Name | ast.Attribute):
            name = test.id if isinstance(test, ast.Name) else test.attr
            return True if _AMP.match(name) else None
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            value = self._assumed(test.operand)
            return None if value is None else not value
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and is_constant(test.comparators[0], None):
            value = self._assumed(test.left)
            return value if isinstance(test.ops[0], ast.IsNot) or value is None else not value
        if isinstance(test, ast.BoolOp):
            values = [self._assumed(one) for one in test.values]
            # One True decides "or", and one False "and".
            decides = isinstance(test.op, ast.Or)
            undecided = None if None in values else not decides
            return decides if decides in values else undecided
        return None

    def _chosen(self, value: ast.expr) -> ast.expr:
        """Return the part of ``a if use_amp else b`` that holds where mixed precision is on."""
        while isinstance(value, ast.IfExp) and (assumed := self._assumed(value.test)) is not None:
            value = value.body if assumed else value.orelse
        return value


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return each target of an assignment with its value: of a tuple, one after the other."""
    both_listed = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
    if both_listed and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
        return list(zip(target.elts, value.elts, strict=True))  # type: ignore[attr-defined]
    return [(target, value)]

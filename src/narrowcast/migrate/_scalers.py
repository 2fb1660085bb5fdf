"""Find the scalers and optimizers of one file, and what its calls do with them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from narrowcast.migrate.source._tree import (
    Function,
    Source,
    argument,
    called_name,
    is_constant,
    method_of,
    receiver_of,
)

# In conditions these names are taken to be true: mixed precision is on (use_amp, self.scaler), or the script
# has a scheduler. So a step inside ``if scheduler:`` is read like one outside of any condition.
_TAKEN_TO_HOLD = re.compile(
    r"^(use|with|do|is|enable|enabled)?_*(amp|fp16|half|mixed|autocast|grad_?scaler|scaler|mixed_precision|"
    r"lr_scheduler|scheduler|sched)(_enabled|_on)?$",
    re.IGNORECASE,
)
# opt, optim, optimizer, opt_g and the like, but not "option" or "adopt".
_OPTIMIZER = re.compile(r"(?<![a-z])opt(?![a-z])|optim", re.IGNORECASE)
_SCALER = re.compile(r"scaler$", re.IGNORECASE)
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
_REGIONS = ("torch.autocast", "torch.amp.autocast", "narrowcast.autocast")
_HALF = ("torch.float16", "torch.half")


class Scalers:
    """The scalers and optimizers of one file, known by the text of their names.

    Attributes:
        scalers: the names that are assigned a new scaler, or are called scaler and used as one.
        made: for each name, the values that are assigned to it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.made: dict[str, list[ast.expr]] = defaultdict(list)
        for node in source.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self.made[source.code(target)].append(node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self.made[source.code(node.target)].append(node.value)
        self._own_functions: set[str] = set()
        # Every dotted name of which the file reads an attribute, such as self.model in
        # self.model.parameters(). Those on self are looked up here: they are objects, not methods.
        self._objects: set[str] = set()
        for node in source.nodes:
            if isinstance(node, Function):
                self._own_functions.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                self._objects.add(source.code(node.value))
        self.scalers = self._find_scalers()
        self._scaled_losses = self._find_scaled_losses()

    def _find_scalers(self) -> set[str]:
        scalers = set()
        for text, values in self.made.items():
            for value in values:
                if self._makes_scaler(value):
                    scalers.add(text)

        # Other scalers come from elsewhere: a parameter, or self.scaler = scaler. Their name and a call of a
        # scaler's method show them. But if a name is assigned the result of a call, that call has shown above
        # whether it is a scaler.
        for call in self.source.all_calls:
            if method_of(call) not in ("scale", "unscale_", "step") or len(call.args) != 1:
                continue
            text = self.source.code(receiver_of(call))
            is_made_by_call = any(isinstance(value, ast.Call) for value in self.made.get(text, []))
            if _SCALER.search(text) and not is_made_by_call:
                scalers.add(text)
        return scalers

    def _makes_scaler(self, value: ast.expr) -> bool:
        """Return whether a value makes a scaler without ``enabled=False``, even if only in one branch."""
        for node in ast.walk(value):
            if not isinstance(node, ast.Call):
                continue
            # Classes of other libraries may unscale in their own way.
            full = self.source.names.full(node.func) or ""
            is_scaler = full.startswith(("torch.", "narrowcast.", "apex.")) and full.endswith("GradScaler")
            # 5 is the position of ``enabled`` in torch.amp.GradScaler and narrowcast.GradScaler.
            if is_scaler and not is_constant(argument(node, 5, "enabled"), False):
                return True
        return False

    def _find_scaled_losses(self) -> dict[str, str]:
        """Return the names of scaled losses, each with its scaler: ``scaled = scaler.scale(loss)``."""
        scaled_losses = {}
        for name, values in self.made.items():
            for value in values:
                scaler = self.scaler_of(self.chosen(value), "scale")
                if scaler is not None:
                    scaled_losses[name] = scaler
        return scaled_losses

    # ---- what a call does

    def scaler_of(self, node: ast.AST, *methods: str) -> str | None:
        """Return the scaler on which one of these methods is called."""
        if method_of(node) not in methods:
            return None
        text = self.source.code(receiver_of(node))
        return text if text in self.scalers else None

    def is_backward(self, call: ast.Call) -> bool:
        """Return whether a call is a backward pass, not ``self.backward()`` where this file defines it."""
        if method_of(call) != "backward":
            return False
        return "backward" not in self._own_functions or self.source.code(receiver_of(call)) != "self"

    def scaler_of_loss(self, backward: ast.Call) -> str | None:
        """Return the scaler by which the loss of a backward pass was scaled."""
        # The loss is the receiver in loss.backward(), and an argument in torch.autograd.backward(loss).
        loss = receiver_of(backward)
        if self.source.code(loss) == "torch.autograd" and backward.args:
            loss = backward.args[0]
        loss = self.chosen(loss)
        return self.scaler_of(loss, "scale") or self._scaled_losses.get(self.source.code(loss))

    def is_optimizer(self, node: ast.expr) -> bool:
        """Return whether the text of an expression names an optimizer, and no scheduler."""
        code = self.source.code(node)
        return bool(_OPTIMIZER.search(code)) and "sched" not in code.lower()

    def is_clip(self, call: ast.Call) -> bool:
        """Return whether a call clips gradients, to a limit that is not multiplied by the scale."""
        full = self.source.names.full(call.func) or self.source.code(call.func)
        if full.rpartition(".")[2] not in _CLIPS:
            return False
        # clip_grad_norm_(parameters, 1.0 * scaler.get_scale()) is right.
        for node in ast.walk(call):
            if isinstance(node, ast.Attribute) and self.source.code(node.value) in self.scalers:
                return False
        return True

    def may_hide_steps(self, call: ast.Call) -> bool:
        """Return whether a call runs other code that may scale, unscale or step."""
        # It gets a scaler as an argument.
        for node in ast.iter_child_nodes(call):
            value = node.value if isinstance(node, ast.keyword) else node
            if value is not call.func and self.source.code(value) in self.scalers:
                return True

        # It calls a function or a method of this file.
        name = called_name(call)
        is_on_self = bool(method_of(call)) and self.source.code(receiver_of(call)) == "self"
        if name in self._own_functions and (is_on_self or isinstance(call.func, ast.Name)):
            return True

        # It calls a method of self that this file does not define, so perhaps one of a base class elsewhere.
        # self.model(x) and self.loss(x) call objects, which do not step.
        text = f"self.{name}"
        is_object = text in self.made or text in self._objects
        return is_on_self and not is_object

    def optimizer_after(self, node: ast.AST) -> str:
        """Return the optimizer that steps next after ``node``, for the corrected line."""
        # A step without a scaler is itself the line to correct.
        if method_of(node) == "step" and self.scaler_of(node, "step") is None:
            return self.source.code(receiver_of(node))
        for call in self.source.all_calls:
            is_later = self.source.start(call) > self.source.start(node)
            if is_later and call.args and self.scaler_of(call, "step"):
                return self.source.code(call.args[0])
        return "optimizer"

    def stepped_optimizers(self) -> set[str]:
        """Return the texts of all optimizers that scalers of this file step or unscale."""
        optimizers = set()
        for call in self.source.all_calls:
            if call.args and self.scaler_of(call, "step", "unscale_"):
                optimizers.add(self.source.code(call.args[0]))
        return optimizers

    def region_state(self, opening: ast.expr) -> bool | None:
        """Return whether an expression opens a region that is on; None if it opens none."""
        # A region may be made earlier and entered by its name.
        for value in [opening, *self.made.get(self.source.code(opening), [])]:
            chosen = self.chosen(value)
            # 2 is the position of ``enabled`` in torch.autocast and narrowcast.autocast.
            if isinstance(chosen, ast.Call) and self.source.names.full(chosen.func) in _REGIONS:
                return not is_constant(argument(chosen, 2, "enabled"), False)
        return None

    def is_fp16_region(self, call: ast.Call) -> bool:
        """Return whether a call makes a region in fp16, by name or because that is CUDA's default."""
        if not self.region_state(call):
            return False
        # nc.autocast takes a policy instead of a dtype, as a keyword alone: no call has an argument at
        # position 4. Only a preset's name shows its format here.
        policy = argument(call, 4, "policy")
        if policy is not None:
            return is_constant(policy, "fp16")
        # 0 and 1 are the positions of ``device_type`` and ``dtype`` in both libraries.
        dtype = argument(call, 1, "dtype")
        if dtype is None:
            return is_constant(argument(call, 0, "device_type"), "cuda")
        return self.source.names.full(dtype) in _HALF

    # ---- conditions that are taken to hold

    def assumed(self, test: ast.expr) -> bool | None:
        """Return what a condition is if those of ``_TAKEN_TO_HOLD`` hold; None if they do not decide it."""
        # Reduce "not use_amp", "scaler is None" and "scaler is not None" to the name in them.
        is_negated = False
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            is_negated = True
            test = test.operand
        elif isinstance(test, ast.Compare) and is_constant(test.comparators[0], None):
            is_negated = isinstance(test.ops[0], ast.Is | ast.Eq)
            test = test.left
        if not isinstance(test, ast.Name | ast.Attribute):
            return None
        name = self.source.code(test).rpartition(".")[2]
        return not is_negated if _TAKEN_TO_HOLD.match(name) else None

    def chosen(self, value: ast.expr) -> ast.expr:
        """Return the branch of ``a if use_amp else b`` for mixed precision; ``value`` where none is known."""
        if isinstance(value, ast.IfExp):
            holds = self.assumed(value.test)
            if holds is not None:
                return value.body if holds else value.orelse
        return value

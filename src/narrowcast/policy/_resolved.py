"""Decide how each operator computes at each place in a model, on one device type.

The autocast kernels and ``explain`` share these decisions.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from narrowcast.policy._ops import (
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_DTYPE,
    ONE_DEVICE_ONLY,
    PROMOTE,
    native_table,
    overloads_of,
)
from narrowcast.policy._policy import PRESET_TABLE, Policy, kept_for
from narrowcast.policy._rule import COMPUTES, FP8_RECIPES, Rule, specificity

if TYPE_CHECKING:
    import torch

UNLISTED = "unlisted"
"""Not cast: the device's own table lists the operator, but the table that the policy names does not."""
CASTS_TO = {**COMPUTES, FP32_SET_DTYPE: FP32, FP32_APPEND_DTYPE: FP32, UNLISTED: None}
"""``Decision.compute`` -> the format that inputs are cast to; None: no cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How one operator computes at one place.

    Attributes:
        compute: a word of ``CASTS_TO``.
        output: format of the outputs, or None to leave them.
        rule: the rule that decided, or None if PyTorch's table did.
        because: the reason as text.
    """

    compute: str
    output: str | None = None
    rule: Rule | None = None
    because: str = ""


class Scope:
    """The set of rules that hold at a place in a model.

    Places with the same rules share one object and its decisions. Rules with an fp8 recipe decide no
    operator: they apply to linear layers, which compute in fp8 themselves.

    Attributes:
        resolved: the policy on the device type.
        rule: the module rule in force, except one with an fp8 recipe, or None.
        actions: operator -> the action that ``casting`` prepared for it.
        mark: the dtype that ``casting`` chose to stand for this scope, or None.
    """

    __slots__ = (
        "__weakref__", "_decisions", "_inside", "_nearest", "_ops", "actions", "mark", "resolved", "rule",
    )  # fmt: skip

    def __init__(
        self, resolved: ResolvedPolicy, rule: Rule | None, nearest: Rule | None, ops: tuple[Rule, ...]
    ) -> None:
        self.resolved = resolved
        self.rule = rule
        self.actions: dict[str, object] = {}
        self.mark: torch.dtype | None = None
        self._nearest = nearest  # as ``rule``, one with an fp8 recipe too
        self._ops = ops  # rules for operators inside modules; the one that wins comes first
        self._decisions: dict[str, Decision | None] = {}
        self._inside: dict[tuple[Rule, ...], Scope] = {}

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that identifies this scope on its device type, also in other processes.

        Scopes inside modules whose rules compute in the same way share it.
        """
        resolved = self.resolved
        compute = None if self.rule is None else self.rule.compute
        ops = tuple((rule.op, rule.compute, rule.output) for rule in self._ops)
        return (resolved.table_name, resolved.lower, resolved.rules, compute, ops)

    @property
    def rules_operators(self) -> bool:
        """Whether a rule for an operator inside modules holds here."""
        return bool(self._ops)

    def inside(self, rules: tuple[Rule, ...]) -> Scope:
        """Return the scope inside a module that ``rules`` (from ``rules_for``) select; else self."""
        if not rules:
            return self
        found = self._inside.get(rules)
        if found is None:
            # The more specific wins, then the later.
            best_first = sorted(rules, key=lambda one: (specificity(one), rules.index(one)), reverse=True)
            plain = [one for one in best_first if one.op is None]
            in_formats = [one for one in plain if one.compute not in FP8_RECIPES]
            ops = (*(one for one in best_first if one.op is not None), *self._ops)
            found = self._inside[rules] = self.resolved.scope(
                in_formats[0] if in_formats else self.rule,
                plain[0] if plain else self._nearest,
                tuple(dict.fromkeys(ops)),
            )
        return found

    def decide(self, op: str) -> Decision | None:
        """Return the decision for ``op`` (``"softmax.int"``), or None if PyTorch decides."""
        try:
            return self._decisions[op]
        except KeyError:
            decision = self._decisions[op] = self._decide(op)
            return decision

    def rule_of(self, op: str) -> Rule | None:
        """Return the winning rule for ``op`` here, with fp8 recipes, or None."""
        inside = next((one for one in self._ops if _covers(one, op)), None)
        if inside is not None:
            return inside
        if self._nearest is None:
            return _best(one for one in self.resolved.rules if not one.is_for_modules and _covers(one, op))
        if self._nearest.compute in FP8_RECIPES and op == "linear":
            return self._nearest
        decision = self.decide(op)
        return None if decision is None else decision.rule

    def _decide(self, op: str) -> Decision | None:
        for one in self._ops:
            if _covers(one, op) and one.compute not in FP8_RECIPES:
                return Decision(compute=one.compute, output=one.output, rule=one, because=str(one))
        if self.rule is not None and self.resolved.is_cast_anywhere(op):
            return Decision(compute=self.rule.compute, rule=self.rule, because=str(self.rule))
        return self.resolved.decide_anywhere(op)


class ResolvedPolicy:
    """A policy on one device type.

    Attributes:
        rules: the policy's rules. No reference to the policy is kept, so that both can be freed together.
        lower: the format of the region, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        native: PyTorch's table of the device.
        table: the table that the policy selects by ``Policy.tables``.
        table_name: the device type of that table.
        names_modules: as ``Policy.names_modules``.
    """

    def __init__(self, policy: Policy, device_type: str, lower: str) -> None:
        self.rules = policy.rules
        self.names_modules = policy.names_modules
        self.device_type = device_type
        self.lower = lower
        self.table_name = device_type if policy.tables == "native" else policy.tables
        self.native = native_table(device_type)
        asked = native_table(self.table_name)
        own = {op: kind for op, kind in self.native.items() if op in ONE_DEVICE_ONLY}
        self.table = {op: kind for op, kind in asked.items() if op not in ONE_DEVICE_ONLY} | own
        self._scopes: dict[tuple[Rule | None, Rule | None, tuple[Rule, ...]], Scope] = {}

    @cached_property
    def root(self) -> Scope:
        """The scope outside of all modules with a rule."""
        return self.scope(None, None, ())

    def scope(self, rule: Rule | None, nearest: Rule | None, ops: tuple[Rule, ...]) -> Scope:
        """Return the scope of these rules, one object for equal rules."""
        key = (rule, nearest, ops)
        return self._scopes.setdefault(key, Scope(self, rule, nearest, ops))

    def forget_scopes(self) -> None:
        """Drop the scopes, which refer to this object, so that it is freed with the last one in use."""
        for one in list(self._scopes.values()):
            one._inside.clear()
            one.actions.clear()
        self._scopes.clear()
        self.__dict__.pop("root", None)

    def rule_for(self, op: str) -> Rule | None:
        """Return the rule for all calls of ``op``; a rule for its overload comes first."""
        return _best(
            one for one in self.rules if _decides(one) and not one.is_for_modules and _covers(one, op)
        )

    def is_cast_anywhere(self, op: str) -> bool:
        """Return whether the table or a rule for all calls of ``op`` casts its inputs."""
        rule = self.rule_for(op)
        return op in self.table or (rule is not None and CASTS_TO[rule.compute] is not None)

    def decide_anywhere(self, op: str) -> Decision | None:
        """Decide as ``Scope.decide`` does, outside of modules with a rule."""
        rule = self.rule_for(op)
        if rule is not None:
            return Decision(compute=rule.compute, output=rule.output, rule=rule, because=str(rule))
        asked, native = self.table.get(op), self.native.get(op)
        if asked == native:
            return None
        because = f"PyTorch's table for {self.table_name}"
        return Decision(compute=asked or UNLISTED, because=because)

    def kernels(self) -> tuple[str, ...]:
        """Return the operators (overloads) for which this policy may differ from PyTorch."""
        found = dict.fromkeys(op for one in self.rules if _decides(one) for op in overloads_of(one.op or ""))
        listed = {**self.native, **self.table}
        found |= dict.fromkeys(op for op in listed if self.native.get(op) != self.table.get(op))
        if any(one.op is None and _decides(one) for one in self.rules):
            # A module rule applies to every operator that is cast.
            found |= dict.fromkeys(self.table)
        words = {word for one in self.rules for word in (one.compute, one.output)}
        if words & ({"bf16", "fp16"} - {self.lower}):
            # PyTorch's kernels that promote raise an error where bf16 meets fp16.
            found |= dict.fromkeys(op for op, kind in self.native.items() if kind == PROMOTE)
        return tuple(found)


def rules_for(policy: Policy, path: str, names: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the rules of ``policy`` for the module at ``path`` with classes ``names``."""
    return tuple(one for one in policy.rules if one.is_for_modules and names_module(one, path, names))


def names_module(rule: Rule, path: str, names: tuple[str, ...]) -> bool:
    """Return whether ``rule`` selects the module at ``path`` with class and bases ``names``."""
    by_path = rule.module is None or fnmatch.fnmatchcase(path, rule.module)
    return by_path and (rule.module_type is None or rule.module_type in names)


def without_prefix(rule: Rule, named: Iterable[tuple[str, tuple[str, ...]]]) -> str | None:
    """Return the end of ``rule.module`` that names one of these modules: ``"head"`` of ``"model.head"``.

    Paths start at the model that is called, not at the variable or the module that holds it.
    """
    modules = list(named)
    path = rule.module or ""
    while "." in path:
        path = path.partition(".")[2]
        shorter = replace(rule, module=path)
        if path.strip("*") and any(names_module(shorter, *module) for module in modules):
            return path
    return None


def _decides(rule: Rule) -> bool:
    """Return whether ``rule`` decides operators: those with an fp8 recipe do not."""
    return rule.compute not in FP8_RECIPES


def _covers(rule: Rule, op: str) -> bool:
    """Return whether ``rule`` selects the overload ``op``."""
    return rule.op is not None and op in overloads_of(rule.op)


def _best(rules: Iterable[Rule]) -> Rule | None:
    """Return the winning rule among those for all calls of an operator."""
    return max(rules, key=specificity, default=None)


def resolved(policy: Policy, device_type: str, lower: str) -> ResolvedPolicy:
    """Return ``policy`` on ``device_type`` with the region's format ``lower``, one object per policy.

    It is freed with the policy, and so are the kernels of its rules in PyTorch's dispatcher.
    """
    kept, key = kept_for(policy), (device_type, lower)
    if key not in kept:
        made = ResolvedPolicy(policy, device_type, lower)
        if kept.setdefault(key, made) is made:  # another thread may be faster
            weakref.finalize(policy, made.forget_scopes).atexit = False
    found: ResolvedPolicy = kept[key]
    return found


def unreached(policy: Policy) -> list[Rule]:
    """Return the rules for operators that decided no call yet, but for those of presets."""
    kept = [one for one in kept_for(policy).values() if isinstance(one, ResolvedPolicy)]
    found = [one for kind in kept for scope in kind._scopes.values() for one in scope._decisions.values()]
    known = {one.rule for one in found if one is not None}
    known |= {Rule(**one) for preset in PRESET_TABLE.values() for one in preset.rules}
    return [one for one in policy.rules if one.op is not None and _decides(one) and one not in known]

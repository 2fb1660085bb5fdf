"""Decide how each operator computes at each place in a model, on one device type.

The autocast kernels and ``explain`` share these decisions.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
from narrowcast.policy._policy import Policy, as_policy
from narrowcast.policy._presets import PRESETS
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
        scope = self._inside.get(rules)
        if scope is None:
            scope = self._inside[rules] = self._scope_inside(rules)
        return scope

    def _scope_inside(self, rules: tuple[Rule, ...]) -> Scope:
        # The more specific wins, then the later.
        best_first = sorted(rules, key=lambda rule: (specificity(rule), rules.index(rule)), reverse=True)

        # The best rule for the whole module replaces that of the module around it. One with an fp8 recipe
        # decides no operator, so that the rule around it stays in force for them.
        nearest = self._nearest
        rule = self.rule
        for_whole_module = [candidate for candidate in best_first if candidate.op is None]
        deciding = [candidate for candidate in for_whole_module if _decides(candidate)]
        if for_whole_module:
            nearest = for_whole_module[0]
        if deciding:
            rule = deciding[0]

        # Rules for operators add to those of the modules around it, and come first.
        ops = [candidate for candidate in best_first if candidate.op is not None]
        ops += self._ops
        return self.resolved.scope(rule, nearest, tuple(dict.fromkeys(ops)))

    def decide(self, op: str) -> Decision | None:
        """Return the decision for ``op`` (``"softmax.int"``), or None if PyTorch decides."""
        try:
            return self._decisions[op]
        except KeyError:
            decision = self._decisions[op] = self._decide(op)
            return decision

    def _decide(self, op: str) -> Decision | None:
        for rule in self._ops:
            if _covers(rule, op) and _decides(rule):
                return Decision(compute=rule.compute, output=rule.output, rule=rule, because=str(rule))
        # A rule for the whole module decides only operators that are cast anyway. Its ``output`` is for what
        # the module returns, not for these operators.
        if self.rule is not None and self.resolved.is_cast_anywhere(op):
            return Decision(compute=self.rule.compute, rule=self.rule, because=str(self.rule))
        return self.resolved.decide_anywhere(op)

    def rule_of(self, op: str) -> Rule | None:
        """Return the rule that wins for ``op`` here, those with an fp8 recipe included, or None."""
        for rule in self._ops:
            if _covers(rule, op):
                return rule
        # ``decide`` ignores rules with an fp8 recipe. Such a rule may be for all calls, or for the module.
        if self._nearest is None:
            everywhere = [rule for rule in self.resolved.rules if not rule.is_for_modules]
            return _best(rule for rule in everywhere if _covers(rule, op))
        if self._nearest.compute in FP8_RECIPES and op == "linear":
            return self._nearest
        decision = self.decide(op)
        return None if decision is None else decision.rule


class ResolvedPolicy:
    """A policy on one device type.

    Attributes:
        device_type: the device type.
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
        self.table = self._table()
        self._scopes: dict[tuple[Rule | None, Rule | None, tuple[Rule, ...]], Scope] = {}

    def _table(self) -> dict[str, str]:
        """Return the table that the policy names, with this device's own operators of recurrent layers."""
        named = native_table(self.table_name)
        table = {op: kind for op, kind in named.items() if op not in ONE_DEVICE_ONLY}
        for op in ONE_DEVICE_ONLY:
            if op in self.native:
                table[op] = self.native[op]
        return table

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
        for scope in list(self._scopes.values()):
            scope._inside.clear()
            scope.actions.clear()
        self._scopes.clear()
        self.__dict__.pop("root", None)

    def rule_for(self, op: str) -> Rule | None:
        """Return the rule for all calls of ``op``; a rule for its overload comes first."""
        everywhere = [rule for rule in self.rules if not rule.is_for_modules and _decides(rule)]
        return _best(rule for rule in everywhere if _covers(rule, op))

    def is_cast_anywhere(self, op: str) -> bool:
        """Return whether the table or a rule for all calls of ``op`` casts its inputs."""
        rule = self.rule_for(op)
        return op in self.table or (rule is not None and CASTS_TO[rule.compute] is not None)

    def decide_anywhere(self, op: str) -> Decision | None:
        """Decide as ``Scope.decide`` does, outside of modules with a rule."""
        rule = self.rule_for(op)
        if rule is not None:
            return Decision(compute=rule.compute, output=rule.output, rule=rule, because=str(rule))
        # Where the two tables agree, PyTorch's own kernel does what the policy wants.
        kind = self.table.get(op)
        if kind == self.native.get(op):
            return None
        return Decision(compute=kind or UNLISTED, because=f"PyTorch's table for {self.table_name}")

    def kernels(self) -> tuple[str, ...]:
        """Return the operators (overloads) for which this policy may differ from PyTorch."""
        deciding = [rule for rule in self.rules if _decides(rule)]
        ops: list[str] = []
        for rule in deciding:
            if rule.op is not None:
                ops += overloads_of(rule.op)
        ops += [op for op in (*self.native, *self.table) if self.native.get(op) != self.table.get(op)]

        # A rule for a whole module applies to every operator that is cast.
        if any(rule.op is None for rule in deciding):
            ops += self.table

        # PyTorch's kernels that promote raise an error where bf16 meets fp16, as they may if rules name a low
        # format other than the region's. Ours promote to fp32.
        words: set[str | None] = set()
        for rule in self.rules:
            words |= {rule.compute, rule.output}
        if words & ({"bf16", "fp16"} - {self.lower}):
            ops += [op for op, kind in self.native.items() if kind == PROMOTE]
        return tuple(dict.fromkeys(ops))


# ---- which modules a rule names


def rules_for(policy: Policy, path: str, names: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the rules of ``policy`` for the module at ``path`` with classes ``names``."""
    for_modules = [rule for rule in policy.rules if rule.is_for_modules]
    return tuple(rule for rule in for_modules if names_module(rule, path, names))


def names_module(rule: Rule, path: str, names: tuple[str, ...]) -> bool:
    """Return whether ``rule`` selects the module at ``path`` with class and bases ``names``."""
    by_path = rule.module is None or fnmatch.fnmatchcase(path, rule.module)
    return by_path and (rule.module_type is None or rule.module_type in names)


def without_prefix(rule: Rule, named: Iterable[tuple[str, tuple[str, ...]]]) -> str | None:
    """Return the end of ``rule.module`` that names one of these modules, as ``"head"`` of ``"model.head"``.

    None: no end of it does. Paths start at the model that is called, not at the variable or the module that
    holds it.
    """
    modules = list(named)
    path = rule.module or ""
    while "." in path:
        path = path.partition(".")[2]
        shorter = replace(rule, module=path)
        if path.strip("*") and any(names_module(shorter, *module) for module in modules):
            return path
    return None


# ---- which operators a rule decides


def _decides(rule: Rule) -> bool:
    """Return whether ``rule`` decides operators: those with an fp8 recipe do not."""
    return rule.compute not in FP8_RECIPES


def _covers(rule: Rule, op: str) -> bool:
    """Return whether ``rule`` selects the overload ``op``."""
    return rule.op is not None and op in overloads_of(rule.op)


def _best(rules: Iterable[Rule]) -> Rule | None:
    """Return the rule of the highest specificity; None: there are no ``rules``."""
    return max(rules, key=specificity, default=None)


# ---- what is computed once for a policy


@dataclass(slots=True, eq=False)
class KeptForPolicy:
    """What this package and ``casting`` compute once for a policy object, until it is freed.

    Attributes:
        resolved: (device type, format of the region) -> the policy there.
        regions: device type -> dtype and scope of a region, which ``casting`` keeps here.
    """

    resolved: dict[tuple[str, str], ResolvedPolicy] = field(default_factory=dict)
    regions: dict[str, tuple[torch.dtype, Scope | None]] = field(default_factory=dict)


_kept: dict[int, tuple[weakref.ref[Policy], KeptForPolicy]] = {}


def kept_for(policy: Policy) -> KeptForPolicy:
    """Return what is kept for this policy object.

    By identity: an equal policy may come from elsewhere, and hashing all rules at each region would take
    longer than the region.
    """
    key = id(policy)  # no other policy has it before the entry is removed
    entry = _kept.get(key)
    if entry is None:
        ended = weakref.ref(policy, lambda _: _kept.pop(key, None))
        entry = _kept.setdefault(key, (ended, KeptForPolicy()))  # another thread may be faster
    return entry[1]


def resolved(policy: Policy, device_type: str, lower: str) -> ResolvedPolicy:
    """Return ``policy`` on ``device_type`` with the region's format ``lower``, one object per policy.

    It is freed with the policy, and so are the kernels of its rules in PyTorch's dispatcher.
    """
    kept = kept_for(policy).resolved
    key = (device_type, lower)
    if key not in kept:
        made = ResolvedPolicy(policy, device_type, lower)
        if kept.setdefault(key, made) is made:  # another thread may be faster
            weakref.finalize(policy, made.forget_scopes).atexit = False
    return kept[key]


def unreached(policy: Policy) -> list[Rule]:
    """Return the rules for operators that decided no call yet, except rules that presets have too."""
    reached = set()
    for on_device in kept_for(policy).resolved.values():
        for scope in on_device._scopes.values():
            for decision in scope._decisions.values():
                if decision is not None:
                    reached.add(decision.rule)

    of_presets: set[Rule] = set()
    for name in PRESETS:
        of_presets.update(as_policy(name).rules)

    for_operators = [rule for rule in policy.rules if rule.op is not None and _decides(rule)]
    return [rule for rule in for_operators if rule not in reached and rule not in of_presets]

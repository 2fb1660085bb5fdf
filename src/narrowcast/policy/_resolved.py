"""What a policy means on one type of device: for each place in a model and each operator, one decision.

Both engines and ``explain`` ask here, so that they cannot differ.
"""

from __future__ import annotations

import fnmatch
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from narrowcast.policy._ops import overloads_of
from narrowcast.policy._policy import Policy
from narrowcast.policy._rule import FP8_RECIPES, Rule, specificity
from narrowcast.policy._tables import LOWER, ONE_DEVICE_ONLY, native_table

if TYPE_CHECKING:
    import torch

UNLISTED = "unlisted"
"""Cast as if PyTorch's table had no such operator; the table of the device has it, and another was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How one operator computes at one place.

    Attributes:
        compute: a word of ``COMPUTES``, a kind of PyTorch's tables (``_tables``), or ``UNLISTED``.
        output: format that is handed on, or None.
        rule: the rule that decided; None where PyTorch's table did.
        because: the same in words.
    """

    compute: str
    output: str | None = None
    rule: Rule | None = None
    because: str = ""


class Scope:
    """A place in a model as far as rules are concerned: which of them hold there.

    Places in which the same rules hold are one object, so that decisions are made once. Rules with an fp8
    recipe decide about no operator: they are for linear layers, which compute in fp8 by themselves.

    Attributes:
        resolved: what the policy means on the type of device.
        rule: the rule for modules in force, not one with an fp8 recipe; None outside of every one.
        actions: operator -> what the kernels of ``casting`` prepared for it here.
        mark: the autocast state that stands for this place, once ``casting`` has chosen one.
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
        self.mark: tuple[torch.dtype, torch.dtype | None] | None = None
        self._nearest = nearest  # as ``rule``, one with an fp8 recipe too
        self._ops = ops  # rules for operators inside modules; the one that wins comes first
        self._decisions: dict[str, Decision | None] = {}
        self._inside: dict[tuple[Rule, ...], Scope] = {}

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells this place from every other one of the same type of device, in other processes too."""
        resolved = self.resolved
        return (resolved.table_name, resolved.lower, resolved.rules, self.rule, self._ops)

    @property
    def rules_operators(self) -> bool:
        """Whether some rule for an operator inside modules holds here."""
        return bool(self._ops)

    def inside(self, rules: tuple[Rule, ...]) -> Scope:
        """The place inside a module for which ``rules`` (of ``rules_for``) hold; self where none does."""
        if not rules:
            return self
        found = self._inside.get(rules)
        if found is None:
            best_first = sorted(rules, key=_rank(rules), reverse=True)
            plain = [one for one in best_first if one.op is None]
            in_formats = [one for one in plain if one.compute not in FP8_RECIPES]
            ops = (*(one for one in best_first if one.op is not None), *self._ops)
            found = self._inside[rules] = self.resolved.place(
                in_formats[0] if in_formats else self.rule,
                plain[0] if plain else self._nearest,
                tuple(dict.fromkeys(ops)),
            )
        return found

    def decide(self, op: str) -> Decision | None:
        """What is to become of a call of ``op`` (``"softmax.int"``); None: what PyTorch itself does."""
        try:
            return self._decisions[op]
        except KeyError:
            decision = self._decisions[op] = self._decide(op)
            return decision

    def rule_of(self, op: str) -> Rule | None:
        """The rule that wins about ``op`` here, one with an fp8 recipe too; None where there is none."""
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
    """A policy on one type of device.

    Attributes:
        rules: those of the policy; the policy itself is not held, so that this can end with it.
        lower: the format of the region, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        native: PyTorch's own table of the device.
        table: the table that the policy asks for; the same but for ``Policy.tables``.
        table_name: the type of device that the table is of.
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
        self._places: dict[tuple[Rule | None, Rule | None, tuple[Rule, ...]], Scope] = {}

    @cached_property
    def root(self) -> Scope:
        """The place outside of every module for which there is a rule."""
        return self.place(None, None, ())

    def place(self, rule: Rule | None, nearest: Rule | None, ops: tuple[Rule, ...]) -> Scope:
        """The one place in which these rules hold."""
        key = (rule, nearest, ops)
        return self._places.setdefault(key, Scope(self, rule, nearest, ops))

    def forget_places(self) -> None:
        """Let go of the places, which hold this, so that this ends when the last one in use does."""
        for one in list(self._places.values()):
            one._inside.clear()
            one.actions.clear()
        self._places.clear()
        self.__dict__.pop("root", None)

    def rule_for(self, op: str) -> Rule | None:
        """The rule for every call of ``op``, one for the overload before one for all."""
        return _best(
            one for one in self.rules if _decides(one) and not one.is_for_modules and _covers(one, op)
        )

    def is_cast_anywhere(self, op: str) -> bool:
        """Whether the table or a rule for every call of ``op`` casts what it is given."""
        rule = self.rule_for(op)
        return op in self.table or (rule is not None and rule.compute not in ("as-is", "refuse"))

    def decide_anywhere(self, op: str) -> Decision | None:
        """As ``Scope.decide``, outside of modules for which there is a rule."""
        rule = self.rule_for(op)
        if rule is not None:
            return Decision(compute=rule.compute, output=rule.output, rule=rule, because=str(rule))
        asked, native = self.table.get(op), self.native.get(op)
        if asked == native:
            return None
        because = f"PyTorch's table for {self.table_name}"
        return Decision(compute=asked or UNLISTED, because=because)

    def kernels(self) -> tuple[str, ...]:
        """The operators (overloads) about which this policy may decide other than PyTorch does."""
        found = dict.fromkeys(op for one in self.rules if _decides(one) for op in overloads_of(one.op or ""))
        listed = {**self.native, **self.table}
        found |= dict.fromkeys(op for op in listed if self.native.get(op) != self.table.get(op))
        if any(one.op is None and _decides(one) for one in self.rules):
            # A rule for modules decides about everything that is cast at all.
            found |= dict.fromkeys(self.table)
        return tuple(found)

    def why_native(self, op: str) -> str:
        """In words why PyTorch does with ``op`` what it does where ``decide`` gives None."""
        kind = self.native.get(op)
        if kind is None:
            return "unlisted: in the formats that come"
        word = self.lower if kind == LOWER else kind
        return f"PyTorch's table for {self.device_type}: {word}"


def rules_for(policy: Policy, path: str, names: tuple[str, ...]) -> tuple[Rule, ...]:
    """The rules of ``policy`` that name the module at ``path`` whose classes are called ``names``."""
    return tuple(one for one in policy.rules if one.is_for_modules and names_module(one, path, names))


def names_module(rule: Rule, path: str, names: tuple[str, ...]) -> bool:
    """Whether ``rule`` is for the module at ``path`` whose class and bases are called ``names``."""
    by_path = rule.module is None or fnmatch.fnmatchcase(path, rule.module)
    return by_path and (rule.module_type is None or rule.module_type in names)


def _decides(rule: Rule) -> bool:
    """Whether ``rule`` decides about operators, which one with an fp8 recipe does not."""
    return rule.compute not in FP8_RECIPES


def _covers(rule: Rule, op: str) -> bool:
    """Whether ``rule`` is for the overload ``op``."""
    return rule.op is not None and op in overloads_of(rule.op)


def _best(rules: Iterable[Rule]) -> Rule | None:
    """That which wins, among rules for operators everywhere."""
    return max(rules, key=specificity, default=None)


def _rank(rules: tuple[Rule, ...]) -> Callable[[Rule], tuple[object, ...]]:
    """The order in which ``rules`` win at one module: the more specific, then the later."""
    return lambda one: (*specificity(one), rules.index(one))


# What is made for a policy ends with it, and with it the kernels that its rules have in PyTorch's dispatcher.
# By identity, since hashing every rule at each region would take longer than the region.
_found: dict[int, tuple[weakref.ref[Policy], dict[tuple[str, str], ResolvedPolicy]]] = {}
_making = threading.RLock()  # a policy may end by garbage collection while something is made for another


def resolved(policy: Policy, device_type: str, lower: str) -> ResolvedPolicy:
    """``policy`` on ``device_type`` with the region's format ``lower``.

    One object as long as ``policy`` lives, so that its places can be compared by identity.
    """
    entry = _found.get(id(policy))
    if entry is not None and entry[0]() is policy:
        made = entry[1].get((device_type, lower))
        if made is not None:
            return made
    with _making:
        of_policy = _made_for(policy)
        if (device_type, lower) not in of_policy:
            of_policy[device_type, lower] = ResolvedPolicy(policy, device_type, lower)
        return of_policy[device_type, lower]


def _made_for(policy: Policy) -> dict[tuple[str, str], ResolvedPolicy]:
    key = id(policy)
    entry = _found.get(key)
    if entry is None or entry[0]() is not policy:
        of_policy: dict[tuple[str, str], ResolvedPolicy] = {}

        def end(_: object) -> None:
            # Another policy may have this one's id by now.
            if key in _found and _found[key][1] is of_policy:
                del _found[key]
            for made in of_policy.values():
                made.forget_places()
            of_policy.clear()

        entry = _found[key] = (weakref.ref(policy, end), of_policy)
    return entry[1]

"""Which rules of a policy decided about a call, and why the others did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.errors import near_names
from narrowcast.policy import FP8_RECIPES, Policy, Rule, base_of, class_names, names_module

_MOST_NAMES = 3
_MOST_MODULES = 500  # that a rule's name is compared with
# Which of these a matmul becomes depends on its bias and its number of dimensions.
_MATMULS = ("mm", "addmm", "matmul", "bmm", "baddbmm", "mv", "addmv")

Named = list[tuple[str, tuple[str, ...]]]
"""Path and names of the class of each module."""


def near_module(rule: Rule, named: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    """Return ``" (did you mean "encoder.*"?)"`` for a rule that names no module, or ``""``.

    Args:
        rule: for modules.
        named: path and names of the class of each module that there is.
    """
    if rule.module is not None:
        asked, known = rule.module, dict.fromkeys(path for path, _ in named if path)
    else:
        asked = str(rule.module_type).rpartition(".")[2]
        known = dict.fromkeys(names[0].rpartition(".")[2] for _, names in named)
    guess, meant, _ = near_names(asked, list(known)[:_MOST_MODULES]).partition("? Known:")
    return f" ({guess[0].lower()}{guess[1:]}?)" if meant else ""


class ReachedRules:
    """Counts which rules decided about a call, and explains why the others did not."""

    def __init__(self, policy: Policy) -> None:
        self._rules = policy.rules
        self.clear()

    def clear(self) -> None:
        self._reached: set[Rule] = set()
        self._called: set[str] = set()
        self._decided_by: dict[str, Counter[str]] = {}
        self._around: dict[str, Counter[str]] = {}

    def saw(self, op: str, rule: Rule | None, below: Iterable[str]) -> None:
        """Count a call of ``op`` in which operations ``below`` ran."""
        names = {op, base_of(op)}
        self._called |= names
        if rule is not None:
            self._reached.add(rule)
            for name in names:
                self._decided_by.setdefault(name, Counter())[str(rule)] += 1
        for name in {each for leaf in below for each in (leaf, base_of(leaf))} - names:
            self._around.setdefault(name, Counter())[op] += 1

    def of_fp8(self, path: str, layer: Any) -> Rule | None:
        """Return the rule by which ``layer`` at ``path`` multiplies in fp8, and count it as reached."""
        names = class_names(type(layer))
        candidates = [
            rule
            for rule in self._rules
            if rule.compute == layer.fp8_recipe
            and (not rule.is_for_modules or names_module(rule, path, names))
        ]
        # As everywhere: an operator in modules, modules, operators; among equals the later.
        order = {rule: (rule.is_for_modules, rule.op is not None, at) for at, rule in enumerate(candidates)}
        found = max(candidates, key=order.__getitem__, default=None)
        if found is not None:
            self._reached.add(found)
        return found

    def unreached(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> list[dict[str, Any]]:
        """Return ``rule``, ``reason`` and ``enclosing`` (operators around it) of each rule not reached.

        Args:
            modules: path and module of each module that was called.
        """
        named = [(path, class_names(type(module))) for path, module in modules]
        found = []
        for rule in self._rules:
            names_one = rule.is_for_modules and any(names_module(rule, *module) for module in named)
            # A rule for a whole module decides about its inputs, whatever is inside.
            whole_module = rule.op is None and rule.compute not in FP8_RECIPES and names_one
            if rule not in self._reached and not whole_module:
                reason, enclosing = self._why(rule, named, names_one=names_one)
                found.append({"rule": str(rule), "reason": reason, "enclosing": enclosing})
        return found

    def _why(self, rule: Rule, named: Named, *, names_one: bool) -> tuple[str, list[str]]:
        if rule.is_for_modules and not names_one:
            return f"no module that was called is one that it names{near_module(rule, named)}", []
        if rule.compute in FP8_RECIPES:
            return "no linear layer that was called multiplies in fp8 by it", []
        op = str(rule.op)
        around = self._around.get(op, Counter())
        if not around and op in _MATMULS:
            around = sum((self._around.get(same, Counter()) for same in _MATMULS), Counter())
        if around and op not in self._called:
            outer = [name for name, _ in around.most_common(_MOST_NAMES)]
            verb = "is" if len(outer) == 1 else "are"
            whole = f"{' and '.join(outer)}, which {verb} decided about as a whole"
            return f"{op} runs only inside {whole}: a rule for {base_of(outer[0])} reaches it", outer
        others = self._decided_by.get(op)
        if others and not rule.is_for_modules:
            first = others.most_common(1)[0][0]
            return f"each call of {op} was decided by a more specific rule: {first}", []
        if op not in self._called:
            return f"{op} was not called", []
        where = "in the modules that it names" if rule.is_for_modules else "where this policy was in force"
        return f"{op} was called, but not {where}", []

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
    """Records which rules decided about a call, and says why the others did not."""

    def __init__(self, policy: Policy) -> None:
        self._rules = policy.rules
        self.clear()

    def clear(self) -> None:
        self._reached: set[Rule] = set()
        self._called: set[str] = set()
        self._around: dict[str, Counter[str]] = {}

    def saw(self, op: str, rule: Rule | None, below: Iterable[str]) -> None:
        """Count a call of ``op`` in which operations ``below`` ran."""
        names = {op, base_of(op)}
        self._called |= names
        if rule is not None:
            self._reached.add(rule)
        for name in {each for inner in below for each in (inner, base_of(inner))} - names:
            self._around.setdefault(name, Counter())[op] += 1

    def of_fp8(self, path: str, layer: Any) -> Rule | None:
        """Return the rule by which ``layer`` at ``path`` multiplies in fp8, and count it as reached."""
        names = class_names(type(layer))
        # As everywhere: an operator in modules, modules, operators; among equals the later.
        candidates = [
            (rule.is_for_modules, rule.op is not None, at)
            for at, rule in enumerate(self._rules)
            if rule.compute == layer.fp8_recipe
            and (not rule.is_for_modules or names_module(rule, path, names))
        ]
        if not candidates:
            return None
        found = self._rules[max(candidates)[-1]]
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
            if rule in self._reached or whole_module:
                continue
            if rule.is_for_modules and not names_one:
                outer: list[str] = []
                reason = f"no module that was called is one that it names{near_module(rule, named)}"
            else:
                reason, outer = self._why(rule)
            found.append({"rule": str(rule), "reason": reason, "enclosing": outer})
        return found

    def _why(self, rule: Rule) -> tuple[str, list[str]]:
        if rule.compute in FP8_RECIPES:
            return "no linear layer that was called multiplies in fp8 by it", []
        op = str(rule.op)
        if op in self._called:
            return f"each call of {op} was decided by a more specific rule, or is outside of its modules", []
        around = self._around.get(op, Counter())
        if not around and op in _MATMULS:
            around = sum((self._around.get(same, Counter()) for same in _MATMULS), Counter())
        outer = [name for name, _ in around.most_common(_MOST_NAMES)]
        if not outer:
            return f"{op} was not called", []
        whole = f"{' and '.join(outer)}, which {'is' if len(outer) == 1 else 'are'} decided about as a whole"
        return f"{op} runs only inside {whole}: a rule for {base_of(outer[0])} reaches it", outer

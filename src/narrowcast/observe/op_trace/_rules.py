"""Which rules of a policy decided about a call, and why the others did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.errors import near_names
from narrowcast.policy import FP8_RECIPES, Policy, Rule, base_of, class_names, names_module

_MOST_NAMES = 3
_MOST_MODULES = 500  # that a rule's name is looked for among
# Which of these a product comes down to depends on its bias and its number of dimensions.
_PRODUCTS = ("mm", "addmm", "matmul", "bmm", "baddbmm", "mv", "addmv")
_THE_SAME = dict.fromkeys(_PRODUCTS, _PRODUCTS)


def near_module(rule: Rule, named: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    """``" (did you mean "encoder.*"?)"`` of a rule that names no module; empty where nothing is near.

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


class RulesSeen:
    """Told of every call, it knows in the end which rules none of them reached, and what stood in the way.

    Args:
        policy: with the rules.
    """

    def __init__(self, policy: Policy) -> None:
        self._rules = policy.rules
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._reached: set[Rule] = set()
        self._called: Counter[str] = Counter()
        self._decided_by: dict[str, Counter[str]] = {}
        self._around: dict[str, Counter[str]] = {}

    def saw(self, op: str, rule: Rule | None, enclosing: Iterable[str], below: Iterable[str]) -> None:
        """A call of ``op``, inside the operators ``enclosing``; operations ``below`` ran in it."""
        for name in {op, base_of(op)}:
            self._called[name] += 1
            if rule is not None:
                self._decided_by.setdefault(name, Counter())[str(rule)] += 1
        if rule is not None:
            self._reached.add(rule)
        for name in {each for leaf in below for each in (leaf, base_of(leaf))} - {op, base_of(op)}:
            self._around.setdefault(name, Counter())[op] += 1

    def of_fp8(self, path: str, layer: Any) -> Rule | None:
        """The rule by which ``layer`` at ``path`` multiplies in fp8; it is reached."""
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
        """The rules that no call reached: ``rule``, ``reason``, and ``enclosing``, operators around theirs.

        Args:
            modules: path and module of each module that was called.
        """
        named = [(path, class_names(type(module))) for path, module in modules]
        # A rule for all of a module decides about its inputs, whatever is inside.
        self._reached |= {
            rule
            for rule in self._rules
            if rule.op is None
            and rule.compute not in FP8_RECIPES
            and any(names_module(rule, path, names) for path, names in named)
        }
        return [
            {"rule": str(rule), "reason": reason, "enclosing": list(enclosing)}
            for rule in self._rules
            if rule not in self._reached
            for reason, enclosing in [self._why(rule, named)]
        ]

    def _why(self, rule: Rule, named: list[tuple[str, tuple[str, ...]]]) -> tuple[str, tuple[str, ...]]:
        if rule.is_for_modules and not any(names_module(rule, path, names) for path, names in named):
            return f"no module that was called is one that it names{near_module(rule, named)}", ()
        if rule.compute in FP8_RECIPES:
            return "no linear layer that was called multiplies in fp8 by it", ()
        assert rule.op is not None
        around = self._around_any(rule.op)
        if around and not self._called[rule.op]:
            outer = tuple(name for name, _ in around.most_common(_MOST_NAMES))
            verb = "is" if len(outer) == 1 else "are"
            whole = f"{' and '.join(outer)}, which {verb} decided about as a whole"
            return f"{rule.op} runs only inside {whole}: a rule for {base_of(outer[0])} reaches it", outer
        others = self._decided_by.get(rule.op)
        if others and not rule.is_for_modules:
            return (
                f"each call of {rule.op} was decided by a more specific rule: {others.most_common(1)[0][0]}",
                (),
            )
        if self._called[rule.op]:
            where = (
                "in the modules that it names" if rule.is_for_modules else "where this policy was in force"
            )
            return f"{rule.op} was called, but not {where}", ()
        return f"{rule.op} was not called", ()

    def _around_any(self, op: str) -> Counter[str]:
        """The operators inside which ``op`` ran, or another way to do the same."""
        found = self._around.get(op, Counter())
        return found or sum((self._around.get(same, Counter()) for same in _THE_SAME.get(op, ())), Counter())

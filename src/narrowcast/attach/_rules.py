"""The rules for modules, put on the modules that an unmodified script calls."""

from __future__ import annotations

import torch

from narrowcast.casting import Applied, named_places
from narrowcast.observe.op_trace import near_module
from narrowcast.policy import Policy, Rule, class_names

NAMED_NOTHING = "named no module of what the script called"
"""Ending of the note on a rule that was for no module."""
_SHOWN = 3  # layers, in a sentence


class ModuleRules:
    """Hooks for the rules of ``policy`` on each model of a script, from its first call on.

    A path in a rule is that in the module which the script calls from outside. Where it calls a part first
    and the whole later, the path in the whole counts from then on.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._applied: dict[torch.nn.Module, Applied] = {}
        self._unmatched: dict[Rule, set[str]] = {}
        self._guesses: dict[Rule, str] = {}
        self._models: set[str] = set()
        self._left_out: dict[str, list[str]] = {}  # why a layer does not multiply in fp8 -> which

    def meet(self, model: torch.nn.Module) -> None:
        """``model`` is called from outside for the first time."""
        if not self._policy.names_modules or any(model in set(whole.modules()) for whole in self._applied):
            return
        inside = set(model.modules())
        for part in [part for part in self._applied if part in inside]:
            self._applied.pop(part).remove()
        kind = type(model).__name__
        self._models.add(kind)

        def missed(rule: Rule) -> None:
            self._unmatched.setdefault(rule, set()).add(kind)
            if not self._guesses.get(rule):
                named = ((path, class_names(type(module))) for path, module in named_places(model))
                self._guesses[rule] = near_module(rule, list(named))

        applied = self._applied[model] = Applied(model, self._policy, opens=False, may_miss=missed)
        for path, why in applied.fp8.left_out.items():
            self._left_out.setdefault(why, []).append(f"{kind}.{path}" if path else kind)

    def remove(self) -> list[str]:
        """Take the hooks away; returns what there is to say of rules that did not hold everywhere."""
        for applied in self._applied.values():
            applied.remove()
        self._applied.clear()
        if not self._models:
            return []
        called = ", ".join(sorted(self._models))
        missed = [rule for rule, kinds in self._unmatched.items() if kinds == self._models]
        self._models.clear()
        return [
            *(
                f"the rule for {rule.target} {NAMED_NOTHING} ({called}){self._guesses[rule]}"
                for rule in missed
            ),
            *(
                f"{_shortened(paths)} {'does' if len(paths) == 1 else 'do'} not multiply in fp8: {why}"
                for why, paths in self._left_out.items()
            ),
        ]


def _shortened(paths: list[str]) -> str:
    shown = ", ".join(paths[:_SHOWN])
    return shown if len(paths) <= _SHOWN else f"{shown} and {len(paths) - _SHOWN} more"

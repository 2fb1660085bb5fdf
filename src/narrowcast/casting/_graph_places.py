"""Where in a model a node of a graph is called from: the calls of modules around it, and their rules."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from narrowcast.casting._paths import clean_path
from narrowcast.policy import FP8_RECIPES, Policy, Rule, Scope, class_names, rules_for

_ROOTS = re.compile(r"^L\['\w+'\]\.?|^L__\w+?__")
# What Dynamo writes for an entry of a container: blocks[0], _modules['blocks'].
_ENTRY = re.compile(r"\._modules\[['\"]([^'\"]+)['\"]\]|\[['\"]?([^'\"\]]+)['\"]?\]")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module, told apart from every other one by ``key``."""

    key: str
    path: str
    rules: tuple[Rule, ...]


class Places:
    """The rules for modules, as nodes of a graph ask for them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._calls: dict[tuple[str, str], Call | None] = {}
        self.rules = [one for one in policy.rules if one.is_for_modules and one.compute not in FP8_RECIPES]
        self.has_rules = bool(self.rules)
        self._unknown: set[str] = set()

    def around(self, node: torch.fx.Node) -> tuple[Call, ...]:
        """The calls of modules with rules that ``node`` is made in, outermost first."""
        if not self.has_rules:
            return ()
        stack = node.meta.get("nn_module_stack") or {}
        found = (self._call(str(key), path, cls) for key, (path, cls) in stack.items())
        return tuple(one for one in found if one is not None)

    def _call(self, key: str, path: str, cls: type | str) -> Call | None:
        if (key, path) not in self._calls:
            self._calls[key, path] = self._make(key, path, cls)
        return self._calls[key, path]

    def _make(self, key: str, path: str, cls: type | str) -> Call | None:
        names = class_names(cls) if isinstance(cls, type) else names_of_class(cls)
        path = readable_path(path)
        if names == (cls,) and any(one.module_type is not None for one in self.rules):
            self._tell_of_unknown(path, str(cls))
        rules = tuple(one for one in rules_for(self.policy, path, names) if one.compute not in FP8_RECIPES)
        return Call(key, path, rules) if rules else None

    def _tell_of_unknown(self, path: str, cls: str) -> None:
        if cls not in self._unknown:
            self._unknown.add(cls)
            warnings.warn(
                f"the class {cls} of module {path!r} cannot be found in what is imported, so that rules for "
                "classes that it is made from do not reach it: import its module first, or name the class "
                "itself in a rule",
                UserWarning,
                stacklevel=2,
            )


def place_in(root: Scope, calls: Iterable[Call]) -> Scope:
    """The place inside ``calls``."""
    for one in calls:
        root = root.inside(one.rules)
    return root


def own_rule(call: Call, inside: Scope) -> Rule | None:
    """The rule for all of the module of ``call``; ``inside`` is the place in it."""
    plain = [one for one in call.rules if one.op is None]
    return inside.rule if plain else None


def readable_path(path: str) -> str:
    """``"L['self'].blocks[0].norm"`` as ``"blocks.0.norm"``."""
    path = _ENTRY.sub(lambda found: f".{found[1] or found[2]}", _ROOTS.sub("", path))
    return clean_path(path.strip("."))


def names_of_class(name: str) -> tuple[str, ...]:
    """The full names of the class called ``name`` and of those below it, as far as it can be found."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:] if found is not None else ():
            found = getattr(found, part, None)
        if isinstance(found, type):
            return (name, *class_names(found)[1:])
    return (name,)

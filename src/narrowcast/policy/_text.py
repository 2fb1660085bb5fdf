"""A policy as a table for a person, at most 80 columns wide."""

from __future__ import annotations

import itertools
import textwrap

from narrowcast.policy._policy import Policy, name_of
from narrowcast.policy._presets import PRESETS
from narrowcast.policy._rule import Rule

_WIDTH = 80
_TARGET_WIDTH = 48
_MANY = 4


def table(policy: Policy) -> str:
    """A heading, then a line for each rule, in the order in which they were made.

    Many operators in a row of which the same is said share one entry.
    """
    lines = textwrap.wrap(_heading(policy), _WIDTH, subsequent_indent="    ")
    if policy.tables != "native":
        lines.append(f"  PyTorch's table for {policy.tables} on every device")
    entries = _entries(policy.rules)
    width = min(_TARGET_WIDTH, max((len(target) for target, _ in entries), default=0))
    for target, effect in entries:
        first, *rest = textwrap.wrap(target, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
        lines.append(f"  {first:<{width}}  {effect}")
        lines += [f"  {line}" for line in rest]
    return "\n".join(lines)


def _entries(rules: tuple[Rule, ...]) -> list[tuple[str, str]]:
    """What each line is about, and what it says."""
    found: list[tuple[str, str]] = []
    for (everywhere, effect), group in itertools.groupby(
        rules, lambda one: (not one.is_for_modules, one.effect)
    ):
        targets = [one.target for one in group]
        if everywhere and len(targets) >= _MANY:
            targets = [", ".join(targets)]
        found += [(target, effect) for target in targets]
    return found


def _heading(policy: Policy) -> str:
    name = name_of(policy)
    if name is not None:
        return f"{name}: {PRESETS[name]}"
    if policy.master_weights:
        heading = f"O2 in {policy.compute}: {PRESETS['O2']}"
    elif policy.low_weights:
        heading = f"O3 in {policy.compute}: {PRESETS['O3']}"
    else:
        heading = f"{policy.compute}: {PRESETS[policy.compute]}"
    count = len(policy.rules)
    return f"{heading}, with {count} rule{'s' * (count != 1)}" if count else heading

"""The mistakes that are looked for, with their reasons and mended lines, and comments that ignore them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from narrowcast.errors import near_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One mistake.

    Attributes:
        name: in kebab case; a comment on the line switches it off by this name.
        reason: why it is a mistake.
        mended: what to write, with ``{scaler}``, ``{optimizer}`` and ``{code}``, the text of the statement.
    """

    name: str
    reason: str
    mended: str


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            name="clip-before-unscale",
            reason="the gradients are still multiplied by the loss scale, so that a limit on their norm "
            "or value clips nearly every step to almost nothing",
            mended="on the line before: {scaler}.unscale_({optimizer})",
        ),
        Rule(
            name="grad-before-unscale",
            reason="the gradient is still multiplied by the loss scale, and so is what is computed from it",
            mended="on a line before: {scaler}.unscale_({optimizer})",
        ),
        Rule(
            name="step-without-scaler",
            reason="the loss was scaled and the optimizer steps by itself: nothing checks for infinities, "
            "and gradients that were not unscaled are too large by the loss scale",
            mended="{scaler}.step({optimizer})",
        ),
        Rule(
            name="scale-missing",
            reason="the scaler divides gradients by the loss scale, and this backward pass did not multiply "
            "the loss by it",
            mended="{scaler}.scale(loss).backward() for the backward pass",
        ),
        Rule(
            name="update-missing",
            reason="the scale is never updated: it cannot back off where gradients overflow, and torch "
            "raises at the next step",
            mended="on a line after the last step: {scaler}.update()",
        ),
        Rule(
            name="update-between-steps",
            reason="the scale is updated between two steps of one backward pass: the gradients of the second "
            "were scaled with the old scale and are unscaled with the new one",
            mended="{scaler}.update() once, after the last step",
        ),
        Rule(
            name="backward-in-region",
            reason="the backward pass runs inside the autocast region, where its own operators may be cast "
            "once more",
            mended="{code} behind the region, with the indentation of its with",
        ),
        Rule(
            name="half-weights",
            reason="the weights themselves become float16: updates smaller than 2**-11 of a weight are lost, "
            "and torch's scaler refuses their gradients",
            mended="{code}",
        ),
    )
}
REWRITINGS = ("apex", "deprecated-amp", "to-narrowcast")
"""The names of findings of the rewritings, which no comment switches off."""

_IGNORE = re.compile(r"#\s*narrowcast:\s*ignore(?:\[([\w\s,-]*)\])?")


def ignored(rule: str, line: str) -> bool:
    """Return whether a comment on ``line`` switches ``rule`` off.

    ``# narrowcast: ignore[half-weights]`` does so for the rules that it names, ``# narrowcast: ignore`` for
    all.
    """
    found = _IGNORE.search(line)
    if found is None:
        return False
    return found[1] is None or rule in {name.strip() for name in found[1].split(",")}


def without_effect(text: str) -> Iterator[tuple[int, str]]:
    """Yield where a comment switches off something that is no rule, and what is wrong."""
    for found in _IGNORE.finditer(text):
        for name in filter(None, map(str.strip, (found[1] or "").split(","))):
            if name in REWRITINGS:
                yield found.start(), f"{name} is no mistake, and a comment does not switch it off"
            elif name not in RULES:
                yield found.start(), f'"{name}" is no rule. {near_names(name, RULES)}'

"""The mistakes that are looked for, with their reasons and mended lines, and comments that ignore them."""

from __future__ import annotations

import re
from dataclasses import dataclass


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
    )
}
_IGNORE = re.compile(r"#\s*narrowcast:\s*ignore(?:\[([\w\s,-]*)\])?")


def ignored(rule: str, line: str) -> bool:
    """Return whether a comment on ``line`` switches ``rule`` off.

    ``# narrowcast: ignore[update-missing]`` does so for the rules that it names, ``# narrowcast: ignore`` for
    all.
    """
    found = _IGNORE.search(line)
    if found is None:
        return False
    return found[1] is None or rule in {name.strip() for name in found[1].split(",")}

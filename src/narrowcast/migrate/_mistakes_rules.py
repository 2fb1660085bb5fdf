"""The mistakes that are looked for: a name to look up and to switch off, and the reason of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from narrowcast.errors import near_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One mistake: what is wrong, why, and what to write."""

    name: str
    reason: str
    advice: str


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            name="clip-before-unscale",
            reason="the gradients are still multiplied by the loss scale, so that a limit on their "
            "norm or value clips nearly every step to almost nothing",
            advice="call {scaler}.unscale_({optimizer}) first",
        ),
        Rule(
            name="backward-in-region",
            reason="the backward pass runs inside the autocast region, where its own operators may "
            "be cast once more",
            advice="end the region after the loss",
        ),
        Rule(
            name="step-in-region",
            reason="the optimizer steps inside the autocast region, which keeps the casts of the old"
            " weights: until the region ends the step has no effect",
            advice="end the region after the loss",
        ),
        Rule(
            name="update-missing",
            reason="the scale is never updated after this step: it cannot back off where gradients "
            "overflow, and torch raises at the next step",
            advice="call {scaler}.update() once after the steps of an iteration",
        ),
        Rule(
            name="update-twice",
            reason="the scale is updated again without a step in between, and torch raises",
            advice="call {scaler}.update() once an iteration",
        ),
        Rule(
            name="update-between-steps",
            reason="the scale is updated between two steps of one backward pass: the gradients of "
            "the second were scaled with the old scale and are unscaled with the new one",
            advice="call {scaler}.update() once, after the last step",
        ),
        Rule(
            name="scaler-with-bf16",
            reason="bfloat16 has the exponents of float32, so that a loss scale gains nothing and "
            "costs a look at every gradient",
            advice="leave the GradScaler out, or make it with enabled=False",
        ),
        Rule(
            name="positional-closure",
            reason="torch's scaler hands a closure by position on to the optimizer, which then steps"
            " on gradients that are still multiplied by the loss scale",
            advice="step without a closure, or take narrowcast.GradScaler, which unscales at each evaluation",
        ),
        Rule(
            name="step-without-scaler",
            reason="the loss was scaled and the optimizer steps by itself: nothing looks for "
            "infinities, and gradients that were not unscaled are too large by the loss scale",
            advice="call {scaler}.step({optimizer})",
        ),
        Rule(
            name="step-twice",
            reason="the scaler has stepped this optimizer already: it steps a second time on the same "
            "gradients, on overflowed ones too",
            advice="leave the second step out",
        ),
        Rule(
            name="backward-after-unscale",
            reason="a backward after unscale_ has added scaled gradients, and the step unscales no second "
            "time: it steps on them as they are",
            advice="call {scaler}.unscale_({optimizer}) after the last backward before the step",
        ),
        Rule(
            name="unscale-twice",
            reason="the gradients of this optimizer were unscaled already since the last update, and"
            " torch raises",
            advice="call {scaler}.unscale_({optimizer}) once, after the last backward before the step",
        ),
        Rule(
            name="scale-missing",
            reason="the scaler steps, and no loss goes through its scale: torch raises at the step",
            advice="call {scaler}.scale(loss).backward()",
        ),
        Rule(
            name="grad-before-unscale",
            reason="the gradient is still multiplied by the loss scale, and so is what is computed of it",
            advice="call {scaler}.unscale_(optimizer) first",
        ),
        Rule(
            name="scaled-autograd-grad",
            reason="torch.autograd.grad of a scaled loss gives gradients that are multiplied by the "
            "loss scale, and nothing here divides them by it",
            advice="divide them by {scaler}.get_scale()",
        ),
        Rule(
            name="scheduler-before-step",
            reason="the scheduler moves before the optimizer steps, so that the first learning rate "
            "is never used",
            advice="call the scheduler's step after the optimizer's",
        ),
        Rule(
            name="host-sync",
            reason="a value is read from the device in every iteration, and Python waits until the "
            "device has computed all that comes before it",
            advice="keep the tensor (loss.detach()) and read it every hundredth iteration",
        ),
        Rule(
            name="half-weights",
            reason="the weights themselves become float16: updates smaller than 2**-11 of a weight "
            "are lost, and torch's scaler refuses their gradients",
            advice="leave the weights in float32; the region casts them where that is right",
        ),
    )
}

REWRITINGS = ("apex", "deprecated-amp", "to-narrowcast")
"""What findings of the other stages are called: a file is rewritten as a whole, whatever a line says."""

_IGNORE = re.compile(r"#\s*narrowcast:\s*ignore(?:\[([\w\s,-]*)\])?")


def ignored(rule: str, line: str) -> bool:
    """Whether a comment on ``line`` switches ``rule`` off.

    ``# narrowcast: ignore[host-sync]`` does so for the rules that it names, ``# narrowcast: ignore`` for all.
    """
    found = _IGNORE.search(line)
    if found is None:
        return False
    return found[1] is None or rule in {name.strip() for name in found[1].split(",")}


def without_effect(text: str) -> Iterator[tuple[int, str]]:
    """The names in comments that switch no rule off: where each comment begins, and what is wrong."""
    for found in _IGNORE.finditer(text):
        for name in filter(None, map(str.strip, (found[1] or "").split(","))):
            if name in REWRITINGS:
                yield found.start(), f"{name} is no mistake, and a comment does not switch it off"
            elif name not in RULES:
                yield found.start(), f'"{name}" is no rule. {near_names(name, RULES)}'

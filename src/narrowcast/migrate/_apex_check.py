"""What was made of apex is looked at before it is kept: it may train wrongly in none of the known ways."""

from __future__ import annotations

from narrowcast.migrate._changes import Applied, Changes, origin
from narrowcast.migrate._mistakes import all_mistakes, mistakes
from narrowcast.migrate._mistakes_flow import Seen
from narrowcast.migrate._mistakes_rules import RULES
from narrowcast.migrate._settings import Settings
from narrowcast.migrate._source import Source

# Wrong weights, or an error of torch; the other rules are about speed and about what the script had before.
_WRONG = {
    "backward-after-unscale", "clip-before-unscale", "grad-before-unscale", "scale-missing",
    "scaled-autograd-grad", "step-twice", "step-without-scaler", "unscale-twice", "update-between-steps",
    "update-missing", "update-twice",
}  # fmt: skip
# A fix may show the next mistake; more rounds than these do not come to an end.
_ROUNDS = 6


def check(source: Source, changes: Changes, settings: Settings) -> list[tuple[int, str]]:
    """Offsets and reasons of what would train wrongly after ``changes`` and has no sure fix.

    What stood there before is the script's own. A comment that switches a rule off does not count here: it
    was written about other lines.
    """
    if not changes.edits:
        return []
    trail = [Applied(source.text, changes.edits)]
    before: set[tuple[str, int]] | None = None
    for _ in range(_ROUNDS):
        made = Source(source.path, trail[-1].text)
        wrong = [(one, origin(trail, made.start(one.node))) for one in _wrong(made)]
        if wrong and before is None:
            before = {(one.rule, source.line_of(source.start(one.node))[0]) for one in _wrong(source)}
        wrong = [(one, at) for one, at in wrong if (one.rule, source.line_of(at)[0]) not in (before or ())]
        if not wrong:
            if len(trail) == 1:
                changes.made = made
            return []
        fixes = mistakes(made, settings)
        if not fixes.edits:
            break
        trail.append(Applied(made.text, fixes.edits))
    return [(at, f"the rewriting would train wrongly here ({one.rule}): {_reason(one)}") for one, at in wrong]


def _wrong(source: Source) -> list[Seen]:
    return [one for one in all_mistakes(source) if one.rule in _WRONG]


def _reason(seen: Seen) -> str:
    return RULES[seen.rule].reason

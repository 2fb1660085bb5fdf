"""The block that ends a run."""

from __future__ import annotations

import math
import textwrap

from narrowcast.observe.capture import Capture
from narrowcast.report._printable import printable

_WIDTH = 79


def run_block(capture: Capture, *, capture_path: str | None = None) -> str:
    """A few lines of at most 79 columns: format, steps, skipped steps, final scale, and what to know.

    The capture's path stays on one line, however long. Of a run that was killed, what its steps tell.
    """
    totals = capture.totals()
    devices = capture.of("device")
    by = _by(capture)
    places = [f"{d['format']} on {d['device_type']}{_because(d['because'], by)}" for d in devices]
    aside = totals["aside"] is not None
    nothing = "left to the script's own mixed precision" if aside else "nothing ran in mixed precision"
    where = "; ".join(places) + (by if places else "")
    lines = _wrapped(f"narrowcast: {printable(where) or nothing}", "  ")
    scale, steps, wall_s = totals["final_scale"], totals["steps"], totals["wall_s"]
    said = [
        f"{steps} optimizer step{'s' * (steps != 1)}{' before that' if aside else ''}",
        f"{totals['skipped_steps']} skipped",
        "loss scale off" if scale is None else f"final loss scale {scale:g}",
    ]
    said += [] if wall_s is None else [f"{wall_s:.1f} s"]
    lines.append(f"  {', '.join(said)}")
    if capture.end is None:
        lines.append("  note: the capture has no end: the run was killed or is still going on")
    notes = [note["text"] for note in capture.of("note")]
    for text in notes + _lost_losses(capture):
        lines += _wrapped(f"  note: {printable(text)}", "        ")
    if capture_path:
        lines.append(f"  capture: {capture_path}")
    return "\n".join(lines)


def _by(capture: Capture) -> str:
    """The policy, where its name is not the format alone: ``, by my.toml (4 rules)``."""
    policy, rules = capture.start.get("policy", ""), capture.start.get("rules", 0)
    if not rules and not policy.endswith(".toml") and "/" not in policy:
        return ""
    return f", by {policy} ({rules} rule{'s' * (rules != 1)})"


def _because(why: str, by: str) -> str:
    return "" if by and why == "as asked" else f" ({why})"


def _lost_losses(capture: Capture) -> list[str]:
    """What to know of losses that ended as no number: since when, by the line that went backward."""
    found = []
    for site in dict.fromkeys(loss["site"] for loss in capture.of("loss")):
        losses = [loss for loss in capture.of("loss") if loss["site"] == site]
        if math.isfinite(losses[-1]["value"]):
            continue
        finite = [n for n, loss in enumerate(losses) if math.isfinite(loss["value"])]
        first = losses[finite[-1] + 1 if finite else 0]
        found.append(
            f"the loss at {site} is {first['value']} from backward {first['backward']} on: "
            "try --policy fp32 to see whether FP32 has it too"
        )
    return found


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )

"""What is shown of a single run: the lines that end it, and its numbers as JSON."""

from __future__ import annotations

import math
from typing import Any

from narrowcast.capture import Capture, json_ready, median_of_runs, times_s
from narrowcast.report._statistics import final_loss, losses_by_site
from narrowcast.report._text import plural, wrapped


def run_summary(capture: Capture) -> dict[str, Any]:
    """Return what a run did, as JSON-ready values; None for what is not known, NaN and infinities as strings.

    Returns:
        ``argv``, ``policy``, ``ended`` (false: it was killed, or still goes on), ``step_time_s_median``,
        ``totals`` (as the ``end`` event has them), ``devices`` (``device_type``, ``format``, ``because``),
        ``losses`` (by call site: ``count``, ``first``, ``last``, ``final``, which is the mean of the last
        tenth, and ``not_finite``, a count) and ``notes``.
    """
    spread = median_of_runs([times_s(capture, "training")])
    totals = dict(capture.totals())
    del totals["event"]
    devices = []
    for device in capture.of("device"):
        devices.append({key: device[key] for key in ("device_type", "format", "because")})

    losses = {}
    for site, values in losses_by_site(capture).items():
        losses[site] = {
            "count": len(values),
            "first": values[0],
            "last": values[-1],
            "final": final_loss(values),
            "not_finite": len(values) - sum(map(math.isfinite, values)),
        }
    result: dict[str, Any] = json_ready(
        {
            "argv": capture.start["argv"],
            "policy": capture.start["policy"],
            "ended": capture.end is not None,
            "step_time_s_median": None if spread is None else spread.median_s,
            "totals": totals,
            "devices": devices,
            "losses": losses,
            "notes": [note["text"] for note in capture.of("note")],
        }
    )
    return result


def run_block(capture: Capture, *, capture_path: str | None = None, with_told: bool = True) -> str:
    """Format the end of a run in a few lines: format, steps, skipped steps, final scale, and notes.

    Lines have at most 79 columns, but paths and other long words stay whole. A run that was killed gets the
    numbers of the steps that it took. ``with_told=False`` leaves out notes that were shown before training.
    """
    totals = capture.totals()
    lines = []
    if totals["skipped_steps"] and not totals["steps"]:
        skipped = "the only optimizer step was skipped"
        if totals["skipped_steps"] > 1:
            skipped = f"all {totals['skipped_steps']} optimizer steps were skipped"
        lines.append(wrapped(f"narrowcast: WARNING: NOTHING WAS TRAINED: {skipped}", then="  "))
    lines.append(wrapped(f"narrowcast: {_formats(capture)}", then="  ", whole_words=True))
    lines.append(f"  {_counts(totals)}")
    if capture.end is None:
        lines.append("  note: the capture has no end: the run was killed or is still going on")

    notes = []
    for note in capture.of("note"):
        if with_told or not note.get("told"):
            notes.append(note["text"])
    for text in notes + _losses_not_finite(capture):
        # A note that tells the story of a skipped step has several lines.
        first, *others = text.split("\n")
        lines.append(wrapped(f"note: {first}", "  ", " " * 8, whole_words=True))
        lines += [wrapped(line, " " * 8, " " * 16) for line in others]
    if capture_path:
        lines.append(f"  capture: {capture_path}")
    return "\n".join(lines)


def _formats(capture: Capture) -> str:
    """Say which format was computed in on which device, why, and by which policy; or that none was."""
    totals = capture.totals()
    here = " in this process" if totals.get("elsewhere") else ""
    formats = _formats_of_devices(capture)
    if totals["left_alone"] is not None:
        left = "left to the script's own mixed precision"
        # A region that was opened has a format, even if the script's own mixed precision took over before
        # anything computed in it.
        computed = any(totals[name] for name in ("steps", "skipped_steps", "backwards", "forwards"))
        if formats and computed:
            return f"{formats}, then {left}"
        return f"{left}{here}"
    if not formats:
        return f"nothing ran in mixed precision{here}"
    return formats


def _formats_of_devices(capture: Capture) -> str:
    """Name the format of each device that had one, why, and the policy; an empty text if none had."""
    policy = _policy_words(capture)
    places = []
    for device in capture.of("device"):
        place = f"{device['format']} on {device['device_type']}"
        # "as asked" is left out where the text goes on with the policy, which says the same.
        if not policy or device["because"] != "as asked":
            place += f" ({device['because']})"
        places.append(place)
    if not places:
        return ""
    return "; ".join(places) + policy


def _policy_words(capture: Capture) -> str:
    """Name the policy where it is more than a format: ``, by my.toml (4 rules)``."""
    policy, rules = capture.start.get("policy", ""), capture.start.get("rules", 0)
    if not rules and not policy.endswith(".toml") and "/" not in policy:
        return ""
    return f", by {policy} ({plural(rules, 'rule')})"


def _counts(totals: dict[str, Any]) -> str:
    steps = plural(totals["steps"], "optimizer step")
    if totals["left_alone"] is not None:
        steps += " before that"
    scale = "loss scale off"
    if totals["final_scale"] is not None:
        scale = f"final loss scale {totals['final_scale']:g}"
    counts = [steps, f"{totals['skipped_steps']} skipped", scale]
    if totals["wall_s"] is not None:
        counts.append(f"{totals['wall_s']:.1f} s")
    return ", ".join(counts)


def _losses_not_finite(capture: Capture) -> list[str]:
    """Return a note for each call site whose last losses are not finite: since when, and what to try."""
    by_site: dict[str, list[dict[str, Any]]] = {}
    for loss in capture.of("loss"):
        by_site.setdefault(loss["site"], []).append(loss)

    notes = []
    for site, losses in by_site.items():
        # Where the losses at the end are all not finite, the first of these.
        first = None
        for loss in losses:
            if math.isfinite(loss["value"]):
                first = None
            elif first is None:
                first = loss
        if first is not None:
            what = f"the loss at {site} is {first['value']} from backward {first['backward']} on"
            # If there is a story of a skipped step, it says whether FP32 has it too.
            if not any(note.get("story") for note in capture.of("note")):
                what += ": try --policy fp32 to see whether FP32 has it too"
            notes.append(what)
    return notes

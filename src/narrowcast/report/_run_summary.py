"""The numbers of one run: what ``narrowcast report --json`` prints of it."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from narrowcast.observe.capture import Capture, json_ready
from narrowcast.report._statistics import final_loss, median_of_runs, step_times_s

_TOTALS = (
    "exit_code",
    "stopped",
    "aside",
    "wall_s",
    "backwards",
    "forwards",
    "steps",
    "skipped_steps",
    "final_scale",
    "peak_resident_bytes",
    "peak_tensor_bytes",
    "settings",
    "versions",
)


def run_summary(capture: Capture) -> dict[str, Any]:
    """What a run did, as JSON-ready values; None for what is not known, NaN and infinities as strings.

    argv, policy, ended (False: killed, or still going on), step_time_s_median, totals (as the ``end`` event
    has them), devices (device_type, format, because), losses (by call site: count, first, last, final, the
    last being the mean of the last tenth, and not_finite, a count) and notes.
    """
    losses: dict[str, list[float]] = defaultdict(list)
    for loss in capture.of("loss"):
        losses[loss["site"]].append(loss["value"])
    spread = median_of_runs([step_times_s(capture.of("step"))])
    totals = capture.totals()
    found: dict[str, Any] = {
        "argv": capture.start["argv"],
        "policy": capture.start["policy"],
        "ended": capture.end is not None,
        "step_time_s_median": None if spread is None else spread.median_s,
        "totals": {key: totals[key] for key in _TOTALS},
        "devices": [
            {key: device[key] for key in ("device_type", "format", "because")}
            for device in capture.of("device")
        ],
        "losses": {site: _of_site(values) for site, values in losses.items()},
        "notes": [note["text"] for note in capture.of("note")],
    }
    ready: dict[str, Any] = json_ready(found)
    return ready


def _of_site(values: list[float]) -> dict[str, Any]:
    return {
        "count": len(values),
        "first": values[0],
        "last": values[-1],
        "final": final_loss(values),
        "not_finite": sum(not math.isfinite(value) for value in values),
    }

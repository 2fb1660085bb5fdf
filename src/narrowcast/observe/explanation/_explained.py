"""What the capture of ``narrowcast explain`` shows, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowcast.errors import FileError
from narrowcast.observe.capture import Capture, read_capture

_SCHEMA = 1
_PER_STEP = ("ops", "calls", "count", "wanted_casts", "casts", "cast_bytes", "moved_bytes", "duration_s")


def read_explanation(path: Path) -> Capture:
    """Read ``explain.jsonl``.

    Raises:
        FileError: it is missing, cannot be read, is of something else, or is incomplete.
    """
    capture = read_capture(path)
    if capture.start["kind"] != "explain":
        raise FileError(f"{path} is not the capture of narrowcast explain")
    if not capture.of("watched"):
        raise FileError(f"{path} was cut short: run narrowcast explain again")
    return capture


def explained(capture: Capture) -> dict[str, Any]:
    """Return what a capture of ``narrowcast explain`` shows.

    Returns:
        JSON-ready: ``schema``, ``target``, ``policy``, ``rules``, ``problem`` (a sentence if there are no
        numbers, else null), ``device``, ``format``, ``unit``, ``steps``, ``totals`` (of one step), ``sites``,
        ``round_trips``, ``odd_shapes``, ``unreached``, ``notes``, ``reasons`` (path of each number that is
        null -> why) and ``versions``. Times and bytes are of one step, shares are of all that was watched.
    """
    watched = capture.of("watched")[-1]
    steps, duration_s, product_s = max(1, watched["steps"]), watched["duration_s"], watched["product_s"]
    totals, reasons = _totals(watched, steps)
    sites = [
        _per_step(site, steps) | {"time_share": _share(site["duration_s"], duration_s)}
        for site in capture.of("site")
    ]
    odd = [
        _per_step(shape, steps) | {"product_time_share": _share(shape["duration_s"], product_s)}
        for shape in capture.of("odd shape")
    ]
    if not duration_s and sites:
        reasons["sites[].time_share"] = "no time was measured"
    if not product_s and odd:
        reasons["odd_shapes[].product_time_share"] = "no product took any time"
    return {
        "schema": _SCHEMA,
        "target": list(capture.start["argv"]),
        "policy": capture.start["policy"],
        "problem": None if sites else "nothing that the script did was seen",
        **{name: watched[name] for name in ("rules", "device", "format", "unit", "steps", "complete")},
        "totals": totals,
        "sites": sites,
        "round_trips": [_per_step(trip, steps) for trip in capture.of("round trip")],
        "odd_shapes": odd,
        "unreached": [_per_step(rule, steps) for rule in capture.of("unreached")],
        "notes": [note["text"] for note in capture.of("note")],
        "reasons": reasons,
        "versions": watched["versions"],
    }


def _per_step(event: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the fields of an event, sums divided by the number of steps."""
    return {
        name: _divided(value, steps) if name in _PER_STEP else value
        for name, value in event.items()
        if name != "event"
    }


def _divided(value: float, steps: int) -> float:
    return value // steps if isinstance(value, int) and value % steps == 0 else value / steps


def _totals(watched: dict[str, Any], steps: int) -> tuple[dict[str, Any], dict[str, str]]:
    totals = {
        name: _divided(watched[name], steps)
        for name in ("ops", "casts", "moved_bytes", "cast_bytes", "duration_s")
    } | {
        "cast_share_of_ops": _share(watched["casts"], watched["ops"]),
        "cast_share_of_bytes": _share(watched["cast_bytes"], watched["moved_bytes"]),
        "cast_share_of_time": _share(watched["cast_s"], watched["duration_s"]),
        "product_share_of_time": _share(watched["product_s"], watched["duration_s"]),
        "narrow_share_of_product_time": _share(watched["narrow_product_s"], watched["product_s"]),
    }
    why = {"narrow_share_of_product_time": "no product took any time"}
    missing = {name: why.get(name, "nothing ran") for name, value in totals.items() if value is None}
    return totals, {f"totals.{name}": reason for name, reason in missing.items()}


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole else None

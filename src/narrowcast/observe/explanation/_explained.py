"""What the capture of ``narrowcast explain`` shows, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowcast.errors import FileError
from narrowcast.observe.capture import Capture, read_capture

_SCHEMA = 1


def read_explanation(path: Path) -> Capture:
    """Read ``explain.jsonl``.

    Raises:
        FileError: it is missing, cannot be read, is of something else, or was cut short.
    """
    capture = read_capture(path)
    if capture.start["kind"] != "explain":
        raise FileError(f"{path} is no capture of what ran in which format (narrowcast explain)")
    if not capture.of("watched"):
        raise FileError(f"{path} was cut short: run narrowcast explain again")
    return capture


def explained(capture: Capture) -> dict[str, Any]:
    """What a capture of ``narrowcast explain`` says.

    Returns:
        JSON-ready: ``schema``, ``target``, ``policy``, ``rules``, ``problem`` (a sentence where there are no
        numbers, else null), ``device``, ``format``, ``unit``, ``steps``, ``totals`` (of one step), ``sites``,
        ``round_trips``, ``odd_shapes``, ``unreached``, ``notes``, ``reasons`` (path of each number that is
        null -> why) and ``versions``. Times and bytes are of one step, shares are of all that was watched.
    """
    watched = capture.of("watched")[-1]
    steps, duration_s = max(1, watched["steps"]), watched["duration_s"]
    totals, reasons = _totals(watched)
    sites = [_without_event(site) for site in capture.of("site")]
    odd = [_without_event(shape) for shape in capture.of("odd shape")]
    for site in sites:
        site["time_share"] = _share(site["duration_s"], duration_s)
        _of_one_step(site, steps)
    for shape in odd:
        shape["product_time_share"] = _share(shape["duration_s"], watched["product_s"])
        _of_one_step(shape, steps)
    trips = [_without_event(trip) for trip in capture.of("round trip")]
    for trip in trips:
        _of_one_step(trip, steps)
    if not duration_s and sites:
        reasons["sites[].time_share"] = "no time was measured"
    if not watched["product_s"] and odd:
        reasons["odd_shapes[].product_time_share"] = "no product took any time"
    return {
        "schema": _SCHEMA,
        "target": list(capture.start["argv"]),
        "policy": capture.start["policy"],
        "rules": watched["rules"],
        "problem": None if sites else "nothing that the script did was seen",
        "device": watched["device"],
        "format": watched["format"],
        "unit": watched["unit"],
        "steps": watched["steps"],
        "complete": watched["complete"],
        "totals": totals,
        "sites": sites,
        "round_trips": trips,
        "odd_shapes": odd,
        "unreached": [_without_event(rule) for rule in capture.of("unreached")],
        "notes": [note["text"] for note in capture.of("note")],
        "reasons": reasons,
        "versions": watched["versions"],
    }


_PER_STEP = ("calls", "count", "wanted_casts", "casts", "cast_bytes", "moved_bytes", "duration_s")


def _of_one_step(event: dict[str, Any], steps: int) -> None:
    for name in _PER_STEP:
        if name in event:
            event[name] = _divided(event[name], steps)


def _divided(value: float, steps: int) -> float:
    return value // steps if isinstance(value, int) and value % steps == 0 else value / steps


def _totals(watched: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    steps = max(1, watched["steps"])
    totals = {
        "ops": _divided(watched["ops"], steps),
        "casts": _divided(watched["casts"], steps),
        "moved_bytes": _divided(watched["moved_bytes"], steps),
        "cast_bytes": _divided(watched["cast_bytes"], steps),
        "duration_s": watched["duration_s"] / steps,
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


def _without_event(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "event"}

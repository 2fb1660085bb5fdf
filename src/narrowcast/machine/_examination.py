"""Everything about this machine: what it has, what does not fit together, measured rates, the choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from narrowcast.machine._auto import best_format, measure_auto, read_auto_rates
from narrowcast.machine._environment import first_line
from narrowcast.machine._facts import gather_facts, mismatches
from narrowcast.machine._kept_rates import keep_rates, key_of_machine, rates_path, read_rates
from narrowcast.machine._rates import Budget, Rate, measure_device
from narrowcast.machine._slow_formats import slow_formats
from narrowcast.machine._work import has_tf32, work_for

_SCHEMA = 1


def examine(
    *,
    cache: Path | None = None,
    fresh: bool = False,
    budget: Budget | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Examine this machine; a device that does not work is a result, not an error.

    Args:
        cache: the folder in which rates are kept; None keeps nothing.
        fresh: measure even where rates are kept.
        budget: how long measuring may take.
        progress: called with a line that names what is being measured.

    Returns:
        JSON-ready values:

        - ``schema``, ``facts`` (of ``gather_facts``) and ``mismatches``
        - ``rates``: ``source`` (``"measured"`` or ``"cache"``), ``measured_at_s`` (since 1970), ``wall_s``,
          ``budget``, ``file`` (null if they are not kept) and ``devices``
        - ``notes``: lines about rates that were not measured, not kept, or measured anew

        Each of ``devices`` has ``device``, ``device_type``, ``name``, ``rows`` (the fields of ``Rate``, and
        ``steady``), ``reason`` (why nothing was measured, or null), ``auto`` (the rows that decide ``auto``,
        null if the table does), ``choice`` and ``slow``.
    """
    progress("what this machine has")
    facts = gather_facts()
    wrong = mismatches(facts)
    # Nothing is measured on a device that is known to fail.
    unusable = {mismatch["device"] for mismatch in wrong if mismatch["severity"] == "error"}
    devices = [device for device in _devices(facts) if device["device"] not in unusable]

    # The rates that decide "auto" are measured first. They take two seconds; without them the table decides.
    notes = []
    for device in devices:
        note = measure_auto(device["device_type"], cache, fresh=fresh, progress=progress)
        if note is not None:
            notes.append(note)
    rates, note = _rates(facts, devices, budget or Budget(), cache, fresh=fresh, progress=progress)
    if note is not None:
        notes.append(note)

    # What follows from rates is computed each time, and not kept.
    for device in rates["devices"]:
        of_auto, _ = read_auto_rates(device["device_type"], cache)
        device["auto"] = None if of_auto is None else of_auto["rows"]
        device["choice"] = asdict(best_format(device["device_type"], cache))
        of_device = [Rate(**row) for row in device["rows"]]
        for row, rate in zip(device["rows"], of_device, strict=True):
            row["steady"] = rate.is_steady
        device["slow"] = slow_formats(("bf16", "fp16"), device["device_type"], of_device)
    return {"schema": _SCHEMA, "facts": facts, "mismatches": wrong, "rates": rates, "notes": notes}


def _devices(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the CPU, and the first of each kind of GPU: two alike would only take twice as long."""
    devices = [{"device": "cpu", "device_type": "cpu", "name": facts["cpu"]["name"]}]
    for gpu in facts["gpus"]:
        if gpu["name"] not in [device["name"] for device in devices]:
            devices.append(gpu)
    if facts["mps"]["available"]:
        devices.append({"device": "mps", "device_type": "mps", "name": "Metal"})
    return devices


def _rates(
    facts: dict[str, Any],
    devices: list[dict[str, Any]],
    budget: Budget,
    cache: Path | None,
    *,
    fresh: bool,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], str | None]:
    """Return the kept rates of these devices, or measure and keep them; and a note about what went wrong."""
    key = key_of_machine(facts, budget)
    file = None if cache is None else str(rates_path(cache, key))
    note = None
    if cache is not None and not fresh:
        kept, why = read_rates(cache, key)
        if kept is not None:
            return kept | {"source": "cache", "file": file}, None
        if why is not None:
            note = f"{why}: measured anew"

    rates = _measured(devices, budget, progress)
    # Incomplete rates are not written.
    why = _why_incomplete(rates)
    if why is None:
        why = keep_rates(cache, key, rates)
    if why is not None:
        file = None
        note = f"the rates were not kept for the next time: {why}"
    return rates | {"source": "measured", "file": file}, note


def _measured(
    devices: list[dict[str, Any]], budget: Budget, progress: Callable[[str], None]
) -> dict[str, Any]:
    start = time.perf_counter()
    measured = []
    for device in devices:
        works = work_for(device["device_type"], has_tf32=has_tf32(device))
        rates: list[Rate] = []
        reason = None
        # An error here concerns the whole device. If the device only lacks a format, the format's rates have
        # the reason.
        try:
            rates = measure_device(device["device"], works, budget, progress=progress)
        except RuntimeError as error:
            reason = first_line(error)
        of_device = {name: device[name] for name in ("device", "device_type", "name")}
        of_device["rows"] = [asdict(rate) for rate in rates]
        of_device["reason"] = reason
        measured.append(of_device)
    wall_s = time.perf_counter() - start
    return {"measured_at_s": time.time(), "wall_s": wall_s, "budget": asdict(budget), "devices": measured}


def _why_incomplete(rates: dict[str, Any]) -> str | None:
    """Return why rates must not be kept: what is missing would be missing in every later decision too."""
    cells = 0
    late = 0
    for device in rates["devices"]:
        cells += len(device["rows"])
        late += sum(row["out_of_time"] for row in device["rows"])
    if late == 0:
        return None
    used_up = f"the time for a device, {rates['budget']['device_s']:.0f} s, was used up"
    return f"{used_up} with {late} of {cells} cells not measured; try again when this machine is quiet"

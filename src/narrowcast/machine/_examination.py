"""Everything about this machine at once: what it has, what does not fit, how fast formats are, the choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from narrowcast.machine._agreement import agreement
from narrowcast.machine._facts import first_line, gather_facts
from narrowcast.machine._instructions import best_format
from narrowcast.machine._mismatches import mismatches
from narrowcast.machine._rates import Budget, measure_device
from narrowcast.machine._rates_file import rates_key, rates_path, read_rates, write_rates
from narrowcast.machine._work import has_tf32, work_for

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """How ``examine`` is to go about it.

    Attributes:
        cache: the folder in which rates are kept; None keeps nothing.
        fresh: measure even where rates are kept.
        budget: how long measuring may take.
    """

    cache: Path | None = None
    fresh: bool = False
    budget: Budget = field(default_factory=Budget)


def examine(
    examination: Examination,
    *,
    facts: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Look at this machine; a device that does not work is a finding and no error.

    Args:
        examination: the settings.
        facts: what ``gather_facts`` returns; None asks it.
        progress: called with a line that says what is being measured.

    Returns:
        JSON-ready values: ``schema``, ``facts``, ``mismatches``, ``rates`` (``source``: ``"measured"`` or
        ``"cache"``, ``measured_at_s`` since 1970, ``wall_s``, ``file``, and of each of its ``devices``
        ``rows`` and ``choice``) and ``notes``, lines about what was not kept.
    """
    progress("what this machine has")
    facts = gather_facts() if facts is None else facts
    wrong = mismatches(facts)
    rates, notes = _rates(examination, facts, wrong, progress)
    for device in rates["devices"]:
        device["choice"] = agreement(best_format(device["device_type"]), device["rows"])
    return {"schema": _SCHEMA, "facts": facts, "mismatches": wrong, "rates": rates, "notes": notes}


def _rates(
    examination: Examination,
    facts: dict[str, Any],
    wrong: list[dict[str, str]],
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    key = rates_key(facts, **asdict(examination.budget))
    path = None if examination.cache is None else rates_path(examination.cache, key)
    if path is not None and not examination.fresh:
        kept, why = read_rates(path, key)
        if kept is not None:
            return kept | {"source": "cache", "file": str(path)}, notes
        if why is not None:
            notes.append(f"{path} {why}: measured anew")
    rates = _measured(examination, facts, wrong, progress)
    if path is None:
        why = "there is no home folder; set NARROWCAST_CACHE_DIR"
    else:
        why = write_rates(path, key, rates)
        why = (
            f"{path.parent}: {why}; set NARROWCAST_CACHE_DIR to a folder that can be written" if why else None
        )
    if why is not None:
        notes.append(f"the rates were not kept for the next time ({why})")
    return rates | {"source": "measured", "file": None if why else str(path)}, notes


def _measured(
    examination: Examination,
    facts: dict[str, Any],
    wrong: list[dict[str, str]],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    start, unusable = time.perf_counter(), {w["device"] for w in wrong if w["severity"] == "error"}
    found = []
    for device in _devices(facts):
        if device["device"] in unusable:
            continue
        works = work_for(device["device_type"], has_tf32=device.pop("has_tf32"))
        try:
            rows = measure_device(device["device"], works, examination.budget, progress=progress)
        except RuntimeError as error:  # a GPU that fails as such; what one format lacks is said in its row
            found.append(device | {"rows": [], "reason": first_line(error)})
            continue
        found.append(device | {"rows": rows, "reason": None})
    return {
        "measured_at_s": time.time(),
        "wall_s": time.perf_counter() - start,
        "budget": asdict(examination.budget),
        "devices": found,
    }


def _devices(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The CPU, and the first of each kind of GPU: two alike would only take twice as long."""
    found = [{"device": "cpu", "device_type": "cpu", "name": facts["cpu"]["name"], "has_tf32": False}]
    for gpu in facts["gpus"]:
        if gpu["name"] not in {device["name"] for device in found}:
            found.append(
                {name: gpu[name] for name in ("device", "device_type", "name")} | {"has_tf32": has_tf32(gpu)}
            )
    if facts["mps"]["available"]:
        found.append({"device": "mps", "device_type": "mps", "name": "Metal", "has_tf32": False})
    return found

"""Everything about this machine: what it has, what does not fit together, measured rates, the choice."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from narrowcast._files import replacing
from narrowcast.machine._environment import Choice, best_format
from narrowcast.machine._facts import first_line, gather_facts, mismatches
from narrowcast.machine._rates import Budget, has_tf32, measure_device, work_for

_SCHEMA = 1
# Raise it whenever rows get another meaning: other shapes, other fields, another way to time.
CACHE_FORMAT = 2
# Within this, two formats are as fast as each other: the spread of a quiet machine is a few percent.
_AS_FAST = 1.1
# How much faster another 16-bit format must be before it is named: the choice is also about range.
_MUCH_FASTER = 1.25
# Where the middle half of the ratios spans more than this share of them, something else was running.
_STEADY = 0.25


def examine(
    *,
    cache: Path | None = None,
    fresh: bool = False,
    budget: Budget | None = None,
    facts: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Examine this machine; a device that does not work is a result, not an error.

    Args:
        cache: the folder in which rates are kept; None keeps nothing.
        fresh: measure even where rates are kept.
        budget: how long measuring may take.
        facts: what ``gather_facts`` returns; None calls it.
        progress: called with a line that names what is being measured.

    Returns:
        JSON-ready values: ``schema``, ``facts``, ``mismatches``, ``rates`` (``source``: ``"measured"`` or
        ``"cache"``, ``measured_at_s`` since 1970, ``wall_s``, ``file``, and of each of its ``devices``
        ``rows`` and ``choice``) and ``notes``, lines about what was not kept.
    """
    progress("what this machine has")
    facts, budget = gather_facts() if facts is None else facts, budget or Budget()
    wrong = mismatches(facts)
    unusable = {found["device"] for found in wrong if found["severity"] == "error"}
    key, notes = rates_key(facts, budget), list[str]()
    path = None if cache is None else rates_path(cache, key)
    rates, why = (None, None) if path is None or fresh else read_rates(path, key)
    if why is not None:
        notes.append(f"{path} {why}: measured anew")
    if rates is None:
        rates = _measured([gpu for gpu in _devices(facts) if gpu["device"] not in unusable], budget, progress)
        why = _keep(rates, path, key)
        rates |= {"source": "measured", "file": None if why else str(path)}
        notes += [f"the rates were not kept for the next time ({why})"] if why else []
    else:
        rates |= {"source": "cache", "file": str(path)}
    for device in rates["devices"]:
        device["choice"] = agreement(best_format(device["device_type"]), device["rows"])
    return {"schema": _SCHEMA, "facts": facts, "mismatches": wrong, "rates": rates, "notes": notes}


def _devices(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the CPU, and the first of each kind of GPU: two alike would only take twice as long."""
    first_of_kind = {gpu["name"]: gpu for gpu in reversed(facts["gpus"])}
    return [
        {"device": "cpu", "device_type": "cpu", "name": facts["cpu"]["name"]},
        *(gpu for gpu in facts["gpus"] if gpu is first_of_kind[gpu["name"]]),
        *([{"device": "mps", "device_type": "mps", "name": "Metal"}] if facts["mps"]["available"] else []),
    ]


def _measured(
    devices: list[dict[str, Any]], budget: Budget, progress: Callable[[str], None]
) -> dict[str, Any]:
    start, found = time.perf_counter(), []
    for device in devices:
        works = work_for(device["device_type"], has_tf32=has_tf32(device))
        rows, reason = list[dict[str, Any]](), None
        try:
            rows = measure_device(device["device"], works, budget, progress=progress)
        except RuntimeError as error:  # of the whole GPU; for what one format lacks, its row has the reason
            reason = first_line(error)
        named = {name: device[name] for name in ("device", "device_type", "name")}
        found.append(named | {"rows": rows, "reason": reason})
    wall_s = time.perf_counter() - start
    return {"measured_at_s": time.time(), "wall_s": wall_s, "budget": asdict(budget), "devices": found}


# ---- rates that are kept in a file, for one machine in one state each


def rates_key(facts: dict[str, Any], budget: Budget) -> dict[str, Any]:
    """Return everything that rates depend on: processors, threads, torch, driver, and the budget."""
    of_torch = ("version", "build", "cuda", "hip", "cudnn", "cpu_kernels")
    return {
        "cache_format": CACHE_FORMAT,
        "cpu": facts["cpu"],
        "gpus": facts["gpus"],
        "mps": facts["mps"]["available"],
        "driver": facts["nvidia"]["driver"],
        "platform": facts["platform"],
        "torch": {name: facts["torch"][name] for name in of_torch},
        "budget": asdict(budget),
    }


def rates_path(folder: Path, key: dict[str, Any]) -> Path:
    """Return where the rates of ``key`` are kept: machines that share a home folder have a file each."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "rates" / f"{digest[:16]}.json"


def read_rates(path: Path, key: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return rates that were kept, or None and why not; both None if there is no file."""
    try:
        kept = json.loads(path.read_bytes())
        rates: dict[str, Any] | None = dict(kept["rates"]) if kept["key"] == key else None
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, RecursionError):
        rates = None
    return rates, "is damaged, or of another machine or version" if rates is None else None


def _keep(rates: dict[str, Any], path: Path | None, key: dict[str, Any]) -> str | None:
    """Write the rates for the next time, whole or not at all; return why not, or None."""
    if any(row["out_of_time"] for device in rates["devices"] for row in device["rows"]):
        # What is missing would be missing in every later decision too.
        return "this machine was too busy to measure all of them; try again when it is quiet"
    if path is None:
        return "there is no home folder; set NARROWCAST_CACHE_DIR"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({"key": key, "rates": rates}, allow_nan=False, indent=1).encode())
    except OSError as error:
        why = error.strerror or error
        return f"{path.parent}: {why}; set NARROWCAST_CACHE_DIR to a folder that can be written"
    return None


# ---- "auto" against the rates


def agreement(choice: Choice, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare a choice with rows of ``measure_device``; it stays the choice whatever the result.

    Judged by the largest matmul that was measured both in fp32 and in the chosen format, where the
    arithmetic decides and not the overhead of a call.

    Returns:
        JSON-ready values: ``format``, ``because``; ``rates_agree``, null if nothing was measured on a quiet
        machine; ``judged_at`` (the shape); ``speed_against_fp32``; ``faster_format``, another 16-bit format
        that is faster by a quarter or more, or null.
    """
    products = [row for row in rows if row["kind"] == "matmul" and _is_steady(row)]
    judged = [row for row in products if row["format"] == choice.format]
    found: dict[str, Any] = {
        "format": choice.format,
        "because": choice.because,
        "rates_agree": None,
        "judged_at": None,
        "speed_against_fp32": None,
        "faster_format": None,
    }
    if not judged:
        return found
    mine = judged[-1]
    others = {
        row["format"]: row["speed_against_fp32"]
        for row in products
        if row["shape"] == mine["shape"] and row["format"] in {"bf16", "fp16"} - {choice.format}
    }
    best = max(others, key=others.__getitem__, default=None)
    faster = best if best and others[best] > _MUCH_FASTER * mine["speed_against_fp32"] else None
    slower_than_fp32 = mine["speed_against_fp32"] * _AS_FAST < 1
    return found | {
        "rates_agree": faster is None and not slower_than_fp32,
        "judged_at": mine["shape"],
        "speed_against_fp32": mine["speed_against_fp32"],
        "faster_format": faster,
    }


def _is_steady(row: dict[str, Any]) -> bool:
    speed = row["speed_against_fp32"]
    low, high = row.get("speed_against_fp32_low"), row.get("speed_against_fp32_high")
    return speed is not None and (low is None or high is None or high - low <= _STEADY * speed)

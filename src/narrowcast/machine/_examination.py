"""Everything about this machine: what it has, what does not fit together, measured rates, the choice."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from narrowcast._files import replacing
from narrowcast.machine._choice import agreement, best_format
from narrowcast.machine._facts import first_line, gather_facts
from narrowcast.machine._mismatches import mismatches
from narrowcast.machine._rates import Budget, measure_device
from narrowcast.machine._work import has_tf32, work_for

_SCHEMA = 1
# Raise it whenever rows get another meaning: other shapes, other fields, another way to time.
CACHE_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Settings of ``examine``.

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
    """Examine this machine; a device that does not work is a result, not an error.

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
    return rates | {"source": "measured", "file": _keep(rates, path, key, notes)}, notes


def _keep(rates: dict[str, Any], path: Path | None, key: dict[str, Any], notes: list[str]) -> str | None:
    """Write the rates for the next time and return where, or note why not."""
    rows = [row for device in rates["devices"] for row in device["rows"]]
    if any(row["out_of_time"] for row in rows):
        # What is missing would be missing in every later decision too.
        why: str | None = "this machine was too busy to measure all of them; try again when it is quiet"
    elif path is None:
        why = "there is no home folder; set NARROWCAST_CACHE_DIR"
    else:
        why = write_rates(path, key, rates)
        why = why and f"{path.parent}: {why}; set NARROWCAST_CACHE_DIR to a folder that can be written"
    if why is not None:
        notes.append(f"the rates were not kept for the next time ({why})")
    return None if why else str(path)


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
    """Return the CPU, and the first of each kind of GPU: two alike would only take twice as long."""
    found = [{"device": "cpu", "device_type": "cpu", "name": facts["cpu"]["name"], "has_tf32": False}]
    for gpu in facts["gpus"]:
        if gpu["name"] not in {device["name"] for device in found}:
            found.append(
                {name: gpu[name] for name in ("device", "device_type", "name")} | {"has_tf32": has_tf32(gpu)}
            )
    if facts["mps"]["available"]:
        found.append({"device": "mps", "device_type": "mps", "name": "Metal", "has_tf32": False})
    return found


# ---- rates that are kept in a file, for one machine in one state each


def rates_key(facts: dict[str, Any], *, device_s: float, call_s: float) -> dict[str, Any]:
    """Return everything that rates depend on: processors, threads, torch, driver, and the budget."""
    torch_facts = facts["torch"]
    return {
        "cpu": facts["cpu"],
        "gpus": facts["gpus"],
        "mps": facts["mps"]["available"],
        "driver": facts["nvidia"]["driver"],
        "platform": facts["platform"],
        "torch": {
            name: torch_facts[name] for name in ("version", "build", "cuda", "hip", "cudnn", "cpu_kernels")
        },
        "budget": {"device_s": device_s, "call_s": call_s},
    }


def rates_path(folder: Path, key: dict[str, Any]) -> Path:
    """Return where the rates of ``key`` are kept: machines that share a home folder have a file each."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "rates" / f"{digest[:16]}.json"


def read_rates(path: Path, key: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return rates that ``write_rates`` kept, or None and why not; both None if there is no file."""
    try:
        kept = msgspec.convert(msgspec.json.decode(path.read_bytes()), _File)
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return None, "is damaged, or of another version of narrowcast"
    rates: Any = kept["rates"]
    return (rates, None) if kept["key"] == key else (None, "is of another machine")


def write_rates(path: Path, key: dict[str, Any], rates: dict[str, Any]) -> str | None:
    """Keep ``rates``, whole or not at all; return why that failed, or None."""
    text = json.dumps({"cache_format": CACHE_FORMAT, "key": key, "rates": rates}, allow_nan=False, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        return error.strerror or str(error)
    return None


_Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]


class _Row(TypedDict):
    kind: str
    size: str
    shape: Annotated[list[int], Meta(min_length=1)]
    format: str
    rounds: int
    calls_per_round: int | None
    reason: str | None
    out_of_time: bool
    expected_time_s: _Positive | None
    time_s_median: _Positive | None
    time_s_low: _Positive | None
    time_s_high: _Positive | None
    rate_flop_per_s: _Positive | None
    rate_element_per_s: _Positive | None
    rate_byte_per_s: _Positive | None
    speed_against_fp32: _Positive | None
    speed_against_fp32_low: _Positive | None
    speed_against_fp32_high: _Positive | None


class _Device(TypedDict):
    device: str
    device_type: str
    name: str
    reason: str | None
    rows: list[_Row]


class _Rates(TypedDict):
    measured_at_s: _Positive
    wall_s: _Positive
    budget: dict[str, float]
    devices: Annotated[list[_Device], Meta(min_length=1)]


class _File(TypedDict):
    cache_format: Literal[2]
    key: Any
    rates: _Rates

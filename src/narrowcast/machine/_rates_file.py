"""Measured rates kept in a file for the next time, for one machine in one state each."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# To be raised whenever rows get another meaning: other shapes, other fields, another way to time.
CACHE_FORMAT = 1
_NUMBERS = (
    "expected_time_s",
    "time_s_median",
    "time_s_low",
    "time_s_high",
    "rate_flop_per_s",
    "rate_element_per_s",
    "rate_byte_per_s",
    "speed_against_fp32",
    "speed_against_fp32_low",
    "speed_against_fp32_high",
)


def rates_key(facts: dict[str, Any], *, device_s: float, call_s: float) -> dict[str, Any]:
    """Everything that rates depend on: processors, instructions, threads, torch, driver, and the budget."""
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
    """Where the rates of ``key`` are kept: machines that share a home folder have a file each."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "rates" / f"{digest[:16]}.json"


def read_rates(path: Path, key: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Rates that ``write_rates`` kept, or None and why not; both None where there is no file."""
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    try:
        kept = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None, "is damaged"
    why = _why_not(kept, key)
    return (None, why) if why else (kept["rates"], None)


def write_rates(path: Path, key: dict[str, Any], rates: dict[str, Any]) -> str | None:
    """Keep ``rates``, whole or not at all; returns why that failed, or None."""
    text = json.dumps({"cache_format": CACHE_FORMAT, "key": key, "rates": rates}, allow_nan=False, indent=1)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        return error.strerror or str(error)
    return None


def _why_not(kept: Any, key: dict[str, Any]) -> str | None:
    if not isinstance(kept, dict) or type(kept.get("cache_format")) is not int:
        return "is not a file of rates"
    if kept["cache_format"] != CACHE_FORMAT:
        return f"is of {'a newer' if kept['cache_format'] > CACHE_FORMAT else 'an older'} narrowcast"
    if kept.get("key") != key:
        return "is of another machine"
    return None if _is_rates(kept.get("rates")) else "is damaged"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no rate")


def _is_rates(rates: Any) -> bool:
    return (
        isinstance(rates, dict)
        and _is_positive(rates.get("measured_at_s"))
        and _is_positive(rates.get("wall_s"))
        and isinstance(rates.get("devices"), list)
        and bool(rates["devices"])
        and all(map(_is_device, rates["devices"]))
    )


def _is_device(device: Any) -> bool:
    return (
        isinstance(device, dict)
        and all(isinstance(device.get(name), str) for name in ("device", "device_type", "name"))
        and isinstance(device.get("rows"), list)
        and all(map(_is_row, device["rows"]))
    )


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not all(name in row for name in _NUMBERS):
        return False
    shape, reason = row.get("shape"), row.get("reason")
    named = all(isinstance(row.get(name), str) for name in ("kind", "size", "format"))
    shaped = isinstance(shape, list) and bool(shape) and all(type(number) is int for number in shape)
    measured = row["time_s_median"] is not None
    numbers = all(row[name] is None or _is_positive(row[name]) for name in _NUMBERS)
    return (
        named
        and shaped
        and numbers
        and type(row.get("rounds")) is int
        and (measured or isinstance(reason, str))
    )


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and 0 < number <= sys.float_info.max

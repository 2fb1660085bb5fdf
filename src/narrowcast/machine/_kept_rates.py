"""Rates in files, kept for the next time: one file for each state of each machine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from narrowcast._files import replacing
from narrowcast.machine._rates import Budget

# Raise it whenever rows get another meaning: other shapes, other fields, another way to time.
CACHE_FORMAT = 3


def key_of_machine(facts: dict[str, Any], budget: Budget) -> dict[str, Any]:
    """Return everything that rates depend on: processors, threads, the system, torch, and the budget."""
    of_torch = ("version", "build", "cuda", "hip", "cudnn", "cpu_kernels")
    return {
        "cache_format": CACHE_FORMAT,
        "cpu": facts["cpu"],
        "gpus": facts["gpus"],
        "mps": facts["mps"]["available"],
        "platform": facts["platform"],
        "torch": {name: facts["torch"][name] for name in of_torch},
        "budget": asdict(budget),
    }


def rates_path(folder: Path, key: dict[str, Any]) -> Path:
    """Return where the rates of ``key`` are kept: machines that share a home folder have a file each."""
    # If anything in the key changes, such as the version of torch, the name is another.
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "rates" / f"{digest[:16]}.json"


def read_rates(folder: Path, key: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return rates that were kept, or None and why not, as a clause; both None if there is no file."""
    path = rates_path(folder, key)
    unusable = f"{path} is damaged, or of another machine or version"
    try:
        kept = json.loads(path.read_bytes())
        # The file may have been copied or edited, or may be of another key with the same digest.
        if kept["key"] != key:
            return None, unusable
        return dict(kept["rates"]), None
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):  # not JSON, or JSON with other content
        return None, unusable


def keep_rates(folder: Path | None, key: dict[str, Any], rates: dict[str, Any]) -> str | None:
    """Write ``rates`` for the next time, whole or not at all; return why not, or None."""
    if folder is None:
        return "there is no home folder; set NARROWCAST_CACHE_DIR"
    path = rates_path(folder, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({"key": key, "rates": rates}, allow_nan=False, indent=1).encode())
    except OSError as error:
        why = error.strerror or error
        return f"{path.parent}: {why}; set NARROWCAST_CACHE_DIR to a folder that can be written"
    return None

"""Everything about this machine: what it has, what does not fit together, measured rates, the choice."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from narrowcast._files import cache_folder, replacing
from narrowcast.machine._environment import (
    Choice,
    cpu_capabilities,
    first_line,
    known_to_be_slow,
    table_format,
)
from narrowcast.machine._facts import cpu_facts, gather_facts, mismatches
from narrowcast.machine._rates import Budget, has_tf32, measure_device, work_for, work_for_auto
from narrowcast.machine._torch_internals import default_store

_SCHEMA = 1
# Raise it whenever rows get another meaning: other shapes, other fields, another way to time.
CACHE_FORMAT = 3
# Of the rates that earlier versions kept, which timed forward passes alone: nothing about training follows.
_FORWARD_ALONE = 2
_NO_BACKWARD = "which did not time backward passes"
_ONLY_FORWARD = f"since the kept rates are of an earlier version, {_NO_BACKWARD}"
_MEASURE_AGAIN = "they have no backward passes; narrowcast doctor measures again"
# Within this, two formats are as fast as each other: the spread of a quiet machine is a few percent.
_AS_FAST = 1.1
# Where the middle half of the ratios spans more than this share of them, something else was running.
_STEADY = 0.25
# For the rates that decide "auto": with the steps on the way, a quiet machine takes less than a second.
_AUTO_BUDGET = Budget(device_s=2.0)
# "auto" leaves fp32 only for a format that is faster by more than this.
_WORTH = 1.03
# How long a rank waits for what rank 0 chose, which may be downloading data first.
_RANK_0_S = 30


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
        ``rows``, ``auto`` (the rows that decide it, null if the table does), ``choice`` and ``slow``) and
        ``notes``, lines about what was not kept.
    """
    progress("what this machine has")
    facts, budget = gather_facts() if facts is None else facts, budget or Budget()
    wrong = mismatches(facts)
    unusable = {found["device"] for found in wrong if found["severity"] == "error"}
    key, notes = rates_key(facts, budget), list[str]()
    devices = [device for device in _devices(facts) if device["device"] not in unusable]
    for device in devices:
        why = measure_auto(device["device_type"], cache, fresh=fresh, progress=progress)
        notes += [why] if why else []
    path = None if cache is None else rates_path(cache, key)
    rates, why = (None, None) if cache is None or fresh else read_rates(cache, key)
    if why is not None:
        notes.append(f"{why}: measured anew")
    if rates is None:
        rates = _measured(devices, budget, progress)
        why = _keep(rates, path, key)
        rates |= {"source": "measured", "file": None if why else str(path)}
        notes += [f"the rates were not kept for the next time: {why}"] if why else []
    else:
        rates |= {"source": "cache", "file": str(path)}
    for device in rates["devices"]:
        of_auto, _ = _auto_rates(device["device_type"], cache)
        device["auto"] = of_auto and of_auto["rows"]
        device["choice"] = asdict(best_format(device["device_type"], cache))
        for row in device["rows"]:
            row["steady"] = _is_steady(row)
        device["slow"] = slow_formats(("bf16", "fp16"), device["device_type"], device["rows"])
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
        "platform": facts["platform"],
        "torch": {name: facts["torch"][name] for name in of_torch},
        "budget": asdict(budget),
    }


def rates_path(folder: Path, key: dict[str, Any]) -> Path:
    """Return where the rates of ``key`` are kept: machines that share a home folder have a file each."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "rates" / f"{digest[:16]}.json"


def read_rates(folder: Path, key: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return rates that were kept, or None and why not, as a clause; both None if there is no file."""
    path = rates_path(folder, key)
    try:
        kept = json.loads(path.read_bytes())
        rates: dict[str, Any] | None = dict(kept["rates"]) if kept["key"] == key else None
    except (FileNotFoundError, NotADirectoryError):
        older = rates_path(folder, _key_of_forward_alone(key))
        return None, f"{older} is of an earlier version, {_NO_BACKWARD}" if older.is_file() else None
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, RecursionError):
        rates = None
    return rates, f"{path} is damaged, or of another machine or version" if rates is None else None


def _key_of_forward_alone(key: dict[str, Any]) -> dict[str, Any]:
    """Return the key under which earlier versions kept what ``key`` is about."""
    if "auto" in key:
        return {"auto": [_FORWARD_ALONE, *key["auto"][1:]]}
    return key | {"cache_format": _FORWARD_ALONE, "driver": None}


def _is_of_forward_alone(why: str | None) -> bool:
    """Return whether ``read_rates`` found only what an earlier version kept."""
    return why is not None and why.endswith(_NO_BACKWARD)


def _keep(rates: dict[str, Any], path: Path | None, key: dict[str, Any]) -> str | None:
    """Write the rates for the next time, whole or not at all; return why not, or None."""
    rows = rates.get("rows") or [row for device in rates["devices"] for row in device["rows"]]
    late = sum(row["out_of_time"] for row in rows)
    if late:
        # What is missing would be missing in every later decision too.
        used = f"the time for a device, {rates['budget']['device_s']:.0f} s, was used up"
        return f"{used} with {late} of {len(rows)} cells not measured; try again when this machine is quiet"
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


# ---- "auto" by the rates


_by_rates: dict[tuple[str, Path | None], tuple[Choice | None, str]] = {}
_of_rank_0: dict[str, Choice] = {}


def best_format(device_type: str, cache: Path | None = None) -> Choice:
    """Return the format of ``auto``: by the rates that ``measure_auto`` kept in ``cache``, else by the table.

    Rates are read once a process. With several ranks rank 0 decides for all of them; before they have a
    process group the table decides, since kept rates may differ between them.
    """
    if device_type in _of_rank_0:
        return _of_rank_0[device_type]
    grouped = dist.is_available() and dist.is_initialized()
    where = device_type, cache or cache_folder()
    if where not in _by_rates:
        _by_rates[where] = _by_kept_rates(*where)
    choice, why_not = _by_rates[where]
    alone = not grouped and os.environ.get("WORLD_SIZE", "1") != "1"
    if choice is None or alone:
        table, why = table_format(device_type), "as ranks cannot agree yet" if choice else why_not
        choice = Choice(format=table.format, because=f"{table.because}; by the table, {why}")
    if grouped and dist.get_world_size() > 1:
        choice = _of_rank_0[device_type] = _agreed(device_type, choice)
    return choice


def _agreed(device_type: str, mine: Choice) -> Choice:
    """Return what rank 0 chose; if it does not choose soon, what the first rank chose that asked.

    Through the store of the process group: a collective would hang where not all ranks come here.
    """
    store, key = default_store(), f"narrowcast/auto/{device_type}"
    if dist.get_rank() > 0:
        with suppress(RuntimeError):  # it was not set in time
            store.wait([key], timedelta(seconds=_RANK_0_S))
    word, because = json.loads(store.compare_set(key, "", json.dumps([mine.format, mine.because])))
    return Choice(format=word, because=because)


def measure_auto(
    device_type: str,
    cache: Path | None,
    *,
    fresh: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> str | None:
    """Measure the small set of cells that decides ``auto``, unless it is kept.

    Returns:
        What to say of it: why it is not kept, or that what an earlier version kept was measured again.
    """
    kept, why = _auto_rates(device_type, cache)
    if not fresh and kept is not None:
        return None
    older = f"{why}: measured anew" if why and not fresh else None
    candidate = _candidate(device_type)
    try:
        rows = measure_device(
            device_type, work_for_auto(device_type, candidate), _AUTO_BUDGET, progress=progress
        )
    except RuntimeError as error:
        return f"the rates that decide auto on {device_type} were not measured: {first_line(error)}"
    if _auto_speeds(rows, candidate, table_format(device_type).format) is None:
        return f"not all rates that decide auto on {device_type} were measured steadily: the table decides"
    key = _auto_key(device_type)
    path = None if cache is None else rates_path(cache, key)
    why = _keep({"measured_at_s": time.time(), "rows": rows}, path, key)
    _by_rates.pop((device_type, cache), None)
    return f"the rates that decide auto on {device_type} were not kept: {why}" if why else older


def _by_kept_rates(device_type: str, cache: Path | None) -> tuple[Choice | None, str]:
    """Return the choice by the kept rates; None where the table decides, with the reason."""
    (kept, why), candidate = _auto_rates(device_type, cache), _candidate(device_type)
    table = table_format(device_type).format
    speeds = None if kept is None else _auto_speeds(kept["rows"], candidate, table)
    if kept is None or speeds is None:
        return None, _ONLY_FORWARD if _is_of_forward_alone(why) else "not measured"
    worth = math.prod(speeds.values()) > _WORTH ** len(speeds)
    date = time.strftime("%Y-%m-%d", time.localtime(kept["measured_at_s"]))
    each = ", ".join(f"{_words_of(speed)} in {kind.replace('_', ' ')}" for kind, speed in speeds.items())
    because = f"measured on {date}, {candidate} against fp32: {each}"
    return Choice(format=candidate if worth else "fp32", because=because), ""


def _words_of(speed: float) -> str:
    """Say a speed against fp32 as ``2.5x faster`` or ``1.6x slower``."""
    if speed == 0:
        return "impossible"
    return f"{speed:.2g}x faster" if speed >= 1 else f"{1 / speed:.2g}x slower"


def _candidate(device_type: str) -> str:
    """Return the format that ``auto`` compares with fp32."""
    table = table_format(device_type).format
    return "bf16" if table == "fp32" else table


def _auto_rates(device_type: str, cache: Path | None) -> tuple[dict[str, Any] | None, str | None]:
    """Return the kept rates that decide ``auto``, or None and why not, as ``read_rates`` does."""
    return (None, None) if cache is None else read_rates(cache, _auto_key(device_type))


def _auto_key(device_type: str) -> dict[str, Any]:
    """Return what the speed of one format against another depends on; the number of threads hardly counts."""
    on: list[Any] = [CACHE_FORMAT, device_type, str(torch.__version__)]
    if device_type == "cpu":
        facts = cpu_facts(cpu_capabilities(), architecture=platform.machine())
        limits = torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA")
        on += [facts["name"], facts["instructions"], *limits]
    elif device_type == "cuda" and torch.cuda.is_available():
        on.append(torch.cuda.get_device_name())
    return {"auto": on}


def _auto_speeds(rows: list[dict[str, Any]], candidate: str, table: str) -> dict[str, float] | None:
    """Return the speed of ``candidate`` against fp32 by kind of work; None if a cell is missing or unclear.

    What was cut short counts as the speed that it had at a smaller size, if that is below fp32's. Where torch
    cannot do it, 0 confirms that the table is fp32.
    """
    speeds = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = {row["format"]: row for row in rows if row["kind"] == kind}
        mine = of_kind[candidate]
        if mine["out_of_time"]:
            return None
        if _is_steady(mine):
            speed = mine["speed_against_fp32"]
        elif mine["speed_at_most"] is not None and mine["speed_at_most"] < 1:
            speed = mine["speed_at_most"]
        elif not mine["rounds"] and mine["expected_time_s"] is None and table == "fp32":
            speed = 0.0
        else:
            return None
        speeds[kind] = speed
    return speeds


def _is_steady(row: dict[str, Any]) -> bool:
    speed = row["speed_against_fp32"]
    if speed is None:
        return False
    width = row["speed_against_fp32_high"] - row["speed_against_fp32_low"]
    return bool(width <= _STEADY * speed)


# ---- formats that are slow here


def _is_slow(row: dict[str, Any]) -> bool:
    """Return whether a row is slower than fp32: measured so, or cut short and so at a smaller size."""
    speed = row["speed_against_fp32"]
    if speed is None:
        speed = row["speed_at_most"]
    return speed is not None and speed * _AS_FAST < 1


def _is_cut_short(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Return whether a call of one cell took too long in this format, and not in fp32 too.

    On a machine that is busy with something else both do, and that shows nothing.
    """
    if not row["speed_at_most"]:
        return False
    cell = (row["kind"], row["shape"])
    of_fp32 = [
        other for other in rows if (other["kind"], other["shape"]) == cell and other["format"] == "fp32"
    ]
    return any(other["speed_against_fp32"] is not None for other in of_fp32)


def _how_slow(row: dict[str, Any], kind: str) -> str:
    """Say how much slower than fp32 a row is, of the size at which that was measured."""
    speed, shape = row["speed_against_fp32"], row["shape"]
    if speed is None:
        speed, shape = row["speed_at_most"], row["speed_at_most_shape"]
    return f"{_words_of(speed)} in {kind}s of {' x '.join(map(str, shape))}"


def slow_formats(
    formats: Iterable[str], device_type: str, rows: list[dict[str, Any]] | None = None
) -> list[str]:
    """Return a sentence for each of ``formats`` that is slower than fp32 on this machine, with what to use.

    Decided by the largest matmul and convolution among ``rows`` that was measured steadily or cut short,
    unless a larger one may be fast; by default those that ``doctor`` kept for this CPU. Where they do not
    show that the largest is fast, what is known of this kind of CPU is said. If only an earlier version kept
    rates, without backward passes, a sentence says that they are not used.
    """
    is_cpu, found = device_type == "cpu", []
    low = [name for name in dict.fromkeys(formats) if name in ("bf16", "fp16")]
    if rows is None:
        rows = kept_rows() if is_cpu else []
        if is_cpu and low and not rows and _is_of_forward_alone(_auto_rates("cpu", cache_folder())[1]):
            found.append(f"the rates that an earlier version kept here are not used: {_MEASURE_AGAIN}")
    for name in low:
        slower, known = [], []
        for kind in ("matmul", "convolution"):
            of_kind = [row for row in rows if (row["kind"], row["format"]) == (kind, name)]
            clear = [at for at, row in enumerate(of_kind) if _is_steady(row) or _is_cut_short(row, rows)]
            from_clear = of_kind[clear[-1] :] if clear else []
            if clear and all(map(_is_slow, from_clear)):
                slower.append(_how_slow(from_clear[0], kind))
                continue
            is_fast = len(from_clear) == 1 and not _is_slow(from_clear[0])
            if is_cpu and not is_fast:
                known.append(known_to_be_slow(name, kind))
        where = "CPU" if is_cpu else "GPU"
        measured = f"{name} on this {where} is slow, as measured forward and backward against fp32: "
        said = [measured + " and ".join(slower)] if slower else []
        said += [fact for fact in known if fact]
        if said:
            instead = best_format(device_type).format
            other = "" if instead in ("fp32", name) else f"--policy {instead} or "
            found.append(f"{'; '.join(said)}: use {other}--policy fp32")
    return found


def kept_rows() -> list[dict[str, Any]]:
    """Return the rates of this CPU that ``doctor`` kept last, for this torch and as many threads.

    Without any, those that decide ``auto``.
    """
    cache = cache_folder()
    here = [cpu_facts(cpu_capabilities(), architecture=platform.machine()), str(torch.__version__)]
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        files = sorted(((cache or Path()) / "rates").glob("*.json"), key=lambda path: path.stat().st_mtime)
        for kept in (json.loads(path.read_bytes()) for path in reversed(files)):
            key = kept["key"]
            if "auto" in key or key["cache_format"] != CACHE_FORMAT:
                continue
            if [key["cpu"], key["torch"]["version"]] == here:
                return list(kept["rates"]["devices"][0]["rows"])
    of_auto, _ = _auto_rates("cpu", cache)
    return list(of_auto["rows"]) if of_auto else []

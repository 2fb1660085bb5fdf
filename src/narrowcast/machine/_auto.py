"""The format of ``auto``: by rates that were kept on this machine, else by the table of devices."""

from __future__ import annotations

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

from narrowcast._files import cache_folder
from narrowcast.machine._environment import Choice, cpu_capabilities, first_line, table_format
from narrowcast.machine._facts import cpu_facts
from narrowcast.machine._kept_rates import CACHE_FORMAT, keep_rates, read_rates
from narrowcast.machine._rates import Budget, Rate, measure_device
from narrowcast.machine._torch_internals import default_store
from narrowcast.machine._work import work_for_auto

# A quiet machine needs less than a second, even with the smaller shapes that come before the medium size.
_AUTO_BUDGET = Budget(device_s=2.0)
# "auto" leaves fp32 only for a format that is faster by more than this.
_WORTH = 1.03
# How long a rank waits for the choice of rank 0, which may be downloading data first.
_RANK_0_S = 30
# The speed of a format in which torch cannot do the work.
_IMPOSSIBLE = 0.0

# Choices by kept rates, by device type and folder: files are read once a process. None: no rates decide.
_by_rates: dict[tuple[str, Path | None], Choice | None] = {}
# What all ranks use, by device type.
_agreed_by_ranks: dict[str, Choice] = {}


def best_format(device_type: str, cache: Path | None = None) -> Choice:
    """Return the format of ``auto``: by the rates that ``measure_auto`` kept in ``cache``, else by the table.

    Rates are read once a process. With several ranks rank 0 decides for all of them; before they have a
    process group the table decides, since kept rates may differ between them.
    """
    if device_type in _agreed_by_ranks:
        return _agreed_by_ranks[device_type]

    # The table is the same on every rank.
    has_group = dist.is_available() and dist.is_initialized()
    if not has_group and os.environ.get("WORLD_SIZE", "1") != "1":
        return _choice_by_table(device_type, "as ranks cannot agree yet")

    # By rates, if any decide.
    place = (device_type, cache or cache_folder())
    if place not in _by_rates:
        _by_rates[place] = choice_by_rates(*place)
    choice = _by_rates[place] or _choice_by_table(device_type, "not measured")
    if has_group and dist.get_world_size() > 1:
        choice = _agreed(device_type, choice)
        _agreed_by_ranks[device_type] = choice
    return choice


def _choice_by_table(device_type: str, why: str) -> Choice:
    table = table_format(device_type)
    return Choice(format=table.format, because=f"{table.because}; by the table, {why}")


def choice_by_rates(device_type: str, cache: Path | None) -> Choice | None:
    """Return the choice by the kept rates, without other ranks; None where the table decides."""
    kept, _ = read_auto_rates(device_type, cache)
    if kept is None:
        return None
    candidate = _candidate(device_type)
    rates = [Rate(**row) for row in kept["rows"]]
    speeds = auto_speeds(rates, candidate, table_format(device_type).format)
    if speeds is None:
        return None

    date = time.strftime("%Y-%m-%d", time.localtime(kept["measured_at_s"]))
    in_words = [f"{speed_in_words(speed)} in {kind.replace('_', ' ')}" for kind, speed in speeds.items()]
    because = f"measured on {date}, {candidate} against fp32: {', '.join(in_words)}"
    return Choice(format=candidate if _is_worth_it(speeds.values()) else "fp32", because=because)


def _agreed(device_type: str, mine: Choice) -> Choice:
    """Return what rank 0 chose.

    If it does not choose within ``_RANK_0_S``, return the choice of the first rank that stops waiting. This
    goes through the store of the process group: a collective would hang where not all ranks come here.
    """
    store = default_store()
    key = f"narrowcast/auto/{device_type}"
    if dist.get_rank() > 0:
        with suppress(RuntimeError):  # it was not set in time
            store.wait([key], timedelta(seconds=_RANK_0_S))
    # This sets the key if no rank has set it yet, and returns its value.
    agreed = store.compare_set(key, "", json.dumps([mine.format, mine.because]))
    format_name, because = json.loads(agreed)
    return Choice(format=format_name, because=because)


# ---- measuring what decides


def measure_auto(
    device_type: str,
    cache: Path | None,
    *,
    fresh: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> str | None:
    """Measure the few kinds of work that decide ``auto``, unless their rates are kept.

    Returns:
        A note for the user: why the rates are not kept, or were measured anew.
    """
    note = None
    if not fresh:
        kept, why = read_auto_rates(device_type, cache)
        if kept is not None:
            return None
        if why is not None:
            note = f"{why}: measured anew"

    candidate = _candidate(device_type)
    works = work_for_auto(device_type, candidate)
    try:
        rates = measure_device(device_type, works, _AUTO_BUDGET, progress=progress)
    except RuntimeError as error:
        return f"the rates that decide auto on {device_type} were not measured: {first_line(error)}"
    # Rates that decide nothing are not kept, so that the next call measures again.
    if auto_speeds(rates, candidate, table_format(device_type).format) is None:
        return f"the rates measured for auto on {device_type} scatter too much to decide: the table decides"

    kept = {"measured_at_s": time.time(), "rows": [asdict(rate) for rate in rates]}
    why = keep_rates(cache, _auto_key(device_type), kept)
    _by_rates.pop((device_type, cache), None)
    if why is not None:
        return f"the rates that decide auto on {device_type} were not kept: {why}"
    return note


def read_auto_rates(device_type: str, cache: Path | None) -> tuple[dict[str, Any] | None, str | None]:
    """Return the kept rates that decide ``auto``, or None and why not, as ``read_rates`` does."""
    if cache is None:
        return None, None
    return read_rates(cache, _auto_key(device_type))


def _auto_key(device_type: str) -> dict[str, Any]:
    """Return what the speed of one format against another depends on. The number of threads hardly counts."""
    key: list[Any] = [CACHE_FORMAT, device_type, str(torch.__version__)]
    if device_type == "cpu":
        facts = cpu_facts(cpu_capabilities(), architecture=platform.machine())
        key += [facts["name"], facts["instructions"]]
        # These two settings limit torch and oneDNN to fewer instructions than the CPU has.
        key += [torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA")]
    elif device_type == "cuda" and torch.cuda.is_available():
        key.append(torch.cuda.get_device_name())
    return {"auto": key}


def _candidate(device_type: str) -> str:
    """Return the format that ``auto`` compares with fp32."""
    table = table_format(device_type).format
    return "bf16" if table == "fp32" else table


def auto_speeds(rates: list[Rate], candidate: str, table: str) -> dict[str, float] | None:
    """Return the speed of ``candidate`` against fp32 by kind of work; None if they do not decide.

    On a machine that other programs use too the rounds scatter. Such rates still decide if the lower
    quartiles of all kinds of work lead to the same choice as the upper quartiles.
    """
    speeds: dict[str, float] = {}
    lower_quartiles: list[float] = []
    upper_quartiles: list[float] = []
    are_steady = True
    for rate in rates:
        if rate.format != candidate:
            continue
        speed = _auto_speed(rate, table)
        if speed is None:
            return None
        speeds[rate.kind] = speed
        # What was not timed in rounds has no quartiles.
        is_timed = rate.speed_against_fp32 is not None
        lower_quartiles.append(rate.speed_against_fp32_low or speed)
        upper_quartiles.append(rate.speed_against_fp32_high or speed)
        if is_timed and not rate.is_steady:
            are_steady = False
    if are_steady or _is_worth_it(lower_quartiles) == _is_worth_it(upper_quartiles):
        return speeds
    return None


def _is_worth_it(speeds: Iterable[float]) -> bool:
    """Return whether ``auto`` leaves fp32 for a format of these speeds against it.

    Their geometric mean decides: a kind of work that gains much makes up for one that loses a little.
    """
    of_each = list(speeds)
    return math.prod(of_each) > _WORTH ** len(of_each)


def _auto_speed(rate: Rate, table: str) -> float | None:
    """Return the speed against fp32 that counts for the choice; None if the rate does not show any."""
    if rate.out_of_time:
        return None
    if rate.speed_against_fp32 is not None:
        return rate.speed_against_fp32
    # What was cut short counts as the speed that it had at a smaller size, if that is below fp32's.
    if rate.speed_at_most is not None and rate.speed_at_most < 1:
        return rate.speed_at_most
    # If torch cannot compute in the format and the table says fp32, the answer is fp32. Where the table says
    # otherwise, the rates do not decide.
    is_impossible = rate.rounds == 0 and rate.expected_time_s is None
    if is_impossible and table == "fp32":
        return _IMPOSSIBLE
    return None


def speed_in_words(speed: float) -> str:
    """Say a speed against fp32 as ``2.5x faster``, ``1.6x slower`` or ``as fast``; 0: torch cannot do it."""
    if speed == _IMPOSSIBLE:
        return "impossible"
    factor = f"{max(speed, 1 / speed):.2g}"
    if factor == "1":
        return "as fast"
    return f"{factor}x faster" if speed > 1 else f"{factor}x slower"

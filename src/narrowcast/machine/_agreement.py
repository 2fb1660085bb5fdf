"""Whether the format that the instructions choose is the one that is fast when measured."""

from __future__ import annotations

from typing import Any

from narrowcast.machine._instructions import Choice

# Within this, two formats are as fast as each other: the spread of a quiet machine is a few percent.
_AS_FAST = 1.1
# How much faster another 16-bit format must be before it is named: the choice is also about range.
_MUCH_FASTER = 1.25
# Where the middle half of the ratios spans more than this share of them, something else was running.
_STEADY = 0.25


def agreement(choice: Choice, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Hold a choice against rows of ``measure_device``. It stays the choice whatever comes out.

    Judged by the largest matrix product that was measured both in fp32 and in the chosen format, where the
    arithmetic decides and not the overhead of a call.

    Returns:
        JSON-ready values: ``format``, ``because``; ``rates_agree``, null where nothing was
        measured on a quiet machine;
        ``judged_at`` (the shape); ``speed_against_fp32``; ``faster_format``, another 16-bit format that is
        faster by a quarter or more, or null.
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
    """Whether the speed of a row was measured, and is worth an opinion."""
    speed = row["speed_against_fp32"]
    low, high = row.get("speed_against_fp32_low"), row.get("speed_against_fp32_high")
    return speed is not None and (low is None or high is None or high - low <= _STEADY * speed)

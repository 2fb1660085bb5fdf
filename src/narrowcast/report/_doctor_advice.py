"""Measured rates in sentences: what to expect of each format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

KINDS = {
    "matmul": "matmul",
    "matmul_with_casts": "matmul with casts",
    "convolution": "convolution 3x3",
    "add": "addition",
}
# Where the middle half of the rounds spans more than this share of the median, something else was running.
NOISY = 0.25
# Between 1 / 1.1 and 1.1 two formats count as equally fast: the spread of a quiet machine is a few percent.
_AS_FAST = 1.1
# A format slower than fp32 by this much, in the largest matrix product measured, is no choice for speed.
_NEVER = 0.5


def shape_text(row: dict[str, Any]) -> str:
    """``64 x 64``; of a convolution batch x channels x height x width; of an addition its elements."""
    return " x ".join(f"{number:,}" if len(row["shape"]) == 1 else str(number) for number in row["shape"])


def spread(row: dict[str, Any]) -> float:
    """What the middle half of a row's rounds spans, as a share of its median."""
    return float((row["time_s_high"] - row["time_s_low"]) / row["time_s_median"])


def two_digits(number: float) -> str:
    """``0.0098``, ``0.37``, ``4.1``, ``12``, ``174``: never an exponent."""
    if number >= 10:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.{2 if number >= 0.1 else 3}f}"


def advice(device: dict[str, Any], arithmetic: dict[str, Any]) -> Iterator[str]:
    """Sentences about a device: the choice against the rates, each format, and from where layers gain.

    Args:
        device: one of ``rates.devices`` of an examination, with its ``choice``.
        arithmetic: ``facts.arithmetic`` of the same examination.
    """
    rows = device["rows"]
    yield from _of_choice(device["choice"])
    for name in dict.fromkeys(row["format"] for row in rows if row["format"] != "fp32"):
        mine = [row for row in rows if row["format"] == name and row["speed_against_fp32"] is not None]
        kinds = {
            kind: [row for row in mine if row["kind"] == kind]
            for kind in dict.fromkeys(row["kind"] for row in mine)
        }
        yield from _of_format(name, kinds, device)
        if name == device["choice"]["format"]:
            yield from _of_layers(kinds.get("matmul_with_casts", []))
        if name == "tf32" and arithmetic["float32_matmul_precision"] == "highest":
            yield (
                'tf32 is off for matmul: torch.set_float32_matmul_precision("high") turns it on, and '
                "gives up 13 of the 23 bits of fp32's significand in every product."
            )


def _of_choice(choice: dict[str, Any]) -> Iterator[str]:
    name, faster = choice["format"], choice["faster_format"]
    if choice["rates_agree"] is None:
        if name != "fp32":
            yield "Nothing was measured that could confirm the choice."
        return
    at = " x ".join(map(str, choice["judged_at"]))
    speed = f"{two_digits(choice['speed_against_fp32'])}x"
    if faster is not None:
        yield f"The rates disagree: {faster} is faster at matmul {at}. To use it: --policy {faster}."
    elif not choice["rates_agree"]:
        yield (
            f"The rates disagree: {name} has {speed} the speed of fp32 at matmul {at}. "
            "To stay in fp32: --policy fp32."
        )
    elif name != "fp32" and choice["speed_against_fp32"] < _AS_FAST:
        yield f"The rates hardly differ: {speed} the speed of fp32 at matmul {at}."
    elif name == "fp32":
        yield f"The rates agree: no other format is faster at matmul {at}."
    else:
        yield f"The rates agree: {speed} the speed of fp32 at matmul {at}."


def _of_format(name: str, kinds: dict[str, list[dict[str, Any]]], device: dict[str, Any]) -> Iterator[str]:
    products = kinds.get("matmul", [])
    if products and products[-1]["speed_against_fp32"] < _NEVER:
        here = "this CPU" if device["device_type"] == "cpu" else "this GPU"
        judged = [kind for kind in ("matmul", "convolution") if kind in kinds]
        slow = [f"{_times_slower(kinds[kind])} in {KINDS[kind]}" for kind in judged]
        yield f"{name} on {here} is {' and '.join(slow)} than fp32: never choose it for speed."
        return
    clauses = [_clause(KINDS.get(kind, kind), measured) for kind, measured in kinds.items()]
    if clauses:
        yield f"{name} against fp32: {'; '.join(clauses)}."


def _times_slower(rows: Sequence[dict[str, Any]]) -> str:
    slow = sorted(1 / row["speed_against_fp32"] for row in rows)
    few, many = two_digits(slow[0]), two_digits(slow[-1])
    return f"{few if few == many else f'{few} to {many}'} times slower"


def _clause(kind: str, rows: Sequence[dict[str, Any]]) -> str:
    """``matmul 4.1 to 4.2x from 512 x 512 up, but 0.37x at 64 x 64``: what gains first, what loses last."""
    gain = [row for row in rows if row["speed_against_fp32"] >= _AS_FAST]
    alike = [row for row in rows if 1 / _AS_FAST < row["speed_against_fp32"] < _AS_FAST]
    lose = [row for row in rows if row["speed_against_fp32"] <= 1 / _AS_FAST]
    parts = [f"{_range(some)}{_where(some, rows)}" for some in (gain, alike) if some]
    if lose:
        parts.append(f"{'but ' if parts else ''}{_range(lose)}{_where(lose, rows)}")
    return f"{kind} {', '.join(parts)}"


def _range(rows: Sequence[dict[str, Any]]) -> str:
    speeds = sorted(row["speed_against_fp32"] for row in rows)
    low, high = two_digits(speeds[0]), two_digits(speeds[-1])
    return f"{low}x" if low == high else f"{low} to {high}x"


def _where(some: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """Sizes in words: nothing for all, all from one up, all up to one, or each."""
    if len(some) == len(rows):
        return ""
    if len(some) > 1 and list(some) == list(rows[-len(some) :]):
        return f" from {shape_text(some[0])} up"
    if len(some) > 1 and list(some) == list(rows[: len(some)]):
        return f" up to {shape_text(some[-1])}"
    return f" at {' and '.join(shape_text(row) for row in some)}"


def _of_layers(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """From which size on a layer repays its casts, where that is between two sizes that were measured."""
    loses = [row["speed_against_fp32"] < 1 for row in rows]
    if True not in loses or loses[-1] or sorted(loses, reverse=True) != loses:
        return
    below, above = rows[loses.count(True) - 1], rows[loses.count(True)]
    yield (
        f"A matmul repays its casts from somewhere between {shape_text(below)} and {shape_text(above)}: a "
        f"model of smaller layers is slower in {below['format']} here."
    )

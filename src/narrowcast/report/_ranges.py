"""What ``narrowcast explain --ranges`` shows: a table of the worst rows, and a page with heat maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from narrowcast.report._render import html_page
from narrowcast.report._text import bold, cut, plural, printable, shortened, without_escapes, wrapped

# How many rows the text shows, the worst ones, and how many each part of the page.
_WORST_ROWS = 10
_MOST_ROWS = 150
_KINDS = {
    "activation": "Activations: what modules return",
    "gradient": "Gradients of activations",
    "weight gradient": "Gradients of weights",
}
_SHORT = {"activation": "output", "gradient": "gradient", "weight gradient": "weight"}
_LINE = "{:<27}{:<10}{:>12}{:>10}{:>10}{:>10}"
# Binary exponents of fp16's smallest subnormal number, smallest normal number, and largest number.
_FP16 = (-24, -14, 15)
# Width of a cell and height of a row of a heat map, in pixels.
_CELL, _ROW = 14, 16


def ranges_text(found: Mapping[str, Any], *, color: bool = False) -> str:
    """Return the ten worst rows in lines of at most 79 columns."""
    target = " ".join(found["target"])
    if found["problem"] is not None:
        return wrapped(f"{target}: {found['problem']}.")
    ranges = found["ranges"]
    worst = sorted(ranges, key=_badness, reverse=True)[:_WORST_ROWS]
    steps = plural(found["steps"], found["unit"])
    lines = [
        bold(wrapped(f"{target}: numbers of {steps} in FP32, {plural(len(ranges), 'row')} in all")),
        "",
        bold(_LINE.format("module, parameter", "numbers", "exponents", "fp16 lost", "subnormal", "fp8 lost")),
        *(_LINE.format(*_line(entry)) for entry in worst),
        "",
        wrapped(
            f"The {plural(len(worst), 'row')} of which fp16 loses most. numbers: what a module returns, the "
            "gradient of that, or the gradient of a weight; exponents: the smallest and the largest exponent "
            "of two; lost: the share of the finite numbers other than zero that a cast flushes to zero or "
            "overflows; subnormal: the share of them that fp16 keeps with only a part of their digits. "
            "Before the cast to fp16, gradients are multiplied by "
            f"{found['loss_scale']:g}, the largest loss scale up to 65536 with which none of them overflows. "
            "fp8 is E4M3 for outputs and E5M2 for gradients, with a scale for each row."
        ),
    ]
    if any(entry["nonfinite"] for entry in ranges):
        names = ", ".join(entry["module"] for entry in ranges if entry["nonfinite"])
        lines.append(wrapped(f"Not finite in FP32 already, in part: {cut(names, 300)}."))
    text = "\n".join(lines)
    return text if color else without_escapes(text)


def ranges_page(found: Mapping[str, Any]) -> str:
    """Render the page: one heat map for each kind of numbers, and the shares of every format."""
    maps = []
    for what, heading in _KINDS.items():
        of_kind = [entry for entry in found["ranges"] if entry["values"] == what]
        # In fp16 only gradients are multiplied by the loss scale.
        scale = 1.0
        if what != "activation":
            scale = found["loss_scale"]
        if of_kind:
            maps.append(_heat_map(heading, of_kind, scale))
    rows = sorted(found["ranges"], key=_badness, reverse=True)
    return html_page(
        "ranges.html",
        title=shortened(found["target"][0].replace("\\", "/").rsplit("/", 1)[-1], 60),
        found=found,
        steps=plural(found["steps"], found["unit"]),
        maps=maps,
        rows=[_shown(entry) for entry in rows[:_MOST_ROWS]],
        more=max(0, len(rows) - _MOST_ROWS),
        cell=_CELL,
        row=_ROW,
    )


# ---- rows


def _badness(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Return the key by which rows are sorted: the share that fp16 loses, then that of its subnormals."""
    shares = entry["formats"]["fp16"]
    return (_lost(shares), shares.get("subnormal", 0.0))


def _lost(shares: Mapping[str, float]) -> float:
    lost = shares.get("flushed", 0.0) + shares.get("overflowed", 0.0)
    return float(lost)


def _fp8_of(entry: Mapping[str, Any]) -> Mapping[str, float]:
    name = "fp8_e4m3" if entry["values"] == "activation" else "fp8_e5m2"
    shares: Mapping[str, float] = entry["formats"][name]
    return shares


def _line(entry: Mapping[str, Any]) -> tuple[str, ...]:
    formats = entry["formats"]
    return (
        _end_of(entry["module"], 26),
        _SHORT[entry["values"]],
        _span(entry),
        _percent(_lost(formats["fp16"])),
        _percent(formats["fp16"].get("subnormal", 0.0)),
        _percent(_lost(_fp8_of(entry))),
    )


def _end_of(name: str, longest: int) -> str:
    """Return a name without its beginning if it is too long: the end of a path says more."""
    shown = printable(name)
    if len(shown) <= longest:
        return shown
    return f"..{shown[-(longest - 2) :]}"


def _shown(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return what a row of the page shows, in words."""
    formats = entry["formats"]
    # ``entry["numbers"]`` is how many numbers there are. In the page's column "numbers" is their kind.
    zeros = 0.0
    if entry["numbers"]:
        zeros = entry["zeros"] / entry["numbers"]
    return {
        "module": entry["module"],
        "numbers": _SHORT[entry["values"]],
        "exponents": _span(entry),
        "zeros": _percent(zeros),
        "flushed": _percent(formats["fp16"].get("flushed", 0.0)),
        "subnormal": _percent(formats["fp16"].get("subnormal", 0.0)),
        "overflowed": _percent(formats["fp16"].get("overflowed", 0.0)),
        "bf16": _percent(_lost(formats["bf16"])),
        "fp8_e4m3": _percent(_lost(formats["fp8_e4m3"])),
        "fp8_e5m2": _percent(_lost(formats["fp8_e5m2"])),
    }


def _span(entry: Mapping[str, Any]) -> str:
    exponents = sorted(map(int, entry["exponents"]))
    return f"{exponents[0]} to {exponents[-1]}" if exponents else "zeros"


def _percent(share: float) -> str:
    if share == 0.0:
        return "0 %"
    if share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.1f} %"


# ---- heat maps


class _Cell(NamedTuple):
    """An exponent of a row: its place, the opacity of its colour, and the text of its tooltip."""

    x: int
    opacity: float
    text: str


class _HeatMap(NamedTuple):
    """What the template of the page draws as one heat map; places and the width are in pixels.

    Attributes:
        heading: the kind of the numbers.
        rows: for each row of numbers, its name and its cells.
        marks: for each limit of fp16, its place and the text of its tooltip.
        ticks: for each tick of the axis, its place and its exponent.
        width: the width of all cells of a row.
        more: how many rows are left out.
    """

    heading: str
    rows: list[tuple[str, list[_Cell]]]
    marks: list[tuple[int, str]]
    ticks: list[tuple[int, int]]
    width: int
    more: int


def _heat_map(heading: str, entries: Sequence[Mapping[str, Any]], scale: float) -> _HeatMap:
    exponents: list[int] = []
    for entry in entries:
        exponents.extend(map(int, entry["exponents"]))
    # A number that is multiplied by ``scale`` before the cast meets the limits at smaller exponents.
    limits = [exponent - round(math.log2(scale)) for exponent in _FP16]
    first = min([*exponents, limits[0]]) - 1
    last = max([*exponents, limits[2]]) + 1
    rows = []
    for entry in entries[:_MOST_ROWS]:
        counts = {int(exponent): count for exponent, count in entry["exponents"].items()}
        nonzero = sum(counts.values())
        cells = []
        for exponent, count in counts.items():
            share = count / nonzero
            text = f"2^{exponent}: {_percent(share)}"
            # The square root of the share, so that rare numbers can be seen too.
            opacity = round(max(0.08, math.sqrt(share)), 3)
            cells.append(_Cell((exponent - first) * _CELL, opacity, text))
        rows.append((shortened(entry["module"], 60), cells))
    # A mark is at the left of a cell. Numbers with the largest exponent still fit, so the mark of the largest
    # number is at the left of the next cell.
    smallest, smallest_normal, largest = limits
    marks = [
        ((smallest - first) * _CELL, "fp16: smallest number"),
        ((smallest_normal - first) * _CELL, "smallest normal number"),
        ((largest + 1 - first) * _CELL, "largest number"),
    ]
    ticks = []
    for exponent in range(first, last + 1):
        if exponent % 4 == 0:
            ticks.append(((exponent - first) * _CELL, exponent))
    width = (last - first + 1) * _CELL
    return _HeatMap(heading, rows, marks, ticks, width, max(0, len(entries) - _MOST_ROWS))

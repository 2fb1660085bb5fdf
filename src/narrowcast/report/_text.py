"""Numbers and foreign text in the words that tables and pages show."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from narrowcast.observe import explanation

UNKNOWN = "-"
WIDTH = 79
"""Columns of every table and every line on a terminal."""

_LONGEST_NAME = 40
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles and links
)


def printable(text: str) -> str:
    """Remove terminal sequences (colour, cursor, links) from ``text`` and spell out other control characters.

    White space becomes a space. Markup such as ``[red]`` stays as it is, since nothing here reads it.
    """
    return "".join(map(_spelled_out, _ESCAPE_SEQUENCE.sub("", text)))


def _spelled_out(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def shortened(text: str, longest: int = _LONGEST_NAME) -> str:
    """Make ``text`` safe to show, without its middle where it is longer than ``longest``."""
    # Cut before as well: a character may become six.
    shown = printable(text if len(text) <= 2 * longest else f"{text[:longest]}...{text[-longest:]}")
    if len(shown) <= longest:
        return shown
    half = (longest - 3) // 2
    return f"{shown[:half]}...{shown[-half:]}"


def without_escapes(text: str) -> str:
    """Remove terminal sequences, such as those of bold type."""
    return _ESCAPE_SEQUENCE.sub("", text)


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


def bold_red(text: str) -> str:
    return f"\x1b[1;31m{text}\x1b[0m"


def wrapped(text: str, first: str = "", then: str | None = None, *, whole_words: bool = False) -> str:
    """Make ``text`` safe to show, in lines of at most 79 columns; a number stays with its unit.

    The first line begins with ``first`` and the others with ``then``, by default two spaces more. With
    ``whole_words``, words such as paths stay whole if they are longer than a line.
    """
    words = " ".join(printable(text).split()).replace(" s)", "\u00a0s)")
    return "\n".join(explanation.wrapped(words, first=first, then=then, whole_words=whole_words))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Format a table of at most 79 columns in bold type; those at places in ``left`` are aligned there."""
    # Slow to import, and the end of a run has no table.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(head):
        made.add_column(Text(printable(name)), justify="left" if place in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, force_terminal=True, color_system="standard").print(made)
    # rich adds empty lines above and below.
    return "\n".join(line for line in stream.getvalue().splitlines() if without_escapes(line).strip())


def site_name(site: str | None) -> str:
    """Shorten a call site to the file's name and the line."""
    return UNKNOWN if site is None else shortened(site.replace("\\", "/").rsplit("/", 1)[-1])


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def seconds(value: float | str | None) -> str:
    return UNKNOWN if value is None else f"{fixed(float(value), 1)} s"


def milliseconds(value: float | str | None) -> str:
    return UNKNOWN if value is None else f"{three_digits(float(value) * 1e3)} ms"


def mebibytes(value: int | None) -> str:
    if value is None:
        return UNKNOWN
    mib = value / 2**20
    return f"{mib:.1f} MiB" if mib < 9.95 else f"{fixed(mib, 0)} MiB"


def number(value: float | str | None, digits: int = 5) -> str:
    """Format to so many significant digits; NaN and infinities come as text."""
    return UNKNOWN if value is None else f"{float(value):.{digits}g}"


def short(value: float | str | None) -> str:
    """Format to three digits: more would claim a precision that an error does not have."""
    return number(value, 3)


def signed(value: float | str | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{float(value):+.3g}" if math.isfinite(float(value)) else short(value)


def decibels(value: float | str | None) -> str:
    return UNKNOWN if value is None else f"{float(value):.4g} dB"


def percent_change(value: float | str | None) -> str:
    """Format a ratio of sizes as "12 % less"; empty where it is not finite."""
    ratio = math.nan if value is None else float(value)
    if not math.isfinite(ratio):
        return ""
    change = (ratio - 1) * 100
    if abs(change) < 0.5:
        return "the same"
    return f"{fixed(abs(change), 0)} % {'more' if change > 0 else 'less'}"


def speed_text(speedup: float | str) -> str:
    """Format FP32 time over mixed time as ``1.32x faster`` or ``1.20x slower``."""
    value = float(speedup)
    return f"{_times(value)}x faster" if value >= 1 else f"{_times(_inverse(value))}x slower"


def speed_interval(ratio: Mapping[str, Any]) -> str:
    """Format the interval in the terms of ``speed_text``: ``0.98x to 1.41x``."""
    if ratio["speedup_interval"] is None:
        return ""
    low, high = map(float, ratio["speedup_interval"])
    faster = float(ratio["speedup"]) >= 1
    low, high = (low, high) if faster else (_inverse(high), _inverse(low))
    return f"{_times(low)}x to {_times(high)}x"


def measured_speed(ratio: Mapping[str, Any]) -> str:
    """Format a speedup with its interval: ``1.32x faster (95 % interval 0.98x to 1.41x)``."""
    return f"{speed_text(ratio['speedup'])} (95 % interval {speed_interval(ratio)})"


def _times(value: float) -> str:
    """Format to three digits, and at most two decimals: ``1.32``, ``13.2``, ``132``."""
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return fixed(value, decimals)


def _inverse(value: float) -> float:
    return 1 / value if value else math.inf


def gibibytes(value: int) -> str:
    return f"{value / 2**30:.1f} GiB"


def duration(value: float) -> str:
    """Format seconds in the unit that fits: ``2.4 s``, ``31 ms``, ``5.2 us``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{two_digits(value * factor)} {unit}"
    return f"{two_digits(value * 1e6)} us"


def ratio(value: float | None) -> str:
    """Format ``0.37x``, ``4.1x``, ``12x``."""
    return UNKNOWN if value is None else f"{two_digits(value)}x"


def two_digits(value: float) -> str:
    """Format ``0.0098``, ``0.37``, ``4.1``, ``12``, ``174``: never an exponent."""
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.{2 if value >= 0.1 else 3}f}"


def three_digits(value: float) -> str:
    """Format a time to at least three digits, and at most two decimals."""
    return f"{value:.3g}" if value < 1 else fixed(value, 2 if value < 100 else 1)


def fixed(value: float, decimals: int) -> str:
    """Format with so many decimals; values from 1e9 on in scientific notation."""
    return f"{value:.{decimals}f}" if abs(value) < 1e9 else f"{value:.3g}"


def when(started: float) -> str:
    """Format seconds since 1970 as a date in UTC."""
    try:
        return datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{number(started)} s since 1970"

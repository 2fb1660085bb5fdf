"""Numbers and foreign text in the words that tables and pages show."""

from __future__ import annotations

import math
import re
import textwrap
from datetime import UTC, datetime

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


def wrapped(text: str, indent: str = "") -> list[str]:
    """Break ``text`` into lines of at most 79 columns; words, such as paths, stay whole."""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def site_name(site: str | None) -> str:
    """Shorten a call site to the file's name and the line."""
    return UNKNOWN if site is None else shortened(site.replace("\\", "/").rsplit("/", 1)[-1])


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

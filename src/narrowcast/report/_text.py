"""Numbers and foreign text in the words that tables and pages show."""

from __future__ import annotations

import functools
import io
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

UNKNOWN = "-"
WIDTH = 79
"""Columns of every table and every line on a terminal."""

_LONGEST_NAME = 40
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles and links
)
_NO_BREAK = "\u00a0"


# ---- foreign text


def printable(text: str) -> str:
    """Remove terminal sequences (colour, cursor, links) from ``text`` and spell out other control characters.

    White space becomes a space. Markup such as ``[red]`` stays as it is, since nothing here reads it.
    """
    return "".join(map(_spelled_out, without_escapes(text)))


def _spelled_out(character: str) -> str:
    if character.isspace():
        return " "
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def without_escapes(text: str) -> str:
    """Remove terminal sequences, such as those of bold type."""
    return _ESCAPE_SEQUENCE.sub("", text)


def shortened(text: str, longest: int = _LONGEST_NAME) -> str:
    """Make ``text`` safe to show, without its middle where it is longer than ``longest``."""
    shown = printable(text)
    if len(shown) <= longest:
        return shown
    half = (longest - 3) // 2
    return f"{shown[:half]}...{shown[-half:]}"


def cut(text: str, longest: int) -> str:
    """Make ``text`` safe to show, without its end where it is longer than ``longest``."""
    shown = " ".join(printable(text).split())
    return shown if len(shown) <= longest else f"{shown[: longest - 2]}.."


def site_name(site: str | None) -> str:
    """Shorten a call site to the file's name and the line."""
    if site is None:
        return UNKNOWN
    return shortened(site.replace("\\", "/").rsplit("/", 1)[-1])


# ---- lines and tables of a terminal


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


def bold_red(text: str) -> str:
    return f"\x1b[1;31m{text}\x1b[0m"


def wrapped(text: str, first: str = "", then: str | None = None, *, whole_words: bool = False) -> str:
    """Make ``text`` safe to show, in lines of at most 79 columns; ``12 %`` and ``2 x 3`` stay whole.

    The first line begins with ``first`` and the others with ``then``, by default two spaces more. With
    ``whole_words``, words such as paths stay whole if they are longer than a line.
    """
    words = " ".join(printable(text).split())
    # No line ends between a number and its unit, or inside of a shape.
    for unit in (" s)", " %"):
        words = words.replace(unit, f"{_NO_BREAK}{unit[1:]}")
    words = words.replace(" x ", f"{_NO_BREAK}x{_NO_BREAK}")
    if then is None:
        then = f"{first}  "
    lines = textwrap.wrap(
        words,
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=not whole_words,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_NO_BREAK, " ")


def type_next(command: str) -> str:
    """Return the line that names the command to type next, below an answer, to be pasted as it is.

    A command that is longer than a line goes on in the next one, after a backslash, as shells read it.
    """
    indent = " " * 11
    lines = [f"{indent}type next:"]
    for word in map(shlex.quote, shlex.split(printable(command))):
        if len(lines[-1]) + 1 + len(word) <= WIDTH - len(" \\"):
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"{indent}  {word}")
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Format a table of at most 79 characters a line, its head in bold type.

    Columns whose index is in ``left`` are aligned left, the others right.
    """
    # Slow to import, and the end of a run has no table.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(head):
        made.add_column(Text(printable(name)), justify="left" if place in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, map(printable, row)))
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, force_terminal=True, color_system="standard").print(made)

    # rich adds empty lines above and below.
    return "\n".join(line for line in stream.getvalue().splitlines() if without_escapes(line).strip())


# ---- numbers


def _or_unknown(show: Callable[..., str]) -> Callable[..., str]:
    """Make a formatter of numbers show ``-`` for None, and accept numbers as text, such as ``"nan"``."""

    @functools.wraps(show)
    def shown(value: float | str | None, *digits: int) -> str:
        return UNKNOWN if value is None else show(float(value), *digits)

    return shown


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@_or_unknown
def count(value: float) -> str:
    return f"{value:.0f}"


@_or_unknown
def number(value: float, digits: int = 5) -> str:
    """Format to ``digits`` significant digits."""
    return f"{value:.{digits}g}"


@_or_unknown
def short(value: float) -> str:
    """Format to three digits: more would claim a precision that an error does not have."""
    return f"{value:.3g}"


@_or_unknown
def signed(value: float) -> str:
    # NaN has no sign.
    return f"{value:+.3g}" if math.isfinite(value) else f"{value:.3g}"


@_or_unknown
def decibels(value: float) -> str:
    return f"{value:.4g} dB"


def two_digits(value: float) -> str:
    """Format ``0.010``, ``0.37``, ``4.1``, ``12``, ``174``: never an exponent."""
    for least, decimals in ((10, 0), (1, 1), (0.1, 2)):
        if value >= least:
            return f"{value:.{decimals}f}"
    return f"{value:.3f}"


def three_digits(value: float) -> str:
    """Format a time: below 1 to three significant digits, below 100 to two decimals, else to one."""
    if value < 1:
        return f"{value:.3g}"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


# ---- times


@_or_unknown
def seconds(value: float) -> str:
    return f"{value:.1f} s"


@_or_unknown
def milliseconds(value: float) -> str:
    """Format seconds in milliseconds."""
    return f"{three_digits(value * 1e3)} ms"


def duration(value_s: float) -> str:
    """Format seconds in the unit that fits: ``2.4 s``, ``31 ms``, ``5.2 us``."""
    if value_s >= 1:
        return f"{two_digits(value_s)} s"
    if value_s >= 1e-3:
        return f"{two_digits(value_s * 1e3)} ms"
    return f"{two_digits(value_s * 1e6)} us"


def when(started_s: float) -> str:
    """Format seconds since 1970 as a date in UTC."""
    return datetime.fromtimestamp(started_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ---- sizes


@_or_unknown
def mebibytes(value: float) -> str:
    mib = value / 2**20
    return f"{mib:.1f} MiB" if mib < 9.95 else f"{mib:.0f} MiB"


def gibibytes(value: int) -> str:
    return f"{value / 2**30:.1f} GiB"


def percent_change(ratio: float | None) -> str:
    """Format a ratio of sizes as "12 % less"; empty where there is none."""
    if ratio is None:
        return ""
    change = (ratio - 1) * 100
    if abs(change) < 0.5:
        return "the same"
    return f"{change:.0f} % more" if change > 0 else f"{-change:.0f} % less"


# ---- speeds


@_or_unknown
def ratio(value: float) -> str:
    """Format ``0.37x``, ``4.1x``, ``12x``."""
    return f"{two_digits(value)}x"


@_or_unknown
def speed_text(speedup: float) -> str:
    """Format FP32 time over mixed time as ``1.32x faster`` or ``1.20x slower``."""
    return f"{_times(speedup)}x faster" if speedup >= 1 else f"{_times(1 / speedup)}x slower"


def speed_interval(timed: Mapping[str, Any]) -> str:
    """Format the interval in the terms of ``speed_text``: ``0.98x to 1.41x``."""
    if timed["speedup_interval"] is None:
        return ""
    low, high = timed["speedup_interval"]
    # ``speed_text`` shows how many times slower, which is the inverse.
    if timed["speedup"] < 1:
        low, high = 1 / high, 1 / low
    return f"{_times(low)}x to {_times(high)}x"


def measured_speed(timed: Mapping[str, Any]) -> str:
    """Format a speedup with its interval: ``1.32x faster (95 % interval 0.98x to 1.41x)``."""
    return f"{speed_text(timed['speedup'])} (95 % interval {speed_interval(timed)})"


def beside_others(speedup: float, share: float) -> str:
    """Say that the speed is not known, since other programs used the ``share`` of the CPUs."""
    return (
        f"timed as {speed_text(speedup)}, but other programs used {100 * share:.0f} % of the CPUs: repeat it "
        "when they have ended"
    )


def _times(value: float) -> str:
    """Format to three digits, and at most two decimals: ``1.32``, ``13.2``, ``132``."""
    for below, decimals in ((9.995, 2), (99.95, 1)):
        if value < below:
            return f"{value:.{decimals}f}"
    return f"{value:.0f}"

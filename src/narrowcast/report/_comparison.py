"""A comparison as text."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.report._printable import printable
from narrowcast.report._rows import UNKNOWN, Check, checks, rows, shortened

_WIDTH = 79
_LONGEST_LINE = 200
_SAID_BY_THE_FORMAT = ("auto", "bf16", "fp16", "fp32")


def comparison_table(summary: Mapping[str, Any], *, color: bool = False) -> str:
    """The result of ``narrowcast compare`` as a table of at most 79 columns, ``color`` for a terminal.

    Args:
        summary: what ``summary`` returns. A number that cannot be had is ``-``, with the reason below it.
        color: whether to use bold type.
    """
    found = rows(summary)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    table.add_column("FP32", justify="right", overflow="fold")
    table.add_column(_mixed_heading(summary), justify="right", overflow="fold")
    table.add_column("mixed is", style="bold")
    for row in found:
        table.add_row(*map(Text, (row.name, row.fp32, row.mixed, row.mixed_is)))
    stream = io.StringIO()
    console = Console(
        file=stream, width=_WIDTH, force_terminal=color, color_system="standard" if color else None
    )
    if not summary["finished"]:
        console.print(Text("This comparison was cut short: what follows is what it had."))
    policy = summary["mixed"]["policy"]
    if policy not in _SAID_BY_THE_FORMAT:
        console.print(_wrapped(f"mixed: by the policy {printable(policy)}", "  "))
    console.print(table)
    bold = "bold" if color else ""
    for row in found:
        if UNKNOWN in (row.fp32, row.mixed):
            for reason in row.reasons:
                console.print(_wrapped(f"no {row.name}: {reason}"))
    for check in checks(summary):
        console.print(_wrapped(_judged(check), "           "))
    console.print(Text(f"verdict    {summary['verdict']}", style=bold))
    console.print()
    console.print(Text("The script's own last line:", style=bold))
    console.print(Text(f"  FP32   {_last_line(summary['fp32'])}"))
    console.print(Text(f"  mixed  {_last_line(summary['mixed'])}"))
    for note in summary["notes"]:
        console.print(_wrapped(f"note: {printable(note)}"))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _mixed_heading(summary: Mapping[str, Any]) -> Text:
    return Text(f"mixed, {shortened(summary['mixed']['format'] or UNKNOWN, 20)}")


def _judged(check: Check) -> str:
    numbers = f": {', '.join(check.numbers)}" if check.numbers else ""
    reason = f"; {printable(check.reason)}" if check.reason else ""
    return f"{check.name:<10} {check.verdict}{numbers}{reason}"


def _wrapped(text: str, indent: str = "") -> Text:
    return Text(textwrap.fill(text, _WIDTH, subsequent_indent=indent))


def _last_line(side: Mapping[str, Any]) -> str:
    line = printable(side["last_line"] or "")
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]} ..."
    return line or "(it printed nothing)"

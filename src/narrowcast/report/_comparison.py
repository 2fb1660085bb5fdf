"""Two runs of one script side by side."""

from __future__ import annotations

import io
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.report._printable import printable

_WIDTH = 79
_UNKNOWN = "-"
_LONGEST_LINE = 200


def comparison_table(comparison: dict[str, Any], *, color: bool = False) -> str:
    """The result of ``narrowcast compare`` as a table of at most 79 columns, ``color`` for a terminal.

    Args:
        comparison: what ``Comparison.to_dict`` returns. A row with no number on either side is left out.
        color: whether to use bold type.
    """
    fp32, mixed, ratio = comparison["fp32"], comparison["mixed"], comparison["ratio"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("FP32", justify="right", overflow="fold")
    table.add_column(f"mixed, {mixed['format'] or _UNKNOWN}", justify="right", overflow="fold")
    table.add_column("mixed is", style="bold")
    rows = [
        (
            "step time, median",
            _milliseconds(fp32["step_time_s_median"]),
            _milliseconds(mixed["step_time_s_median"]),
            _times(ratio["speed"], "faster", "slower"),
        ),
        (
            "peak process memory",
            _mebibytes(fp32["peak_resident_bytes"]),
            _mebibytes(mixed["peak_resident_bytes"]),
            _percent(ratio["peak_resident_bytes"]),
        ),
        (
            "peak GPU tensor memory",
            _mebibytes(fp32["peak_tensor_bytes"]),
            _mebibytes(mixed["peak_tensor_bytes"]),
            _percent(ratio["peak_tensor_bytes"]),
        ),
        ("final loss", _loss(fp32["final_loss"]), _loss(mixed["final_loss"]), ""),
        ("optimizer steps", _count(fp32["steps"]), _count(mixed["steps"]), ""),
        ("skipped steps", _count(fp32["skipped_steps"]), _count(mixed["skipped_steps"]), ""),
        ("wall time", _seconds(fp32["wall_s"]), _seconds(mixed["wall_s"]), ""),
    ]
    for name, left, right, verdict in rows:
        if (left, right) != (_UNKNOWN, _UNKNOWN):
            table.add_row(name, left, right, verdict)
    stream = io.StringIO()
    console = Console(
        file=stream, width=_WIDTH, force_terminal=color, color_system="standard" if color else None
    )
    console.print(table)
    console.print("The script's own last line:", style="bold" if color else "")
    console.print(Text(f"  FP32   {_last_line(fp32)}"))
    console.print(Text(f"  mixed  {_last_line(mixed)}"))
    for note in mixed["notes"]:
        console.print(Text(f"note: {printable(note)}"))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _last_line(run: dict[str, Any]) -> str:
    line = printable(run["last_line"])
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]} ..."
    return line or "(it printed nothing)"


def _count(count: int | None) -> str:
    return _UNKNOWN if count is None else str(count)


def _seconds(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{seconds:.1f} s"


def _milliseconds(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{seconds * 1e3:.2f} ms"


def _mebibytes(count: int | None) -> str:
    return _UNKNOWN if count is None else f"{count / 2**20:.0f} MiB"


def _loss(loss: float | str | None) -> str:
    return _UNKNOWN if loss is None else f"{float(loss):.5g}"


def _times(ratio: float | None, more: str, less: str) -> str:
    if ratio is None:
        return ""
    if abs(ratio - 1) < 0.005:
        return "the same"
    return f"{ratio:.2f}x {more}" if ratio >= 1 else f"{1 / ratio:.2f}x {less}"


def _percent(ratio: float | None) -> str:
    if ratio is None:
        return ""
    change = (ratio - 1) * 100
    return "the same" if abs(change) < 0.5 else f"{abs(change):.0f} % {'more' if change > 0 else 'less'}"

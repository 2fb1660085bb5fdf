"""Two runs of one script side by side."""

from __future__ import annotations

import io
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 79
_UNKNOWN = "-"


def comparison_table(comparison: dict[str, Any], *, color: bool = False) -> str:
    """The result of ``narrowcast compare`` as a table of at most 79 columns, ``color`` for a terminal."""
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
        ("optimizer steps", str(fp32["steps"]), str(mixed["steps"]), ""),
        ("skipped steps", str(fp32["skipped_steps"]), str(mixed["skipped_steps"]), ""),
        ("wall time", f"{fp32['wall_s']:.1f} s", f"{mixed['wall_s']:.1f} s", ""),
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
    console.print(Text(f"  FP32   {fp32['last_line'] or '(it printed nothing)'}"))
    console.print(Text(f"  mixed  {mixed['last_line'] or '(it printed nothing)'}"))
    for note in mixed["notes"]:
        console.print(Text(f"note: {note}"))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _milliseconds(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{seconds * 1e3:.2f} ms"


def _mebibytes(count: int | None) -> str:
    return _UNKNOWN if count is None else f"{count / 2**20:.0f} MiB"


def _loss(loss: float | None) -> str:
    return _UNKNOWN if loss is None else f"{loss:.5g}"


def _times(ratio: float | None, more: str, less: str) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}x {more}" if ratio >= 1 else f"{1 / ratio:.2f}x {less}"


def _percent(ratio: float | None) -> str:
    if ratio is None:
        return ""
    change = (ratio - 1) * 100
    return "the same" if abs(change) < 0.5 else f"{abs(change):.0f} % {'more' if change > 0 else 'less'}"

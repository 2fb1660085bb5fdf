"""Text and page of ``narrowcast doctor``: the machine, what does not fit together, rates, what they mean."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from narrowcast.report._render import html_page, terminal_text
from narrowcast.report._text import UNKNOWN, ratio, table

_TERA_FROM = 1e13
_KINDS = {
    "matmul": "matmul",
    "matmul_with_casts": "matmul with casts",
    "convolution": "convolution 3x3",
    "add": "addition",
}


def doctor_text(examination: dict[str, Any], *, color: bool = False) -> str:
    """Return the result of ``narrowcast doctor`` in lines of at most 79 columns.

    Args:
        examination: what ``machine.examine`` returns.
        color: whether to use bold type and red.
    """
    values = _values(examination)
    for device in values["devices"]:
        device["table"] = table(*device["table"]) if device["rows"] else ""
    return terminal_text("doctor.txt", color=color, **values)


def doctor_page(examination: dict[str, Any], **of_script: Any) -> str:
    """Render the page of a machine; with what ``_doctor_script`` adds, that of a script on it."""
    given = {"title": "this machine", "found": None} | of_script
    return html_page("doctor.html", **given, **_values(examination))


def _values(examination: dict[str, Any]) -> dict[str, Any]:
    facts, rates = examination["facts"], examination["rates"]
    instructions = facts["cpu"]["instructions"]
    known = {
        head: [name for name, there in instructions.items() if there is value]
        for head, value in (("  has", True), ("  lacks", False), ("  unknown", None))
    }
    exact = facts["arithmetic"]["float32_matmul_precision"] == "highest"
    return {
        "facts": facts,
        "instructions": {head: names for head, names in known.items() if names or head == "  has"},
        "exact": exact,
        "devices": [_device(device, fp32_is_exact=exact) for device in rates["devices"]],
        "rates": rates,
        "measured": _measured(rates),
        "mismatches": examination["mismatches"],
    }


def _device(device: dict[str, Any], *, fp32_is_exact: bool) -> dict[str, Any]:
    """Add to a device of the rates what the template shows of it."""
    rows, choice, table = device["rows"], device["choice"], _table(device["rows"])
    is_cpu = device["device_type"] == "cpu"
    of_format: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        if row["steady"] and row["format"] != "fp32":
            of_format.setdefault(row["format"], {}).setdefault(row["kind"], []).append(row)
    return device | {
        "where": "this CPU" if is_cpu else f"{device['name']} ({device['device']})",
        "table": table,
        "columns": [(name, name != "fp32") for name in table[0][1:] if name],
        "skipped": _skipped(rows),
        "has_cut_short": any(row["speed_at_most"] is not None for row in rows),
        "repays": _repays(of_format.get(choice["format"], {}).get("matmul_with_casts", [])),
        "tf32_is_off": "tf32" in of_format and fp32_is_exact,
    }


def _table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the lines of the table of a device; a line of one cell is a heading."""
    formats = list(dict.fromkeys(row["format"] for row in rows))
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        scale, unit = _unit(of_kind)
        lines.append([f"{_KINDS.get(kind, kind)}, {unit}"])
        for size in dict.fromkeys(row["size"] for row in of_kind):
            cells = {row["format"]: row for row in of_kind if row["size"] == size}
            lines.append([f"  {_shape(next(iter(cells.values())))}"])
            for name in formats:
                row = cells.get(name)
                lines[-1].append(_rate(row, scale) if row else "")
                if name != "fp32":
                    lines[-1].append(_speed(row) if row else "")
    head = [word for name in formats for word in ([name] if name == "fp32" else [name, ""])]
    return ["", *head], lines


def _unit(rows: Sequence[dict[str, Any]]) -> tuple[float, str]:
    most = max((_per_s(row) for row in rows), default=0.0)
    scale, prefix = (1e12, "T") if most >= _TERA_FROM else (1e9, "G")
    return scale, f"{prefix}FLOP/s" if rows[0]["kind"] != "add" else f"{prefix} elements/s"


def _per_s(row: dict[str, Any]) -> float:
    return float(row["rate_flop_per_s"] or row["rate_element_per_s"] or 0.0)


def _rate(row: dict[str, Any], scale: float) -> str:
    rate = _per_s(row) / scale
    if not row["rounds"]:
        return UNKNOWN
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def _speed(row: dict[str, Any]) -> str:
    """Format the speed against fp32: ``~0.50x`` if unsteady, ``(0.06x)`` if cut short, of a smaller size."""
    if row["speed_against_fp32"] is not None:
        return f"{'' if row['steady'] else '~'}{ratio(row['speed_against_fp32'])}"
    if row["speed_at_most"] is not None:
        return f"({ratio(row['speed_at_most'])})"
    return ""


def _spread(row: dict[str, Any]) -> float:
    """Return what the middle half of a row's rounds spans, as a share of its median."""
    return float((row["time_s_high"] - row["time_s_low"]) / row["time_s_median"])


def _shape(row: dict[str, Any]) -> str:
    """Format ``64 x 64``; of a convolution batch x channels x height x width; of an addition its elements."""
    return " x ".join(f"{number:,}" if len(row["shape"]) == 1 else str(number) for number in row["shape"])


def _skipped(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return formats, places and the reason why they have no figure."""
    of_format: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["reason"] and (row["expected_time_s"] is None or row["out_of_time"]):
            place = f"{_KINDS.get(row['kind'], row['kind'])} {_shape(row)}"
            of_format.setdefault((row["format"], row["reason"]), []).append(place)
    formats: dict[tuple[str, str], list[str]] = {}
    for (name, reason), places in of_format.items():
        formats.setdefault((reason, ", ".join(places)), []).append(name)
    return [(", ".join(names), places, reason) for (reason, places), names in sorted(formats.items())]


def _measured(rates: dict[str, Any]) -> dict[str, Any] | None:
    """Return how many rounds there were and how they differed; None if nothing was measured."""
    rows = [row for device in rates["devices"] for row in device["rows"] if row["rounds"]]
    if not rows:
        return None
    spreads = sorted(map(_spread, rows))
    few, many = min(row["rounds"] for row in rows), max(row["rounds"] for row in rows)
    return {
        "rounds": str(few) if few == many else f"{few} to {many}",
        "typical": spreads[len(spreads) // 2],
        "worst": spreads[-1],
        "is_noisy": any(row["speed_against_fp32"] is not None and not row["steady"] for row in rows),
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(rates["measured_at_s"])),
    }


def _repays(rows: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    """Return the two measured sizes between which a layer begins to repay its casts."""
    loses = [row["speed_against_fp32"] < 1 for row in rows]
    if True not in loses or loses[-1] or sorted(loses, reverse=True) != loses:
        return None
    return _shape(rows[loses.count(True) - 1]), _shape(rows[loses.count(True)])

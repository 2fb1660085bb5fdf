"""Text and page of ``narrowcast doctor``: the machine, what does not fit together, rates, what they mean."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from narrowcast.report._render import html_page, terminal_text
from narrowcast.report._text import UNKNOWN, ratio, table

# From this rate on a kind of operation is shown in tera, below it in giga.
_TERA_FROM = 1e13
_KINDS = {
    "matmul": "matmul",
    "matmul_with_casts": "matmul with casts",
    "convolution": "convolution 3x3",
    "add": "addition",
}
# Heads of the lines that list a CPU's instructions.
_HAS, _LACKS, _NOT_KNOWN = "  has", "  lacks", "  unknown"

Rate = Mapping[str, Any]


def doctor_text(examination: dict[str, Any], *, color: bool = False) -> str:
    """Return the result of ``narrowcast doctor`` in lines of at most 79 columns.

    Args:
        examination: what ``machine.examine`` returns.
        color: whether to use bold type and red.
    """
    values = _values(examination)
    for device in values["devices"]:
        if device["rows"]:
            device["table"] = table(*device["table"])
    return terminal_text("doctor.txt", color=color, **values)


def doctor_page(examination: dict[str, Any], **of_script: Any) -> str:
    """Render the page of a machine; with what ``_doctor_script`` adds, that of a script on it."""
    values = {"title": "this machine", "found": None} | of_script
    return html_page("doctor.html", **values, **_values(examination))


def _values(examination: dict[str, Any]) -> dict[str, Any]:
    facts, rates = examination["facts"], examination["rates"]
    is_exact = facts["arithmetic"]["float32_matmul_precision"] == "highest"
    return {
        "facts": facts,
        "instructions": _instructions(facts["cpu"]["instructions"]),
        "exact": is_exact,
        "devices": [_device(device, fp32_is_exact=is_exact) for device in rates["devices"]],
        "rates": rates,
        "measured": _measured(rates),
        "mismatches": examination["mismatches"],
    }


def _instructions(known: Mapping[str, bool | None]) -> dict[str, list[str]]:
    """Return the names of the instructions that a CPU has, lacks or may have, by the head of their line."""
    # The line of those that it has is shown even if it is empty.
    names: dict[str, list[str]] = {_HAS: []}
    for head, value in ((_HAS, True), (_LACKS, False), (_NOT_KNOWN, None)):
        of_head = [name for name, has_it in known.items() if has_it is value]
        if of_head:
            names[head] = of_head
    return names


def _device(device: dict[str, Any], *, fp32_is_exact: bool) -> dict[str, Any]:
    """Add to a device of the rates what the template shows of it."""
    rows, chosen_format = device["rows"], device["choice"]["format"]
    formats = _distinct(rows, "format")
    with_casts, has_tf32, has_cut_short = [], False, False
    for row in rows:
        has_tf32 = has_tf32 or (row["steady"] and row["format"] == "tf32")
        has_cut_short = has_cut_short or row["speed_at_most"] is not None
        is_in_chosen = row["format"] == chosen_format and chosen_format != "fp32"
        if row["steady"] and is_in_chosen and row["kind"] == "matmul_with_casts":
            with_casts.append(row)

    where = "this CPU"
    if device["device_type"] != "cpu":
        where = f"{device['name']} ({device['device']})"
    return device | {
        "where": where,
        "formats": formats,
        "table": _table(rows, formats),
        "skipped": _skipped(rows),
        "has_cut_short": has_cut_short,
        "repays": _repays(with_casts),
        "tf32_is_off": has_tf32 and fp32_is_exact,
    }


def _distinct(rows: Sequence[Rate], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


# ---- the table of rates


def _table(rows: Sequence[Rate], formats: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the lines of the table of a device; a line of one cell is a heading."""
    head = [""]
    for name in formats:
        head.append(name)
        # Beside each rate stands its speed against fp32.
        if name != "fp32":
            head.append("")

    lines = []
    for kind in _distinct(rows, "kind"):
        of_kind = [row for row in rows if row["kind"] == kind]
        scale, unit = _unit(of_kind)
        lines.append([f"{_KINDS.get(kind, kind)}, {unit}"])
        for size in _distinct(of_kind, "size"):
            of_size = {row["format"]: row for row in of_kind if row["size"] == size}
            lines.append(_line(of_size, formats, scale))
    return head, lines


def _line(of_size: Mapping[str, Rate], formats: Sequence[str], scale: float) -> list[str]:
    """Return the cells of one size: its shape, then the rate of each format, with its speed."""
    cells = [f"  {_shape(next(iter(of_size.values())))}"]
    for name in formats:
        rate, speed = "", ""
        if name in of_size:
            rate, speed = _rate(of_size[name], scale), _speed(of_size[name])
        cells.append(rate)
        if name != "fp32":
            cells.append(speed)
    return cells


def _unit(rows: Sequence[Rate]) -> tuple[float, str]:
    scale, prefix = 1e9, "G"
    if max(map(_per_s, rows)) >= _TERA_FROM:
        scale, prefix = 1e12, "T"
    if rows[0]["kind"] == "add":
        return scale, f"{prefix} elements/s"
    return scale, f"{prefix}FLOP/s"


def _per_s(row: Rate) -> float:
    return float(row["rate_flop_per_s"] or row["rate_element_per_s"] or 0.0)


def _rate(row: Rate, scale: float) -> str:
    if not row["rounds"]:
        return UNKNOWN
    rate = _per_s(row) / scale
    for least, decimals in ((100, 0), (10, 1)):
        if rate >= least:
            return f"{rate:,.{decimals}f}"
    return f"{rate:.2f}"


def _speed(row: Rate) -> str:
    """Format the speed against fp32.

    ``~0.50x`` is unsteady. ``(0.06x)`` is the speed at a smaller size, as this size was cut short.
    """
    if row["speed_against_fp32"] is not None:
        speed = ratio(row["speed_against_fp32"])
        return speed if row["steady"] else f"~{speed}"
    if row["speed_at_most"] is not None:
        return f"({ratio(row['speed_at_most'])})"
    return ""


def _shape(row: Rate) -> str:
    """Format ``64 x 64``; of a convolution batch x channels x height x width; of an addition its elements."""
    shape = row["shape"]
    return f"{shape[0]:,}" if len(shape) == 1 else " x ".join(map(str, shape))


# ---- what the rates mean


def _skipped(rows: Sequence[Rate]) -> list[tuple[str, str, str]]:
    """Return what was not measured: formats, kinds with their sizes, and the reason."""
    places_of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        # A row that was cut short shows the speed at a smaller size, which has an explanation of its own.
        if row["reason"] and row["speed_at_most"] is None:
            place = f"{_KINDS.get(row['kind'], row['kind'])} {_shape(row)}"
            places_of.setdefault((row["format"], row["reason"]), []).append(place)

    # Formats that lack the same sizes for the same reason share a line.
    formats_of: dict[tuple[str, str], list[str]] = {}
    for (name, reason), places in places_of.items():
        formats_of.setdefault((reason, ", ".join(places)), []).append(name)
    lines = []
    for (reason, all_places), names in sorted(formats_of.items()):
        lines.append((", ".join(names), all_places, reason))
    return lines


def _measured(rates: dict[str, Any]) -> dict[str, Any] | None:
    """Return how many rounds there were and how they differed; None if nothing was measured."""
    rounds, spreads, is_noisy = [], [], False
    for device in rates["devices"]:
        for row in device["rows"]:
            if not row["rounds"]:
                continue
            rounds.append(row["rounds"])
            # The range of the middle half of its rounds, as a share of the median.
            spreads.append((row["time_s_high"] - row["time_s_low"]) / row["time_s_median"])
            is_noisy = is_noisy or (row["speed_against_fp32"] is not None and not row["steady"])
    if not rounds:
        return None
    fewest, most = min(rounds), max(rounds)
    text = str(fewest)
    if most > fewest:
        text = f"{fewest} to {most}"
    spreads.sort()
    return {
        "rounds": text,
        "typical": spreads[len(spreads) // 2],
        "worst": spreads[-1],
        "is_noisy": is_noisy,
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(rates["measured_at_s"])),
    }


def _repays(rows: Sequence[Rate]) -> tuple[str, str] | None:
    """Return the two measured sizes between which a layer begins to repay its casts, or None.

    Args:
        rows: matmuls with casts, in the order of their sizes.
    """
    is_slower = [row["speed_against_fp32"] < 1 for row in rows]
    slower = is_slower.count(True)
    # There are two such sizes only if each smaller size is slower than fp32 and each larger one is not.
    if slower in (0, len(rows)) or not all(is_slower[:slower]):
        return None
    return _shape(rows[slower - 1]), _shape(rows[slower])

"""Text of ``narrowcast doctor``: the machine, what does not fit together, rates, and what they mean."""

from __future__ import annotations

import io
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.report._text import printable

_WIDTH = 79
_INDENT = 10
_BUILDS = {"cpu": "for CPUs alone", "cuda": "for CUDA", "rocm": "for ROCm", "xpu": "for Intel GPUs"}
_TERA_FROM = 1e13
_KINDS = {
    "matmul": "matmul",
    "matmul_with_casts": "matmul with casts",
    "convolution": "convolution 3x3",
    "add": "addition",
}
# If the middle half of the rounds spans more than this share of the median, something else was running.
NOISY = 0.25
# Between 1 / 1.1 and 1.1 two formats count as equally fast: the spread of a quiet machine is a few percent.
_AS_FAST = 1.1
# A format slower than fp32 by this much in the largest matmul is no choice for speed.
_NEVER = 0.5


def doctor_text(examination: dict[str, Any], *, color: bool = False) -> str:
    """Return the result of ``narrowcast doctor`` in lines of at most 79 columns.

    Args:
        examination: what ``machine.examine`` returns.
        color: whether to use bold type and red.
    """
    stream = io.StringIO()
    console = Console(
        file=stream, width=_WIDTH, force_terminal=color, color_system="standard" if color else None
    )
    facts, rates = examination["facts"], examination["rates"]
    _machine(console, facts)
    for device in rates["devices"]:
        _rates(console, device)
    _provenance(console, rates)
    for device in rates["devices"]:
        _conclusions(console, device, facts["arithmetic"])
    _wrong(console, examination["mismatches"])
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    # A table may end in an empty line of its own.
    return "\n".join(line for line, before in zip(lines, ["", *lines], strict=False) if line or before)


def _machine(console: Console, facts: dict[str, Any]) -> None:
    cpu = facts["cpu"]
    has = [name for name, there in cpu["instructions"].items() if there]
    lacks = [name for name, there in cpu["instructions"].items() if there is False]
    unknown = [name for name, there in cpu["instructions"].items() if there is None]
    cores = f"{_plural(cpu['cores'], 'core')}, " if cpu["cores"] else ""
    memory = f", {_gibibytes(cpu['memory_bytes'])}" if cpu["memory_bytes"] else ""
    _line(console, "CPU", f"{cpu['name']}, {cores}{_plural(cpu['torch_threads'], 'thread')} of torch{memory}")
    _line(console, "  has", ", ".join(has) or "no instructions that matter here")
    _line(console, "  lacks", ", ".join(lacks))
    _line(console, "  unknown", ", ".join(unknown))
    for gpu in facts["gpus"]:
        kind = f"compute capability {gpu['capability']}" if gpu["capability"] else gpu["gfx"]
        words = (gpu["name"], _gibibytes(gpu["memory_bytes"]), kind, gpu["device"])
        _line(console, "GPU", ", ".join(word for word in words if word))
    if facts["mps"]["available"]:
        _line(console, "GPU", "Metal (mps)")
    elif not facts["gpus"]:
        _line(console, "GPU", "none that torch sees")
    _line(console, "torch", _torch(facts["torch"]))
    nvidia = facts["nvidia"]
    if nvidia["driver"]:
        supports = f", CUDA up to {nvidia['driver_cuda']}" if nvidia["driver_cuda"] else ""
        _line(console, "driver", f"NVIDIA {nvidia['driver']}{supports}")
    if nvidia["toolkit"] and facts["gpus"]:
        _line(console, "toolkit", f"CUDA {nvidia['toolkit']} (nvcc)")
    precision = facts["arithmetic"]["float32_matmul_precision"]
    exact = "exact fp32" if precision == "highest" else "less exact than fp32"
    _line(console, "fp32", f'matmul precision "{precision}": {exact}')


def _torch(torch: dict[str, Any]) -> str:
    version = torch["cuda"] or torch["hip"]
    built = f"{_BUILDS.get(torch['build'], torch['build'])}{f' {version}' if version else ''}"
    cudnn = f", cuDNN {torch['cudnn']}" if torch["cudnn"] else ""
    return f"{torch['version']}, built {built}{cudnn}; CPU kernels: {torch['cpu_kernels']}"


def _wrong(console: Console, mismatches: list[dict[str, str]]) -> None:
    console.print()
    if not mismatches:
        _paragraph(console, "torch, drivers and devices fit together.")
    for found in mismatches:
        is_error = found["severity"] == "error"
        head = f"{'PROBLEM' if is_error else 'note'}, {found['device']}: {found['text']}"
        _paragraph(console, printable(head), indent="  ", style="bold red" if is_error else "")
        _paragraph(console, printable(f"  fix: {found['fix']}"), indent="       ")


def _rates(console: Console, device: dict[str, Any]) -> None:
    console.print()
    if not device["rows"]:
        _paragraph(console, printable(f"Not measured: {_where(device)} ({device['reason']})"))
        return
    console.print(Text(f"How fast each format is on {_where(device)}", style="bold"))
    console.print(_table(device["rows"]))
    for line in _skipped(device["rows"]):
        _paragraph(console, f"- {printable(line)}", indent="  ")


def _conclusions(console: Console, device: dict[str, Any], arithmetic: dict[str, Any]) -> None:
    choice = device["choice"]
    console.print()
    text = f'On {_where(device)}, policy "auto" chooses {choice["format"]}: {choice["because"]}.'
    _paragraph(console, printable(text), style="bold")
    for line in advice(device, arithmetic):
        _paragraph(console, f"- {printable(line)}", indent="  ")


def _where(device: dict[str, Any]) -> str:
    return "this CPU" if device["device_type"] == "cpu" else f"{device['name']} ({device['device']})"


def _table(rows: list[dict[str, Any]]) -> Table:
    formats = list(dict.fromkeys(row["format"] for row in rows))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    for name in formats:
        table.add_column(name, justify="right", no_wrap=True)
        if name != "fp32":
            table.add_column("", justify="right", no_wrap=True)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        factor, unit = _unit(of_kind)
        table.add_row(Text(f"{_KINDS.get(kind, kind)}, {unit}"))
        for size in dict.fromkeys(row["size"] for row in of_kind):
            cells = {row["format"]: row for row in of_kind if row["size"] == size}
            words = [f"  {shape_text(next(iter(cells.values())))}"]
            for name in formats:
                row = cells.get(name)
                words.append(_rate(row, factor))
                if name != "fp32":
                    words.append(_speed(row))
            table.add_row(*words)
    return table


def _unit(rows: list[dict[str, Any]]) -> tuple[float, str]:
    most = max((_per_s(row) for row in rows), default=0.0)
    scale, prefix = (1e12, "T") if most >= _TERA_FROM else (1e9, "G")
    return scale, f"{prefix}FLOP/s" if rows[0]["kind"] != "add" else f"{prefix[0]} elements/s"


def _per_s(row: dict[str, Any]) -> float:
    return float(row["rate_flop_per_s"] or row["rate_element_per_s"] or 0.0)


def _rate(row: dict[str, Any] | None, scale: float) -> str:
    if row is None:
        return ""
    return _three_digits(_per_s(row) / scale) if row["rounds"] else "-"


def _speed(row: dict[str, Any] | None) -> str:
    speed = row["speed_against_fp32"] if row else None
    if row is None or speed is None:
        return ""
    return f"{'~' if spread(row) > NOISY else ''}{two_digits(speed)}x"


def _skipped(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield one line for each reason and list of places, with the formats that it holds for."""
    of_format: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        place = f"{_KINDS.get(row['kind'], row['kind'])} {shape_text(row)}"
        if row["expected_time_s"] is not None:
            place = f"{place} ({row['expected_time_s']:.1f} s)"
            of_format.setdefault((row["format"], ""), []).append(place)
        elif row["reason"]:
            of_format.setdefault((row["format"], row["reason"]), []).append(place)
    formats: dict[tuple[str, str], list[str]] = {}
    for (name, reason), places in of_format.items():
        formats.setdefault((reason, ", ".join(places)), []).append(name)
    for (reason, listed), names in sorted(formats.items()):
        if reason:
            yield f"{', '.join(names)} not measured in {listed}: {reason}."
        else:
            yield f"{', '.join(names)} skipped where one call would take long: {listed}."


def _provenance(console: Console, rates: dict[str, Any]) -> None:
    measured = [row for device in rates["devices"] for row in device["rows"] if row["rounds"]]
    console.print()
    if not measured:
        return
    rounds, spreads = [row["rounds"] for row in measured], sorted(map(spread, measured))
    few, many = min(rounds), max(rounds)
    typical, worst = spreads[len(spreads) // 2], spreads[-1]
    _paragraph(
        console,
        "x: times the speed of exact fp32. Operands are in the format already; with casts they are in fp32 "
        "and cast at every call, as autocast does with what is new to it. Forward calls; medians of "
        f"{few if few == many else f'{few} to {many}'} rounds in which the formats take turns, whose "
        f"middle half spans {typical:.0%} of the median, {worst:.0%} at worst.",
    )
    if worst > NOISY:
        _paragraph(
            console, "~: something else was running; measure again with --fresh when this machine is quiet."
        )
    took = f"Measured just now, in {rates['wall_s']:.1f} s"
    if rates["source"] == "cache":
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(rates["measured_at_s"]))
        took = f"Measured on {when}; --fresh measures again"
    _paragraph(console, f"{took}.")


# ---- advice


def advice(device: dict[str, Any], arithmetic: dict[str, Any]) -> Iterator[str]:
    """Yield sentences about a device: the choice against the rates, slow formats, and small layers.

    Args:
        device: one of ``rates.devices`` of an examination, with its ``choice``.
        arithmetic: ``facts.arithmetic`` of the same examination.
    """
    choice, here = device["choice"], "this CPU" if device["device_type"] == "cpu" else "this GPU"
    yield from _of_choice(choice)
    measured = [row for row in device["rows"] if row["speed_against_fp32"] is not None]
    for name in dict.fromkeys(row["format"] for row in measured if row["format"] != "fp32"):
        kinds: dict[str, list[dict[str, Any]]] = {}
        for row in measured:
            if row["format"] == name:
                kinds.setdefault(row["kind"], []).append(row)
        if "matmul" in kinds and kinds["matmul"][-1]["speed_against_fp32"] < _NEVER:
            judged = [kind for kind in ("matmul", "convolution") if kind in kinds]
            slow = [f"{_times_slower(kinds[kind])} in {_KINDS[kind]}" for kind in judged]
            yield f"{name} on {here} is {' and '.join(slow)} than fp32: never choose it for speed."
        if name == choice["format"]:
            yield from _of_layers(kinds.get("matmul_with_casts", []))
        if name == "tf32" and arithmetic["float32_matmul_precision"] == "highest":
            yield (
                'tf32 is off for matmul: torch.set_float32_matmul_precision("high") turns it on, and '
                "drops 13 of the 23 bits of fp32's significand in every product."
            )


def _of_choice(choice: dict[str, Any]) -> Iterator[str]:
    name, faster = choice["format"], choice["faster_format"]
    if choice["rates_agree"] is None:
        if name != "fp32":
            yield "Nothing was measured that could confirm the choice."
        return
    at = f"at matmul {' x '.join(map(str, choice['judged_at']))}"
    speed = f"{two_digits(choice['speed_against_fp32'])}x the speed of fp32 {at}"
    if faster is not None:
        yield f"The rates disagree: {faster} is faster {at}. To use it: --policy {faster}."
    elif not choice["rates_agree"]:
        yield f"The rates disagree: {name} has {speed}. To stay in fp32: --policy fp32."
    elif name == "fp32":
        yield f"The rates agree: no other format is faster {at}."
    elif choice["speed_against_fp32"] < _AS_FAST:
        yield f"The rates hardly differ: {speed}."
    else:
        yield f"The rates agree: {speed}."


def _times_slower(rows: Sequence[dict[str, Any]]) -> str:
    slow = sorted(1 / row["speed_against_fp32"] for row in rows)
    few, many = two_digits(slow[0]), two_digits(slow[-1])
    return f"{few if few == many else f'{few} to {many}'} times slower"


def _of_layers(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Name the two measured sizes between which a layer begins to repay its casts."""
    loses = [row["speed_against_fp32"] < 1 for row in rows]
    if True not in loses or loses[-1] or sorted(loses, reverse=True) != loses:
        return
    below, above = rows[loses.count(True) - 1], rows[loses.count(True)]
    yield (
        f"A matmul repays its casts from somewhere between {shape_text(below)} and {shape_text(above)}: a "
        f"model of smaller layers is slower in {below['format']} here."
    )


# ---- words


def shape_text(row: dict[str, Any]) -> str:
    """Format ``64 x 64``; of a convolution batch x channels x height x width; of an addition its elements."""
    return " x ".join(f"{number:,}" if len(row["shape"]) == 1 else str(number) for number in row["shape"])


def spread(row: dict[str, Any]) -> float:
    """Return what the middle half of a row's rounds spans, as a share of its median."""
    return float((row["time_s_high"] - row["time_s_low"]) / row["time_s_median"])


def two_digits(number: float) -> str:
    """Format ``0.0098``, ``0.37``, ``4.1``, ``12``, ``174``: never an exponent."""
    if number >= 10:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.{2 if number >= 0.1 else 3}f}"


def _line(console: Console, head: str, text: str) -> None:
    if text:
        indent = " " * _INDENT
        _paragraph(console, f"{head:<{_INDENT}}{printable(text)}", indent=indent)


def _paragraph(console: Console, text: str, *, indent: str = "", style: str = "") -> None:
    # A shape and a time stay on one line: textwrap breaks at plain spaces alone.
    whole = text.replace(" x ", "\u00a0x\u00a0").replace(" s)", "\u00a0s)")
    lines = textwrap.wrap(whole, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    console.print(Text("\n".join(lines).replace("\u00a0", " "), style=style))


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"

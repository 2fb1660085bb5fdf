"""What ``narrowcast doctor SCRIPT`` says: where the time of a step goes, and what that means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from narrowcast.report._doctor_advice import two_digits
from narrowcast.report._doctor_script_advice import conclusion, count_text, seconds, size_text, waiting_reads
from narrowcast.report._text import printable

_WIDTH = 79
_MOST_READS = 4
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_PARTS = (
    ("products", "products (linear, conv, attention)"),
    ("casts", "casts between formats"),
    ("other_ops", "other ops (norms, elementwise, loss)"),
    ("optimizer", "optimizer"),
    ("loading", "loading data"),
    ("python", "Python and dispatch"),
)
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def diagnosis_text(found: dict[str, Any], *, color: bool = False) -> str:
    """The result of ``narrowcast doctor SCRIPT`` in lines of at most 79 columns.

    Args:
        found: what ``verify.diagnose`` returns.
        color: whether to use bold type.
    """
    target = " ".join(found["target"])
    if found["problem"] is not None:
        return "\n".join(_wrap(f"{printable(target)}: {printable(found['problem'])}."))
    lines = [*_head(found, printable(target), color=color), "", *_parts(found, color=color), ""]
    lines += [*_sizes(found, color=color), *_counts(found), ""]
    lines.append(_bold("What this means", color=color))
    for text in conclusion(found):
        lines += _wrap(f"- {text}", first="  ", then="    ")
    return "\n".join([*lines, "", *_provenance(found)])


def _head(found: dict[str, Any], target: str, *, color: bool) -> Iterator[str]:
    fp32, mixed, unit = found["fp32"], found["mixed"], found["unit"]
    where = "this CPU" if found["device"] == "cpu" else found["device"]
    speed = two_digits(found["together"]["speedup"])
    for line in _wrap(f"{target}: in {found['format']} on {where}, {speed}x the speed of FP32"):
        yield _bold(line, color=color)
    yield from _wrap(
        f"A {unit} takes {seconds(fp32['plain_step_s'])} in FP32 and {seconds(mixed['plain_step_s'])} in "
        f"{found['format']}."
    )


def _parts(found: dict[str, Any], *, color: bool) -> Iterator[str]:
    head = f"Where the time of a {found['unit']} goes"
    yield _bold(f"{head:<40}{'FP32':>16}{found['format']:>18}", color=color)
    on_gpu = found["mixed"]["gpu_busy_share"] is not None
    for part, words in _PARTS:
        shown = "waiting of the GPU" if on_gpu and part == "python" else words
        if any(found[run]["shares"][part] > 0 for run in ("fp32", "mixed")):
            cells = "".join(f"{_cell(found[run], part):>{16 + 2 * (run == 'mixed')}}" for run in _RUNS)
            yield f"  {shown:<38}{cells}"


_RUNS = ("fp32", "mixed")


def _cell(profile: dict[str, Any], part: str) -> str:
    share = profile["shares"][part]
    if share == 0:
        return "-"
    return f"{seconds(share * profile['plain_step_s'])} {_percent(share):>5}"


def _percent(share: float) -> str:
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def _sizes(found: dict[str, Any], *, color: bool) -> Iterator[str]:
    together = found["together"]
    if not together["sizes"]:
        return
    head = "Products by size, M x N x K"
    yield _bold(f"{head:<40}{'of FP32':>9}{'here':>8}  {'this machine'}", color=color)
    for row in together["sizes"]:
        name = f"{printable(size_text(row))} ({row['count']:.4g})"
        here = "-" if row["speedup"] is None else f"{two_digits(row['speedup'])}x"
        machine = ""
        if row["machine_speedup"] is not None:
            at = "x".join(map(str, row["machine_shape"]))
            machine = f"{two_digits(row['machine_speedup'])}x at {at}"
        if len(name) > 37:
            yield f"  {name}"[:_WIDTH]
            name = ""
        yield f"  {name:<38}{_percent(row['share']):>9}{here:>8}  {machine}".rstrip()
    left = together["sizes_left_out"]
    if left:
        yield f"  and {left} more"


def _counts(found: dict[str, Any]) -> Iterator[str]:
    mixed, unit = found["mixed"], found["unit"]
    casts, ops = mixed["casts"], mixed["ops"]
    yield from _wrap(
        f"Casts: {count_text(casts['count'])} a {unit}, {_bytes(casts['bytes'])} read and written; "
        f"{count_text(casts['weight_count'])} of weights, {_bytes(casts['weight_bytes'])}."
    )
    mean = "" if ops["mean_s"] is None else f", {seconds(ops['mean_s'])} each"
    if mixed["gpu_busy_share"] is None:
        tail = "a CPU does them as they come, no host waits for a device"
    else:
        tail = f"on the host; the GPU is busy {mixed['gpu_busy_share']:.0%} of the {unit}"
    yield from _wrap(f"Ops: {count_text(ops['count'])} a {unit}{mean}: {tail}.")
    yield from _wrap(_reads(found))


def _reads(found: dict[str, Any]) -> str:
    reads, unit = found["mixed"]["reads"], found["unit"]
    if reads is None:
        return f"Reads of tensors: the script ended before any {unit} was left to count them in."
    sites = waiting_reads(found)
    if not sites:
        return f"Reads of tensors: none in {reads['steps']} {unit}s."
    shown = [
        f"{printable(site['site'])} {printable(site['what'])} {count_text(site['count'] / reads['steps'])}"
        for site in sites[:_MOST_READS]
    ]
    more = f", and {len(sites) - _MOST_READS} more lines" if len(sites) > _MOST_READS else ""
    return f"Reads of tensors a {unit}: {', '.join(shown)}{more}."


def _provenance(found: dict[str, Any]) -> list[str]:
    fp32, mixed, unit = found["fp32"], found["mixed"], found["unit"]
    return _wrap(
        f"A {unit}: the median of {fp32['plain_steps']} and of {mixed['plain_steps']}. Its parts: shares of "
        f"{fp32['steps']} and {mixed['steps']} {unit}s under torch's profiler, and what they are of the "
        f"median. (n): products of a size in a {unit}; here: their speed against FP32 in this script, casts "
        "apart; this machine: that of the nearest size that narrowcast doctor measured."
    )


def _wrap(text: str, *, first: str = "", then: str = "  ") -> list[str]:
    # A size stays on one line: textwrap breaks at plain spaces alone.
    whole = text.replace(" x ", "\u00a0x\u00a0").replace(" %", "\u00a0%")
    lines = textwrap.wrap(whole, _WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def _bold(text: str, *, color: bool) -> str:
    return f"{_BOLD}{text}{_PLAIN}" if color else text


def _bytes(count: float) -> str:
    for factor, unit in _UNITS:
        if count >= factor:
            return f"{two_digits(count / factor)} {unit}"
    return f"{count:.0f} bytes"

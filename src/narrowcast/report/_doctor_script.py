"""Text and page of ``narrowcast doctor SCRIPT``: where the time of a step goes, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from narrowcast.report._doctor import doctor_page
from narrowcast.report._explanation import count_text, percent
from narrowcast.report._render import sentence, terminal_text
from narrowcast.report._text import (
    UNKNOWN,
    beside_others,
    duration,
    measured_speed,
    printable,
    site_name,
    speed_text,
)

_RUNS = ("fp32", "mixed")
_PARTS = {
    "products": "matmuls (linear, conv, attention)",
    "casts": "casts between formats",
    "other_ops": "other ops (norms, elementwise, loss)",
    "optimizer": "optimizer",
    "loading": "loading data",
    "python": "Python and dispatch",
}
_PARTS_ON_GPU = _PARTS | {"python": "GPU waits"}
_SHORT = {"batched matmul": "bmm", "convolution": "conv", "recurrent layer": "recurrent"}
# Shares of a step from which on a part is worth a sentence.
_MUCH_LOADING, _MUCH_OPTIMIZER, _MUCH_CASTING = 0.15, 0.15, 0.08
_MUCH_PYTHON, _MUCH_OTHER, _MUCH_OF_PRODUCTS = 0.25, 0.25, 0.05
# A GPU that computes for a smaller share of a step waits too long for the host.
_BUSY = 0.8
# The longest that the dispatch of one operator takes. More time than that goes to the script's own Python.
_LONGEST_DISPATCH_S = 100e-6
# From this speedup on a format is called faster.
_LEAST_SPEEDUP = 1.1
# A matmul is small if the one that gains most on this machine has more than this many times its operations.
_MUCH_SMALLER = 8
# Shares are rough where the profiler makes a step more than this many times as long.
_MUCH_LONGER = 1.5
_TENSOR_CORE_MULTIPLE = 8
_MOST_CHANGES = 4

# What a sentence of the template ``findings.txt`` is about, and the values that only it needs.
_Finding = tuple[str, dict[str, Any]]


def diagnosis_text(found: dict[str, Any], *, color: bool = False) -> str:
    """Return what ``verify.diagnose`` found in lines of at most 79 columns."""
    return terminal_text("diagnosis.txt", color=color, **_values(found))


def diagnosis_page(found: dict[str, Any], examination: dict[str, Any]) -> str:
    """Render the page of what ``verify.diagnose`` found on a machine that ``machine.examine`` saw."""
    return doctor_page(examination, title=site_name(found["target"][0]), **_values(found))


def _values(found: dict[str, Any]) -> dict[str, Any]:
    if found["problem"] is not None:
        return {"found": found}
    return {
        "found": found,
        "parts": _parts(found),
        "sizes": [_size(row) for row in found["together"]["sizes"]],
        "reads": _read_lines(found),
        "conclusion": conclusion(found),
        "worth_it": _worth_it(found["together"]),
    }


def _worth_it(together: dict[str, Any]) -> str:
    """Say whether mixed precision is worth it, in the words of ``narrowcast compare``."""
    if together["speedup"] is None:
        return f"cannot tell: {together['why_unknown']}"
    if together["speedup_interval"] is None:
        return f"cannot tell: {beside_others(together['speedup'], together['by_others'])}"
    return f"{together['worth_it']}: {measured_speed(together)}"


def _parts(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the parts of a step, with their times in FP32 and in mixed precision."""
    names = _PARTS if found["mixed"]["gpu_busy_share"] is None else _PARTS_ON_GPU
    rows = []
    for part, name in names.items():
        cells = []
        for run in _RUNS:
            share = found[run]["shares"][part]
            cell = UNKNOWN
            if share:
                time_s = share * found[run]["plain_step_s"]
                cell = f"{duration(time_s)} {percent(share):>5}"
            cells.append(cell)
        if cells != [UNKNOWN, UNKNOWN]:
            rows.append((name, *cells))
    return rows


def _size(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"{printable(_shape_text(row))} ({count_text(row['count'])})"
    machine = "" if row["machine_speedup"] is None else speed_text(row["machine_speedup"])
    return name, percent(row["share"]), speed_text(row["speedup"]), machine


def _shape_text(row: dict[str, Any]) -> str:
    """Format ``32 x 128 x 64``; of a convolution ``conv 8x64x32x32, 64x64x3x3``, input and weight."""
    shape, kind = row["shape"], row["kind"]
    if kind == "matmul":
        return " x ".join(map(str, shape)) or "unknown"
    operands = [shape]
    # The shape joins those of both operands, which have the same number of dimensions.
    if kind in ("convolution", "attention"):
        operands = [shape[: len(shape) // 2], shape[len(shape) // 2 :]]
    texts = ", ".join("x".join(map(str, operand)) for operand in operands)
    return f"{_SHORT.get(kind, kind)} {texts}"


def _read_lines(found: dict[str, Any]) -> list[str]:
    """Return a line such as ``train.py:11 item() 1`` for each call site that reads tensors."""
    lines = []
    for read in _waiting_reads(found):
        per_step = count_text(read["count"] / found["mixed"]["reads"]["steps"])
        lines.append(f"{read['site']} {read['what']} {per_step}")
    return lines


def _waiting_reads(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return reads of tensors on the model's device, the most frequent first."""
    if found["mixed"]["reads"] is None:
        return []
    return [read for read in found["mixed"]["reads"]["sites"] if read["device"] == found["device"]]


# ---- what it means


def conclusion(found: dict[str, Any]) -> list[str]:
    """Return sentences: what to expect of mixed precision, what to change, and the notes of the run."""
    if found["problem"] is not None:
        return []
    lines = []
    for finding in _expectation(found):
        lines.append(_text_of(finding, found))
    changes = sorted(_changes(found), key=lambda change: -change[0])[:_MOST_CHANGES]
    begins = "Change first"
    for _, change in changes:
        lines.append(f"{begins}: {_text_of(change, found)}")
        begins = "Then"
    for finding in _reads(found):
        lines.append(_text_of(finding, found))
    for note in (*found["notes"], *found["mixed"]["notes"]):
        lines.append(f"{note[:1].upper()}{note[1:]}.")
    return lines


def _text_of(finding: _Finding, found: dict[str, Any]) -> str:
    kind, values = finding
    return sentence("findings.txt", kind, found=found, **values)


def _expectation(found: dict[str, Any]) -> Iterator[_Finding]:
    """Yield what matmuls alone would give, and what was measured or why it is not worth it."""
    together = found["together"]
    limit = together["limit_machine"]
    has_matmuls = together["products_share"] and together["products_speedup"] is not None
    if not has_matmuls:
        yield "no matmuls", {}
    elif limit is None:
        yield "no limit", {}
    else:
        yield "limit", {}

    if together["not_faster"] is not None:
        # Its text also says what the matmuls gained in this script, and how much the profiler slowed a step.
        yield "not faster", {}
        return
    if has_matmuls:
        yield "limit here", {}
    for run, name in (("fp32", "FP32"), ("mixed", found["format"])):
        longer = found[run]["step_s"] / found[run]["plain_step_s"]
        if longer > _MUCH_LONGER:
            yield "slowed", {"run": name, "longer": longer}


def _changes(found: dict[str, Any]) -> Iterator[tuple[float, _Finding]]:
    """Yield changes, each with its priority: about the share of a step that it concerns."""
    mixed = found["mixed"]
    shares, busy = mixed["shares"], mixed["gpu_busy_share"]
    yield from _small_products(found)
    if busy is not None:
        yield from _unaligned(found)
        if busy < _BUSY:
            yield 1 - busy, ("gpu waits", {"share": 1 - busy})
    elif shares["python"] > _MUCH_PYTHON and mixed["ops"]["mean_s"]:
        between_s = shares["python"] * mixed["plain_step_s"]
        kind = "own python"
        if between_s < _LONGEST_DISPATCH_S * mixed["ops"]["count"]:
            kind = "python"
        yield shares["python"], (kind, {"between_s": between_s})

    for kind, share, much in (
        ("loading", mixed["loading_share"], _MUCH_LOADING),
        ("optimizer", shares["optimizer"], _MUCH_OPTIMIZER),
        ("casts", shares["casts"], _MUCH_CASTING),
        ("other ops", shares["other_ops"], _MUCH_OTHER),
    ):
        if share > much:
            yield share, (kind, {})


def _small_products(found: dict[str, Any]) -> Iterator[tuple[float, _Finding]]:
    """Yield that matmuls are too small, where larger ones are faster on this machine."""
    together, share = found["together"], found["mixed"]["shares"]["products"]
    here, best = together["products_speedup"], together["machine_best"]
    if here is None or best is None or not together["sizes"] or share < _MUCH_OF_PRODUCTS:
        return
    # No larger one is faster either, or the script's matmuls already gain at least half as much as the best.
    if best["speed"] < _LEAST_SPEEDUP or here >= max(_LEAST_SPEEDUP, best["speed"] / 2):
        return
    largest = together["sizes"][0]
    # Convolutions have rates of their own.
    if largest["kind"] not in ("matmul", "batched matmul"):
        return
    if math.prod(largest["shape"]) * _MUCH_SMALLER >= best["shape"][0] ** 3:
        return
    reason = together["not_faster"]
    if reason is not None and reason["cause"] == "kernels":
        # This change comes first: it is why the format loses.
        share += 1
    yield share, ("small", {"largest": _shape_text(largest), "speed": largest["speedup"]})


def _unaligned(found: dict[str, Any]) -> Iterator[tuple[float, _Finding]]:
    """Yield the product that takes longest among those with a size that is not a multiple of 8."""
    for row in found["together"]["sizes"]:
        odd = [size for size in _aligned_sizes(row) if size % _TENSOR_CORE_MULTIPLE]
        if odd and row["share"] > _MUCH_OF_PRODUCTS:
            values = {"shape": _shape_text(row), "share": row["share"], "odd": odd[0]}
            yield row["share"], ("unaligned", values)
            return


def _aligned_sizes(row: dict[str, Any]) -> list[int]:
    """Return the sizes that tensor cores need as multiples of 8; of a convolution, its channels."""
    shape: list[int] = row["shape"]
    if row["kind"] == "matmul":
        return shape
    if row["kind"] == "convolution":
        # The shape joins that of the input (batch, channels, ...) and that of the weight (channels, ...).
        return [shape[len(shape) // 2], *shape[1:2]]
    return []


def _reads(found: dict[str, Any]) -> Iterator[_Finding]:
    waiting = _waiting_reads(found)
    if waiting:
        total = sum(read["count"] for read in waiting) / found["mixed"]["reads"]["steps"]
        yield "reads", {"count": total, "site": waiting[0]["site"], "what": waiting[0]["what"]}

"""Text and page of ``narrowcast doctor SCRIPT``: where the time of a step goes, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from narrowcast.observe.explanation import count_text, percent
from narrowcast.report._doctor import doctor_page
from narrowcast.report._render import sentence, terminal_text
from narrowcast.report._text import UNKNOWN, duration, measured_speed, printable, site_name, speed_text

_RUNS = ("fp32", "mixed")
_PARTS = {
    "products": "matmuls (linear, conv, attention)",
    "casts": "casts between formats",
    "other_ops": "other ops (norms, elementwise, loss)",
    "optimizer": "optimizer",
    "loading": "loading data",
    "python": "Python and dispatch",
}
_SHORT = {"batched matmul": "bmm", "convolution": "conv", "recurrent layer": "recurrent"}
# Shares of a step from which on a part is worth a sentence.
_MUCH, _MUCH_CASTING, _MUCH_PYTHON, _SMALL_SHARE = 0.15, 0.08, 0.25, 0.05
_BUSY = 0.8
_LONGEST_DISPATCH_S = 100e-6
_AS_FAST = 1.1
_MUCH_SMALLER = 8
_MUCH_LONGER = 1.5
_TENSOR_CORES = 8
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
    values: dict[str, Any] = {"found": found}
    if found["problem"] is None:
        reads, steps = _waiting_reads(found), (found["mixed"]["reads"] or {"steps": 1})["steps"]
        values |= {
            "parts": _parts(found),
            "sizes": [_size(row) for row in found["together"]["sizes"]],
            "reads": [f"{read['site']} {read['what']} {count_text(read['count'] / steps)}" for read in reads],
            "conclusion": conclusion(found),
            "worth_it": _worth_it(found["together"]),
        }
    return values


def _worth_it(together: dict[str, Any]) -> str:
    """Say whether mixed precision is worth it, in the words of ``narrowcast compare``."""
    if together["speedup"] is None:
        return f"cannot tell: {together['why_unknown']}"
    return f"{together['worth_it']}: {measured_speed(together)}"


def _parts(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the parts of a step, with their times in FP32 and in mixed precision."""
    names = _PARTS if found["mixed"]["gpu_busy_share"] is None else _PARTS | {"python": "GPU waits"}
    rows = []
    for part, name in names.items():
        shares = [found[run]["shares"][part] for run in _RUNS]
        if any(share > 0 for share in shares):
            times = [share * found[run]["plain_step_s"] for run, share in zip(_RUNS, shares, strict=True)]
            cells = zip(times, shares, strict=True)
            rows.append((name, *(f"{duration(t)} {percent(s):>5}" if s else UNKNOWN for t, s in cells)))
    return rows


def _size(row: dict[str, Any]) -> tuple[str, ...]:
    here = UNKNOWN if row["speedup"] is None else speed_text(row["speedup"])
    machine = "" if row["machine_speedup"] is None else speed_text(row["machine_speedup"])
    name = f"{printable(_shape_text(row))} ({count_text(row['count'])})"
    return name, percent(row["share"]), here, machine


def conclusion(found: dict[str, Any]) -> list[str]:
    """Return what to expect of mixed precision for this script, what to change, and the notes of its run."""
    if found["problem"] is not None:
        return []

    def text(finding: _Finding) -> str:
        kind, values = finding
        return sentence("findings.txt", kind, found=found, **values)

    changes = sorted(_changes(found), key=lambda change: -change[0])[:_MOST_CHANGES]
    lines = [text(finding) for finding in (*_expectation(found), *_doubts(found))]
    lines += [f"{'Then' if n else 'Change first'}: {text(change)}" for n, (_, change) in enumerate(changes)]
    notes = [f"{note[:1].upper()}{note[1:]}." for note in (*found["notes"], *found["mixed"]["notes"])]
    return [*lines, *map(text, _reads(found)), *notes]


def _expectation(found: dict[str, Any]) -> Iterator[_Finding]:
    together, limit = found["together"], found["together"]["limit_machine"]
    if not together["products_share"] or together["products_speedup"] is None:
        yield "no matmuls", {}
    elif limit is None:
        yield "no limit", {}
        yield "limit here", {}
    else:
        before, after = (found[run]["shares"]["other_ops"] * found[run]["plain_step_s"] for run in _RUNS)
        faster = together["speedup"] is not None and together["speedup"] > limit
        yield "limit", {"others": (before, after) if faster and before > after else None}
        yield "limit here", {}
    if together["not_faster"] is not None:
        yield "not faster", {}


def _doubts(found: dict[str, Any]) -> Iterator[_Finding]:
    runs = (found["fp32"], found["mixed"])
    for run, name in zip(runs, ("FP32", found["format"]), strict=True):
        longer = run["step_s"] / run["plain_step_s"]
        if longer > _MUCH_LONGER:
            yield "slowed", {"run": name, "longer": longer}


def _changes(found: dict[str, Any]) -> Iterator[tuple[float, _Finding]]:
    """Yield the share of the mixed step that a change is about, and the change."""
    mixed = found["mixed"]
    shares, busy = mixed["shares"], mixed["gpu_busy_share"]
    yield from _small_products(found)
    if busy is not None:
        yield from _unaligned(found)
    if busy is not None and busy < _BUSY:
        yield 1 - busy, ("gpu waits", {"share": 1 - busy})
    elif busy is None and shares["python"] > _MUCH_PYTHON and mixed["ops"]["mean_s"]:
        between_s = shares["python"] * mixed["plain_step_s"]
        is_dispatch = between_s < _LONGEST_DISPATCH_S * mixed["ops"]["count"]
        yield shares["python"], ("python" if is_dispatch else "own python", {"between_s": between_s})
    for kind, share, much in (
        ("loading", mixed["loading_share"], _MUCH),
        ("optimizer", shares["optimizer"], _MUCH),
        ("casts", shares["casts"], _MUCH_CASTING),
        ("other ops", shares["other_ops"], _MUCH_PYTHON),
    ):
        if share > much:
            yield share, (kind, {})


def _small_products(found: dict[str, Any]) -> Iterator[tuple[float, _Finding]]:
    here, best = found["together"]["products_speedup"], found["together"]["machine_best"]
    if here is None or best is None or best["speed"] < _AS_FAST or not found["together"]["sizes"]:
        return
    if found["mixed"]["shares"]["products"] < _SMALL_SHARE:
        return
    largest = found["together"]["sizes"][0]
    # Convolutions have rates of their own.
    of_matrices = largest["kind"] in ("matmul", "batched matmul")
    small = of_matrices and math.prod(largest["shape"]) * _MUCH_SMALLER < best["shape"][0] ** 3
    if small and (here < _AS_FAST or here < best["speed"] / 2):
        # First, if it is why the format loses.
        reason = found["together"]["not_faster"]
        weight = found["mixed"]["shares"]["products"] + (reason is not None and reason["cause"] == "kernels")
        yield weight, ("small", {"largest": _shape_text(largest), "speed": largest["speedup"]})


def _unaligned(found: dict[str, Any]) -> Iterator[tuple[float, _Finding]]:
    """Yield the slowest product with a size that is no multiple of what tensor cores take."""
    for row in found["together"]["sizes"]:
        shape = row["shape"]
        channels = {"matmul": shape, "convolution": [shape[len(shape) // 2], *shape[1:2]]}
        odd = [number for number in channels.get(row["kind"], []) if number % _TENSOR_CORES]
        if odd and row["share"] > _SMALL_SHARE:
            values = {"shape": _shape_text(row), "share": row["share"], "odd": odd[0]}
            yield row["share"], ("unaligned", values)
            return


def _reads(found: dict[str, Any]) -> Iterator[_Finding]:
    waiting = _waiting_reads(found)
    if waiting:
        total = sum(read["count"] for read in waiting) / found["mixed"]["reads"]["steps"]
        yield "reads", {"count": total, "site": waiting[0]["site"], "what": waiting[0]["what"]}


def _waiting_reads(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return reads of tensors on the model's device, the most frequent first."""
    reads = found["mixed"]["reads"] or {"sites": []}
    return [site for site in reads["sites"] if site["device"] == found["device"]]


def _shape_text(row: dict[str, Any]) -> str:
    """Format ``32 x 128 x 64``; of a convolution ``conv 8x64x32x32, 64x64x3x3``, input and weight."""
    shape, kind = row["shape"], row["kind"]
    if kind == "matmul":
        return " x ".join(map(str, shape)) or "unknown"
    half = len(shape) // 2 if kind in ("convolution", "attention") else len(shape)
    parts = ["x".join(map(str, part)) for part in (shape[:half], shape[half:]) if part]
    return f"{_SHORT.get(kind, kind)} {', '.join(parts)}"

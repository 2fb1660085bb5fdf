"""Text of ``narrowcast doctor SCRIPT``: where the time of a step goes, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowcast.observe.explanation import bytes_text, percent, wrapped
from narrowcast.report._doctor import NOISY, two_digits
from narrowcast.report._explain import BOLD, PLAIN
from narrowcast.report._text import printable

_WIDTH = 79
_MOST_READS = 4
_RUNS = ("fp32", "mixed")
_PARTS = {
    "products": "products (linear, conv, attention)",
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
_AS_FAST = 1.1
_MUCH_FASTER = 1.5
_MUCH_LONGER = 1.5
_TENSOR_CORES = 8
_MOST_FINDINGS = 4


def diagnosis_text(found: dict[str, Any], *, color: bool = False) -> str:
    """Return the result of ``narrowcast doctor SCRIPT`` in lines of at most 79 columns.

    Args:
        found: what ``verify.diagnose`` returns.
        color: whether to use bold type.
    """
    target = printable(" ".join(found["target"]))
    if found["problem"] is not None:
        return "\n".join(wrapped(f"{target}: {printable(found['problem'])}."))
    fp32, mixed, unit, name = found["fp32"], found["mixed"], found["unit"], found["format"]
    where = "this CPU" if found["device"] == "cpu" else found["device"]
    speed = two_digits(found["together"]["speedup"])
    lines = [(line, True) for line in wrapped(f"{target}: in {name} on {where}, {speed}x the speed of FP32")]
    times = f"{_seconds(fp32['plain_step_s'])} in FP32 and {_seconds(mixed['plain_step_s'])} in {name}"
    lines += _plain(f"A {unit} takes {times}.")
    lines += [("", False), *_parts(found), ("", False), *_sizes(found), *_counts(found), ("", False)]
    lines.append(("What this means", True))
    for text in conclusion(found):
        lines += _plain(f"- {text}", first="  ", then="    ")
    lines += [
        ("", False),
        *_plain(
            f"A {unit}: the median of {fp32['plain_steps']} and of {mixed['plain_steps']}. Its parts: shares "
            f"of {fp32['steps']} and {mixed['steps']} {unit}s under torch's profiler, and what they are of "
            f"the median. (n): products of a size in a {unit}; here: their speed against FP32 here, "
            "without casts; this machine: that of the nearest size that narrowcast doctor measured."
        ),
    ]
    return "\n".join(f"{BOLD}{text}{PLAIN}" if heading and color else text for text, heading in lines)


def _parts(found: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    head = f"Where the time of a {found['unit']} goes"
    yield f"{head:<40}{'FP32':>16}{found['format']:>18}", True
    on_gpu = found["mixed"]["gpu_busy_share"] is not None
    for part, words in _PARTS.items():
        shown = "GPU waits" if on_gpu and part == "python" else words
        cells = []
        for run, width in zip(_RUNS, (16, 18), strict=True):
            share = found[run]["shares"][part]
            time = f"{_seconds(share * found[run]['plain_step_s'])} {percent(share):>5}" if share else "-"
            cells.append(f"{time:>{width}}")
        if any(found[run]["shares"][part] > 0 for run in _RUNS):
            yield f"  {shown:<38}{''.join(cells)}", False


def _sizes(found: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    sizes, left = found["together"]["sizes"], found["together"]["sizes_left_out"]
    if not sizes:
        return
    yield f"{'Products by size, M x N x K':<40}{'of FP32':>9}{'here':>8}  {'this machine'}", True
    for row in sizes:
        name = f"{printable(_shape_text(row))} ({row['count']:.4g})"
        here = "-" if row["speedup"] is None else _x(row["speedup"])
        machine = ""
        if row["machine_speedup"] is not None:
            machine = f"{_x(row['machine_speedup'])} at {'x'.join(map(str, row['machine_shape']))}"
        if len(name) > 37:
            yield f"  {name}"[:_WIDTH], False
            name = ""
        yield f"  {name:<38}{percent(row['share']):>9}{here:>8}  {machine}".rstrip(), False
    if left:
        yield f"  and {left} more", False


def _counts(found: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    mixed, unit = found["mixed"], found["unit"]
    casts, ops = mixed["casts"], mixed["ops"]
    yield from _plain(
        f"Casts: {_count(casts['count'])} a {unit}, {bytes_text(casts['bytes'])} read and written; "
        f"{_count(casts['weight_count'])} of weights, {bytes_text(casts['weight_bytes'])}."
    )
    mean = "" if ops["mean_s"] is None else f", {_seconds(ops['mean_s'])} each"
    busy = mixed["gpu_busy_share"]
    tail = "" if busy is None else f" on the host; the GPU is busy {busy:.0%} of the {unit}"
    yield from _plain(f"Ops: {_count(ops['count'])} a {unit}{mean}{tail}.")
    if mixed["reads"] is None:
        yield from _plain(f"Reads of tensors: the script ended before any {unit} was left to count them in.")
        return
    sites, steps = _waiting_reads(found), mixed["reads"]["steps"]
    shown = [
        f"{printable(site['site'])} {printable(site['what'])} {_count(site['count'] / steps)}"
        for site in sites[:_MOST_READS]
    ]
    more = f", and {len(sites) - _MOST_READS} more lines" if len(sites) > _MOST_READS else ""
    listed = f" a {unit}: {', '.join(shown)}{more}" if sites else f": none in {steps} {unit}s"
    yield from _plain(f"Reads of tensors{listed}.")


# ---- what it means


def conclusion(found: dict[str, Any]) -> list[str]:
    """Return what to expect of mixed precision for this script, then what to change, the most time first.

    Args:
        found: what ``verify.diagnose`` returns.
    """
    if found["problem"] is not None:
        return []
    changes = sorted(_changes(found), key=lambda change: -change[0])[:_MOST_FINDINGS]
    lines = [*_expectation(found), *_doubts(found)]
    for number, (_, text) in enumerate(changes):
        lines.append(f"Change first: {text}" if number == 0 else f"Then: {text}")
    return [*lines, *_reads(found)]


def _expectation(found: dict[str, Any]) -> Iterator[str]:
    together, name, unit = found["together"], found["format"], found["unit"]
    share, here, limit = together["products_share"], together["products_speedup"], together["limit_machine"]
    measured = _x(together["speedup"])
    if not share or here is None:
        yield (
            f"No products were seen in both runs, and only they are faster in {name}: expect no gain. "
            f"Measured: {measured}."
        )
    else:
        part = f"Products take {share:.0%} of the FP32 {unit}"
        if limit is not None:
            before, after = (found[run]["shares"]["other_ops"] * found[run]["plain_step_s"] for run in _RUNS)
            more = f", since other ops took less time too ({_seconds(before)}, {_seconds(after)})"
            yield (
                f"{part}. If they alone got faster, by this machine's {_x(together['machine_speedup'])} for "
                f"sizes like these, a {unit} would be at most {_x(limit)} as fast; measured: {measured}"
                f"{more if together['speedup'] > limit and before > after else ''}."
            )
        else:
            yield (
                f"{part}; no size near these was measured on this machine. Measured: a {unit} is "
                f"{measured} as fast in {name}."
            )
        yield (
            f"In this script the same products ran {_x(here)} as fast in {name}, casts not counted; by "
            f"itself that is {_x(together['limit_here'])} for the {unit}."
        )
    if together["speedup"] * _AS_FAST < 1:
        yield f"As it is, the {unit} is faster in FP32."


def _doubts(found: dict[str, Any]) -> Iterator[str]:
    unit, runs = found["unit"], (found["fp32"], found["mixed"])
    noisy = max((run["plain_step_s_high"] - run["plain_step_s_low"]) / run["plain_step_s"] for run in runs)
    if noisy > NOISY:
        yield (
            f"The {unit}s differed: the middle half spans {noisy:.0%} of the median. Run it again on a quiet "
            "machine before you trust a difference of that size."
        )
    for run, name in zip(runs, ("FP32", found["format"]), strict=True):
        longer = run["step_s"] / run["plain_step_s"]
        if longer > _MUCH_LONGER:
            yield f"Under the profiler a {unit} in {name} took {_x(longer)} as long: its shares are rough."


def _changes(found: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Yield the share of the mixed step that a change is about, and the change."""
    mixed, unit = found["mixed"], found["unit"]
    shares, ops, casts, busy = mixed["shares"], mixed["ops"], mixed["casts"], mixed["gpu_busy_share"]
    yield from _small_products(found)
    yield from _unaligned(found) if busy is not None else ()
    if busy is not None and busy < _BUSY:
        text = (
            f"the GPU waits {1 - busy:.0%} of the {unit} for {ops['count']:.0f} ops from the host; a bigger "
            "batch, torch.compile or CUDA graphs launch less."
        )
        yield 1 - busy, text
    elif busy is None and shares["python"] > _MUCH_PYTHON and ops["mean_s"]:
        text = (
            f"Python and dispatch take {shares['python']:.0%}, around {ops['count']:.0f} ops a {unit} of "
            f"{_seconds(ops['mean_s'])} each; a bigger batch makes the same ops larger, torch.compile makes "
            "fewer."
        )
        yield shares["python"], text
    if mixed["loading_share"] > _MUCH:
        text = (
            f"loading data takes {mixed['loading_share']:.0%} of the host's time, which no format changes: "
            "DataLoader(num_workers=...) does it in other processes, or prepare the data once."
        )
        yield mixed["loading_share"], text
    if shares["optimizer"] > _MUCH:
        fused = "fused=True makes it one op, " if mixed["fused"] is False else ""
        text = f"the optimizer takes {shares['optimizer']:.0%}, in FP32 as it should: {fused}a bigger batch "
        yield shares["optimizer"], f"{text}means fewer steps."
    if shares["casts"] > _MUCH_CASTING:
        text = (
            f"casts take {shares['casts']:.0%} ({casts['count']:.0f} a {unit}, {casts['weight_count']:.0f} "
            "of weights, which cost the same for any batch): a bigger batch, or torch.compile, which joins "
            "casts with the ops beside them."
        )
        yield shares["casts"], text
    if shares["other_ops"] > _MUCH_PYTHON:
        text = (
            f"other ops (norms, elementwise, loss) take {shares['other_ops']:.0%}; torch.compile joins them, "
            "so that each tensor is read once."
        )
        yield shares["other_ops"], text


def _small_products(found: dict[str, Any]) -> Iterator[tuple[float, str]]:
    here, best = found["together"]["products_speedup"], found["together"]["machine_best"]
    if here is None or best is None or best["speed"] < _AS_FAST or not found["together"]["sizes"]:
        return
    largest = found["together"]["sizes"][0]
    near, speed = largest["machine_speedup"], largest["speedup"]
    # Convolutions have rates of their own; if the nearest size gains nearly as much, size is not the reason.
    of_matrices = largest["kind"] in ("matmul", "batched matmul")
    small = of_matrices and (near is None or near * _MUCH_FASTER < best["speed"])
    if small and (here < _AS_FAST or here < best["speed"] / 2):
        ran = f"{found['format']} {'was not seen' if speed is None else f'ran {_x(speed)} as fast as FP32'}"
        # First, if it is why the format loses.
        yield (
            found["mixed"]["shares"]["products"] + (here < 1),
            f"the products are small: most time goes to {_shape_text(largest)}, where {ran}; "
            f"{_times(best['shape'])} runs {_x(best['speed'])} as fast on this machine. A bigger batch or "
            "wider layers come nearer.",
        )


def _unaligned(found: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Yield the slowest product with a size that is no multiple of what tensor cores take."""
    for row in found["together"]["sizes"]:
        shape = row["shape"]
        channels = {"matmul": shape, "convolution": [shape[len(shape) // 2], *shape[1:2]]}.get(
            row["kind"], []
        )
        odd = [number for number in channels if number % _TENSOR_CORES]
        if odd and row["share"] > _SMALL_SHARE:
            text = (
                f"{_shape_text(row)} takes {row['share']:.0%} of the FP32 time, and {odd[0]} is no multiple"
            )
            yield row["share"], f"{text} of 8, which tensor cores want."
            return


def _reads(found: dict[str, Any]) -> Iterator[str]:
    waiting = _waiting_reads(found)
    if waiting:
        total = sum(site["count"] for site in waiting) / found["mixed"]["reads"]["steps"]
        where = f"{printable(waiting[0]['site'])}, {printable(waiting[0]['what'])}"
        some = f"Reads of tensors, {_count(total)} a {found['unit']} (most at {where}),"
        if found["device"] == "cpu":
            yield f"{some} cost nothing on a CPU; on a GPU each would wait for it."
        else:
            yield f"{some} each wait until the GPU has come so far: read every N {found['unit']}s instead."


def _waiting_reads(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return reads of tensors on the model's device, the most frequent first."""
    reads = found["mixed"]["reads"] or {"sites": []}
    return [site for site in reads["sites"] if site["device"] == found["device"]]


# ---- words


def _shape_text(row: dict[str, Any]) -> str:
    """Format ``32 x 128 x 64``; of a convolution ``conv 8x64x32x32, 64x64x3x3``, input and weight."""
    shape, kind = row["shape"], row["kind"]
    if kind == "matmul":
        return _times(shape) or "unknown"
    half = len(shape) // 2 if kind in ("convolution", "attention") else len(shape)
    parts = ["x".join(map(str, part)) for part in (shape[:half], shape[half:]) if part]
    return f"{_SHORT.get(kind, kind)} {', '.join(parts)}"


def _times(shape: list[int]) -> str:
    return " x ".join(map(str, shape))


def _x(ratio: float) -> str:
    return f"{two_digits(ratio)}x"


def _count(number: float) -> str:
    return f"{number:.0f}" if number >= 10 or number == round(number) else f"{number:.1f}"


def _seconds(number: float) -> str:
    """Format ``2.4 s``, ``31 ms``, ``5.2 us``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if number * factor >= 1:
            return f"{two_digits(number * factor)} {unit}"
    return f"{two_digits(number * 1e6)} us"


def _plain(text: str, *, first: str = "", then: str = "  ") -> list[tuple[str, bool]]:
    return [(line, False) for line in wrapped(text, first=first, then=then)]

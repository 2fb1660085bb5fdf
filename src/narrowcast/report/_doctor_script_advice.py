"""What a diagnosis of a script means: sentences, each from a figure that was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowcast.report._doctor_advice import NOISY, two_digits
from narrowcast.report._text import printable

# Shares of a step from which on a part is worth a sentence.
_MUCH = 0.15
_MUCH_CASTING = 0.08
_MUCH_PYTHON = 0.25
_BUSY = 0.8
_SMALL_SHARE = 0.05
_AS_FAST = 1.1
_TENSOR_CORES = 8
_MUCH_LONGER = 1.5
_MUCH_FASTER = 1.5
_MOST_FINDINGS = 4


def conclusion(found: dict[str, Any]) -> list[str]:
    """What to expect of mixed precision for this script, then what to change, the most time first.

    Args:
        found: what ``verify.diagnose`` returns.
    """
    if found["problem"] is not None:
        return []
    changes = sorted(_changes(found), key=lambda change: -change[0])[:_MOST_FINDINGS]
    lines = [*_expectation(found)]
    for number, (_, text) in enumerate(changes):
        lines.append(f"Change first: {text}" if number == 0 else f"Then: {text}")
    return [*lines, *_reads(found)]


def _expectation(found: dict[str, Any]) -> Iterator[str]:
    together, name = found["together"], found["format"]
    share, unit = together["products_share"], found["unit"]
    here, limit = together["products_speedup"], together["limit_machine"]
    if not share or here is None:
        yield (
            f"No products were seen in both runs, and they are what {name} makes faster: expect no gain "
            f"from it. Measured: {_x(together['speedup'])}."
        )
    else:
        part = f"Products take {share:.0%} of the FP32 {unit}"
        if limit is not None:
            yield (
                f"{part}. If they alone got faster, by this machine's {_x(together['machine_speedup'])} for "
                f"sizes like these, a {unit} would be at most {_x(limit)} as fast; measured: "
                f"{_x(together['speedup'])}{_more(found, limit)}."
            )
        else:
            yield (
                f"{part}; no size near these was measured on this machine. Measured: a {unit} is "
                f"{_x(together['speedup'])} as fast in {name}."
            )
        yield (
            f"In this script the same products ran {_x(here)} as fast in {name}, casts not counted; by "
            f"itself that is {_x(together['limit_here'])} for the {unit}."
        )
    if together["speedup"] * _AS_FAST < 1:
        yield f"As it is, the {unit} is faster in FP32."
    yield from _doubts(found)


def _more(found: dict[str, Any], limit: float) -> str:
    """Why more than products was gained, where other ops took less time too."""
    runs = (found["fp32"], found["mixed"])
    before, after = (run["shares"]["other_ops"] * run["plain_step_s"] for run in runs)
    if found["together"]["speedup"] <= limit or before <= after:
        return ""
    return f", since other ops took less time too ({seconds(before)}, {seconds(after)})"


def _doubts(found: dict[str, Any]) -> Iterator[str]:
    unit = found["unit"]
    noisy = max(_spread(found["fp32"]), _spread(found["mixed"]))
    if noisy > NOISY:
        yield (
            f"The {unit}s differed: the middle half spans {noisy:.0%} of the median. Run it again on a quiet "
            "machine before you trust a difference of that size."
        )
    for run, name in (("fp32", "FP32"), ("mixed", found["format"])):
        longer = found[run]["step_s"] / found[run]["plain_step_s"]
        if longer > _MUCH_LONGER:
            yield (
                f"Under the profiler a {unit} in {name} took {_x(longer)} as long, so its shares are rough."
            )


def _changes(found: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Share of the mixed step that a change is about, and the change."""
    mixed, unit = found["mixed"], found["unit"]
    shares, on_gpu = mixed["shares"], mixed["gpu_busy_share"] is not None
    yield from _small_products(found)
    yield from _unaligned(found) if on_gpu else ()
    if on_gpu and mixed["gpu_busy_share"] < _BUSY:
        waits = 1 - mixed["gpu_busy_share"]
        yield (
            waits,
            f"the GPU waits {waits:.0%} of the {unit} for {mixed['ops']['count']:.0f} ops from the host; a "
            "bigger batch, torch.compile or CUDA graphs launch less.",
        )
    elif not on_gpu and shares["python"] > _MUCH_PYTHON and mixed["ops"]["mean_s"]:
        yield (
            shares["python"],
            f"Python and dispatch take {shares['python']:.0%}, around {mixed['ops']['count']:.0f} ops a "
            f"{unit} of {seconds(mixed['ops']['mean_s'])} each; a bigger batch makes the same ops larger, "
            "torch.compile makes fewer.",
        )
    if mixed["loading_share"] > _MUCH:
        yield (
            mixed["loading_share"],
            f"loading data takes {mixed['loading_share']:.0%} of the host's time, which no format changes: "
            "DataLoader(num_workers=...) does it in other processes, or prepare the data once.",
        )
    if shares["optimizer"] > _MUCH:
        fused = "fused=True makes it one op, " if mixed["fused"] is False else ""
        yield (
            shares["optimizer"],
            f"the optimizer takes {shares['optimizer']:.0%}, in FP32 as it should: {fused}a bigger batch "
            "means fewer steps.",
        )
    if shares["casts"] > _MUCH_CASTING:
        casts = mixed["casts"]
        yield (
            shares["casts"],
            f"casts take {shares['casts']:.0%} ({casts['count']:.0f} a {unit}, {casts['weight_count']:.0f} "
            "of weights, which cost the same for any batch): a bigger batch, or torch.compile, which joins "
            "casts with the ops beside them.",
        )
    if shares["other_ops"] > _MUCH_PYTHON:
        yield (
            shares["other_ops"],
            f"other ops (norms, elementwise, loss) take {shares['other_ops']:.0%}; torch.compile joins them, "
            "so that each tensor is read once.",
        )


def _small_products(found: dict[str, Any]) -> Iterator[tuple[float, str]]:
    together, best = found["together"], found["together"]["machine_best"]
    here = together["products_speedup"]
    if here is None or best is None or best["speed"] < _AS_FAST or not together["sizes"]:
        return
    largest = together["sizes"][0]
    near = largest["machine_speedup"]
    # Convolutions have rates of their own; where the nearest size gains nearly as much, size is no reason.
    of_matrices = largest["kind"] in ("matmul", "batched matmul")
    small = of_matrices and (near is None or near * _MUCH_FASTER < best["speed"])
    if small and (here < _AS_FAST or here < best["speed"] / 2):
        yield (
            found["mixed"]["shares"]["products"] + (here < 1),  # first, where it is why the format loses
            f"the products are small: most time goes to {size_text(largest)}, where "
            f"{_speed_of(largest, found['format'])}; {_times(best['shape'])} runs {_x(best['speed'])} as "
            "fast on this machine. A bigger batch or wider layers come nearer.",
        )


def _speed_of(size: dict[str, Any], format_: str) -> str:
    if size["speedup"] is None:
        return f"{format_} was not seen"
    return f"{format_} ran {_x(size['speedup'])} as fast as FP32"


def _unaligned(found: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Sizes that tensor cores take in pieces of eight."""
    rows = [row for row in found["together"]["sizes"] if row["kind"] in ("matmul", "convolution")]
    for row in rows:
        channels = row["shape"] if row["kind"] == "matmul" else _channels(row["shape"])
        odd = [number for number in channels if number % _TENSOR_CORES]
        if odd and row["share"] > _SMALL_SHARE:
            yield (
                row["share"],
                f"{size_text(row)} takes {row['share']:.0%} of the FP32 time, and {odd[0]} is no multiple of "
                "8, which tensor cores want.",
            )
            return


def _channels(shape: list[int]) -> list[int]:
    half = len(shape) // 2
    return [shape[half], shape[1]]


def _reads(found: dict[str, Any]) -> Iterator[str]:
    reads, on_cpu = found["mixed"]["reads"], found["device"] == "cpu"
    waiting = [] if reads is None else waiting_reads(found)
    if not waiting or reads is None:
        return
    total, first = sum(site["count"] for site in waiting) / reads["steps"], waiting[0]
    where = f"{printable(first['site'])}, {printable(first['what'])}"
    some = f"Reads of tensors, {count_text(total)} a {found['unit']} (most at {where}),"
    if on_cpu:
        yield f"{some} cost nothing on a CPU; on a GPU each would wait for it."
    else:
        yield f"{some} each wait until the GPU has come so far: read every N {found['unit']}s instead."


def waiting_reads(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads of tensors on the model's device, the most frequent first."""
    reads = found["mixed"]["reads"]
    return [site for site in (reads or {"sites": []})["sites"] if site["device"] == found["device"]]


_SHORT = {"batched matmul": "bmm", "convolution": "conv", "recurrent layer": "recurrent"}


def size_text(row: dict[str, Any]) -> str:
    """``32 x 128 x 64``; of a convolution ``conv 8x64x32x32, 64x64x3x3``, input and weight."""
    shape, kind = row["shape"], row["kind"]
    if kind == "matmul":
        return _times(shape) or "unknown"
    half = len(shape) // 2 if kind in ("convolution", "attention") else len(shape)
    parts = ["x".join(map(str, part)) for part in (shape[:half], shape[half:]) if part]
    return f"{_SHORT.get(kind, kind)} {', '.join(parts)}"


def _times(shape: list[int]) -> str:
    return " x ".join(map(str, shape))


def _spread(profile: dict[str, Any]) -> float:
    low, high = profile["plain_step_s_low"], profile["plain_step_s_high"]
    return float((high - low) / profile["plain_step_s"])


def _x(ratio: float) -> str:
    return f"{two_digits(ratio)}x"


def count_text(number: float) -> str:
    """``77``, ``2.5``."""
    return f"{number:.0f}" if number >= 10 or number == round(number) else f"{number:.1f}"


def seconds(number: float) -> str:
    """``2.4 s``, ``31 ms``, ``5.2 us``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if number * factor >= 1:
            return f"{two_digits(number * factor)} {unit}"
    return f"{two_digits(number * 1e6)} us"

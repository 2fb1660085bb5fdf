"""Where the time of a training step goes: a few steps recorded by torch's profiler, and the sums per step."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.observe._torch_internals import profiler_is_on
from narrowcast.observe.profiling._products import is_product, product_size, same_size

PRODUCTS, CASTS, OTHER, OPTIMIZER, LOADING, PYTHON = (
    "products",
    "casts",
    "other_ops",
    "optimizer",
    "loading",
    "python",
)
PARTS = (PRODUCTS, CASTS, OTHER, OPTIMIZER, LOADING, PYTHON)
_MARK = "narrowcast: between two steps"
# Ranges that torch's optimizers and DataLoader record around their work.
_STEP, _LOADER = "Optimizer.step#", "enumerate(DataLoader)#"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# A cast is a copy inside one of these; autograd makes it again for the gradient.
_CASTING = ("aten::to", "aten::_to_copy", "aten::copy_")
_CAST_BACKWARD = ("ToCopyBackward0", "autograd::engine::evaluate_function: ToCopyBackward0")
# A step that lasts longer than this times the median was disturbed by something else.
_DISTURBED = 1.5


def stamp(device_type: str) -> Any:
    """Return the time now; on CUDA an event of the current stream."""
    if device_type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(earlier: Any, later: Any) -> float:
    """Return the seconds between two stamps; waits until a GPU has reached ``later``."""
    if isinstance(earlier, float):
        return float(later) - earlier
    later.synchronize()
    return float(earlier.elapsed_time(later)) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that an op was given: shape, dtype without ``torch.``, and address of its storage."""

    shape: tuple[int, ...]
    dtype: str
    storage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An op as the profiler recorded it.

    Attributes:
        name: such as ``"aten::mm"``.
        start_ns: on the clock of the profiler.
        duration_ns: on the host, children included.
        device_ns: of the kernels that it launched itself, children not included.
        thread: in which it ran.
        operands: its tensors by position; None for other arguments.
        children: the ops that it called, in order.
    """

    name: str
    start_ns: int = 0
    duration_ns: int = 0
    device_ns: int = 0
    thread: int = 1
    operands: tuple[Operand | None, ...] = ()
    children: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Some recorded steps.

    Attributes:
        ops: the outermost ops of every thread, in order.
        marks_ns: where steps begin and end, one more than there are steps.
        thread: in which the script steps.
        kernels_ns: start and end of everything that ran on a GPU.
    """

    ops: Sequence[Op]
    marks_ns: Sequence[int]
    thread: int = 1
    kernels_ns: Sequence[tuple[int, int]] = ()


class StepProfiler:
    """Records the ops of some steps; start it, mark each end of a step, stop it between steps::

        profiler = StepProfiler()
        profiler.start()
        for _ in range(3):
            step()
            profiler.mark()
        print(summarize(profiler.stop()))

    Raises:
        UnsupportedError: on starting or stopping, if another profiler runs in this thread.
        OrderError: on stopping what was not started.
    """

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        if profiler_is_on():
            raise UnsupportedError("a profiler runs in this thread already: switch that one off")
        recording = profile(activities=activities, record_shapes=True)
        recording.__enter__()  # type: ignore[no-untyped-call]
        self._profile = recording
        self.mark()

    def mark(self) -> None:
        """End a step and begin the next."""
        with record_function(_MARK):
            pass

    def stop(self) -> Recording:
        if self._profile is None:
            raise OrderError("nothing is recorded: start the profiler first")
        recording, self._profile = self._profile, None
        recording.__exit__(None, None, None)
        results = recording.profiler.kineto_results if recording.profiler else None
        if results is None:
            raise UnsupportedError("another profiler ran in this thread meanwhile; switch that one off")
        return _recording(results)


def _recording(results: Any) -> Recording:
    kernels: dict[int, int] = defaultdict(int)
    intervals = []
    for event in results.events():
        # Annotations of the host appear on the GPU too, around the kernels that it launched.
        on_gpu = event.device_type() == torch.profiler.DeviceType.CUDA and not event.is_user_annotation()
        if on_gpu and event.duration_ns() > 0:
            intervals.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            kernels[event.linked_correlation_id()] += event.duration_ns()
    ops = [op for event in results.experimental_event_tree() if (op := _op(event, kernels)) is not None]
    marks = [op for op in ops if op.name == _MARK]
    if not marks:
        raise UnsupportedError("the record has no steps: another profiler ran in this thread meanwhile")
    return Recording(
        ops=[op for op in ops if op.name != _MARK],
        marks_ns=[op.start_ns for op in marks],
        thread=marks[0].thread,
        kernels_ns=intervals,
    )


def _op(event: Any, kernels: dict[int, int]) -> Op | None:
    kind = event.tag.name
    if kind not in ("TorchOp", "Backend"):
        return None
    given = event.typed[1].inputs if kind == "TorchOp" else ()
    return Op(
        name=event.name,
        start_ns=event.start_time_ns,
        duration_ns=event.duration_time_ns,
        device_ns=kernels.get(event.correlation_id, 0),
        thread=event.start_tid,
        operands=tuple(_operand(value) for value in given),
        children=tuple(op for child in event.children if (op := _op(child, kernels)) is not None),
    )


def _operand(value: Any) -> Operand | None:
    if getattr(value, "sizes", None) is None:
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    return Operand(shape=tuple(value.sizes), dtype=dtype, storage=value.storage_data_ptr or 0)


def summarize(
    recording: Recording, *, device: str = "cpu", left_out: Iterable[int] = (), weights: Iterable[int] = ()
) -> dict[str, Any]:
    """Sum up what one step spends its time on; means over the recorded steps.

    On a CPU time is that of ops in the script's thread, and the rest of a step is Python and dispatch. On a
    GPU time is that of kernels, and the rest is the GPU waiting.

    Args:
        recording: what ``StepProfiler.stop`` returned. Steps that lasted half as long again as the median
            are left out: something else was running.
        device: type of the model's device.
        left_out: numbers of steps that are not like the others, such as those with an evaluation.
        weights: storages of the parameters.

    Returns:
        JSON-ready: ``steps``; ``step_s`` under the profiler; ``parts_s`` and ``shares`` (sum 1) of products,
        casts, other ops, the optimizer, loading of data, and Python (on a GPU: waiting); ``products`` by size
        with ``count``, ``share`` of the step and ``each_s``, the median; ``casts``; ``ops`` with their number
        and mean time; ``loading_share`` of the host's time; ``gpu_busy_share``, null on a CPU.

    Raises:
        UnsupportedError: there is no step in it.
    """
    on_gpu, out = device != "cpu" and bool(recording.kernels_ns), set(left_out)
    pairs = list(zip(recording.marks_ns, recording.marks_ns[1:], strict=False))
    windows = [pair for number, pair in enumerate(pairs) if number not in out] or pairs
    if not windows:
        raise UnsupportedError("no step was recorded")
    usual = statistics.median_low([b - a for a, b in windows])
    windows = [(a, b) for a, b in windows if b - a <= _DISTURBED * usual]
    every = [op for op in recording.ops if any(a <= op.start_ns < b for a, b in windows)]
    mine = [op for op in every if op.thread == recording.thread]
    ops, steps = (every if on_gpu else mine), len(windows)
    wall = sum(b - a for a, b in windows)
    busy = sum(union_ns(recording.kernels_ns, a, b) for a, b in windows) if on_gpu else None
    shares = _shares(parts_ns(ops, device=on_gpu), wall, busy)
    called = list(outermost_ops(ops))
    sizes = products_by_size(ops, device=on_gpu)
    in_sizes = sum(row["count"] * row["each_ns"] for row in sizes) or 1
    scale = wall / steps / 1e9
    return {
        "device": device,
        "steps": steps,
        "step_s": scale,
        "parts_s": {part: share * scale for part, share in shares.items()},
        "shares": shares,
        "products": [
            {
                "kind": row["kind"],
                "shape": list(row["shape"]),
                "count": row["count"] / steps,
                "share": shares[PRODUCTS] * row["count"] * row["each_ns"] / in_sizes,
                "each_s": row["each_ns"] / 1e9,
            }
            for row in sizes
        ],
        "casts": {name: value / steps for name, value in sum_of_casts(ops, frozenset(weights)).items()}
        | {"share": shares[CASTS]},
        "ops": {
            "count": len(called) / steps,
            "mean_s": sum(op.duration_ns for op in called) / len(called) / 1e9 if called else None,
        },
        "loading_share": parts_ns(mine, device=False)[LOADING] / wall,
        "gpu_busy_share": None if busy is None else busy / wall,
    }


def _shares(parts: dict[str, int], wall: int, busy: int | None) -> dict[str, float]:
    """Return shares of a step's time; kernels that ran side by side share the time that the GPU was busy."""
    total = sum(parts.values())
    covered = min(total, wall) if busy is None else min(busy, wall)
    shares = {part: covered * parts.get(part, 0) / (total or 1) / wall for part in PARTS if part != PYTHON}
    return shares | {PYTHON: 1.0 - sum(shares.values())}


# ---- arithmetic on ops


def parts_ns(ops: Iterable[Op], *, device: bool) -> dict[str, int]:
    """Return the nanoseconds of each part but ``PYTHON``, which is the rest of a step.

    An op belongs to the part that its own name says, else to that of its caller: the softmax inside an
    attention is the attention's, a cast inside a linear layer is a cast, a matmul inside an optimizer is a
    product.

    Args:
        ops: the outermost ones.
        device: time of kernels on the device; else time of ops on the host.
    """
    sums = dict.fromkeys(PARTS, 0)

    def add(op: Op, inherited: str) -> None:
        part = _part_of(op, inherited)
        own = op.device_ns if device else max(0, op.duration_ns - sum(c.duration_ns for c in op.children))
        sums[OTHER if device and part == PYTHON else part] += own
        for child in op.children:
            add(child, part)

    for op in ops:
        add(op, PYTHON)
    sums.pop(PYTHON)
    return sums


def _part_of(op: Op, inherited: str) -> str:
    name = op.name
    if inherited in (LOADING, CASTS):
        return inherited
    if name.startswith(_LOADER):
        return LOADING
    if name in (*_CASTING, *_CAST_BACKWARD) and next(casts_in(op), None) is not None:
        return CASTS
    if is_product(name):
        return PRODUCTS
    if inherited != PYTHON or name.startswith(_STEP):
        return OPTIMIZER if name.startswith(_STEP) else inherited
    is_op = "::" in name and not name.startswith(("autograd::", "torch::autograd::"))
    return OTHER if is_op or name.startswith("## Call CompiledFxGraph") else PYTHON


def casts_in(op: Op) -> Iterator[tuple[Operand, Operand]]:
    """Yield destination and source of every copy in ``op`` between fp32, bf16 and fp16, loaders left out."""
    if op.name.startswith(_LOADER):
        return
    if op.name == "aten::copy_" and len(op.operands) > 1:
        into, source = op.operands[:2]
        if into and source and into.dtype != source.dtype and {into.dtype, source.dtype} <= set(_ITEM_BYTES):
            yield into, source
    for child in op.children:
        yield from casts_in(child)


def sum_of_casts(ops: Iterable[Op], weights: frozenset[int]) -> dict[str, int]:
    """Return ``count`` and ``bytes`` (read and written) of all casts, ``weight_`` those of parameters."""
    sums = {"count": 0, "bytes": 0, "weight_count": 0, "weight_bytes": 0}
    for op in ops:
        for into, source in casts_in(op):
            moved = sum(_ITEM_BYTES[side.dtype] * math.prod(side.shape) for side in (into, source))
            for prefix in ("", "weight_") if source.storage in weights else ("",):
                sums[f"{prefix}count"] += 1
                sums[f"{prefix}bytes"] += moved
    return sums


def products_by_size(ops: Iterable[Op], *, device: bool) -> list[dict[str, Any]]:
    """Return time and number of products of each size, the one that takes the most time first.

    Returns:
        ``kind``, ``shape`` (of the first product of the size), ``count`` and ``each_ns``: the median, since a
        busy machine makes one product out of hundreds last ten times as long.
    """
    found: dict[Any, tuple[dict[str, Any], list[int]]] = {}
    for op in ops:
        for product in innermost_products(op):
            shapes = [None if operand is None else operand.shape for operand in product.operands]
            kind, shape = product_size(product.name, shapes)
            _, times = found.setdefault(same_size(kind, shape), ({"kind": kind, "shape": shape}, []))
            times.append(_device_ns(product) if device else product.duration_ns)
    rows = [row | {"count": len(t), "each_ns": statistics.median(t)} for row, t in found.values()]
    return sorted(rows, key=lambda row: -row["count"] * row["each_ns"])


def innermost_products(op: Op) -> Iterator[Op]:
    """Yield the products in ``op`` that call no other product."""
    inner = [product for child in op.children for product in innermost_products(child)]
    yield from inner or ([op] if is_product(op.name) else [])


def _device_ns(op: Op) -> int:
    return op.device_ns + sum(_device_ns(child) for child in op.children)


def outermost_ops(ops: Iterable[Op]) -> Iterator[Op]:
    """Yield the ops that Python or autograd called, not those that ops called."""
    for op in ops:
        around = op.name.startswith((_STEP, _LOADER)) or op.name in _CAST_BACKWARD
        if around or _part_of(op, PYTHON) == PYTHON:
            yield from outermost_ops(op.children)
        else:
            yield op


def union_ns(intervals: Iterable[tuple[int, int]], start: int, end: int) -> int:
    """Return how much of the time from ``start`` to ``end`` is covered by any of ``intervals``."""
    covered, reached = 0, start
    for begins, ends in sorted(intervals):
        fresh = min(ends, end) - max(begins, reached)
        if fresh > 0:
            covered += fresh
            reached = min(ends, end)
    return covered

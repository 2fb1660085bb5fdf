"""What a few steps of a script spend their time on: recorded by torch's profiler, summed up per step."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.observe._torch_internals import profiler_is_on
from narrowcast.observe.profiling._ops import (
    PARTS,
    PRODUCTS,
    PYTHON,
    Op,
    Operand,
    outermost_ops,
    parts_ns,
    products_by_size,
    sum_of_casts,
    union_ns,
)

_MARK = "narrowcast: between two steps"
# Times as long as the median step.
_DISTURBED = 1.5
_CASTS, _LOADING = "casts", "loading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was recorded of some steps.

    Attributes:
        ops: the outermost ops of every thread, in the order of their start.
        marks_ns: where steps begin and end, one more than there are steps.
        thread: in which the script steps.
        kernels_ns: start and end of everything that ran on a GPU.
    """

    ops: Sequence[Op]
    marks_ns: Sequence[int]
    thread: int = 1
    kernels_ns: Sequence[tuple[int, int]] = field(default=())


class StepProfiler:
    """Records the ops of some steps; it is started, told of each boundary, and stopped between steps::

        profiler = StepProfiler()
        profiler.start()
        for _ in range(3):
            step()
            profiler.mark()
        recording = profiler.stop()

    Raises:
        UnsupportedError: on starting or stopping, where another profiler runs in this thread.
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
        """A step ends here, and the next begins."""
        with record_function(_MARK):
            pass

    def stop(self) -> Recording:
        if self._profile is None:
            raise OrderError("nothing is recorded: start the profiler first")
        recording, self._profile = self._profile, None
        recording.__exit__(None, None, None)
        results = recording.profiler.kineto_results if recording.profiler else None
        if results is None:
            raise UnsupportedError(
                "nothing was recorded: another profiler ran in this thread meanwhile; switch that one off"
            )
        return _recording(results)


def _recording(results: Any) -> Recording:
    kernels: dict[int, int] = defaultdict(int)
    intervals = []
    for event in results.events():
        # An annotation of the host's is drawn on the GPU's line too, around the kernels that it launched.
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
    children = [op for child in event.children if (op := _op(child, kernels)) is not None]
    return Op(
        name=event.name,
        start_ns=event.start_time_ns,
        duration_ns=event.duration_time_ns,
        device_ns=kernels.get(event.correlation_id, 0),
        thread=event.start_tid,
        operands=tuple(_operand(value) for value in given),
        children=tuple(children),
    )


def _operand(value: Any) -> Operand | None:
    sizes = getattr(value, "sizes", None)
    if sizes is None:
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    return Operand(shape=tuple(sizes), dtype=dtype, storage=value.storage_data_ptr or 0)


def summarize(
    recording: Recording, *, device: str = "cpu", left_out: Iterable[int] = (), weights: Iterable[int] = ()
) -> dict[str, Any]:
    """What one step spends its time on, as means over the steps that were recorded.

    On a CPU time is that of ops in the script's thread, and what they leave of a step is Python and torch's
    way from it to the ops. On a GPU time is that of kernels, and what they leave is the GPU waiting.

    Args:
        recording: what ``StepProfiler.stop`` returned. Steps that lasted half as long again as the median
            are left out: something else was running.
        device: type of the device on which the model is.
        left_out: numbers of steps that are not like the others, as where an evaluation came between.
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
    windows = _undisturbed([pair for number, pair in enumerate(pairs) if number not in out] or pairs)
    if not windows:
        raise UnsupportedError("no step was recorded")
    every = [op for op in recording.ops if any(a <= op.start_ns < b for a, b in windows)]
    mine = [op for op in every if op.thread == recording.thread]
    ops, steps = (every if on_gpu else mine), len(windows)
    wall = sum(b - a for a, b in windows)
    busy = sum(union_ns(recording.kernels_ns, a, b) for a, b in windows) if on_gpu else None
    shares = _shares(parts_ns(ops, device=on_gpu), wall, busy)
    casts = sum_of_casts(ops, frozenset(weights))
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
        "casts": {name: value / steps for name, value in casts.items()} | {"share": shares[_CASTS]},
        "ops": {
            "count": len(called) / steps,
            "mean_s": sum(op.duration_ns for op in called) / len(called) / 1e9 if called else None,
        },
        "loading_share": parts_ns(mine, device=False)[_LOADING] / wall,
        "gpu_busy_share": None if busy is None else busy / wall,
    }


def _undisturbed(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without steps that lasted much longer than the usual one, as where something else was running."""
    if not windows:
        return []
    usual = statistics.median_low([b - a for a, b in windows])
    return [(a, b) for a, b in windows if b - a <= _DISTURBED * usual]


def _shares(parts: dict[str, int], wall: int, busy: int | None) -> dict[str, float]:
    """Of a step's time; where kernels ran side by side, each counts for its part of the busy time."""
    total = sum(parts.values())
    covered = min(total, wall) if busy is None else min(busy, wall)
    shares = {part: covered * parts.get(part, 0) / (total or 1) / wall for part in PARTS if part != PYTHON}
    return shares | {PYTHON: 1.0 - sum(shares.values())}

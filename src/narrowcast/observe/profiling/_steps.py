"""Where the time of a training step goes, by torch's profiler."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from narrowcast.errors import UnsupportedError
from narrowcast.observe.profiling._block import CLOSURE, MARK, every_event
from narrowcast.policy import format_name

PARTS = ("products", "casts", "other_ops", "optimizer", "loading", "python")
PRODUCTS, CASTS, OTHER, OPTIMIZER, LOADING, PYTHON = PARTS
# Ranges that torch's optimizers and DataLoader record around their work. A closure that a step evaluates goes
# forward and backward: what it calls belongs to the parts that it would belong to outside of the step.
_LOADER = "enumerate(DataLoader)#"
_RANGES = {"Optimizer.step#": OPTIMIZER, _LOADER: LOADING, CLOSURE: PYTHON}
_CAST_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# A cast is a copy inside one of these. In backward autograd casts the gradient, in ``ToCopyBackward0``.
_CASTING = ("aten::to", "aten::_to_copy", "aten::copy_")
# A step that lasts longer than this times the median was disturbed by something else.
_DISTURBED = 1.5

_Interval = tuple[int, int]
"""Start and end, in nanoseconds."""


def summarize(
    tree: Iterable[Any], results: Any, *, device: str = "cpu", weights: Iterable[int] = ()
) -> dict[str, Any]:
    """Sum up what one step spends its time on; means over the recorded steps.

    On a CPU time is that of ops in the script's thread, and the rest of a step is Python and dispatch. On a
    GPU time is that of kernels, and the rest is the GPU waiting. Steps that lasted half as long again as the
    median are left out: something else was running.

    Args:
        tree, results: what ``Recorder.stop`` returned; steps are between its marks.
        device: type of the model's device.
        weights: storages of the parameters.

    Returns:
        JSON-ready: ``steps``; ``step_s`` under the profiler; ``shares`` (sum 1) of products, casts, other
        ops, the optimizer, loading of data, and Python (on a GPU: waiting); ``products`` by size and by the
        narrowest ``format`` of their operands, with ``count``, ``share`` of the step and ``each_s``, the mean
        of medians by operator and operands; ``casts``; ``ops`` with their number and mean time;
        ``loading_share`` of the host's time; ``gpu_busy_share``, null on a CPU.

    Raises:
        UnsupportedError: there is no step in it, or a range of the script encloses the steps.
    """
    marks = [op for op in _ops(tree) if op.name == MARK]
    if not marks:
        raise UnsupportedError("a range of torch's profiler is open around the steps: end it before them")
    steps = _undisturbed([mark.start_time_ns for mark in marks])
    steps_ns = sum(map(_length, steps))
    on_gpu = _on_gpu(results.events())

    # On a GPU the time of an op is that of its kernels, whatever thread launched them. On a CPU only the time
    # of the script's thread counts, as the step does not wait for other threads.
    timed_on_gpu = device != "cpu" and bool(on_gpu.intervals)
    script_thread = marks[0].start_tid
    sums = _Sums(on_gpu.kernels_ns if timed_on_gpu else None, weights)
    of_script: list[Any] = []
    for op in _ops(tree):
        if op.name == MARK or not _is_within(op.start_time_ns, steps):
            continue
        if op.start_tid == script_thread:
            of_script.append(op)
        if timed_on_gpu or op.start_tid == script_thread:
            sums.add(op)

    busy_ns: int | None = None
    busy_share: float | None = None
    if timed_on_gpu:
        busy_ns = sum(union_ns(on_gpu.intervals, start, end) for start, end in steps)
        busy_share = busy_ns / steps_ns
    loading_ns = 0
    for event in every_event(of_script):
        if event.name.startswith(_LOADER):
            loading_ns += event.duration_time_ns
    shares = _shares(sums.parts_ns, steps_ns, busy_ns)
    mean_s: float | None = None
    if sums.calls_ns:
        mean_s = statistics.fmean(sums.calls_ns) / 1e9
    casts = {name: value / len(steps) for name, value in sums.casts.items()}
    return {
        "device": device,
        "steps": len(steps),
        "step_s": steps_ns / len(steps) / 1e9,
        "shares": shares,
        "products": sums.products(len(steps), shares[PRODUCTS]),
        "casts": casts | {"share": shares[CASTS]},
        "ops": {"count": len(sums.calls_ns) / len(steps), "mean_s": mean_s},
        "loading_share": loading_ns / steps_ns,
        "gpu_busy_share": busy_share,
    }


def _ops(events: Iterable[Any]) -> list[Any]:
    """Return the ops and ranges among events, without allocations and calls of CUDA."""
    return [event for event in events if event.tag.name in ("TorchOp", "Backend")]


def _undisturbed(marks_ns: Sequence[int]) -> list[_Interval]:
    """Return the steps between marks, without those that something else made longer."""
    steps = list(pairwise(marks_ns))
    if not steps:
        raise UnsupportedError("no step was recorded")
    usual_ns = statistics.median_low(list(map(_length, steps)))
    return [step for step in steps if _length(step) <= _DISTURBED * usual_ns]


def _length(interval: _Interval) -> int:
    start, end = interval
    return end - start


def _is_within(time_ns: int, steps: Sequence[_Interval]) -> bool:
    return any(start <= time_ns < end for start, end in steps)


@dataclass(frozen=True, slots=True)
class _OnGpu:
    """What ran on the GPU: when, and how long by the op that launched it."""

    kernels_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    intervals: list[_Interval] = field(default_factory=list)


def _on_gpu(events: Iterable[Any]) -> _OnGpu:
    on_gpu = _OnGpu()
    for event in events:
        is_kernel = event.device_type() == torch.profiler.DeviceType.CUDA
        # Annotations of the host appear on the GPU too, around the kernels that it launched.
        if is_kernel and not event.is_user_annotation() and event.duration_ns() > 0:
            on_gpu.intervals.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            on_gpu.kernels_ns[event.linked_correlation_id()] += event.duration_ns()
    return on_gpu


def union_ns(intervals: Iterable[_Interval], start: int, end: int) -> int:
    """Return how much of the time from ``start`` to ``end`` is covered by any of ``intervals``."""
    # In the order of their starts, an interval adds the part of it that lies after all earlier ones.
    covered, reached = 0, start
    for begins, ends in sorted(intervals):
        fresh = min(ends, end) - max(begins, reached)
        if fresh > 0:
            covered += fresh
            reached = min(ends, end)
    return covered


def _shares(parts_ns: Mapping[str, int], steps_ns: int, busy_ns: int | None) -> dict[str, float]:
    """Return the share of each part in a step's time.

    On a GPU, kernels overlap, so that their times are scaled to the GPU's busy time, ``busy_ns``.
    """
    known_ns = dict(parts_ns)
    del known_ns[PYTHON]
    total_ns = sum(known_ns.values())
    # How much of the steps the other parts take together. Python is what they leave.
    covered_ns = total_ns
    if busy_ns is not None:
        covered_ns = busy_ns
    covered_ns = min(covered_ns, steps_ns)
    shares: dict[str, float] = {}
    for part, time_ns in known_ns.items():
        shares[part] = covered_ns * time_ns / (total_ns or 1) / steps_ns
    shares[PYTHON] = 1.0 - sum(shares.values())
    return shares


# ---- sums over ops


# Operator, shapes and layouts of its operands (None: not a tensor).
_Variant = tuple[str, tuple["Shape | None", ...], tuple[int | None, ...]]


@dataclass(slots=True)
class _ProductTimes:
    """The products of one size and format; kind and shape are those of the first.

    Attributes:
        times_ns: how long each took, by operator and operands. The forward product of a linear layer and the
            two of its backward pass have one size, but other operands, and may differ much: a CPU that
            emulates bf16 has fast kernels for the first alone.
    """

    kind: str
    shape: Shape
    format: str
    times_ns: dict[_Variant, list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def count(self) -> int:
        return sum(map(len, self.times_ns.values()))

    @property
    def total_ns(self) -> float:
        """The time of all of them, each as long as the median of those with its operator and operands.

        On a busy machine one product out of hundreds lasts ten times as long.
        """
        return sum(len(times) * statistics.median(times) for times in self.times_ns.values())

    @property
    def each_ns(self) -> float:
        """The mean time of one, by ``total_ns``."""
        return self.total_ns / self.count


class _Sums:
    """What ops of some steps add up to; without ``kernels_ns``, time is that of ops on the host.

    Inside a cast or the loading of data every op belongs to that. Elsewhere an op belongs to the part that
    its own name says, else to that of its caller: the softmax inside an attention is the attention's, a cast
    inside a linear layer is a cast, a matmul inside an optimizer is a product.
    """

    def __init__(self, kernels_ns: Mapping[int, int] | None = None, weights: Iterable[int] = ()) -> None:
        self._kernels_ns, self._weights = kernels_ns, frozenset(weights)
        self.parts_ns = dict.fromkeys(PARTS, 0)
        # Bytes are those read and those written. ``weight_`` counts casts of parameters.
        self.casts = {"count": 0, "bytes": 0, "weight_count": 0, "weight_bytes": 0}
        self.calls_ns: list[int] = []  # of ops that Python or autograd called, not of those that ops called
        self._products: dict[Any, _ProductTimes] = {}

    def add(self, op: Any, inherited: str = PYTHON, *, is_call: bool = True) -> bool:
        """Add an op and those that it called; return whether one of them is a product."""
        part = _part_of(op, inherited)
        if part != LOADING:
            self._add_cast(op)
        if is_call and _is_op(op.name):
            self.calls_ns.append(op.duration_time_ns)
            is_call = False

        has_product = False
        for child in _ops(op.children):
            has_product |= self.add(child, part, is_call=is_call)

        # On a GPU, PYTHON is the time in which no kernel runs. So a kernel that Python launched without an
        # op, as an extension does, counts as one of another op.
        if part == PYTHON and self._kernels_ns is not None:
            part = OTHER
        self.parts_ns[part] += self._own_ns(op)
        if not is_product(op.name):
            return has_product
        # A linear layer calls a matmul, which then is the product that counts. Products in the loading of
        # data do not count.
        if not has_product and part != LOADING:
            self._add_product(op)
        return True

    def _add_product(self, op: Any) -> None:
        operands = _operands(op)
        shapes: list[Shape | None] = []
        for tensor in operands:
            shapes.append(None if tensor is None else tuple(tensor.sizes))
        kind, shape = product_size(op.name, shapes)
        format_ = _narrowest_format(operands)
        size = (*same_size(kind, shape), format_)
        if size not in self._products:
            self._products[size] = _ProductTimes(kind, shape, format_)
        # Whether a matrix is transposed shows in which of its strides is 1.
        layouts = tuple(None if tensor is None else _fastest_dimension(tensor) for tensor in operands)
        variant = (op.name, tuple(shapes), layouts)
        times_ns = self._products[size].times_ns[variant]
        times_ns.append(self._total_ns(op))

    def _own_ns(self, op: Any) -> int:
        if self._kernels_ns is not None:
            return self._kernels_ns.get(op.correlation_id, 0)
        inside_ns = sum(int(child.duration_time_ns) for child in _ops(op.children))
        return max(0, int(op.duration_time_ns) - inside_ns)

    def _total_ns(self, op: Any) -> int:
        return self._own_ns(op) + sum(map(self._total_ns, _ops(op.children)))

    def _add_cast(self, op: Any) -> None:
        sides = _cast_sides(op)
        if not sides:
            return
        moved_bytes = sum(math.prod(side.sizes) * side.dtype.itemsize for side in sides)
        self.casts["count"] += 1
        self.casts["bytes"] += moved_bytes
        _, source = sides
        if source.storage_data_ptr in self._weights:
            self.casts["weight_count"] += 1
            self.casts["weight_bytes"] += moved_bytes

    def products(self, steps: int, share: float) -> list[dict[str, Any]]:
        """Return the products of one step by size, slowest first; together they take ``share`` of it."""
        sizes = list(self._products.values())
        sizes.sort(key=lambda size: size.total_ns, reverse=True)
        total_ns = sum(size.total_ns for size in sizes) or 1
        rows = []
        for size in sizes:
            rows.append(
                {
                    "kind": size.kind,
                    "shape": list(size.shape),
                    "format": size.format,
                    "count": size.count / steps,
                    "share": share * size.total_ns / total_ns,
                    "each_s": size.each_ns / 1e9,
                }
            )
        return rows


def _part_of(op: Any, inherited: str) -> str:
    if inherited in (LOADING, CASTS):
        return inherited
    for prefix, part in _RANGES.items():
        if op.name.startswith(prefix):
            return part
    if (op.name in _CASTING or op.name.endswith("ToCopyBackward0")) and _has_cast(op):
        return CASTS
    if is_product(op.name):
        return PRODUCTS
    if inherited == PYTHON and _is_op(op.name):
        return OTHER
    return inherited


def _is_op(name: str) -> bool:
    is_node = name.startswith(("autograd::", "torch::autograd::"))
    return ("::" in name and not is_node) or name.startswith("## Call CompiledFxGraph")


def _operands(op: Any) -> list[Any]:
    """Return the metadata of each argument that is a tensor, None for each other argument."""
    if op.tag.name != "TorchOp":
        return []
    return [argument if hasattr(argument, "sizes") else None for argument in op.typed[1].inputs]


def _fastest_dimension(tensor: Any) -> int:
    """Return the dimension along which a tensor lies in memory without gaps; -1: none."""
    strides = list(tensor.strides)
    return strides.index(1) if 1 in strides else -1


def _narrowest_format(operands: Sequence[Any]) -> str:
    narrowest = torch.float32
    dtypes = [tensor.dtype for tensor in operands if tensor is not None and tensor.dtype.is_floating_point]
    if dtypes:
        narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    return format_name(narrowest)


def _cast_sides(op: Any) -> list[Any]:
    """Return destination and source of a copy between fp32, bf16 and fp16; for other ops an empty list."""
    if op.name != "aten::copy_":
        return []
    sides = _operands(op)[:2]
    dtypes = {side.dtype for side in sides if side is not None}
    if len(dtypes) != 2 or not dtypes <= _CAST_DTYPES:
        return []
    return sides


def _has_cast(op: Any) -> bool:
    return bool(_cast_sides(op)) or any(map(_has_cast, _ops(op.children)))


# ---- products


Shape = tuple[int, ...]

# Position of the first of the two matrices among the arguments.
_MATRICES = {
    "mm": 0, "matmul": 0, "bmm": 0, "mv": 0, "addmm": 1, "_addmm_activation": 1, "addmv": 1, "baddbmm": 1,
    "addbmm": 1,
}  # fmt: skip
_CONVOLUTION = re.compile(r"convolution|conv(_transpose)?\dd")
_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward")
_ATTENTION = ("scaled_dot_product_", "_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")
_LINEAR = ("linear", "mkldnn_linear", "_linear_pointwise")
_SCALED = ("_scaled_mm", "_scaled_grouped_mm")  # fp8
_NAMES = frozenset((*_MATRICES, *_RECURRENT, *_LINEAR, *_SCALED, "einsum"))


def is_product(name: str) -> bool:
    """Return whether the operator ``name``, such as ``"aten::mm"``, multiplies, in forward or backward."""
    space, _, op = name.partition("::")
    if space not in ("aten", "mkldnn"):
        return False
    op = op.removesuffix("_")  # of ``addmm_``, which works in place
    return op in _NAMES or op.startswith(_ATTENTION) or _CONVOLUTION.search(op) is not None


def product_size(name: str, shapes: Sequence[Shape | None]) -> tuple[str, Shape]:
    """Return kind and size of a product from the ``shapes`` of its arguments (None: not a tensor).

    ``("matmul", (M, N, K))`` is an M x K matrix times a K x N one. The others are ``("batched matmul", (B, M,
    N, K))``, ``("convolution", input + weight)``, ``("attention", query + key)`` and ``("recurrent layer",
    input)``, where ``+`` joins two shapes.
    """
    op = name.partition("::")[2].removesuffix("_")
    is_attention = op.startswith(_ATTENTION)
    is_convolution = _CONVOLUTION.search(op) is not None
    operands = [shape or () for shape in shapes]
    # Backward operators of these take the gradient of the output as their first argument.
    if "backward" in op and (is_attention or is_convolution):
        operands = operands[1:]
    operands = operands[_MATRICES.get(op, 0) :]
    # A product with fewer than two recorded operands gets empty shapes.
    first, second, *_ = [*operands, (), ()]

    if is_convolution:
        return "convolution", first + second
    if is_attention:
        return "attention", first + second
    if op in _RECURRENT:
        return "recurrent layer", first
    if op in _LINEAR:
        second = second[::-1]  # the weight is stored N x K
    if len(first) == 3 and len(second) == 3:
        return "batched matmul", (first[0], first[1], second[2], first[2])
    # A vector is one column, and leading dimensions of the first operand are rows.
    columns = second[-1] if len(second) > 1 else 1
    inner = first[-1] if first else 1
    return "matmul", (math.prod(first[:-1]), columns, inner)


def same_size(kind: str, shape: Sequence[int]) -> tuple[str, Shape]:
    """Return a key that products of one size share.

    Matmuls whose M, N and K are permuted are of one size, as the forward matmul of a linear layer and the two
    of its backward pass.
    """
    if kind == "matmul":
        return kind, tuple(sorted(shape))
    if kind == "batched matmul":
        return kind, (shape[0], *sorted(shape[1:]))
    return kind, tuple(shape)

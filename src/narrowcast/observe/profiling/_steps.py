"""Where the time of a training step goes, by torch's profiler, and where a script reads values of tensors."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from narrowcast.errors import UnsupportedError
from narrowcast.observe.profiling._block import MARK, every_event
from narrowcast.policy import format_name

PARTS = ("products", "casts", "other_ops", "optimizer", "loading", "python")
PRODUCTS, CASTS, OTHER, OPTIMIZER, LOADING, PYTHON = PARTS
# Ranges that torch's optimizers and DataLoader record around their work.
_LOADER = "enumerate(DataLoader)#"
_RANGES = {"Optimizer.step#": OPTIMIZER, _LOADER: LOADING}
_CAST_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# A cast is a copy inside one of these; autograd makes it again for the gradient, in a node of its own.
_CASTING = ("aten::to", "aten::_to_copy", "aten::copy_")
# A step that lasts longer than this times the median was disturbed by something else.
_DISTURBED = 1.5


def _kernels(events: Iterable[Any]) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Return the time on the GPU by the op that launched it, and start and end of all that ran there."""
    kernels: dict[int, int] = defaultdict(int)
    intervals = []
    for event in events:
        # Annotations of the host appear on the GPU too, around the kernels that it launched.
        on_gpu = event.device_type() == torch.profiler.DeviceType.CUDA and not event.is_user_annotation()
        if on_gpu and event.duration_ns() > 0:
            intervals.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            kernels[event.linked_correlation_id()] += event.duration_ns()
    return kernels, intervals


def _ops(events: Iterable[Any]) -> list[Any]:
    """Return the ops and ranges among events, without allocations and calls of CUDA."""
    return [event for event in events if event.tag.name in ("TorchOp", "Backend")]


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
        narrowest ``format`` of their operands, with ``count``, ``share`` of the step and ``each_s``, the
        median; ``casts``; ``ops`` with their number and mean time; ``loading_share`` of the host's time;
        ``gpu_busy_share``, null on a CPU.

    Raises:
        UnsupportedError: there is no step in it, or a range of the script encloses the steps.
    """
    marks = [op for op in _ops(tree) if op.name == MARK]
    if not marks:
        raise UnsupportedError("a range of torch's profiler is open around the steps: end it before them")
    kernels_ns, intervals_ns = _kernels(results.events())
    on_gpu = device != "cpu" and bool(intervals_ns)
    windows = list(pairwise(mark.start_time_ns for mark in marks))
    if not windows:
        raise UnsupportedError("no step was recorded")
    usual = statistics.median_low([b - a for a, b in windows])
    windows = [(a, b) for a, b in windows if b - a <= _DISTURBED * usual]
    every = [op for op in _ops(tree) if any(a <= op.start_time_ns < b for a, b in windows) if op.name != MARK]
    mine = [op for op in every if op.start_tid == marks[0].start_tid]
    steps, wall = len(windows), sum(b - a for a, b in windows)
    busy = sum(union_ns(intervals_ns, a, b) for a, b in windows) if on_gpu else None
    sums = _Sums(kernels_ns if on_gpu else None, weights)
    for op in every if on_gpu else mine:
        sums.add(op)
    loading_ns = sum(op.duration_time_ns for op in every_event(mine) if op.name.startswith(_LOADER))
    shares, calls_ns = _shares(sums.parts_ns, wall, busy), sums.calls_ns
    return {
        "device": device,
        "steps": steps,
        "step_s": wall / steps / 1e9,
        "shares": shares,
        "products": sums.products(steps, shares[PRODUCTS]),
        "casts": {name: value / steps for name, value in sums.casts.items()} | {"share": shares[CASTS]},
        "ops": {
            "count": len(calls_ns) / steps,
            "mean_s": statistics.fmean(calls_ns) / 1e9 if calls_ns else None,
        },
        "loading_share": loading_ns / wall,
        "gpu_busy_share": None if busy is None else busy / wall,
    }


def _shares(parts: dict[str, int], wall: int, busy: int | None) -> dict[str, float]:
    """Return shares of a step's time; kernels that ran side by side share the time that the GPU was busy."""
    known = {part: time for part, time in parts.items() if part != PYTHON}
    total = sum(known.values())
    covered = min(total, wall) if busy is None else min(busy, wall)
    shares = {part: covered * time / (total or 1) / wall for part, time in known.items()}
    return shares | {PYTHON: 1.0 - sum(shares.values())}


class _Sums:
    """What ops of some steps add up to; without ``kernels_ns``, time is that of ops on the host.

    An op belongs to the part that its own name says, else to that of its caller: the softmax inside an
    attention is the attention's, a cast inside a linear layer is a cast, a matmul inside an optimizer is a
    product.
    """

    def __init__(self, kernels_ns: Mapping[int, int] | None = None, weights: Iterable[int] = ()) -> None:
        self._kernels_ns, self._weights = kernels_ns, frozenset(weights)
        self.parts_ns = dict.fromkeys(PARTS, 0)
        # Bytes are read and written; ``weight_``: of parameters.
        self.casts = {"count": 0, "bytes": 0, "weight_count": 0, "weight_bytes": 0}
        self.calls_ns: list[int] = []  # of ops that Python or autograd called, not of those that ops called
        self._products: dict[Any, tuple[tuple[str, Shape, str], list[int]]] = {}

    def add(self, op: Any, inherited: str = PYTHON, *, is_call: bool = True) -> bool:
        """Add an op and those that it called; return whether one of them is a product."""
        part, children = _part_of(op, inherited), _ops(op.children)
        if part != LOADING:
            self._add_cast(op)
        if is_call and _is_op(op.name):
            self.calls_ns.append(op.duration_time_ns)
            is_call = False
        has_product = False
        for child in children:
            has_product |= self.add(child, part, is_call=is_call)
        self.parts_ns[OTHER if part == PYTHON and self._kernels_ns is not None else part] += self._own_ns(op)
        if is_product(op.name) and not has_product:
            operands = _operands(op)
            shapes = [None if tensor is None else tuple(tensor.sizes) for tensor in operands]
            kind, shape = product_size(op.name, shapes)
            format_ = _narrowest_format(operands)
            of_size = (*same_size(kind, shape), format_)
            _, times = self._products.setdefault(of_size, ((kind, shape, format_), []))
            times.append(self._total_ns(op))
        return has_product or is_product(op.name)

    def _own_ns(self, op: Any) -> int:
        if self._kernels_ns is not None:
            return self._kernels_ns.get(op.correlation_id, 0)
        inside_ns = sum(int(child.duration_time_ns) for child in _ops(op.children))
        return max(0, int(op.duration_time_ns) - inside_ns)

    def _total_ns(self, op: Any) -> int:
        return self._own_ns(op) + sum(map(self._total_ns, _ops(op.children)))

    def _add_cast(self, op: Any) -> None:
        sides = _cast_sides(op)
        if sides:
            moved = sum(math.prod(side.sizes) * side.dtype.itemsize for side in sides)
            for prefix in ("", "weight_") if sides[1].storage_data_ptr in self._weights else ("",):
                self.casts[f"{prefix}count"] += 1
                self.casts[f"{prefix}bytes"] += moved

    def products(self, steps: int, share: float) -> list[dict[str, Any]]:
        """Return the products of each size in one step, of which all take ``share``, the slowest first."""
        # A median: on a busy machine one product out of hundreds lasts ten times as long.
        sizes = [(*key, len(times), statistics.median(times)) for key, times in self._products.values()]
        sizes.sort(key=lambda size: -size[-2] * size[-1])
        total_ns = sum(count * each_ns for *_, count, each_ns in sizes) or 1
        return [
            {
                "kind": kind,
                "shape": list(shape),
                "format": format_,
                "count": count / steps,
                "share": share * count * each_ns / total_ns,
                "each_s": each_ns / 1e9,
            }
            for kind, shape, format_, count, each_ns in sizes
        ]


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
    return OTHER if inherited == PYTHON and _is_op(op.name) else inherited


def _is_op(name: str) -> bool:
    is_node = name.startswith(("autograd::", "torch::autograd::"))
    return ("::" in name and not is_node) or name.startswith("## Call CompiledFxGraph")


def _operands(op: Any) -> list[Any]:
    """Return metadata of its tensors by position; None for other arguments."""
    given = op.typed[1].inputs if op.tag.name == "TorchOp" else ()
    return [value if getattr(value, "sizes", None) is not None else None for value in given]


def _narrowest_format(operands: Sequence[Any]) -> str:
    dtypes = [tensor.dtype for tensor in operands if tensor is not None and tensor.dtype.is_floating_point]
    return format_name(min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32))


def _cast_sides(op: Any) -> list[Any]:
    """Return destination and source of a copy between fp32, bf16 and fp16; nothing for other ops."""
    sides = _operands(op)[:2] if op.name == "aten::copy_" else []
    dtypes = {side.dtype for side in sides if side is not None}
    return sides if len(dtypes) == 2 and dtypes <= _CAST_DTYPES else []


def _has_cast(op: Any) -> bool:
    return bool(_cast_sides(op)) or any(map(_has_cast, _ops(op.children)))


def union_ns(intervals: Iterable[tuple[int, int]], start: int, end: int) -> int:
    """Return how much of the time from ``start`` to ``end`` is covered by any of ``intervals``."""
    covered, reached = 0, start
    for begins, ends in sorted(intervals):
        fresh = min(ends, end) - max(begins, reached)
        if fresh > 0:
            covered += fresh
            reached = min(ends, end)
    return covered


# ---- products


Shape = tuple[int, ...]

# Position of the first of the two matrices among the arguments.
_MATRICES = {"mm": 0, "matmul": 0, "bmm": 0, "mv": 0, "addmm": 1, "_addmm_activation": 1, "baddbmm": 1}
_CONVOLUTION = re.compile(r"convolution|conv(_transpose)?\dd")
_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward")
_ATTENTION = ("scaled_dot_product_", "_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")
_LINEAR = ("linear", "mkldnn_linear", "_linear_pointwise")
_SCALED = ("_scaled_mm", "_scaled_grouped_mm")  # fp8
_NAMES = frozenset((*_MATRICES, *_RECURRENT, *_LINEAR, *_SCALED, "einsum", "addbmm", "addmv"))


def is_product(name: str) -> bool:
    """Return whether the operator ``name``, such as ``"aten::mm"``, multiplies, in forward or backward."""
    space, _, op = name.partition("::")
    is_one = op in _NAMES or op.startswith(_ATTENTION) or _CONVOLUTION.search(op) is not None
    return space in ("aten", "mkldnn") and is_one


def product_size(name: str, shapes: Sequence[Shape | None]) -> tuple[str, Shape]:
    """Return kind and size of a product from the ``shapes`` of its arguments (None: not a tensor).

    ``("matmul", (M, N, K))`` is an M x K matrix times a K x N one. Others: ``("batched matmul", (B, M, N,
    K))``, ``("convolution", input + weight)``, ``("attention", query + key)``, ``("recurrent layer", input)``
    """
    op = name.partition("::")[2]
    # Backward of these gets the gradient of the output first.
    is_convolution = _CONVOLUTION.search(op) is not None
    first = "backward" in op and (op.startswith(_ATTENTION) or is_convolution)
    given = [shape or () for shape in shapes[int(first) :]]
    one, two = [*given[_MATRICES.get(op, 0) :], (), ()][:2]
    if op.startswith(_ATTENTION) or is_convolution:
        return "convolution" if is_convolution else "attention", one + two
    if op in _RECURRENT:
        return "recurrent layer", one
    if op in _LINEAR:
        two = two[::-1]  # the weight is stored N x K
    if len(one) == 3 and len(two) == 3:
        return "batched matmul", (one[0], one[1], two[2], one[2])
    return "matmul", (math.prod(one[:-1]), two[-1] if len(two) > 1 else 1, one[-1] if one else 1)


def same_size(kind: str, shape: Sequence[int]) -> tuple[str, Shape]:
    """Return a key for products of one size; the three matmuls of a linear layer permute its sizes."""
    if kind == "matmul":
        return kind, tuple(sorted(shape))
    if kind == "batched matmul":
        return kind, (shape[0], *sorted(shape[1:]))
    return kind, tuple(shape)


# ---- reads by Python

_READS = (
    "item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", "to", "__bool__", "__int__",
    "__float__", "__index__", "__repr__", "__format__", "__array__", "__getitem__",
)  # fmt: skip
# They read counters and indices of their own, which are on the CPU wherever the model is.
_ON_CPU_ANYWHERE = ("torch.optim.", "torch.utils.data.", "narrowcast.")


class HostReads(TorchFunctionMode):
    """Counts each read of a tensor's values by Python, by the line that ``call_site`` returns::

        with HostReads(call_site) as reads:
            step()
        reads.rows()  # [{"site": "train.py:42", "what": "item()", "device": "cpu", "count": 1}]

    On a GPU each read waits until the GPU has computed the values. A read inside another is one: printing a
    tensor reads it several times. Not counted: reads of CPU tensors by optimizers, samplers and narrowcast.
    Models under ``torch.compile`` run eagerly within the block.
    """

    def __init__(self, call_site: Callable[[], str]) -> None:
        super().__init__()
        self._call_site = call_site
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._stance = ExitStack()

    def __enter__(self) -> Self:
        # Dynamo would compile each graph again, with this mode traced into it.
        if "torch._dynamo" in sys.modules:
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stance.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensor = args[0] if args else None
        if name in _READS and isinstance(tensor, torch.Tensor) and _reads(name, tensor, args, kwargs):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if tensor.device.type != "cpu" or not caller.startswith(_ON_CPU_ANYWHERE):
                site = "narrowcast" if caller.startswith("narrowcast.") else self._call_site()
                self._counts[site, f"{name.strip('_')}()", tensor.device.type] += 1
        return func(*args, **kwargs)

    def rows(self) -> list[dict[str, Any]]:
        """Return rows of ``site``, ``what``, ``device`` and ``count``, the most frequent first."""
        return [
            {"site": site, "what": what, "device": device, "count": count}
            for (site, what, device), count in self._counts.most_common()
        ]


def _reads(name: str, tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
    if name == "__getitem__":  # a mask must be counted to know the size of the result
        index = args[1] if len(args) > 1 else None
        parts = index if isinstance(index, tuple) else (index,)
        return any(isinstance(p, torch.Tensor) and p.dtype in (torch.bool, torch.uint8) for p in parts)
    if name != "to":
        return True
    if tensor.device.type == "cpu" or kwargs.get("non_blocking"):
        return False
    devices = [getattr(value, "device", value) for value in (*args[1:], kwargs.get("device"))]
    return any(str(device).startswith("cpu") for device in devices)

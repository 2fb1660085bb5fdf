"""What torch does below autocast and autograd, operation by operation: times, bytes, casts, products.

An operator that a person calls may be made of several of these; the casts that autocast itself makes are seen
only here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.casting import ops_under_way, rule_that_casts
from narrowcast.observe.op_trace._modules import Place
from narrowcast.observe.profiling._device_time import seconds_between, stamp
from narrowcast.observe.profiling._ops import Op, Operand, is_product, product_size
from narrowcast.policy import Rule, format_name

_CASTS = ("aten::_to_copy", "aten::to.dtype", "aten::_to_copy.default")
_SCALED_PRODUCTS = ("aten::_scaled_mm", "aten::_scaled_grouped_mm")


@dataclass(slots=True, eq=False)
class Leaf:
    """One operation that ran.

    Attributes:
        op: as ``"mm"`` or ``"add.Tensor"``.
        place: where it was called.
        depth: how many operators that are watched it was called in.
        seconds: how long it took; None: the events say it.
        events: on a GPU, before and after it.
        moved_bytes: read and written; 0 for a view.
        view: whether it only looks at the same memory.
        inputs, outputs: formats of its floating tensors.
        cast: formats from and to, of a cast between floating formats.
        product: kind, sizes and format of the operands, of a product.
        sources: storages of the tensors that it was given.
        rule: that for a module, of a cast of what goes into the module or comes out of it.
        owner: what it was counted with; set later.
    """

    op: str
    place: Place
    depth: int
    seconds: float | None
    events: tuple[Any, Any] | None
    moved_bytes: int
    view: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cast: tuple[str, str] | None = None
    product: tuple[str, tuple[int, ...], str] | None = None
    sources: tuple[int, ...] = ()
    rule: Rule | None = None
    owner: Any = field(default=None)

    def took_s(self) -> float:
        """Seconds; of a GPU's only once its work has come so far."""
        if self.seconds is None:
            assert self.events is not None
            self.seconds = seconds_between(*self.events)
            self.events = None
        return self.seconds


class LeafWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells ``seen`` of each operation, in the thread that made it; autograd's threads are followed.

    Args:
        here: the place of a call made now.
        seen: called with each leaf.
    """

    def __init__(self, here: Callable[[], Place], seen: Callable[[Leaf], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._here = here
        self._seen = seen
        self._lock = threading.Lock()
        # Storage of what a cast made -> the cast, as long as nothing has written there.
        self._made: dict[int, tuple[Any, Leaf]] = {}
        self.round_trips: list[tuple[Leaf, Leaf]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name is None:
            return func(*args, **kwargs)
        given = list(_tensors(args)) + list(_tensors(tuple(kwargs.values())))
        place = self._here()
        by_events = any(tensor.is_cuda for tensor in given) and not _is_capturing()
        clock = "cuda" if by_events else "cpu"
        began = stamp(clock)
        result = func(*args, **kwargs)
        ended = stamp(clock)
        made = list(_tensors(result if isinstance(result, tuple | list) else (result,)))
        view = _is_view(func)
        leaf = Leaf(
            op=name.removeprefix("aten::"),
            place=place,
            depth=len(ops_under_way()),
            seconds=None if by_events else ended - began,
            events=(began, ended) if by_events else None,
            moved_bytes=0 if view else sum(_bytes(tensor) for tensor in (*given, *made)),
            view=view,
            inputs=formats_of(given),
            outputs=formats_of(made),
            sources=tuple(_storage(tensor) for tensor in given),
            rule=rule_that_casts(),
        )
        self._look_at_casts(func, name, leaf, given, made)
        leaf.product = _product(name, args, given)
        self._seen(leaf)
        return result

    def _look_at_casts(
        self, func: Any, name: str, leaf: Leaf, given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        """See whether it casts, and back to where an earlier cast came from."""
        if func._schema.is_mutable:
            with self._lock:
                for tensor in given:
                    self._made.pop(_storage(tensor), None)
            return
        if name not in _CASTS or len(leaf.inputs) != 1 or len(leaf.outputs) != 1:
            return
        if leaf.inputs == leaf.outputs:
            return
        leaf.cast = (leaf.inputs[0], leaf.outputs[0])
        with self._lock:
            earlier = self._made.get(leaf.sources[0])
            if earlier is not None and not earlier[0].expired() and earlier[1].cast == leaf.cast[::-1]:
                self.round_trips.append((earlier[1], leaf))
            self._made[_storage(made[0])] = (_weakly(made[0]), leaf)


def formats_of(tensors: Any) -> tuple[str, ...]:
    """The formats of the floating tensors among ``tensors``, each once, the widest first."""
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    return tuple(format_name(dtype) for dtype in sorted(found, key=lambda d: (-d.itemsize, str(d))))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


@functools.cache
def _name_of(func: Any) -> str | None:
    """``"aten::add.Tensor"``; None for what is no operator on tensors.

    As a question for a size, for the wider of two formats, or a mark of the profiler.
    """
    name: str = func.name()
    schema = func._schema
    on_tensors = any("Tensor" in str(one.type) for one in (*schema.arguments, *schema.returns))
    return name if on_tensors and not name.startswith("prim::") else None


@functools.cache
def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    aliases = [one.alias_info for one in returned]
    return bool(returned) and all(info is not None and not info.is_write for info in aliases)


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)  # sparse tensors and wrappers have none


def _weakly(tensor: torch.Tensor) -> Any:
    """What tells by ``expired()`` whether the memory of ``tensor`` was freed."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize if tensor.layout == torch.strided else 0


def _product(
    name: str, args: tuple[Any, ...], given: list[torch.Tensor]
) -> tuple[str, tuple[int, ...], str] | None:
    base = name.partition(".")[0]
    operands = tuple(
        Operand(shape=tuple(value.shape), dtype=format_name(value.dtype))
        if isinstance(value, torch.Tensor)
        else None
        for value in args
    )
    op = Op(name=base, operands=operands)
    if not is_product(op) and base not in _SCALED_PRODUCTS:
        return None
    floating = [tensor for tensor in given if tensor.is_floating_point()]
    if not floating:
        return None
    kind, shape = product_size(op)
    # What is narrow decides: a bias or a running sum may be wide.
    narrow = min(
        (tensor.dtype for tensor in floating if tensor.dim() > 1), key=lambda d: d.itemsize, default=None
    )
    return None if narrow is None else (kind, shape, format_name(narrow))


def _is_capturing() -> bool:
    """Whether work is being recorded into a CUDA graph, which takes no events that tell the time."""
    return bool(torch.cuda.is_current_stream_capturing())

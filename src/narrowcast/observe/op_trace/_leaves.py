"""Every operation that torch runs below autocast and autograd: time, bytes, casts, products.

An operator that a script calls may consist of several of these. Casts by autocast itself are seen only here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.casting import ops_under_way, rule_that_casts
from narrowcast.observe.op_trace._places import Place
from narrowcast.observe.profiling import is_product, product_size, seconds_between, stamp
from narrowcast.policy import Rule, format_name

_CASTS = ("aten::_to_copy", "aten::to.dtype", "aten::_to_copy.default")


@dataclass(slots=True, eq=False)
class Leaf:
    """One operation that ran.

    Attributes:
        op: such as ``"mm"`` or ``"add.Tensor"``.
        place: where it was called.
        depth: in how many watched operators it ran.
        stamps: before and after it.
        moved_bytes: read and written; 0 for a view.
        view: whether it returns the memory of its input.
        inputs, outputs: formats of its floating-point tensors.
        cast: formats from and to, of a cast between floating-point formats.
        product: kind, sizes and format of the operands, of a product.
        rule: the rule for a module whose input or output it casts.
        owner: the site that it was counted with; set later.
    """

    op: str
    place: Place
    depth: int
    stamps: tuple[Any, Any]
    moved_bytes: int
    view: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rule: Rule | None
    cast: tuple[str, str] | None = None
    product: tuple[str, tuple[int, ...], str] | None = None
    owner: Any = None
    _took_s: float | None = None

    def took_s(self) -> float:
        """Return its seconds; waits for a GPU to finish it."""
        if self._took_s is None:
            self._took_s = seconds_between(*self.stamps)
        return self._took_s


class LeafWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports each operation, also those of autograd's own threads.

    Args:
        here: returns the place of a call made now.
        report: called with each leaf, in the thread that ran it.
    """

    def __init__(self, here: Callable[[], Place], report: Callable[[Leaf], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._here, self._report = here, report
        self._lock = threading.Lock()
        # By storage of the result: casts whose result nothing has written to since.
        self._casts: dict[int, tuple[Any, Leaf]] = {}
        self.round_trips: list[tuple[Leaf, Leaf]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name is None:
            return func(*args, **kwargs)
        given = list(_tensors([*args, *kwargs.values()]))
        place = self._here()
        # A CUDA graph that is being captured takes no events that tell the time.
        on_gpu = any(tensor.is_cuda for tensor in given) and not torch.cuda.is_current_stream_capturing()
        clock = "cuda" if on_gpu else "cpu"
        began = stamp(clock)
        result = func(*args, **kwargs)
        ended = stamp(clock)
        made = list(_tensors(result if isinstance(result, tuple | list) else (result,)))
        view = _is_view(func)
        leaf = Leaf(
            op=name.removeprefix("aten::"),
            place=place,
            depth=len(ops_under_way()),
            stamps=(began, ended),
            moved_bytes=0 if view else sum(_bytes(tensor) for tensor in (*given, *made)),
            view=view,
            inputs=formats_of(given),
            outputs=formats_of(made),
            rule=rule_that_casts(),
            product=_product(name, args),
        )
        self._find_casts(func, name, leaf, given, made)
        self._report(leaf)
        return result

    def _find_casts(
        self, func: Any, name: str, leaf: Leaf, given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        """Note a cast, and whether it returns to the format that an earlier cast came from."""
        if func._schema.is_mutable:
            with self._lock:
                for tensor in given:
                    self._casts.pop(_storage(tensor), None)
            return
        formats = (*leaf.inputs, *leaf.outputs)
        if name not in _CASTS or len(formats) != 2 or leaf.inputs == leaf.outputs:
            return
        leaf.cast = formats
        with self._lock:
            earlier = self._casts.get(_storage(given[0]))
            if earlier is not None and not earlier[0].expired() and earlier[1].cast == formats[::-1]:
                self.round_trips.append((earlier[1], leaf))
            weak = StorageWeakRef(made[0].untyped_storage())  # type: ignore[no-untyped-call]
            self._casts[_storage(made[0])] = (weak, leaf)


def formats_of(tensors: Any) -> tuple[str, ...]:
    """Return the formats of the floating-point tensors among ``tensors``, each once, the widest first."""
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
    """Return ``"aten::add.Tensor"``; None if it does not work on tensors, as a mark of the profiler."""
    name: str = func.name()
    schema = func._schema
    on_tensors = any("Tensor" in str(one.type) for one in (*schema.arguments, *schema.returns))
    return name if on_tensors and not name.startswith("prim::") else None


@functools.cache
def _is_view(func: Any) -> bool:
    aliases = [one.alias_info for one in func._schema.returns]
    return bool(aliases) and all(info is not None and not info.is_write for info in aliases)


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)  # sparse tensors and wrappers have none


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize if tensor.layout == torch.strided else 0


def _product(name: str, args: tuple[Any, ...]) -> tuple[str, tuple[int, ...], str] | None:
    base = name.partition(".")[0]
    if not is_product(base):
        return None
    matrices = [t for t in _tensors(args) if t.is_floating_point() and t.dim() > 1]
    if not matrices:
        return None
    shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in args]
    # The narrowest operand decides: a bias or a running sum may be wider.
    narrow = min((tensor.dtype for tensor in matrices), key=lambda dtype: dtype.itemsize)
    return (*product_size(base, shapes), format_name(narrow))

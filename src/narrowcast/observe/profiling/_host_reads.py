"""Where a script reads values of tensors: on a GPU each read waits until the GPU has computed it."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

# Each is called as a method of the tensor that it reads.
_METHODS = (
    "item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select",
    "__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__", "__array__",
)  # fmt: skip
_FUNCTIONS = ("nonzero", "unique", "masked_select")
_SHOWN = {
    "__bool__": "bool()", "__int__": "int()", "__float__": "float()", "__index__": "as an index",
    "__repr__": "printing", "__format__": "printing", "__array__": "numpy()",
}  # fmt: skip
# They read counters and indices of their own, which are on the CPU wherever the model is.
_ON_CPU_ANYWHERE = ("torch.optim.", "torch.utils.data.")


class HostReads:
    """Within it each read of a tensor's values by Python is counted, by the line that asked::

        with HostReads(call_site) as reads:
            step()
        reads.sites  # [{"site": "train.py:42", "what": "item()", "device": "cpu", "count": 1}]

    A read inside another is one: printing a tensor reads it several times. Reads by optimizers and samplers
    of counters that are on the CPU everywhere are left out, and so are narrowcast's own of CPU tensors.

    Args:
        call_site: says which line of the script is running.
    """

    def __init__(self, call_site: Callable[[], str]) -> None:
        self._call_site = call_site
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._undo: list[Callable[[], None]] = []
        self._thread = threading.local()

    def __enter__(self) -> Self:
        for name in _METHODS:
            self._replace(torch.Tensor, name, _reads_always, _SHOWN.get(name, f"{name}()"))
        for name in _FUNCTIONS:
            self._replace(torch, name, _reads_always, f"{name}()")
        self._replace(torch.Tensor, "__getitem__", _reads_a_mask, "indexing by a mask")
        self._replace(torch.Tensor, "to", _leaves_the_device, 'to("cpu")')
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()

    @property
    def sites(self) -> list[dict[str, Any]]:
        """``site``, ``what``, ``device`` type and ``count``, the most frequent first."""
        return as_sites(self._counts)

    def take(self) -> Counter[tuple[str, str, str]]:
        """Count from nothing again; what was counted so far, by site, what and device type."""
        counted, self._counts = self._counts, Counter()
        return counted

    def _replace(self, owner: Any, name: str, reads: Callable[..., bool], what: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._thread, "inside", False) or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            tensor = args[0] if args else None
            if not isinstance(tensor, torch.Tensor) or not reads(tensor, args, kwargs):
                return original(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            self._thread.inside = True
            try:
                self._saw(what, tensor, caller)
                return original(*args, **kwargs)
            finally:
                self._thread.inside = False

        if name in vars(owner):
            there = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, there))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, counted)

    def _saw(self, what: str, tensor: torch.Tensor, caller: str) -> None:
        on_cpu, ours = tensor.device.type == "cpu", caller.startswith("narrowcast.")
        if on_cpu and (ours or caller.startswith(_ON_CPU_ANYWHERE)):
            return
        site = "narrowcast" if ours else self._call_site()
        self._counts[site, what, tensor.device.type] += 1


def as_sites(counts: Counter[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """JSON-ready rows, the most frequent first."""
    return [
        {"site": site, "what": what, "device": device, "count": count}
        for (site, what, device), count in counts.most_common()
    ]


def _reads_always(tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
    return True


def _reads_a_mask(tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
    """Indexing by a mask must know how many are chosen."""
    index = args[1] if len(args) > 1 else None
    return any(
        isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
        for part in (index if isinstance(index, tuple) else (index,))
    )


def _leaves_the_device(tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
    if tensor.device.type == "cpu" or kwargs.get("non_blocking"):
        return False
    asked = [*args[1:], kwargs.get("device")]
    return any(
        (isinstance(value, str) and value.startswith("cpu"))
        or (isinstance(value, torch.device) and value.type == "cpu")
        or (isinstance(value, torch.Tensor) and value.device.type == "cpu")
        for value in asked
    )

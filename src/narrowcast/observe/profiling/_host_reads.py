"""Where a script reads values of tensors: on a GPU each read waits until the GPU has computed them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

_SHOWN = {
    "__bool__": "bool()", "__int__": "int()", "__float__": "float()", "__index__": "as an index",
    "__repr__": "printing", "__format__": "printing", "__array__": "numpy()",
    "__getitem__": "indexing by a mask", "to": 'to("cpu")',
}  # fmt: skip
_READS = (
    "item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", *_SHOWN,
)  # fmt: skip
# They read counters and indices of their own, which are on the CPU wherever the model is.
_ON_CPU_ANYWHERE = ("torch.optim.", "torch.utils.data.", "narrowcast.")

Reads = Counter[tuple[str, str, str]]
"""Number of reads by site, kind and type of device."""


class HostReads(TorchFunctionMode):
    """Counts each read of a tensor's values by Python, by the line that asked::

        with HostReads(call_site) as reads:
            step()
        read_rows(reads.take())  # [{"site": "train.py:42", "what": "item()", "device": "cpu", "count": 1}]

    A read inside another is one: printing a tensor reads it several times. Not counted: reads of CPU tensors
    by optimizers, samplers and narrowcast. Models under ``torch.compile`` run eagerly within the block.

    Args:
        call_site: returns the line of the script that is running.
    """

    def __init__(self, call_site: Callable[[], str]) -> None:
        super().__init__()
        self._call_site = call_site
        self._counts: Reads = Counter()
        self._stance: Any = None

    def __enter__(self) -> Self:
        # Dynamo would compile each graph again, with this mode traced into it.
        if "torch._dynamo" in sys.modules:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        if self._stance is not None:
            self._stance.__exit__(kind, value, trace)

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
                self._counts[site, _SHOWN.get(name, f"{name}()"), tensor.device.type] += 1
        return func(*args, **kwargs)

    def take(self) -> Reads:
        """Return what was counted so far, and count from nothing again."""
        counted, self._counts = self._counts, Counter()
        return counted


def read_rows(counts: Reads) -> list[dict[str, Any]]:
    """Return JSON-ready rows of ``site``, ``what``, ``device`` and ``count``, the most frequent first."""
    return [
        {"site": site, "what": what, "device": device, "count": count}
        for (site, what, device), count in counts.most_common()
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

"""Where a script reads values of tensors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

_READS = (
    "item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", "to", "__bool__", "__int__",
    "__float__", "__index__", "__repr__", "__format__", "__array__", "__getitem__",
)  # fmt: skip
# Reads of CPU tensors by these modules do not count: the tensors are the modules' own counters and indices,
# which stay on the CPU even if the model is on a GPU.
_READERS_OF_CPU_TENSORS = ("torch.optim.", "torch.utils.data.", "narrowcast.")


class HostReads(TorchFunctionMode):
    """Counts each read of a tensor's values by Python, by the line that ``call_site`` returns::

        with HostReads(call_site) as reads:
            step()
        reads.rows()  # [{"site": "train.py:42", "what": "item()", "device": "cpu", "count": 1}]

    On a GPU each read waits until the GPU has computed the values. Printing a tensor reads it several times,
    which counts as one read. Not counted: reads of CPU tensors by optimizers, samplers and narrowcast.
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
            if tensor.device.type != "cpu" or not caller.startswith(_READERS_OF_CPU_TENSORS):
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
    """Return whether a call of a method in ``_READS`` reads the values."""
    if name == "__getitem__":
        index = args[1] if len(args) > 1 else None
        parts = index if isinstance(index, tuple) else (index,)
        return any(map(_is_mask, parts))
    if name == "to":
        return not _is_non_blocking(args, kwargs) and _moves_to_cpu(tensor, args, kwargs)
    return True


def _is_mask(index: Any) -> bool:
    """Return whether an index is a mask: its true values are counted to know the size of the result."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_non_blocking(args: Any, kwargs: Any) -> bool:
    # ``Module.to`` passes ``non_blocking`` by position: it is the first bool in each overload of ``to``.
    for argument in args[1:]:
        if isinstance(argument, bool):
            return argument
    return bool(kwargs.get("non_blocking"))


def _moves_to_cpu(tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
    # A script's ``to(device)`` on a CPU does not say that it would read on a GPU, as ``cpu()`` does.
    if tensor.device.type == "cpu":
        return False
    for target in (*args[1:], kwargs.get("device")):
        device = getattr(target, "device", target)  # ``to`` takes a device, or a tensor on it
        if str(device).startswith("cpu"):
            return True
    return False

"""What PyTorch's own table does with an operator, for kernels of ours in whose thread no rule is in force.

PyTorch's kernel can be fetched and called, but Python's lock is held as long as it computes: no other thread
runs meanwhile, and one that clears the cache of casts, for which it needs both that lock and the cache's own,
would wait for ever. So what its kernel does is done here, with the lock given back, wherever tensors are what
they seem. The kernel itself is for tracers, and with the cache off for transformations and other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from narrowcast.casting import _actions
from narrowcast.casting._torch_internals import (
    has_kernel,
    is_of_pytorch,
    is_proxy_tracing,
    is_tracing,
    is_transforming,
)
from narrowcast.policy import FP32, FP32_SET_DTYPE, LOWER, autocast_key, native_table

_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
# Others, as those of fp8, PyTorch's kernels cast as they do these.
_FORMATS = frozenset({
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip


def native_kernel(op: str, device_type: str) -> Callable[..., Any] | None:
    """The kernel that is on the autocast key now, to be called with a keyset first; None: there is none."""
    qualified, key = op if "::" in op else f"aten::{op}", autocast_key(device_type)
    if not has_kernel(qualified, key):
        return None
    fetched = torch.library.get_kernel(qualified, key)
    call: Callable[..., Any] = fetched.call_boxed
    kind = native_table(device_type).get(op)
    if kind not in (LOWER, FP32, FP32_SET_DTYPE) or not is_of_pytorch(fetched):
        return call
    action = _actions.native_action(op, kind, device_type)

    call = without_waiting(call)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        plain = _are_plain(args) and (not kwargs or _are_plain(kwargs.values()))
        if plain and not is_transforming() and not _is_traced():
            return action(keyset, args, kwargs)
        return call(keyset, *args, **kwargs)

    return kernel


def without_waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    """A fetched kernel that neither reads nor writes PyTorch's cache, whose lock others may hold.

    Tracers, of which there is one at a time, keep it: a weight is cast once in what they record.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        caches = torch.is_autocast_cache_enabled()
        if not caches or _is_traced():
            return call(*args, **kwargs)
        torch.set_autocast_cache_enabled(False)
        try:
            return call(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(caches)

    return kernel


def _is_traced() -> bool:
    return is_proxy_tracing() or is_tracing() or torch.compiler.is_compiling()


def _are_plain(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) not in _CLASSES or value.dtype not in _FORMATS:
                return False
        elif isinstance(value, list | tuple) and not _are_plain(value):
            return False
    return True

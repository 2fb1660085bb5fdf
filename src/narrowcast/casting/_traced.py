"""Regions in code that is being traced, by ``torch.compile`` or ``torch.export``.

Dynamo writes the calls of torch's public setters into the graph, so the region ends up where it was written
without a graph break. It traces no locks and no thread-local stacks, and needs none: the state before is in
the graph too, and the cache of weight casts is off inside, so that no cast of another region can be met.
``torch.export`` keeps a region as a part of the graph only if ``torch.autocast`` opens it.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.errors import UnsupportedError

Left = Any  # a torch.autocast, or the state before


def enter(stack: list[Left], device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
    """Open a region; ``leave(stack)`` closes it."""
    if not torch.compiler.is_dynamo_compiling():
        if enabled and dtype == torch.float32:
            raise UnsupportedError(
                "expected an exported region in float16 or bfloat16, got torch.float32, which torch.export "
                "cannot keep; cast the inputs of the layer with .float() and its weights are fp32 already"
            )
        region: Any = torch.autocast(device, dtype, enabled, cache_enabled)
        region.__enter__()
        stack.append(region)
        return
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            "expected torch.export to run the code, got strict=True, which loses the region without a word; "
            "write torch.export.export(..., strict=False)"
        )
    enabled_before, dtype_before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    stack.append((device, enabled_before, dtype_before, torch.is_autocast_cache_enabled()))
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(False)
    torch.autocast_increment_nesting()


def leave(stack: list[Left]) -> None:
    """Close the region that was opened last."""
    left = stack.pop()
    if isinstance(left, torch.autocast):
        left.__exit__(None, None, None)
        return
    device, enabled, dtype, cache_enabled = left
    torch.autocast_decrement_nesting()
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cache_enabled)

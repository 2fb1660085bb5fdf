"""Regions in code that is being traced, by ``torch.compile`` or ``torch.export``.

Dynamo traces ``torch.autocast`` itself, inside checkpoints and custom functions too, but neither locks and
thread-local stacks nor (in those) the setters of torch's state. So traced code gets a ``torch.autocast``,
with the cache of weight casts off: no cast of another region can be met there. One in float32, which torch
would disable on the CPU, is one of another format in which the format is then set to float32.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.casting._regions import traced_region
from narrowcast.errors import UnsupportedError
from narrowcast.policy import Policy, as_policy


def region(
    device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, policy: Policy | str | None = None
) -> Any:
    """A context manager that Dynamo and ``torch.export`` follow without a graph break.

    Raises:
        UnsupportedError: for a policy with rules, which a graph could not keep.
    """
    if policy is not None and not as_policy(policy).is_plain:
        if torch.compiler.is_exporting():
            raise UnsupportedError(
                "a region whose policy has rules was opened in code that torch.export traces, and a program "
                "keeps no rules: leave it out"
            )
        raise UnsupportedError(
            "a region whose policy has rules was opened in code that torch.compile traces: open it around "
            "the compiled function, or use nc.compile(model, policy)"
        )
    if torch.compiler.is_exporting():
        if enabled and dtype == torch.float32:
            raise UnsupportedError(
                "expected a region in float16 or bfloat16 for torch.export, got torch.float32, which an "
                "exported program cannot keep; leave the region out and cast the half inputs of its layers "
                "with .float()"
            )
        # torch.export writes the setting into the graph, where it should say what the script did.
        return torch.autocast(device, dtype, enabled, cache_enabled)
    return traced_region(device, dtype, enabled)

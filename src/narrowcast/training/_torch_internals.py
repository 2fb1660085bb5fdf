"""The names of torch without a promise of stability that this room uses; tests/training checks each one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from narrowcast.gradients import leaf_of

_SOONEST = 2**64 - 1
"""The engine runs the node with the largest number of those that are ready; leaves have this one."""
_CAST = "ToCopyBackward0"


def run_casts_of_leaves_soon(nodes: Iterable[Any]) -> None:
    """Let each cast of a leaf among graph nodes go backward as soon as its gradient is there.

    Where the node cannot be told (torch before ``_set_sequence_nr``) nothing changes but the order.
    """
    for node in nodes:
        if node.name() == _CAST and len(node.next_functions) == 1:
            below, _ = node.next_functions[0]
            if below is not None and leaf_of(below) is not None and hasattr(node, "_set_sequence_nr"):
                node._set_sequence_nr(_SOONEST)

"""Walking an autograd graph from its roots to the leaves that gradients accumulate in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from narrowcast.gradients._torch_internals import ACCUMULATE_GRAD


def nodes_below(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graph that backward from ``roots`` would visit, each once, roots included."""
    seen = set(roots)
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def leaf_of(node: Any) -> torch.Tensor | None:
    """The tensor that accumulates what reaches ``node``; None for a node inside the graph."""
    return node.variable if type(node) is ACCUMULATE_GRAD else None  # type: ignore[attr-defined]

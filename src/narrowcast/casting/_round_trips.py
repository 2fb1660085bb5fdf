"""Casts up and down again, which change nothing: bf16 to fp32 and back.

Every bf16 and every fp16 value is an fp32 value, so the way up and down gives back what went up, NaN and
infinities included. The other way round it would not: fp32 to bf16 and back rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node


class RoundTrips:
    """The casts of one graph, as far as they widen without loss.

    Where gradients flow, a wide value may have other uses, whose gradients autograd adds up in fp32 before it
    goes down: then the way up and down stays, so that gradients are what they are without this.
    """

    def __init__(self, values: dict[Node, Any], differentiable: set[Node]) -> None:
        self._values = values
        self._differentiable = differentiable
        self._widened: dict[Node, tuple[Node, int, int]] = {}
        self._back: dict[Node, list[Node]] = {}

    def note(self, cast: Node, source: Node) -> None:
        """``cast`` was made from ``source``."""
        narrow, wide = self._values[source], self._values[cast]
        origin = self._widened.get(source)
        if origin is not None and self._unwritten(source) and self._values[origin[0]].dtype == wide.dtype:
            self._back.setdefault(source, []).append(cast)
        if narrow.dtype in (torch.bfloat16, torch.float16) and wide.dtype == torch.float32:
            self._widened[cast] = (source, narrow._version, wide._version)

    def source(self, value: Node, dtype: torch.dtype) -> Node | None:
        """What ``value`` was widened from, if that is its cast to ``dtype`` and no gradient flows."""
        origin = self._widened.get(value)
        if origin is None or not self._unwritten(value) or self._values[origin[0]].dtype != dtype:
            return None
        return None if value in self._differentiable else origin[0]

    def remove(self, graph: Graph) -> None:
        """Take out those that are left where nothing else uses the wide value."""
        for wide, casts in self._back.items():
            if set(wide.users) == set(casts):
                for cast in casts:
                    cast.replace_all_uses_with(self._widened[wide][0])
                    graph.erase_node(cast)
                graph.erase_node(wide)

    def _unwritten(self, value: Node) -> bool:
        source, narrow, wide = self._widened[value]
        written = self._values[source]._version != narrow or self._values[value]._version != wide
        return not written

"""Casts of what goes into and comes out of modules with rules, where a value of a graph crosses bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from narrowcast.casting._actions import is_eligible, widest
from narrowcast.casting._graph_places import Call, Places, own_rule, place_in
from narrowcast.errors import UnsupportedError
from narrowcast.policy import LOWER, PROMOTE, Rule, Scope, dtype_of


class Walk(Protocol):
    """What is asked of the walk: where it is, what it knows, and a cast."""

    root: Scope
    places: Places
    graph: Graph
    device: str
    inside: tuple[Call, ...]
    values: dict[Node, Any]
    calls: dict[Node, tuple[Call, ...]]
    state: set[Node]
    owners: dict[Node, tuple[str, ...]]

    def cast(self, value: Node, dtype: torch.dtype, near: Node, call: Any = None) -> Node: ...


class Bounds:
    """The bounds of modules in the graph of one walk."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._widest: dict[Call, torch.dtype | None] = {}
        self._called_on: dict[Call, bool] = {}

    def note(self, calls: tuple[Call, ...]) -> None:
        """A node in ``calls`` comes. Where autocast is off as a module is called, rules leave it alone."""
        for one in calls:
            if one not in self._called_on:
                self._called_on[one] = torch.is_autocast_enabled(self._walk.device)

    def enter(self, node: Node, calls: tuple[Call, ...]) -> None:
        """Cast what comes out of modules, and goes into them, on its way to ``node``, which is in ``calls``.

        Raises:
            UnsupportedError: a rule refuses a module that is called.
        """
        walk = self._walk
        if not walk.places.has_rules:
            return
        moved = {}
        with walk.graph.inserting_before(node):
            for one in node.all_input_nodes:
                if self._is_handed_on(one):
                    new = self._carry(one, self._made_in(one, calls), calls, node)
                    if new is not one:
                        moved[one] = new
        if moved:
            node.args = map_arg(node.args, lambda one: moved.get(one, one))
            node.kwargs = map_arg(node.kwargs, lambda one: moved.get(one, one))

    def _is_handed_on(self, node: Node) -> bool:
        """Whether ``node`` is a value that modules may hand to each other."""
        walk = self._walk
        return (node not in walk.state or node in walk.owners) and isinstance(
            walk.values.get(node), torch.Tensor
        )

    def _made_in(self, value: Node, used_in: tuple[Call, ...]) -> tuple[Call, ...]:
        """The calls that ``value`` was made in; of a parameter that is used there, those that have it."""
        names = self._walk.owners.get(value)
        if names is None:
            return self._walk.calls.get(value, ())
        having = [
            depth
            for depth, call in enumerate(used_in, 1)
            if not call.path or any(name.startswith(f"{call.path}.") for name in names)
        ]
        return used_in[: max(having, default=0)]

    def _carry(self, value: Node, made_in: tuple[Call, ...], used_in: tuple[Call, ...], node: Node) -> Node:
        """``value``, made in the calls ``made_in``, as it comes to ``node``, which is in ``used_in``."""
        common = 0
        while common < min(len(made_in), len(used_in)) and made_in[common] == used_in[common]:
            common += 1
        for depth in range(len(made_in), common, -1):
            rule = self._rule(made_in[:depth])
            if rule is not None and rule.output is not None:
                dtype = dtype_of(self._walk.root.resolved.lower if rule.output == LOWER else rule.output)
                value = self._cast_if_eligible(value, dtype, node, made_in[depth - 1])
        for depth in range(common + 1, len(used_in) + 1):
            rule = self._rule(used_in[:depth])
            if rule is not None:
                call = used_in[depth - 1]
                value = self._cast_if_eligible(value, self._compute_dtype(rule, call, node), node, call)
        return value

    def _compute_dtype(self, rule: Rule, call: Call, node: Node) -> torch.dtype | None:
        """What the inputs of a module are cast to; None: to nothing."""
        if rule.compute == "refuse":
            raise UnsupportedError(f"module {call.path!r} was called, which a rule refuses ({rule})")
        if rule.compute == "as-is":
            return None
        if rule.compute == PROMOTE:
            if call not in self._widest:
                self._widest[call] = widest(self._inputs(call, node), self._walk.device)
            return self._widest[call]
        return dtype_of(self._walk.root.resolved.lower if rule.compute == LOWER else rule.compute)

    def _inputs(self, call: Call, node: Node) -> Iterator[torch.Tensor]:
        """The values from outside of ``call`` that its nodes take, ``node`` and those after it."""
        walk = self._walk
        while node.op != "output":
            around = (*walk.inside, *walk.places.around(node))
            if call in around:
                for one in node.all_input_nodes:
                    is_known = one in walk.calls or one in walk.owners
                    if is_known and self._is_handed_on(one) and call not in self._made_in(one, around):
                        yield walk.values[one]
            node = node.next

    def _rule(self, calls: tuple[Call, ...]) -> Rule | None:
        if not self._called_on.get(calls[-1], True):
            return None
        return own_rule(calls[-1], place_in(self._walk.root, calls))

    def _cast_if_eligible(self, value: Node, dtype: torch.dtype | None, node: Node, call: Call) -> Node:
        tensor = self._walk.values[value]
        if dtype in (None, tensor.dtype) or not is_eligible(tensor, self._walk.device):
            return value
        return self._walk.cast(value, dtype, node, call)

"""Casts written into a graph: its nodes walked in order, on tensors without data.

Works on graphs as Dynamo hands them to a backend and as ``torch.export`` makes them. A node that comes to
operators which are cast is replaced by these operators with their casts before them; any other stays as it
is. The casts are the whole truth afterwards: regions in the graph are taken out, and it is to be run with
autocast off. One cast of a value serves all its uses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from narrowcast.casting._graph_bounds import Bounds
from narrowcast.casting._graph_calls import as_it_was, balanced, cross, is_bound, path_at
from narrowcast.casting._graph_nodes import (
    attribute_of,
    callable_of,
    constant_in,
    dtype_of_value,
    fake_mode_of,
    grad_in_body,
    name_of,
    replace_uses,
    results_of,
    varies,
    without_data,
)
from narrowcast.casting._graph_ops import CAST, Caster
from narrowcast.casting._graph_places import Call, Places, place_in
from narrowcast.casting._places import here
from narrowcast.casting._round_trips import RoundTrips
from narrowcast.casting._torch_internals import HigherOrderOperator, rename_node
from narrowcast.errors import UnsupportedError
from narrowcast.policy import Scope

_autocast: Any = torch.amp.autocast_mode
_ENTER, _EXIT = _autocast._enter_autocast, _autocast._exit_autocast
_ASSERTS: Any = torch.ops.aten._assert_tensor_metadata.default
# Higher-order operators whose body takes the operands that follow it, and whose result is the body's.
_TRANSPARENT = (
    *("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "wrap_with_set_grad_enabled"),
    *("invoke_subgraph", "autograd_function_apply"),
)


class Writer:
    """Writes casts into one graph module, the bodies inside it included.

    Attributes:
        shares: whether one cast serves all uses of an activation, whose gradients then meet in its format.
        owners: the names in the model of parameters and buffers, by which it shows that they are handed.
    """

    def __init__(
        self,
        root: Scope,
        places: Places,
        *,
        example: str,
        shares: bool = False,
        owners: Mapping[Node, tuple[str, ...]] | None = None,
    ) -> None:
        self.shares = shares
        self.owners = dict(owners or {})
        self._root = root
        self._places = places
        self._example = example  # what the meta of a node calls the tensor without data
        self._caster = Caster(root)

    def write(self, graph_module: GraphModule, state: set[Node]) -> None:
        """Write casts into ``graph_module``; ``state``: the placeholders that are parameters and buffers."""
        slots = graph_module.graph.find_nodes(op="placeholder")
        inputs = [slot.meta.get(self._example) for slot in slots]
        with as_it_was(), balanced():
            self._walk(graph_module, inputs, (), state)

    def _walk(
        self, graph_module: GraphModule, inputs: list[Any], inside: tuple[Call, ...], state: set[Node]
    ) -> Any:
        walk = _Walk(self, graph_module, inside, state)
        result = walk.run(inputs)
        graph_module.graph.lint()
        graph_module.recompile()
        return result


class _Walk:
    """One walk over one graph."""

    def __init__(
        self, writer: Writer, graph_module: GraphModule, inside: tuple[Call, ...], state: set[Node]
    ) -> None:
        self.writer = writer
        self.root, self.places = writer._root, writer._places
        self.caster = writer._caster
        self.graph_module = graph_module
        self.graph = graph_module.graph
        self.inside = inside
        self.state = state
        self.owners = writer.owners
        self.device = self.root.resolved.device_type
        self.values: dict[Node, Any] = {}
        self.calls: dict[Node, tuple[Call, ...]] = {}
        self.made: dict[tuple[Node, torch.dtype, int, bool, Any], Node] = {}
        self.differentiable: set[Node] = set()
        self.round_trips = RoundTrips(self.values, self.differentiable)
        self.bounds = Bounds(self)
        self.spent: list[Node] = []  # to be taken out once the walk is over

    def run(self, inputs: list[Any]) -> Any:
        fake_mode = fake_mode_of([*inputs, *(n.meta.get(self.writer._example) for n in self.graph.nodes)])
        given = iter(inputs)
        result = None
        with ExitStack() as stack:
            if fake_mode is not None:
                stack.enter_context(fake_mode)
                if fake_mode.shape_env is not None:
                    stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
            for node in list(self.graph.nodes):
                if node.op == "placeholder":
                    self._take(node, next(given))
                    self.calls[node] = self.inside
                elif node.op == "get_attr":
                    self.values[node] = without_data(attribute_of(self.graph_module, node.target), fake_mode)
                    self.calls[node] = self.inside
                    if isinstance(self.values[node], torch.Tensor):
                        self.state.add(node)
                elif node.op == "output":
                    self.bounds.enter(node, self.inside)
                    result = self._value(node.args[0])
                else:
                    self._visit(node)
        for node in reversed(self.spent):
            self.graph.erase_node(node)
        self.round_trips.remove(self.graph)
        return result

    def _take(self, node: Node, value: Any) -> None:
        """Have the placeholder ``node`` stand for ``value``."""
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                self.differentiable.add(node)
            # What is differentiable is known by node; so a graph may write to its inputs, run a second time.
            value = value.detach()
            known = node.meta.get(self.writer._example)
            if dtype_of_value(known) != value.dtype:
                node.meta[self.writer._example] = value
        self.values[node] = value

    # ---- one node

    def _visit(self, node: Node) -> None:
        target = node.target
        calls = (*self.inside, *(one for one in self.places.around(node) if one not in self.inside))
        self.bounds.note(calls)
        if target in (_ENTER, _EXIT):
            self.spent.append(node)
            self.values[node] = target(*self._value(node.args))  # type: ignore[operator]
            return
        if target is operator.getitem and not isinstance(node.args[0], Node):
            self.spent.append(node)  # of what is several nodes now; its users have theirs
            return
        self.calls[node] = calls
        if is_bound(node):
            self._cross(node)
            return
        self.bounds.enter(node, calls)
        if isinstance(target, HigherOrderOperator):
            self._visit_body(node)
            return
        if "unbacked_bindings" in node.meta:  # its sizes have names, which a second run would not give it
            self._keep(node, node.meta.get(self.writer._example))
            return
        if target is _ASSERTS:
            self._assert_what_is(node)
        args, kwargs = self._value(node.args), self._value(node.kwargs)
        call = callable_of(node)
        if not torch.is_autocast_enabled(self.device):
            self._keep(node, call(*args, **kwargs))
            return
        self.caster.place = place_in(here.places.get(self.device, self.root), calls)
        result, seen = self.caster.run(call, args, kwargs)
        if any(seen.values()):
            self._replace(node, call, seen, calls, result)
        else:
            self._keep(node, result)

    def _cross(self, node: Node) -> None:
        """Enter or leave a module as its hooks did while it was traced.

        Where tensors are on several types of device, the first of the walks casts all that is to be cast.
        """
        handed: Any = node.args[1:]
        values = node.meta.setdefault("narrowcast_handed", self._value(handed))
        found = iter(cross(node, [list(some) for some in values]))
        traced = iter(node.meta[self.writer._example])
        result = []
        with self.graph.inserting_before(node):
            for group, some in enumerate(handed):
                for one in some:
                    dtype, seen = next(found).dtype, next(traced).dtype
                    is_cast = dtype != self.values[one].dtype
                    if is_cast and seen != dtype:
                        raise UnsupportedError(_TRACED_OTHERWISE.format(path_at(node), dtype, seen))
                    result.append(self.cast(one, dtype, node, (node, group)) if is_cast else one)
        replace_uses(node, result)
        node.args = node.args[:1]
        self.values[node] = result

    def _assert_what_is(self, node: Node) -> None:
        """torch.export asserts the format of what the model's code casts, which is another one by now."""
        name, tensor = node.args[0], self._value(node.args[0])
        known = dict(zip(("size", "stride", "dtype"), node.args[1:], strict=False))
        settings = {**known, **node.kwargs}
        if settings.get("dtype") is not None:
            settings["dtype"] = tensor.dtype
        node.args, node.kwargs = (name,), settings

    def _propagate(self, node: Node) -> None:
        if torch.is_grad_enabled() and any(one in self.differentiable for one in node.all_input_nodes):
            self.differentiable.add(node)

    def _keep(self, node: Node, result: Any) -> None:
        self.values[node] = result
        self._propagate(node)
        if self.writer._example in node.meta:
            node.meta[self.writer._example] = result

    def _replace(
        self,
        node: Node,
        call: Callable[..., Any],
        seen: Mapping[Any, bool],
        calls: tuple[Call, ...],
        value: Any,
    ) -> None:
        """Put the operators that ``node`` comes to, which give ``value``, in its place, with their casts."""
        leaves: dict[Node, None] = {}
        map_arg((node.args, node.kwargs), leaves.setdefault)
        changing = [one for one in leaves if varies(self.values[one])]

        def again(*values: Any) -> Any:
            known = dict(zip(changing, values, strict=True))
            look_up = lambda one: known[one] if one in known else self.values[one]  # noqa: E731
            return call(*map_arg(node.args, look_up), **map_arg(node.kwargs, look_up))

        name = node.name
        inner = self.caster.record(again, [self.values[one] for one in changing], dict(seen))
        before = set(self.values)
        with self.graph.inserting_before(node):
            result = self._inline(inner, changing, node, calls)
        self._settle(result, value)
        replace_uses(node, result)
        self.graph.erase_node(node)
        if isinstance(result, Node) and result not in before:
            rename_node(result, name)  # by which an exported program's signature knows it

    def _inline(self, inner: GraphModule, outer: list[Node], node: Node, calls: tuple[Call, ...]) -> Any:
        known: dict[Node, Any] = {}
        given = iter(outer)
        for one in inner.graph.nodes:
            if one.op == "placeholder":
                known[one] = next(given)
            elif one.op == "output":
                return map_arg(one.args[0], known.__getitem__)
            elif one.op == "call_function" and one.target is CAST and set(one.kwargs) == {"dtype"}:
                known[one] = self.cast(known[one.args[0]], one.kwargs["dtype"], node)
                continue
            elif one.op == "get_attr":
                known[one] = constant_in(self.graph_module, attribute_of(inner, one.target))
            else:
                known[one] = self.graph.node_copy(one, known.__getitem__)
            if one.op != "placeholder":
                self._describe(known[one], one.meta.get("val"), node)
                self.calls[known[one]] = calls
        raise AssertionError("a graph without output")

    def _settle(self, result: Any, value: Any) -> None:
        """Note the values of the nodes of ``result``: what was recorded shares no memory with its inputs."""
        if isinstance(result, Node):
            if result not in self.state:
                self.values[result] = value
        elif isinstance(result, list | tuple):
            for one, part in zip(result, value, strict=True):
                self._settle(one, part)

    def _describe(self, new: Node, value: Any, node: Node) -> None:
        self.values[new] = value
        self._propagate(new)
        skipped = ("unbacked_bindings", "tensor_meta", "val", "example_value")
        new.meta = {key: held for key, held in node.meta.items() if key not in skipped}
        new.meta[self.writer._example] = value

    # ---- casts

    def cast(self, value: Node, dtype: torch.dtype, near: Node, call: Any = None) -> Node:
        """``value`` in ``dtype``: the cast of it that is there, or one made before the node ``near``.

        ``call``: the call of a module that it goes into or comes out of, at which it is cast once.
        """
        tensor = self.values[value]
        found = self.round_trips.source(value, dtype)
        if found is not None:
            return found
        is_shared = self.writer.shares or self._is_shared(value)
        key = (value, dtype, tensor._version, torch.is_grad_enabled(), None if is_shared else call)
        if key in self.made and (is_shared or call is not None):
            return self.made[key]
        new = self.made[key] = self.graph.call_function(CAST, (value,), {"dtype": dtype})
        self._describe(new, self.caster.plainly(CAST, (tensor,), {"dtype": dtype}), near)
        self.calls[new] = self.calls.get(value, self.inside)
        self.round_trips.note(new, value)
        return new

    def _is_shared(self, value: Node) -> bool:
        """Whether one cast serves all uses of ``value``, as PyTorch keeps those of weights in eager code.

        An activation's gradients from its uses are added up in fp32 there, behind a cast for each. The
        compiler makes one of such casts once it has written the backward.
        """
        return value in self.state or value not in self.differentiable

    # ---- bodies

    def _visit_body(self, node: Node) -> None:
        """A higher-order operator: casts are written into its bodies."""
        name = name_of(node.target)
        if name == "wrap_with_autocast":
            raise UnsupportedError(_HAS_REGIONS)
        example = self.writer._example
        nodes = [one for one in node.args if isinstance(one, Node)]
        bodies = [one for one in nodes if isinstance(self.values[one], GraphModule)]
        calls = self.calls[node]
        result = node.meta.get(example)
        for position, body in enumerate(bodies):
            module = self.values[body]
            slots = module.graph.find_nodes(op="placeholder")
            inputs = [one.meta.get(example) for one in slots]
            state: set[Node] = set()
            if name in _TRANSPARENT:
                if position:
                    continue  # a backward, which autograd runs with autocast off
                operands = [one for one in nodes if one not in bodies]
                if len(operands) == len(slots):
                    inputs = [self._as_operand(one) for one in operands]
                    pairs = list(zip(slots, operands, strict=True))
                    state = {slot for slot, one in pairs if one in self.state}
                    owners = self.owners
                    owners |= {slot: owners[one] for slot, one in pairs if one in owners}
            formats = [dtype_of_value(one.meta.get(example)) for one in results_of(module)]
            with torch.set_grad_enabled(grad_in_body(node, name)):
                found = self.writer._walk(module, inputs, calls, state)
            if name in _TRANSPARENT:
                result = found
            else:
                self._hold_formats(module, formats)
        self._keep(node, result)

    def _as_operand(self, node: Node) -> Any:
        value = self.values[node]
        if node in self.differentiable and isinstance(value, torch.Tensor):
            return value.detach().requires_grad_()
        return value

    def _hold_formats(self, body: GraphModule, formats: list[torch.dtype | None]) -> None:
        """What loops and branches hand on keeps its format, which the operator around them has fixed."""
        output = next(iter(reversed(body.graph.nodes)))
        new = {}
        with body.graph.inserting_before(output):
            for one, dtype in zip(results_of(body), formats, strict=True):
                now = dtype_of_value(one.meta.get(self.writer._example))
                if dtype is not None and now is not None and now != dtype:
                    cast = new[one] = body.graph.call_function(CAST, (one,), {"dtype": dtype})
                    value = one.meta[self.writer._example]
                    cast.meta = {**one.meta, self.writer._example: value.to(dtype)}
        output.args = map_arg(output.args, lambda one: new.get(one, one))
        body.recompile()

    def _value(self, argument: Any) -> Any:
        return map_arg(argument, self.values.__getitem__)


_TRACED_OTHERWISE = (
    "expected module {!r}, which has a rule, to be traced with what its rule casts in {}, got it in {}, "
    "so that code which reads formats would read others than in eager code: use nc.apply"
)
_HAS_REGIONS = (
    "expected a program that was exported outside of every autocast region, got one with regions of its own: "
    "export the model without them, and say in the policy what they said"
)

"""Calls of modules with rules, as nodes of the graphs that Dynamo makes.

A module's hooks are traced with it, and go through ``go_inside`` and ``come_out``, each of which stands in
the graph as one node. Dynamo calls them with tensors without data as it traces: so the region of the module
is open for the code inside, its inputs have the format of its rule, and code that asks for formats reads what
it reads without a compiler. The walk that writes casts calls them again, casts what they cast, and takes them
out.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from narrowcast.casting import _regions
from narrowcast.casting._module_hooks import Hook, Shared
from narrowcast.casting._torch_internals import is_tracing_for, set_gradients, when_tracing_ends
from narrowcast.errors import UnsupportedError
from narrowcast.policy import Rule, Scope

CASTABLE = (torch.float16, torch.bfloat16, torch.float32)
_numbers = itertools.count(1)
_hooks: weakref.WeakValueDictionary[str, HookInGraphs] = weakref.WeakValueDictionary()


class _Call:
    """One call of a module, in a trace or a walk."""

    def __init__(self, key: str, module: torch.nn.Module | None) -> None:
        self.key = key
        self.module = module
        self.regions = 0
        self.output: list[tuple[str, torch.dtype, Rule]] = []

    def close(self) -> None:
        """End it; once."""
        if self in _here.calls:
            _here.calls.remove(self)
        for _ in range(self.regions):
            _regions.leave(self)
        self.regions = 0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


_here = _Thread()


class HookInGraphs(Hook):
    """What the hooks of one module do in a graph.

    Attributes:
        key: by which the nodes of graphs know it.
    """

    def __init__(self, shared: Shared, rules: tuple[Rule, ...], module: torch.nn.Module, path: str) -> None:
        super().__init__(shared, rules, opening=False)
        self.key = f"{path}#{next(_numbers)}"
        self._module = weakref.ref(module)
        _hooks[self.key] = self

    def open(self, handed: list[list[torch.Tensor]]) -> tuple[_Call, list[list[torch.Tensor]]]:
        call: Any = _Call(self.key, self._module())
        try:
            for device in self._devices():
                handed, _ = self._go_inside(call, device, handed, {})
        except BaseException:
            call.close()
            raise
        _here.calls.append(call)
        return call, handed

    def _enter(self, call: Any, device: str, place: Scope | None, dtype: torch.dtype, enabled: bool) -> None:
        # Without a cache of casts: nobody else could use those of tensors without data.
        _regions.enter(call, device, dtype, enabled, False, audible=False, place=place)
        call.regions += 1


class Backend:
    """Of whose graphs the bounds of modules are taken out. In any other they do nothing."""


def go_inside(key: str, *handed: list[torch.Tensor]) -> list[torch.Tensor]:
    """Enter the module of ``key``, which is ``handed`` these; what it gets. Called by Dynamo as it traces."""
    if not is_tracing_for(Backend):
        return [one for some in handed for one in some]
    call, found = _open(key, handed)
    when_tracing_ends(call.close)
    return found


def come_out(key: str, handed: list[torch.Tensor]) -> list[torch.Tensor]:
    """Leave the module of ``key``, which returned ``handed``; what its caller gets."""
    call = next((one for one in reversed(_here.calls) if one.key == key), None)
    if call is None:
        return list(handed)
    _close_inside(call)
    call.close()
    found = list(handed)
    for device, dtype, _ in call.output:
        found = [one.to(dtype) if _is_castable(one, device) else one for one in found]
    return _once([handed], [found])


def is_bound(node: Node) -> bool:
    """Whether ``node`` is where a module with a rule is entered or left."""
    return node.target is go_inside or node.target is come_out


def cross(node: Node, handed: list[list[Any]]) -> list[Any]:
    """In a walk: enter or leave the module of ``node`` with other values; what the other side gets.

    Raises:
        UnsupportedError: a rule refuses the module, or one inside it was entered and not left.
    """
    key: Any = node.args[0]
    if node.target is go_inside:
        return _open(key, handed)[1]
    if _here.calls[-1].key != key:
        raise _left_by_an_exception(_here.calls[-1])
    return come_out(key, *handed)


@contextmanager
def balanced() -> Iterator[None]:
    """A walk, which leaves every module that it enters.

    Raises:
        UnsupportedError: an exception left one of them in the code that was traced.
    """
    outside = _here.calls[-1] if _here.calls else None
    try:
        yield
        if _here.calls and _here.calls[-1] is not outside:
            raise _left_by_an_exception(_here.calls[-1])
    finally:
        _close_inside(outside)


@contextmanager
def as_it_was() -> Iterator[None]:
    """Nodes that switch gradients or autocast do so while a graph is walked."""
    devices = [d for d in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(d)]
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    grad, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # given already, where the graph was made
            yield
    finally:
        set_gradients(grad)
        torch.set_autocast_cache_enabled(cache)
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def _left_by_an_exception(call: _Call) -> UnsupportedError:
    return UnsupportedError(
        f"module {path_of(call.key)!r}, which has a rule, was left by an exception that the code around it "
        "caught, which torch.compile does not tell its hooks: put a torch.compiler.disable on that code, or "
        "use nc.apply"
    )


def _close_inside(call: _Call | None) -> None:
    """End the calls of this thread inside ``call``; None: all."""
    while _here.calls and _here.calls[-1] is not call:
        _here.calls[-1].close()


def path_at(node: Node) -> str:
    """The path of the module that is entered or left at ``node``."""
    return path_of(str(node.args[0]))


def path_of(key: str) -> str:
    return key.rpartition("#")[0]


def rule_at(node: Node) -> Rule:
    """The first rule for that module."""
    return _hooks[str(node.args[0])]._rules[0]


def nodes_of(graph_module: GraphModule) -> Iterator[Node]:
    """The nodes of a graph, and those of the bodies in it."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def without_bounds(graph_module: GraphModule) -> None:
    """Take the bounds out of a graph, and out of the bodies in it, where casts are written."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        found = [node for node in module.graph.nodes if is_bound(node)]
        for node in found:
            if node.users:
                raise AssertionError(f"{node} was not walked over")
            module.graph.erase_node(node)
        if found:
            module.recompile()


def _open(key: str, handed: Sequence[list[torch.Tensor]]) -> tuple[_Call, list[torch.Tensor]]:
    call, found = _hooks[key].open([list(some) for some in handed])
    return call, _once(handed, found)


def _is_castable(tensor: torch.Tensor, device: str) -> bool:
    return tensor.dtype in CASTABLE and tensor.device.type == device


def _once(handed: Sequence[Any], found: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    """``found`` in one list, with one cast of what was handed twice."""
    result = []
    for given, made in zip(handed, found, strict=True):
        first: dict[int, torch.Tensor] = {}
        result += [first.setdefault(id(one), new) for one, new in zip(given, made, strict=True)]
    return result

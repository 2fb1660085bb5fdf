"""The hooks of ``nc.compile`` on modules with rules, which Dynamo traces, or Python calls.

Where Dynamo left a piece of the model to Python, they do as those of ``nc.apply``, and what is compiled
inside begins in the module's place. In code that Dynamo traces, see ``_graph_calls``.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from narrowcast.casting._graph_calls import CASTABLE, HookInGraphs, come_out, go_inside
from narrowcast.casting._module_hooks import Hook, HookBesideGraphs, Shared
from narrowcast.casting._modules import rules_at
from narrowcast.casting._paths import all_paths, is_wrapper
from narrowcast.casting._structure import Structure
from narrowcast.casting._torch_internals import (
    guard_hooks_of_modules,
    stand_in_graphs,
    whole_graphs_under_ddp,
)
from narrowcast.policy import Policy, Rule, class_names

_Places = Iterable[tuple[tuple[str, ...], torch.nn.Module]]
# What the eager engine looks into, beside dataclasses, and this does not.
_OTHERS = (
    *(tuple, list, dict, deque, set, frozenset, torch.distributions.Distribution, UserDict, UserList),
    types.SimpleNamespace,
)


class CompiledHooks:
    """The hooks of one ``nc.compile`` on the parts of a model that have rules; they end with this."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._shared = Shared(policy, opens=False)
        self._handles: list[Any] = []
        self._root: Hook | None = None
        self._hooked: dict[int, Callable[[], torch.nn.Module | None]] = {}  # weak references
        self.reached: set[Rule] = set()
        self._structure: Structure | None = None
        guard_hooks_of_modules()
        stand_in_graphs(go_inside, come_out)
        weakref.finalize(self, _remove, self._handles).atexit = False

    def follow(self, model: torch.nn.Module) -> None:
        """Put hooks on the parts that a model has now, which is compiled as a whole."""
        if self._structure is not None:
            if self._structure.holds():
                return
            _remove(self._handles)
            self._handles.clear()
            self._hooked.clear()
        self._structure = Structure(model)
        places = all_paths(model)
        for paths, module in places:
            if "" in paths and not is_wrapper(module):
                rules = self._rules(paths, module)
                self._root = Hook(self._shared, rules, opening=False) if rules else None
        self.put_on((paths, module) for paths, module in places if "" not in paths)

    def put_on(self, places: _Places) -> None:
        """Put hooks on modules with their paths."""
        for paths, module in places:
            if self.know((module,)):
                continue
            self._hooked[id(module)] = weakref.ref(module)
            rules = () if is_wrapper(module) else self._rules(paths, module)
            if rules:
                hook = _ModuleHook(HookInGraphs(self._shared, rules, module, paths[0]))
                self._handles += [
                    module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True),
                    module.register_forward_hook(hook.after, always_call=True),
                ]

    def know(self, modules: Iterable[torch.nn.Module]) -> bool:
        """Whether all of these were looked at."""
        return all(self._hooked.get(id(module), _nothing)() is module for module in modules)

    def has(self, identity: int) -> bool:
        """Whether the module with that ``id`` was looked at."""
        return self._hooked.get(identity, _nothing)() is not None

    def call(self, function: Callable[..., Any], model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` as the call of ``model`` itself, whose bounds no graph has."""
        self.follow(model)
        if self._root is None:
            with whole_graphs_under_ddp():
                return function(*args, **kwargs)
        output = None
        args, kwargs = self._root._before(model, args, kwargs) or (args, kwargs)
        try:
            with whole_graphs_under_ddp():
                output = function(*args, **kwargs)
        finally:
            output = self._root._after(model, args, output)
        return output

    def _rules(self, paths: tuple[str, ...], module: torch.nn.Module) -> tuple[Rule, ...]:
        rules = rules_at(self._policy, paths, class_names(type(module)))
        self.reached.update(rules)
        return rules


class _ModuleHook(HookBesideGraphs):
    """Where Dynamo traces them, they stand in the graph. Copies of a model have none: they do nothing."""

    def __init__(self, hook: HookInGraphs | None) -> None:
        super().__init__(hook)
        self.key = None if hook is None else hook.key

    def traced_before(self, args: Any, kwargs: Any) -> Any:
        if self.key is None:
            return None
        by_position: list[torch.Tensor] = []
        by_name: list[torch.Tensor] = []
        _collect(args, by_position)
        _collect(kwargs, by_name)
        cast = iter(go_inside(self.key, by_position, by_name))
        return _filled(args, cast)[0], _filled(kwargs, cast)[0]

    def traced_after(self, output: Any) -> Any:
        if self.key is None:
            return None
        found: list[torch.Tensor] = []
        _collect(output, found)
        return _filled(output, iter(come_out(self.key, found)))[0]

    def __deepcopy__(self, _memo: object) -> _ModuleHook:
        return _ModuleHook(None)

    def __reduce__(self) -> Any:
        return _ModuleHook, (None,)


# ---- for Dynamo to trace, in the same order: the tensors in a value, and a value with others


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.dtype in CASTABLE:
            found.append(value)
        return
    for part in _parts(value):
        _collect(part, found)


def _filled(value: Any, new: Iterator[torch.Tensor]) -> tuple[Any, bool]:
    """``value`` with the tensors of ``new``, which it takes, and whether that is another value."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in CASTABLE:
            return value, False
        one = next(new)
        is_cast = one.dtype != value.dtype
        return (one if is_cast else value), is_cast
    made = [_filled(part, new) for part in _parts(value)]
    if not any(is_other for _, is_other in made):
        return value, False
    return _rebuilt(value, [part for part, _ in made]), True


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    cls = type(value)
    if cls is tuple or cls is list:
        return cls(parts)
    if isinstance(value, tuple):
        return cls(*parts)
    if isinstance(value, dict):
        items = dict(zip(value, parts, strict=True))
        return items if cls is dict else cls(**items)
    if hasattr(cls, "__post_init__") or not all(field.init for field in dataclasses.fields(value)):
        torch._dynamo.graph_break()
    return cls(**dict(zip(_names_of_fields(value), parts, strict=True)))


def _parts(value: Any) -> list[Any]:
    """What is looked into; what only the eager engine can rebuild breaks the graph, so that it does."""
    cls = type(value)
    if cls is tuple or cls is list or (isinstance(value, tuple) and hasattr(cls, "_fields")):
        return list(value)
    if cls is dict or (isinstance(value, OrderedDict) and dataclasses.is_dataclass(value)):
        return list(value.values())
    if isinstance(value, _OTHERS) and not isinstance(value, torch.Size):
        torch._dynamo.graph_break()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in _names_of_fields(value)]
    return []


def _names_of_fields(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]


def _nothing() -> None:
    """Where there is no reference."""


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()

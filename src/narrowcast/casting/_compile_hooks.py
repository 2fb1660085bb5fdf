"""Rules for modules in calls that ``nc.compile`` writes into no graph.

A module is called in code that Dynamo traces, and the graph casts; or by Python, where Dynamo left a piece of
the model: then hooks cast, as those of ``nc.apply`` do, and what is compiled inside begins in the module's
place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting._module_hooks import Hook, HookOutsideOfGraphs, Shared
from narrowcast.casting._modules import rules_at
from narrowcast.casting._paths import all_paths, is_wrapper
from narrowcast.policy import Policy, class_names


class Untraced:
    """The hooks of one ``nc.compile`` on the parts of a model that have rules; they end with this."""

    def __init__(self, model: torch.nn.Module, policy: Policy) -> None:
        shared = Shared(policy, opens=False)
        handles: list[Any] = []
        self._root: Hook | None = None
        for paths, module in all_paths(model):
            rules = () if is_wrapper(module) else rules_at(policy, paths, class_names(type(module)))
            if rules and "" in paths:
                self._root = Hook(shared, rules, opening=False)
            elif rules:
                hook = HookOutsideOfGraphs(Hook(shared, rules, opening=False))
                handles += [
                    module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True),
                    module.register_forward_hook(hook.after, always_call=True),
                ]
        weakref.finalize(self, _remove, handles).atexit = False

    def call(self, function: Callable[..., Any], model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` as the call of ``model`` itself, whose bounds no graph has."""
        if self._root is None:
            return function(*args, **kwargs)
        output = None
        args, kwargs = self._root._before(model, args, kwargs) or (args, kwargs)
        try:
            output = function(*args, **kwargs)
        finally:
            output = self._root._after(model, args, output)
        return output

    def __deepcopy__(self, _memo: object) -> Untraced:
        return self

    def __reduce__(self) -> Any:
        return _nothing, ()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _nothing() -> None:
    """What a pickled model holds in another process."""

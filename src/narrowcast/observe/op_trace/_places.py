"""Which module of a model an operator was called in, forward and backward.

A hook on every module keeps the paths of the calls that a thread is in. Autograd numbers the nodes of a graph
in the order in which they are made, so a node in backward belongs to the module that was running at its
number.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from narrowcast.casting import Fp8Linear, modules_by_path
from narrowcast.observe._torch_internals import NO_GRAPH_TASK, backward_node, graph_task_id, next_node_number

FORWARD, BACKWARD, OPTIMIZER, OUTSIDE = "forward", "backward", "optimizer", "outside"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator was called: class of the model, path of the module in it, and phase of the step.

    ``root`` and ``path`` are empty outside of modules; ``path`` alone is empty in the model itself.
    """

    root: str
    path: str
    phase: str


class _Thread(threading.local):
    def __init__(self) -> None:
        # Of each running call of a module: the module's id, its place, the backward pass that recomputes it,
        # and the hook that ends it.
        self.calls: list[tuple[int, Place, int, Any]] = []


class ModulePaths:
    """Knows the place of each call while it is entered.

    Args:
        fp8_returned: called with the place, the module, its arguments and its output when a linear layer
            that multiplies in fp8 returns; autocast does not see its operators.

    Attributes:
        in_optimizer: set it while an optimizer steps.
    """

    def __init__(self, fp8_returned: Callable[[Place, torch.nn.Module, Any, Any], None]) -> None:
        self._fp8_returned = fp8_returned
        self.in_optimizer = False
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._titles: dict[str, int] = {}
        self._thread = _Thread()
        self._hook: Any = None
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # From each number on, which module made the nodes of the thread that entered.
        self._thread_id = 0
        self._numbers: list[int] = []
        self._makers: list[Place] = []

    def add_model(self, model: torch.nn.Module) -> None:
        """Name the modules of ``model`` by their paths in it; those that have a name keep it."""
        if model in self._names:
            return
        modules = list(modules_by_path(model))
        # The class of the model inside wrappers such as DDP's or torch.compile's.
        title = [type(module).__name__ for path, module in modules if path == ""][-1]
        self._titles[title] = self._titles.get(title, 0) + 1
        if self._titles[title] > 1:
            title = f"{title}-{self._titles[title]}"
        for path, module in modules:
            self._names.setdefault(module, (title, path))

    def called_modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Return path and module of each that was called and still exists."""
        return [(path, module) for module, (_, path) in list(self._names.items()) if module in self._called]

    def __enter__(self) -> Self:
        self._thread_id = threading.get_ident()
        self._hook = register_module_forward_pre_hook(self._before_forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        while self._thread.calls:
            self._thread.calls.pop()[3].remove()

    def here(self) -> Place:
        """Return the place of a call that this thread makes now."""
        calls, task = self._thread.calls, graph_task_id()
        if calls and (calls[-1][2] == task or task == NO_GRAPH_TASK):
            return calls[-1][1]
        if task == NO_GRAPH_TASK:
            return Place("", "", OPTIMIZER if self.in_optimizer else OUTSIDE)
        node = backward_node()
        at = -1 if node is None else bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        # Past the last mark nothing says which module made the node.
        return self._makers[at] if 0 <= at < len(self._numbers) - 1 else Place("", "", BACKWARD)

    def _before_forward(self, module: torch.nn.Module, _args: Any) -> None:
        calls = self._thread.calls
        name = self._names.get(module)
        if name is None and not calls:
            return
        place = calls[-1][1] if name is None else Place(*name, FORWARD)
        self._called.add(module)
        # Registered now, it runs after the module's other hooks: those that cast its output run inside.
        hook = module.register_forward_hook(self._after_forward, always_call=True)
        calls.append((id(module), place, graph_task_id(), hook))
        self._mark(place)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        calls = self._thread.calls
        if not any(call[0] == id(module) for call in calls):
            return
        if isinstance(module, Fp8Linear) and calls[-1][0] == id(module):
            self._fp8_returned(calls[-1][1], module, args, output)
        ended = 0
        while ended != id(module):  # calls inside it that an exception ended are still there
            ended, _, _, hook = calls.pop()
            hook.remove()
        self._mark(calls[-1][1] if calls else Place("", "", OUTSIDE))

    def _mark(self, place: Place) -> None:
        if threading.get_ident() != self._thread_id:
            return
        number = next_node_number()
        if self._numbers and self._numbers[-1] == number:
            self._makers.pop()
            self._numbers.pop()
        self._numbers.append(number)
        self._makers.append(Place(place.root, place.path, BACKWARD))

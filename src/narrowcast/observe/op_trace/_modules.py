"""Which module of a model an operator was called in, forward and backward.

A hook on every module keeps the paths of the calls that a thread is in. Backward is told by the numbers that
autograd gives to the nodes of a graph in the order in which they are made: the calls between two modules'
beginnings and ends have the numbers between.
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

from narrowcast.casting import Fp8Linear, named_places
from narrowcast.observe._torch_internals import NO_GRAPH_TASK, backward_node, graph_task_id, next_node_number

FORWARD, BACKWARD, OPTIMIZER, OUTSIDE = "forward", "backward", "optimizer", "outside"
PHASES = (FORWARD, BACKWARD, OPTIMIZER, OUTSIDE)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator was called: the model's class, a path in it, and what was going on.

    ``root`` and ``path`` are empty outside of every module, ``path`` alone is in the model itself.
    """

    root: str
    path: str
    phase: str


_OUTSIDE = Place("", "", OUTSIDE)
_OPTIMIZER = Place("", "", OPTIMIZER)
_BACKWARD = Place("", "", BACKWARD)


class _Thread(threading.local):
    def __init__(self) -> None:
        # Of each module that is being called: itself, its place, the backward that it is recomputed in, and
        # the hook that ends it.
        self.calls: list[tuple[int, Place, int, Any]] = []


class ModulePaths:
    """Knows the place of each call while it is entered.

    Args:
        fp8_returned: called with the place, the module, its arguments and its output when a linear layer that
            multiplies in fp8 returns, which autocast sees nothing of.
    """

    def __init__(self, fp8_returned: Callable[[Place, torch.nn.Module, Any, Any], None]) -> None:
        self._fp8_returned = fp8_returned
        self.optimizer_steps = False  # whether an optimizer's step is going on
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._classes: dict[str, int] = {}
        self._thread = _Thread()
        self._hook: Any = None
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # From which number of a node on which module made it, in the thread that entered.
        self._home = 0
        self._numbers: list[int] = []
        self._makers: list[Place] = []

    def meet(self, model: torch.nn.Module) -> None:
        """Name the modules of ``model`` by their paths in it; those that have a name keep it."""
        if model in self._names:
            return
        title = _title(model)
        self._classes[title] = self._classes.get(title, 0) + 1
        if self._classes[title] > 1:
            title = f"{title}-{self._classes[title]}"
        for path, module in named_places(model):
            self._names.setdefault(module, (title, path))

    def called_modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Path and module of each that was called and is still there."""
        return [(path, module) for module, (_, path) in list(self._names.items()) if module in self._called]

    def __enter__(self) -> Self:
        self._home = threading.get_ident()
        self._hook = register_module_forward_pre_hook(self._begins)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        while self._thread.calls:
            self._thread.calls.pop()[3].remove()

    def here(self) -> Place:
        """The place of a call that this thread makes now."""
        calls, task = self._thread.calls, graph_task_id()
        if calls and calls[-1][2] == task:
            return calls[-1][1]
        if task != NO_GRAPH_TASK:
            return self._maker_of(backward_node())
        if calls:
            return calls[-1][1]
        return _OPTIMIZER if self.optimizer_steps else _OUTSIDE

    def _maker_of(self, node: Any) -> Place:
        """The module in whose call ``node`` of a graph was made."""
        if node is None:
            return _BACKWARD
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        past_the_last = at == len(self._numbers) - 1
        return _BACKWARD if at < 0 or past_the_last else self._makers[at]

    def _begins(self, module: torch.nn.Module, _args: Any) -> None:
        calls = self._thread.calls
        name = self._names.get(module)
        if name is not None:
            place = Place(*name, FORWARD)
        elif calls:
            place = calls[-1][1]
        else:
            return
        self._called.add(module)
        # Registered now, it comes last of the module's hooks: those that cast what it returns run inside.
        hook = module.register_forward_hook(self._ended, always_call=True)
        calls.append((id(module), place, graph_task_id(), hook))
        self._mark(place)

    def _ended(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        calls = self._thread.calls
        if not any(call[0] == id(module) for call in calls):
            return
        if isinstance(module, Fp8Linear) and calls[-1][0] == id(module):
            self._fp8_returned(calls[-1][1], module, args, output)
        ended = 0
        while ended != id(module):  # the others are calls inside that an exception ended
            ended, _, _, hook = calls.pop()
            hook.remove()
        self._mark(calls[-1][1] if calls else _OUTSIDE)

    def _mark(self, place: Place) -> None:
        if threading.get_ident() != self._home:
            return
        number = next_node_number()
        if self._numbers and self._numbers[-1] == number:
            self._makers.pop()
            self._numbers.pop()
        self._numbers.append(number)
        self._makers.append(Place(place.root, place.path, BACKWARD))


def _title(model: torch.nn.Module) -> str:
    """The class of the model inside wrappers such as DDP's or ``torch.compile``'s."""
    return [type(module).__name__ for path, module in named_places(model) if path == ""][-1]

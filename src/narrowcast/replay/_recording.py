"""What a step must hold so that it can be run again: references to what went into the model's calls."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from narrowcast.casting import tensors_inside

MOST_BYTES = 64 * 2**20
"""Of the inputs and arriving gradients that are held for one step."""

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class RecordedCall:
    """One outermost call of a module.

    Attributes:
        random_state: of torch's generators before the call: the CPU's, and those of the devices in use.
        versions: of the tensors among ``args`` and the values of ``kwargs``, to see whether they changed.
        arrived: the gradient that arrived at each output that needs one; None: none did.
        site: file and line that made the call.
    """

    __slots__ = ("args", "arrived", "kwargs", "module", "random_state", "site", "versions")

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.random_state = torch.get_rng_state()
        self.versions: list[int] = []
        self.arrived: list[torch.Tensor | None] = []
        self.site = _call_site()

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments, those inside of containers left out."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, torch.Tensor)]

    def changed(self) -> bool:
        """Return whether an input was written to since the call."""
        return self.versions != [tensor._version for tensor in self.tensors()]


@dataclass(frozen=True)
class RecordedStep:
    """The calls of one step, in their order; none if it had more than can be held."""

    calls: list[RecordedCall]
    is_past_limit: bool


class Recording:
    """Holds what one step needs to be run again, by reference, until ``take`` or ``clear``.

    It stands as hooks before and after the call of each module that ``watch`` is given. Nothing is copied,
    and no operator runs.

    Attributes:
        paused: record nothing, while a step is run again.
    """

    def __init__(self) -> None:
        self.paused = False
        self._calls: list[RecordedCall] = []
        self._is_past_limit = False
        self._bytes = 0
        self._pending: RecordedCall | None = None

    def watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Record the calls of ``module`` until the handles are removed."""
        return [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    def take(self) -> RecordedStep:
        """Return the calls with gradients since the last time, and let go of them."""
        step = RecordedStep(self._calls, self._is_past_limit)
        self.clear()
        return step

    def clear(self) -> None:
        """Let go of the step."""
        self._calls = []
        self._is_past_limit = False
        self._bytes = 0
        self._pending = None

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self.paused or not torch.is_grad_enabled():
            return
        self._pending = RecordedCall(module, args, kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        call = self._pending
        self._pending = None
        # A call that raised leaves another's record, or none.
        if call is None or call.module is not module or self._is_past_limit:
            return
        _let_go_of_graphs(call)
        for tensor in call.tensors():
            call.versions.append(tensor._version)
            self._hold(tensor)
        outputs = [output] if isinstance(output, torch.Tensor) else tensors_inside(output)
        for tensor in outputs:
            if tensor.requires_grad:
                arrive = functools.partial(self._arrive, call, len(call.arrived))
                call.arrived.append(None)
                tensor.register_hook(arrive)  # type: ignore[no-untyped-call]
        self._calls.append(call)

    def _arrive(self, call: RecordedCall, index: int, gradient: torch.Tensor) -> None:
        if self.paused or self._is_past_limit:
            return
        call.arrived[index] = gradient
        self._hold(gradient)

    def _hold(self, tensor: torch.Tensor) -> None:
        self._bytes += tensor.nbytes
        if self._bytes > MOST_BYTES:
            self.clear()
            self._is_past_limit = True

    def __reduce__(self) -> Any:
        # A model that is copied or saved takes its hooks along. Nobody would clear what they record.
        return (_recording_of_a_copy, ())


def called_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a training calls: ``model``, or those in it if it is a container alone.

    None if parameters are sharded over ranks, which would have to run a step again together.
    """
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return []
    if type(model).forward is not nn.Module.forward:
        return [model]
    return [module for child in model.children() for module in called_modules(child)]


def _recording_of_a_copy() -> Recording:
    recording = Recording()
    recording.paused = True
    return recording


def _let_go_of_graphs(call: RecordedCall) -> None:
    """Hold inputs without the graph that made them, which would keep all that it saved."""
    for value in call.args:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            call.args = tuple(map(_without_graph, call.args))
            break
    for value in call.kwargs.values():
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            call.kwargs = {name: _without_graph(value) for name, value in call.kwargs.items()}
            break


def _without_graph(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _call_site() -> tuple[str, int]:
    """Return file and line of the innermost code that belongs to neither torch nor narrowcast."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ("", 0)
    return (frame.f_code.co_filename, frame.f_lineno)

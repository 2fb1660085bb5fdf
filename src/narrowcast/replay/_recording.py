"""What a step must hold so that it can be run again: references to what went into the model's calls."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from narrowcast.casting import tensors_inside

MOST_BYTES = 64 * 2**20
"""Of the inputs and arriving gradients that are held for one step; a random state adds 5 KB to each call."""

MOST_CALLS = 256
"""Outermost calls that are held for one step; reinforcement learning may make a thousand for one."""

_TOO_LARGE = "the inputs and gradients of the step were too large to be held"
_TOO_MANY = f"the step made more than {MOST_CALLS} calls"
_NOT_HELD = "an input of a call could not be held"
_HOLDS_GRAPH = "an input of a call holds a graph inside of an object, which is not kept"

_STEPS_WITH_GRADIENTS = 4000  # after a skip that arose in a backward pass
_NARROWCAST = str(Path(__file__).parents[1]) + os.sep
_MODULES: str = nn.Module.__call__.__code__.co_filename
_CONTAINERS = (list, tuple, dict)
_grad_fn = attrgetter("grad_fn")
_PLAIN = (int, float, str, type(None))

# Looked up here once: all of it runs at each outermost call.
_Tensor = torch.Tensor
_strided = torch.strided
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_state_on_cpu = torch.default_generator.get_state

RandomState = tuple[torch.Tensor, torch.device | None, torch.Tensor | None]
"""Of torch's generator on the CPU, and of that on the device of the inputs if it is another."""


class NotHeldError(Exception):
    """Why a call is not held."""


class RecordedCall:
    """One outermost call of a module.

    Attributes:
        random_state: before the call.
        inputs: the tensors among the arguments, and in the lists, tuples and dicts among them.
        had_graph: ids of those that were computed from something that needs a gradient.
        versions: of the inputs, to see whether they changed.
        arrived: the gradient that arrived at each output that needs one; None: none did.
        had_several_passes: whether gradients arrived at an output more than once.
        site: file and line that made the call.
    """

    __slots__ = (
        "__weakref__", "args", "arrived", "had_graph", "had_several_passes", "inputs", "kwargs", "module",
        "random_state", "site", "versions",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        random_state: RandomState | None = None,
    ) -> None:
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.arrived: list[torch.Tensor | None] = []
        self.had_several_passes = False
        self.site = _call_site()

        inputs: list[torch.Tensor] = []
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, _Tensor):
                inputs.append(value)
            elif isinstance(value, _CONTAINERS):
                inputs += tensors_inside(value)
            elif not isinstance(value, _PLAIN) and any(map(_grad_fn, tensors_inside(value))):
                raise NotHeldError(_HOLDS_GRAPH)
        self.inputs = inputs
        self.versions = versions_of(inputs)
        self.random_state = random_state or random_state_on(inputs)
        self.had_graph: set[int] = set()
        for tensor in inputs:
            if tensor.grad_fn is not None:
                self._let_go_of_graphs()
                break

    def _let_go_of_graphs(self) -> None:
        """Hold inputs without the graphs that made them, which would keep all that they saved."""
        without: dict[int, torch.Tensor] = {}
        for tensor in self.inputs:
            if tensor.grad_fn is not None and id(tensor) not in without:
                without[id(tensor)] = tensor.detach().requires_grad_()
        self.args = tuple([_replaced(value, without) for value in self.args])
        self.kwargs = {name: _replaced(value, without) for name, value in self.kwargs.items()}
        self.inputs = [without.get(id(tensor), tensor) for tensor in self.inputs]
        self.had_graph = set(map(id, without.values()))

    def changed(self) -> bool:
        """Return whether an input was written to since the call."""
        return self.versions != versions_of(self.inputs)


class RecordedStep(NamedTuple):
    """The calls of one step, in their order.

    Attributes:
        calls: none if the step is not held.
        why_not_held: empty if it is.
        has_gradients: whether the gradients that arrived at the outputs of the calls were held too.
    """

    calls: list[RecordedCall]
    why_not_held: str
    has_gradients: bool


class Recording:
    """Holds what one step needs to be run again, by reference, until ``clear``.

    It has hooks before and after the call of each module that ``watch`` is given. Nothing is copied. The
    gradients that arrive at outputs are held only after ``hold_gradients``, as a hook in each backward pass
    takes longer than all the rest.

    Attributes:
        records: whether calls are recorded now. A copy of the model takes its hooks along, and so a copy of
            this, which records nothing.
        pass_is_repeated: whether a backward pass runs again, and its gradients replace those of before.
    """

    def __init__(self) -> None:
        self.records = False
        self.pass_is_repeated = False
        self._calls: list[RecordedCall] = []
        self._why_not_held = ""
        self._step_has_ended = False
        self._steps_with_gradients = 0  # that are still to come
        self._storages: set[int] = set()  # whose bytes were counted
        self._bytes = 0
        self._begun: RecordedCall | None = None
        self._calls_of_begun = 0  # inside of its own call, where a module calls itself

    def watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Record the calls of ``module`` until the handles are removed."""
        return [
            # Before hooks that change the arguments, which are called again too.
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def hold_gradients(self, hold: bool) -> None:
        """Hold the gradients that arrive at the outputs in the next steps too, or stop holding them."""
        self._steps_with_gradients = _STEPS_WITH_GRADIENTS if hold else 0

    def recorded_step(self) -> RecordedStep:
        """Return the calls since the latest step ended."""
        return RecordedStep(self._calls, self._why_not_held, self._steps_with_gradients > 0)

    def end_step(self) -> None:
        """Let go of the calls when the next one begins: another optimizer may step on them before."""
        if self._steps_with_gradients and not self._step_has_ended:
            self._steps_with_gradients -= 1
        self._step_has_ended = True
        # An interrupt (Ctrl-C in a notebook) ends a call without its hook. While a call counts as running, no
        # other one is recorded.
        self._begun = None
        self._calls_of_begun = 0

    def clear(self) -> None:
        """Let go of the step."""
        self._calls = []
        self._why_not_held = ""
        self._step_has_ended = False
        self._storages = set()
        self._bytes = 0
        self._begun = None
        self._calls_of_begun = 0

    # ---- one call

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall | None:
        """Return what the outermost call of a module, which begins now, needs to be made again.

        None if it runs without gradients, or cannot be held. Never raises, so that the call itself goes on.
        """
        if self._step_has_ended:
            self.clear()
        if self._why_not_held or not _is_grad_enabled():
            return None
        try:
            return RecordedCall(module, args, kwargs)
        except NotHeldError as reason:
            self._let_go(str(reason))
        except Exception:  # as inside of torch.func, which refuses to detach
            self._let_go(_NOT_HELD)
        return None

    def end(self, call: RecordedCall, output: Any) -> None:
        """Hold a call, which returned ``output``."""
        if self._why_not_held:
            return
        self._calls.append(call)
        if len(self._calls) > MOST_CALLS:
            self._let_go(_TOO_MANY)
            return
        try:
            for tensor in call.inputs:
                self._hold(tensor)
            if self._steps_with_gradients:
                self._hold_arriving(call, output)
        except Exception:  # whatever it is, the call itself goes on
            self._let_go(_NOT_HELD)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _is_compiling() or not self.records:
            return
        # A call inside of another one is made again with it.
        if self._begun is None:
            self._begun = self.begin(module, args, kwargs)
        elif self._begun.module is module:
            self._calls_of_begun += 1

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_compiling() or self._begun is None or self._begun.module is not module:
            return
        if self._calls_of_begun:
            self._calls_of_begun -= 1
            return
        call = self._begun
        self._begun = None
        # A call that raised is not recorded. For one the hook is called with None too, which a model may also
        # return that writes its results into an argument.
        if output is not None or written_tensors(call.args, call.kwargs, call.inputs):
            self.end(call, output)

    def _let_go(self, reason: str) -> None:
        """Hold nothing more of this step."""
        self.clear()
        self._why_not_held = reason

    def _hold_arriving(self, call: RecordedCall, output: Any) -> None:
        """Hold the gradients that will arrive at the outputs of a call."""
        outputs = (output,) if isinstance(output, torch.Tensor) else tensors_inside(output)
        for tensor in (*outputs, *written_tensors(call.args, call.kwargs, call.inputs)):
            node = tensor.grad_fn
            if node is not None:
                # A hook of the node takes a third of the time that one of the tensor takes.
                # It lives as long as the graph, and so holds nothing.
                arrive = functools.partial(
                    self._arrive, weakref.ref(call), len(call.arrived), tensor.output_nr
                )
                node.register_prehook(arrive)
                call.arrived.append(None)

    def _arrive(
        self,
        reference: weakref.ref[RecordedCall],
        index: int,
        output_nr: int,
        gradients: tuple[torch.Tensor | None, ...],
    ) -> None:
        call = reference()
        gradient = gradients[output_nr]
        if call is None or gradient is None or self._why_not_held:
            return
        if call.arrived[index] is not None and not self.pass_is_repeated:
            call.had_several_passes = True
        call.arrived[index] = gradient
        self._hold(gradient)

    def _hold(self, tensor: torch.Tensor) -> None:
        if tensor.layout is _strided:
            storage = tensor.untyped_storage()  # a view holds all of it
            address = storage.data_ptr()
            if address not in self._storages:
                self._storages.add(address)
                self._bytes += storage.nbytes()
        else:
            self._bytes += _bytes(tensor)
        if self._bytes > MOST_BYTES:
            self._let_go(_TOO_LARGE)

    def __reduce__(self) -> Any:
        return (Recording, ())


def called_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a training calls: ``model``, or those in it if it is a container alone.

    The list is empty if parameters are sharded over ranks, which would have to run a step again together.
    """
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return []
    if isinstance(model, torch.jit.ScriptModule):
        return []  # it takes no hooks
    # A compiled model has its forward as an attribute.
    if getattr(model.forward, "__func__", None) is not nn.Module.forward:
        return [model]
    modules = []
    for child in model.children():
        modules += called_modules(child)
    return modules


def on_tensors(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Return ``values`` with each tensor changed, also inside of lists, tuples and dicts."""
    return tree_map_only(torch.Tensor, change, values)


def written_tensors(args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a call has put into the lists and dicts among its arguments."""
    given = set(map(id, inputs))
    return [tensor for tensor in tensors_inside((args, kwargs)) if id(tensor) not in given]


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """Return ``version_of`` each tensor."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor is among them
        return [version_of(tensor) for tensor in tensors]


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; an inference tensor does not know."""
    return -1 if tensor.is_inference() else tensor._version


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout == torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes


def _replaced(value: Any, instead: dict[int, torch.Tensor]) -> Any:
    """Return an argument with the tensor in place of each whose id is a key."""
    if isinstance(value, torch.Tensor):
        return instead.get(id(value), value)
    if isinstance(value, _CONTAINERS):
        return on_tensors(lambda tensor: instead.get(id(tensor), tensor), value)
    return value


def _call_site() -> tuple[str, int]:
    """Return file and line that called the module, outside of torch's modules and of this package."""
    frame = sys._getframe(3)  # of what called Recording.begin
    file = frame.f_code.co_filename
    while file == _MODULES or file.startswith(_NARROWCAST):
        if frame.f_back is None:
            break
        frame = frame.f_back
        file = frame.f_code.co_filename
    return (file, frame.f_lineno)


def random_state_on(tensors: list[torch.Tensor]) -> RandomState:
    """Return the state of the CPU's generator, and of that on the GPU of the first tensor that is on one."""
    cpu = _state_on_cpu()
    for tensor in tensors:
        # While a CUDA graph is captured, the state cannot be read.
        if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
            return (cpu, tensor.device, torch.cuda.get_rng_state(tensor.device))
    return (cpu, None, None)


def set_random_state(state: RandomState) -> None:
    cpu, device, on_device = state
    torch.default_generator.set_state(cpu)
    if device is not None and on_device is not None:
        torch.cuda.set_rng_state(on_device, device)

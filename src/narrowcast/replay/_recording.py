"""Hold what is needed to run a step again: references to the inputs of the model's calls."""

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
"""Limit on the inputs and arriving gradients held for one step. Random states, 5 KB a call, do not count."""

MOST_CALLS = 256
"""Limit on the outermost calls held for one step. Reinforcement learning may make a thousand in one step."""

_TOO_LARGE = "the inputs and gradients of the step were too large to be held"
_TOO_MANY_CALLS = f"the step made more than {MOST_CALLS} calls"
_INPUT_NOT_HELD = "an input of a call could not be held"
_GRADIENT_NOT_HELD = "a gradient that arrived at an output could not be held"
_HOLDS_GRAPH = "an input of a call holds a graph inside of an object, which is not kept"

# For how many steps arriving gradients are held after a skip that arose in a backward pass: twice the growth
# interval of a dynamic loss scale, so that the next overflow falls into them.
_STEPS_WITH_GRADIENTS = 4000
_FOLDER_OF_NARROWCAST = str(Path(__file__).parents[1]) + os.sep
_FILE_OF_MODULES: str = nn.Module.__call__.__code__.co_filename
_CONTAINER_TYPES = (list, tuple, dict)
_grad_fn = attrgetter("grad_fn")
_PLAIN_TYPES = (int, float, str, type(None))

# Looked up here once: all of it runs at each outermost call.
_Tensor = torch.Tensor
_strided = torch.strided
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_state_on_cpu = torch.default_generator.get_state

RandomState = tuple[torch.Tensor, torch.device | None, torch.Tensor | None]
"""The state of torch's CPU generator; the GPU of the inputs and the state of its generator, or None twice."""


class NotHeldError(Exception):
    """Raised where a call cannot be held; its text is the reason."""


class RecordedCall:
    """One outermost call of a module.

    Attributes:
        random_state: the state of the random generators before the call.
        inputs: the tensors among the arguments, and in the lists, tuples and dicts among them.
        had_graph: ids of the inputs that were computed from something that needs a gradient.
        versions: the versions of the inputs at the call, to see whether they were changed since.
        arrived: for each output that has a node in the graph, the gradient that arrived at it, or None. Empty
            if gradients are not held.
        had_several_passes: whether more than one gradient arrived at an output.
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
        values = (*args, *kwargs.values()) if kwargs else args
        for value in values:
            if isinstance(value, _Tensor):
                inputs.append(value)
            elif isinstance(value, _CONTAINER_TYPES):
                inputs += tensors_inside(value)
            # The tensors of an object cannot be replaced, so it would keep their graph alive.
            elif not isinstance(value, _PLAIN_TYPES) and any(map(_grad_fn, tensors_inside(value))):
                raise NotHeldError(_HOLDS_GRAPH)
        self.inputs = inputs
        self.versions = versions_of(inputs)
        self.random_state = random_state or random_state_on(inputs)
        self.had_graph: set[int] = set()
        for tensor in inputs:
            if tensor.grad_fn is not None:
                self._detach_inputs()
                break

    def _detach_inputs(self) -> None:
        """Hold inputs without the graphs that computed them, since a graph keeps all tensors that it saved.

        A detached tensor shares the version of the original, so ``changed`` still sees writes to that.
        """
        detached: dict[int, torch.Tensor] = {}
        for tensor in self.inputs:
            if tensor.grad_fn is not None and id(tensor) not in detached:
                detached[id(tensor)] = tensor.detach().requires_grad_()
        self.args = tuple([_replaced(value, detached) for value in self.args])
        self.kwargs = {name: _replaced(value, detached) for name, value in self.kwargs.items()}
        self.inputs = [detached.get(id(tensor), tensor) for tensor in self.inputs]
        self.had_graph = set(map(id, detached.values()))

    def changed(self) -> bool:
        """Return whether an input was written to since the call."""
        return self.versions != versions_of(self.inputs)


class RecordedStep(NamedTuple):
    """The calls of one step, in the order in which they were made.

    Attributes:
        calls: empty if the step is not held.
        why_not_held: why the step is not held; empty if it is held.
        has_gradients: whether the gradients that arrived at the outputs of the calls were held too.
    """

    calls: list[RecordedCall]
    why_not_held: str
    has_gradients: bool


class Recording:
    """Holds what one step needs to be run again, by reference, until ``clear``.

    ``watch`` registers hooks before and after the calls of a module. Nothing is copied. The gradients that
    arrive at outputs are held only in steps that begin after ``hold_gradients``, because the hooks in the
    backward pass take longer than all the rest.

    Copying a model copies its hooks, and with them this object. The copy records nothing.

    Attributes:
        records: whether calls are recorded now.
        pass_is_repeated: whether a backward pass is being run again, so that its gradients replace those of
            the first run.
    """

    def __init__(self) -> None:
        self.records = False
        self.pass_is_repeated = False
        self._calls: list[RecordedCall] = []
        self._why_not_held = ""
        self._step_has_ended = False
        self._steps_with_gradients = 0  # how many steps to come hold arriving gradients
        self._step_has_gradients = False  # whether this step does
        self._bytes = 0
        self._storages: set[int] = set()  # addresses of the storages counted in _bytes
        self._running_call: RecordedCall | None = None  # the outermost call
        self._nested_calls = 0  # calls of the same module that run inside of it

    def watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Record the calls of ``module`` until the handles are removed."""
        return [
            # Ahead of hooks that change the arguments: they change them again in the repeated call.
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def hold_gradients(self, hold: bool) -> None:
        """Hold, or stop holding, the gradients that arrive at outputs in the steps that begin after this."""
        self._steps_with_gradients = _STEPS_WITH_GRADIENTS if hold else 0

    def recorded_step(self) -> RecordedStep:
        """Return the calls since the latest step ended."""
        return RecordedStep(self._calls, self._why_not_held, self._step_has_gradients)

    def end_step(self) -> None:
        """End a step; its calls are held until the next call begins, for another optimizer's step."""
        if self._steps_with_gradients and not self._step_has_ended:
            self._steps_with_gradients -= 1
        self._step_has_ended = True
        # An interrupt (Ctrl-C in a notebook) ends a call without calling its hook. If that call counted as
        # running from then on, no other call would be recorded.
        self._running_call = None
        self._nested_calls = 0

    def clear(self) -> None:
        """Release everything that is held for the step."""
        self._calls = []
        self._why_not_held = ""
        self._step_has_ended = False
        self._step_has_gradients = self._steps_with_gradients > 0
        self._storages = set()
        self._bytes = 0
        self._running_call = None
        self._nested_calls = 0

    # ---- one call

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall | None:
        """Record what is needed to repeat an outermost call of a module, which begins now.

        Returns None if the call runs without gradients or cannot be held. Raises nothing, so that the call
        itself goes on.
        """
        if self._step_has_ended:
            self.clear()
        if self._why_not_held or not _is_grad_enabled():
            return None
        try:
            return RecordedCall(module, args, kwargs)
        except NotHeldError as reason:
            self._hold_nothing(str(reason))
        except Exception:  # as inside of torch.func, which refuses to detach
            self._hold_nothing(_INPUT_NOT_HELD)
        return None

    def end(self, call: RecordedCall, output: Any) -> None:
        """Hold a call that has returned ``output``. Raises nothing."""
        if self._why_not_held:
            return
        self._calls.append(call)
        if len(self._calls) > MOST_CALLS:
            self._hold_nothing(_TOO_MANY_CALLS)
            return
        try:
            for tensor in call.inputs:
                self._count_bytes(tensor)
            if self._step_has_gradients:
                self._hold_arriving(call, output)
        except Exception:  # of any kind: the training must go on
            self._hold_nothing(_INPUT_NOT_HELD)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _is_compiling() or not self.records:
            return
        # Only the outermost call is recorded, since repeating it repeats the calls inside.
        if self._running_call is None:
            self._running_call = self.begin(module, args, kwargs)
        elif self._running_call.module is module:
            self._nested_calls += 1

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_compiling() or self._running_call is None or self._running_call.module is not module:
            return
        if self._nested_calls:
            self._nested_calls -= 1
            return
        call = self._running_call
        self._running_call = None
        # A call that raised is not recorded: torch calls this hook with None as its output. A model that
        # writes its results into an argument returns None too, but its call is recorded.
        if output is not None or written_tensors(call.args, call.kwargs, call.inputs):
            self.end(call, output)

    def _hold_nothing(self, reason: str) -> None:
        """Release what is held, and hold nothing more until the step ends."""
        self.clear()
        self._why_not_held = reason

    def _hold_arriving(self, call: RecordedCall, output: Any) -> None:
        """Hold the gradients that will arrive at the outputs of a call."""
        outputs = (output,) if isinstance(output, torch.Tensor) else tensors_inside(output)
        for tensor in (*outputs, *written_tensors(call.args, call.kwargs, call.inputs)):
            node = tensor.grad_fn
            if node is not None:
                # A hook on the node takes a third of the time of a hook on the tensor. The hook lives as long
                # as the graph, so it has only a weak reference to the call.
                arrive = functools.partial(
                    self._arrive, weakref.ref(call), len(call.arrived), tensor.output_nr
                )
                node.register_prehook(arrive)
                call.arrived.append(None)

    def _arrive(
        self,
        call_reference: weakref.ref[RecordedCall],
        index: int,
        output_nr: int,
        gradients: tuple[torch.Tensor | None, ...],
    ) -> None:
        """Keep the gradient that arrived at an output, as item ``index`` of the ``arrived`` of its call."""
        call = call_reference()
        gradient = gradients[output_nr]
        if call is None or gradient is None or self._why_not_held:
            return
        if call.arrived[index] is not None and not self.pass_is_repeated:
            call.had_several_passes = True
        try:
            self._count_bytes(gradient)
        except Exception:  # as with is_grads_batched, whose gradients have no storage
            self._hold_nothing(_GRADIENT_NOT_HELD)
            return
        call.arrived[index] = gradient

    def _count_bytes(self, tensor: torch.Tensor) -> None:
        """Count the bytes that a reference to ``tensor`` keeps in memory; hold nothing beyond the limit."""
        if tensor.layout is _strided:
            storage = tensor.untyped_storage()  # a view keeps all of its storage
            address = storage.data_ptr()
            if address not in self._storages:
                self._storages.add(address)
                self._bytes += storage.nbytes()
        else:
            self._bytes += _bytes_of(tensor)
        if self._bytes > MOST_BYTES:
            self._hold_nothing(_TOO_LARGE)

    def __reduce__(self) -> Any:
        return (Recording, ())


def called_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a training calls: ``model``, or the modules in it if it has no forward.

    The list is empty if parameters are sharded over ranks: the ranks would have to run a step again together.
    """
    # DTensors have a device mesh.
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return []
    if isinstance(model, torch.jit.ScriptModule):
        return []  # it takes no hooks
    # Containers such as ModuleDict inherit the forward of nn.Module, which only raises. The forward of a
    # compiled model is an attribute of the instance, a plain function without ``__func__``.
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
    """Return how often a tensor was written to; -1 for an inference tensor, whose writes are not counted."""
    return -1 if tensor.is_inference() else tensor._version


def _bytes_of(tensor: torch.Tensor) -> int:
    if tensor.layout == torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes


def _replaced(value: Any, instead: dict[int, torch.Tensor]) -> Any:
    """Return an argument in which each tensor whose id is a key of ``instead`` is replaced."""
    if isinstance(value, torch.Tensor):
        return instead.get(id(value), value)
    if isinstance(value, _CONTAINER_TYPES):
        return on_tensors(lambda tensor: instead.get(id(tensor), tensor), value)
    return value


def _call_site() -> tuple[str, int]:
    """Return file and line that called the module, outside of torch's modules and of this package."""
    frame = sys._getframe(3)  # skips this function, RecordedCall.__init__ and Recording.begin
    file = frame.f_code.co_filename
    while file == _FILE_OF_MODULES or file.startswith(_FOLDER_OF_NARROWCAST):
        if frame.f_back is None:
            break
        frame = frame.f_back
        file = frame.f_code.co_filename
    return (file, frame.f_lineno)


def random_state_on(tensors: list[torch.Tensor]) -> RandomState:
    """Return the states of the CPU's generator, and of the generator of the first GPU that a tensor is on."""
    cpu_state = _state_on_cpu()
    for tensor in tensors:
        # While a CUDA graph is captured, the state cannot be read.
        if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
            return (cpu_state, tensor.device, torch.cuda.get_rng_state(tensor.device))
    return (cpu_state, None, None)


def set_random_state(state: RandomState) -> None:
    cpu_state, device, device_state = state
    torch.default_generator.set_state(cpu_state)
    if device is not None and device_state is not None:
        torch.cuda.set_rng_state(device_state, device)

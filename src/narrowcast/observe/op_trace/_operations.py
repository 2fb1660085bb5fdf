"""Every operation that torch runs below autocast and autograd: its module, formats, bytes, time and casts.

An operator that a script calls may consist of several of these. Casts by autocast itself are seen only here.
A hook on every module keeps the paths of the calls that a thread is in.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.casting import modules_by_path, ops_under_way, rule_that_casts, tensors_inside
from narrowcast.observe._torch_internals import NO_GRAPH_TASK, graph_task_id
from narrowcast.observe.profiling import is_product, seconds_between, stamp
from narrowcast.policy import Rule, format_name

FORWARD, BACKWARD, OPTIMIZER, OUTSIDE = "forward", "backward", "optimizer", "outside"
# ``to`` arrives here in inference mode; elsewhere it was decomposed before.
_CASTS = ("aten::_to_copy", "aten::to.dtype", "aten::to.device", "aten::to.dtype_layout")


# ---- modules


class Place(NamedTuple):
    """Where an operator was called: class of the model, path of the module in it, and phase of the step.

    ``root`` and ``path`` are empty outside of modules, in backward passes and in optimizers; ``path`` alone
    is empty in the model itself. ``fp8_rule`` is that of a linear layer that multiplies in fp8, whose
    operators autocast does not see.
    """

    root: str
    path: str
    phase: str
    fp8_rule: Rule | None = None


class _ModuleCall(NamedTuple):
    """A running call of a module.

    Attributes:
        task: number of the backward pass that recomputes it, or ``NO_GRAPH_TASK`` in a forward pass.
        hook: handle of the hook that ends it; None if a call of the same module around it has the hook.
    """

    module_id: int
    place: Place
    task: int
    hook: Any


class _RunningCalls(threading.local):
    """The calls of modules that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[_ModuleCall] = []


class ModulePaths:
    """Tracks which module each thread is in, while this context is open."""

    def __init__(self) -> None:
        self.in_optimizer = False
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._titles: Counter[str] = Counter()
        self._running = _RunningCalls()
        self._hook: Any = None
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def add_model(self, model: torch.nn.Module) -> None:
        """Name the modules of ``model`` by their paths in it; those that have a name keep it."""
        if model in self._names:
            return
        modules = list(modules_by_path(model))
        title = ""
        for path, module in modules:
            # Wrappers such as DDP's have this path too, and come before the model that they wrap.
            if path == "":
                title = type(module).__name__
        self._titles[title] += 1
        if self._titles[title] > 1:
            title = f"{title}-{self._titles[title]}"
        for path, module in modules:
            self._names.setdefault(module, (title, path))

    def called_modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Return path and module of each named module that was called and still exists."""
        called = []
        for module, (_, path) in list(self._names.items()):
            if module in self._called:
                called.append((path, module))
        return called

    def __enter__(self) -> Self:
        self._hook = register_module_forward_pre_hook(self._before_forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        while self._running.stack:
            call = self._running.stack.pop()
            if call.hook is not None:
                call.hook.remove()

    def here(self) -> Place:
        """Return the place of a call that this thread makes now."""
        calls, task = self._running.stack, graph_task_id()
        # Inside a backward pass the innermost call counts only if this pass recomputes it, for a checkpoint
        # of activations. Otherwise that call started the pass, and waits for its end.
        if calls and task in (calls[-1].task, NO_GRAPH_TASK):
            return calls[-1].place
        if task != NO_GRAPH_TASK:
            return Place("", "", BACKWARD)
        return Place("", "", OPTIMIZER if self.in_optimizer else OUTSIDE)

    def _before_forward(self, module: torch.nn.Module, _args: Any) -> None:
        calls = self._running.stack
        name = self._names.get(module)
        if name is None and not calls:
            return
        fp8_rule = vars(module).get("fp8_rule")
        # A module without a name, such as one that its caller made just now, counts as a part of its caller.
        place = calls[-1].place if name is None else Place(*name, FORWARD, fp8_rule)
        self._called.add(module)
        # Registered now, it runs after the module's other hooks: those that cast its output run inside. A
        # module that calls itself gets one hook, since torch runs all of its hooks at the end of each call.
        hook = None
        if not any(call.module_id == id(module) for call in calls):
            hook = module.register_forward_hook(self._after_forward, always_call=True)
        calls.append(_ModuleCall(id(module), place, graph_task_id(), hook))

    def _after_forward(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        calls = self._running.stack
        if not any(call.module_id == id(module) for call in calls):
            return
        # Also takes off the calls inside it that an exception ended.
        while True:
            ended = calls.pop()
            if ended.hook is not None:
                ended.hook.remove()
            if ended.module_id == id(module):
                return


# ---- operations


@dataclass(slots=True, eq=False)
class Operation:
    """One operation that ran below autocast and autograd: where, how long, and in which formats."""

    op: str
    place: Place
    depth: int  # in how many watched operators it ran
    stamps: tuple[Any, Any]
    moved_bytes: int  # read and written; 0 for a view
    is_view: bool
    is_cast: bool  # between floating-point formats
    inputs: tuple[str, ...]  # formats of floating-point tensors
    outputs: tuple[str, ...]
    rule: Rule | None  # for a module whose input or output it casts
    multiplies: str | None  # format of the narrowest operand of a matmul, convolution or attention

    def took_s(self) -> float:
        """Return its seconds; waits for a GPU to finish it."""
        return seconds_between(*self.stamps)


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``report`` with each operation in the thread that ran it, also in those of autograd."""

    def __init__(self, paths: ModulePaths, report: Callable[[Operation], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths, self._report = paths, report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name is None:
            return func(*args, **kwargs)
        read = tensors_inside((args, kwargs))
        place = self._paths.here()
        clock = _clock_of(read)
        began = stamp(clock)
        result = func(*args, **kwargs)
        ended = stamp(clock)

        written = tensors_inside(result)
        inputs, outputs = formats_of(read), formats_of(written)
        is_cast = name in _CASTS and len(inputs) == len(outputs) == 1 and inputs != outputs
        # By its schema ``to`` may return its input; where the format changes, it copies.
        is_view = _is_view(func) and not is_cast
        moved_bytes = 0
        if not is_view:
            moved_bytes = sum(map(_bytes, read)) + sum(map(_bytes, written))
        multiplies: str | None = None
        if is_product(name.partition(".")[0]):
            multiplies = _narrowest_operand(read)
        self._report(
            Operation(
                op=name.removeprefix("aten::"),
                place=place,
                depth=len(ops_under_way()),
                stamps=(began, ended),
                moved_bytes=moved_bytes,
                is_view=is_view,
                is_cast=is_cast,
                inputs=inputs,
                outputs=outputs,
                rule=rule_that_casts(),
                multiplies=multiplies,
            )
        )
        return result


def _clock_of(tensors: list[torch.Tensor]) -> str:
    """Return the type of the device on which an operation on these tensors is timed."""
    for tensor in tensors:
        if not tensor.is_cpu:
            # A CUDA graph that is being captured takes no events that tell the time.
            is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
            return "cpu" if is_captured else tensor.device.type
    return "cpu"


def formats_of(tensors: Any) -> tuple[str, ...]:
    """Return the formats of the floating-point tensors among ``tensors``, each once, the widest first."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    widest_first = sorted(dtypes, key=lambda dtype: (-dtype.itemsize, str(dtype)))
    return tuple(map(format_name, widest_first))


def _narrowest_operand(tensors: list[torch.Tensor]) -> str | None:
    """Return the format of the narrowest matrix; a bias or a running sum may be wider."""
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1]
    if not dtypes:
        return None
    return format_name(min(dtypes, key=lambda dtype: dtype.itemsize))


@functools.cache
def _name_of(func: Any) -> str | None:
    """Return the name, such as ``"aten::add.Tensor"``; None for an operator without any tensor."""
    name: str = func.name()
    if name.startswith("prim::"):
        return None
    values = (*func._schema.arguments, *func._schema.returns)
    if not any("Tensor" in str(value.type) for value in values):
        return None
    return name


@functools.cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    for value in returns:
        if value.alias_info is None or value.alias_info.is_write:
            return False
    return bool(returns)


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        return 0
    return tensor.numel() * tensor.itemsize

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
_CASTS = ("aten::_to_copy", "aten::to.dtype", "aten::_to_copy.default")


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
    """A running call of a module; ``task``: the backward pass that recomputes it; ``hook``: ends it."""

    module_id: int
    place: Place
    task: int
    hook: Any


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_ModuleCall] = []


class ModulePaths:
    """Tracks which module each thread is in, between entering and leaving it."""

    def __init__(self) -> None:
        self.in_optimizer = False
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._titles: Counter[str] = Counter()
        self._thread = _Thread()
        self._hook: Any = None
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def add_model(self, model: torch.nn.Module) -> None:
        """Name the modules of ``model`` by their paths in it; those that have a name keep it."""
        if model in self._names:
            return
        modules = list(modules_by_path(model))
        # The class of the model inside wrappers such as DDP's or torch.compile's.
        title = [type(module).__name__ for path, module in modules if path == ""][-1]
        self._titles[title] += 1
        if self._titles[title] > 1:
            title = f"{title}-{self._titles[title]}"
        for path, module in modules:
            self._names.setdefault(module, (title, path))

    def called_modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Return path and module of each that was called and still exists."""
        return [(path, module) for module, (_, path) in list(self._names.items()) if module in self._called]

    def __enter__(self) -> Self:
        self._hook = register_module_forward_pre_hook(self._before_forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        while self._thread.calls:
            self._thread.calls.pop().hook.remove()

    def here(self) -> Place:
        """Return the place of a call that this thread makes now."""
        calls, task = self._thread.calls, graph_task_id()
        if calls and task in (calls[-1].task, NO_GRAPH_TASK):
            return calls[-1].place
        if task != NO_GRAPH_TASK:
            return Place("", "", BACKWARD)
        return Place("", "", OPTIMIZER if self.in_optimizer else OUTSIDE)

    def _before_forward(self, module: torch.nn.Module, _args: Any) -> None:
        calls = self._thread.calls
        name = self._names.get(module)
        if name is None and not calls:
            return
        fp8_rule = vars(module).get("fp8_rule")
        place = calls[-1].place if name is None else Place(*name, FORWARD, fp8_rule)
        self._called.add(module)
        # Registered now, it runs after the module's other hooks: those that cast its output run inside.
        hook = module.register_forward_hook(self._after_forward, always_call=True)
        calls.append(_ModuleCall(id(module), place, graph_task_id(), hook))

    def _after_forward(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        calls = self._thread.calls
        if not any(call.module_id == id(module) for call in calls):
            return
        ended = 0
        while ended != id(module):  # calls inside it that an exception ended are still there
            ended, _, _, hook = calls.pop()
            hook.remove()


# ---- operations


@dataclass(slots=True, eq=False)
class Operation:
    """One operation that ran."""

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
        given = tensors_inside((args, kwargs))
        place = self._paths.here()
        # A CUDA graph that is being captured takes no events that tell the time.
        clock = next((tensor.device.type for tensor in given if not tensor.is_cpu), "cpu")
        clock = "cpu" if clock == "cuda" and torch.cuda.is_current_stream_capturing() else clock
        began = stamp(clock)
        result = func(*args, **kwargs)
        ended = stamp(clock)
        made = tensors_inside(result)
        is_view = _is_view(func)
        inputs, outputs = formats_of(given), formats_of(made)
        is_cast = name in _CASTS and len(inputs) == len(outputs) == 1 and inputs != outputs
        self._report(
            Operation(
                op=name.removeprefix("aten::"),
                place=place,
                depth=len(ops_under_way()),
                stamps=(began, ended),
                moved_bytes=0 if is_view else sum(_bytes(tensor) for tensor in (*given, *made)),
                is_view=is_view,
                is_cast=is_cast,
                inputs=inputs,
                outputs=outputs,
                rule=rule_that_casts(),
                multiplies=_narrowest_operand(given) if is_product(name.partition(".")[0]) else None,
            )
        )
        return result


def formats_of(tensors: Any) -> tuple[str, ...]:
    """Return the formats of the floating-point tensors among ``tensors``, each once, the widest first."""
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    return tuple(format_name(dtype) for dtype in sorted(found, key=lambda d: (-d.itemsize, str(d))))


def _narrowest_operand(given: list[torch.Tensor]) -> str | None:
    """Return the format of the narrowest matrix; a bias or a running sum may be wider."""
    dtypes = [tensor.dtype for tensor in given if tensor.is_floating_point() and tensor.dim() > 1]
    return format_name(min(dtypes, key=lambda dtype: dtype.itemsize)) if dtypes else None


@functools.cache
def _name_of(func: Any) -> str | None:
    """Return ``"aten::add.Tensor"``; None if it does not work on tensors."""
    name: str = func.name()
    schema = func._schema
    on_tensors = any("Tensor" in str(one.type) for one in (*schema.arguments, *schema.returns))
    return name if on_tensors and not name.startswith("prim::") else None


@functools.cache
def _is_view(func: Any) -> bool:
    aliases = [one.alias_info for one in func._schema.returns]
    return bool(aliases) and all(info is not None and not info.is_write for info in aliases)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize if tensor.layout == torch.strided else 0

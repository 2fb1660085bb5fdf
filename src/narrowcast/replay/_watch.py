"""Find the first value that is not finite: the operator that made it, its module, and the line of code."""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowcast.casting import tensors_inside
from narrowcast.replay._torch_internals import (
    NO_GRAPH_TASK,
    TRACEBACK,
    current_node,
    graph_task_id,
    sequence_number,
)

_FOLDER_OF_TORCH = str(Path(torch.__file__).parent) + os.sep
_FOLDER_OF_NARROWCAST = str(Path(__file__).parents[1]) + os.sep
_FILE_THAT_REPLAYS = str(Path(__file__).with_name("_replay.py"))
_STACK_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_MODULE_PATH = "narrowcast_module"  # key in the metadata of a node, for the path of the module that made it
_NODE_ENDING = re.compile(r"Backward\d*$")  # "MmBackward0" -> "Mm"
# Namespaces of operators that would wait for other ranks, which do not repeat the step.
_COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional"}
_CHECKED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# Names of operations that stand for values that were there before any operator ran.
INPUT = "input"
BUFFER = "buffer"
# Operations whose infinities were written on purpose, as by a mask.
MEANT = {
    BUFFER,
    "fill",
    "fill_",
    "full",
    "full_like",
    "masked_fill",
    "masked_fill_",
    "scalar_tensor",
    "where",
}
# Operators whose result does not depend on the values of their first argument.
_OVERWRITING = {"copy_", "fill_", "zero_"}

LONGEST_S = 60.0
"""Time after which a replay is given up."""

_ANNOUNCED_AFTER_S = 5.0


class ReplayError(Exception):
    """Raised where a step cannot be repeated exactly; its text is the reason."""


class TimeLimit:
    """Ends a replay after ``LONGEST_S`` seconds, and announces earlier that it takes long.

    Args:
        announce: called once, if the replay still runs after a few seconds.

    Attributes:
        was_announced: whether ``announce`` was called.
        is_over: whether ``check`` has raised.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self.was_announced = False
        self.is_over = False
        self._announce = announce
        self._begin_s = time.monotonic()

    def check(self) -> None:
        """Raise ReplayError if the time is over; announce the replay if it is due."""
        elapsed_s = time.monotonic() - self._begin_s
        if elapsed_s > LONGEST_S:
            self.is_over = True
            raise ReplayError(f"running the step again took more than {LONGEST_S:.0f} s")
        if elapsed_s > _ANNOUNCED_AFTER_S and not self.was_announced:
            self.was_announced = True
            self._announce()


Site = tuple[str, int]
"""File and line."""

Place = tuple[str, str, str, Site | None]
"""Name, direction, module and line of an operator."""


class Range(NamedTuple):
    """The values of a tensor: the smallest and the largest finite one, and how many are not finite."""

    low: float
    high: float
    nonfinite: int


@dataclass(slots=True)
class Operation:
    """A call of an operator whose result is not finite; or an input or a buffer that is not finite.

    Attributes:
        number: its number in the order of execution, from 1; 0 for an input or a buffer.
        name: the name of the operator, as "bmm"; or ``INPUT`` or ``BUFFER``.
        direction: "forward" or "backward".
        module: the path of the module that it belongs to.
        site: file and line of the user's code; None if there is none.
        dtype: the format of its result.
        ranges: the ranges of its inputs.
        is_nan: whether its result holds NaN, and not only infinities.
        gradient_of: the operator or Function whose backward it is part of; empty in a forward pass.
        makes_new: whether it made an infinity or a NaN from finite values, instead of passing one on.
        inputs: the operations that made the inputs that are not finite.
    """

    number: int
    name: str
    direction: str
    module: str
    site: Site | None
    dtype: torch.dtype
    ranges: list[Range]
    is_nan: bool
    gradient_of: str = ""
    makes_new: bool = True
    inputs: list[Operation] = field(default_factory=list)

    @property
    def place(self) -> Place:
        return (self.name, self.direction, self.module, self.site)


class _RunningModule(NamedTuple):
    """A module that has been called and has not returned.

    Attributes:
        path: the path of the module.
        graph_task: the backward pass in which it was called; NO_GRAPH_TASK in a forward pass.
        newest_input: the number of the newest node that made one of its inputs; -1 if none has a node.
    """

    path: str
    graph_task: int
    newest_input: int


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operators while it is entered, and modules and autograd nodes inside ``watching``.

    Values that are not finite are followed from operator to operator, by the address of the memory that holds
    them. So an infinity that was written on purpose (a mask) is not confused with the one that did harm. The
    time limit is checked before each operator, since one call may run the whole model.
    """

    def __init__(self, root: nn.Module, time_limit: TimeLimit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._time_limit = time_limit
        self._paths = {module: path for path, module in root.named_modules()}
        self._running: list[_RunningModule] = []  # the innermost one is last
        # By the address of the memory that holds its result, which is not finite.
        self._made: dict[int, Operation] = {}
        self._count = 0
        # The largest absolute value among the finite results in each place.
        self.largest_results: dict[Place, float] = {}

    @contextmanager
    def watching(self, *, backward: bool) -> Iterator[None]:
        """Track which module runs and, for a backward pass, which line made each node of the graph."""
        with ExitStack() as stack:
            for module in self._paths:
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # it takes no hooks
                stack.callback(module.register_forward_pre_hook(self._before_call, with_kwargs=True).remove)
                # always_call, because a checkpoint ends its recomputation by an exception.
                stack.callback(module.register_forward_hook(self._after_call, always_call=True).remove)
            if backward:
                # Anomaly mode keeps the stack at which each node is made. That is slow, so it is on only if a
                # backward pass follows. It warns that it is slow, and of each exception in a backward pass,
                # such as that of the time limit.
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            yield

    def begins_with(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Note which inputs (``INPUT``) or buffers (``BUFFER``) are not finite before any operator runs."""
        for tensor in _checked(tensors):
            if not is_finite(tensor):
                is_nan = bool(tensor.isnan().any())
                self._made[_address(tensor)] = Operation(
                    0, name, "forward", "", None, tensor.dtype, [], is_nan
                )

    def origin_of(self, tensors: Iterable[torch.Tensor]) -> Operation | None:
        """Return the earliest operation to blame for the values in ``tensors`` that are not finite.

        It is taken from the first of these groups that is not empty: operators that made such a value; inputs
        that held one; operators that made NaN from infinities that were written on purpose; operations that
        wrote those infinities.
        """
        operations = _with_inputs(self._makers_of(tensors))
        origins = [operation for operation in operations if operation.makes_new]
        groups = (
            [operation for operation in origins if operation.name not in (*MEANT, INPUT)],
            [operation for operation in origins if operation.name == INPUT],
            [operation for operation in operations if operation.is_nan],
            origins,
        )
        for group in groups:
            if group:
                return min(group, key=lambda operation: operation.number)
        return None

    # ---- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._time_limit.check()
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise ReplayError("the model talks to other ranks")
        # Everything about the inputs is read before the operator runs, which may write to them.
        inputs = _checked(tree_leaves((args, kwargs)))
        bad_inputs = [tensor for tensor in inputs if not is_finite(tensor)]
        # baddbmm(input, a, b, beta=0) does not read ``input``.
        ignores_first = _name_of(func) in _OVERWRITING or kwargs.get("beta", 1) == 0
        if ignores_first:
            bad_inputs = [tensor for tensor in bad_inputs if tensor is not args[0]]
        bad_elements = [~tensor.detach().isfinite() for tensor in bad_inputs]
        ranges = list(map(_range, inputs))

        result = func(*args, **kwargs)
        self._count += 1

        addresses = {_address(tensor) for tensor in inputs}
        for output in _checked(tree_leaves(result)):
            # A view computes nothing, and the values of a new ``empty`` tensor are not used.
            is_view = _address(output) in addresses and not func._schema.is_mutable
            if is_view or "empty" in _name_of(func):
                continue
            self._note_result(func, output)
            if is_finite(output):
                # If the output is only a part of its memory, the rest of it may hold the bad value.
                if output.nbytes == output.untyped_storage().nbytes():
                    self._made.pop(_address(output), None)
            else:
                operation = self._operation(func, output, ranges)
                operation.inputs = self._makers_of(bad_inputs)
                if operation.inputs:
                    operation.makes_new = _makes_new(func, output, bad_elements)
                self._made[_address(output)] = operation
        return result

    def _note_result(self, func: Any, output: torch.Tensor) -> None:
        low, high, _ = _range(output)
        place = (_name_of(func), *self._place())
        self.largest_results[place] = max(-low, high, self.largest_results.get(place, 0.0))

    def _makers_of(self, tensors: Iterable[torch.Tensor]) -> list[Operation]:
        """Return the operations that made the values in ``tensors`` that are not finite."""
        addresses = map(_address, tensors)
        return [self._made[address] for address in addresses if address in self._made]

    def _operation(self, func: Any, output: torch.Tensor, ranges: list[Range]) -> Operation:
        direction, module, site = self._place()
        gradient_of = ""
        if direction == "backward":
            gradient_of = _NODE_ENDING.sub("", current_node().name())
        return Operation(
            number=self._count,
            name=_name_of(func),
            direction=direction,
            module=module,
            site=site,
            dtype=output.dtype,
            ranges=ranges,
            is_nan=bool(output.isnan().any()),
            gradient_of=gradient_of,
        )

    def _place(self) -> tuple[str, str, Site | None]:
        """Return direction, module and line of the operator that runs now."""
        task = graph_task_id()
        # Inside a backward pass a checkpoint may recompute its modules, which is a forward pass.
        recomputes = bool(self._running) and self._running[-1].graph_task == task
        if task == NO_GRAPH_TASK or recomputes:
            module = self._running[-1].path if self._running else ""
            return "forward", module, _site_of_stack()
        node = current_node()
        return "backward", self._module_of(node), _site_of_stack() or _site_of_node(node)

    # ---- modules and nodes

    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = tensors_inside((args, kwargs))
        numbers = [sequence_number(tensor.grad_fn) for tensor in inputs if tensor.grad_fn is not None]
        path = self._paths.get(module, "")
        newest_input = max(numbers, default=-1)
        self._running.append(_RunningModule(path, graph_task_id(), newest_input))

    def _after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self._running.pop()
        outputs = tensors_inside(output)
        nodes: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        # Walk from the outputs back to the inputs. Nodes of the modules inside are marked already and keep
        # their mark, but the walk goes on through them: nodes of this module may lie behind. It ends at nodes
        # no newer than the newest input, which were made before the call.
        seen = set()
        for node in nodes:  # grows in the loop
            if node in seen or sequence_number(node) <= running.newest_input:
                continue
            seen.add(node)
            node.metadata.setdefault(_MODULE_PATH, running.path)
            nodes += [below for below, _ in node.next_functions if below is not None]

    def _module_of(self, node: Any) -> str:
        if node is not None and _MODULE_PATH in node.metadata:
            return str(node.metadata[_MODULE_PATH])
        if self._running:
            return self._running[-1].path
        return ""


def _with_inputs(ends: Iterable[Operation]) -> list[Operation]:
    """Return ``ends`` and all operations that their values that are not finite came from."""
    seen = {id(operation): operation for operation in ends}
    operations = list(seen.values())
    for operation in operations:  # grows in the loop
        for maker in operation.inputs:
            if id(maker) not in seen:
                seen[id(maker)] = maker
                operations.append(maker)
    return operations


# ---- values


def _checked(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``values`` whose elements can be checked."""
    tensors = []
    for value in values:
        if not isinstance(value, torch.Tensor) or value.is_meta:
            continue
        if value.dtype in _CHECKED_DTYPES and value.layout == torch.strided:
            tensors.append(value)
    return tensors


def _makes_new(func: Any, output: torch.Tensor, bad_elements: list[torch.Tensor]) -> bool:
    """Return whether a result is not finite at an element where every input is finite.

    ``bad_elements`` has, for each input that is not finite, flags of the elements that are not.
    """
    # Only a pointwise operator computes an element from the same element of its inputs. In others the inputs
    # are to blame.
    if torch.Tag.pointwise not in func.tags or "foreach" in _name_of(func):
        return False
    from_inputs = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    for flags in bad_elements:
        from_inputs |= flags
    return bool((~output.detach().isfinite() & ~from_inputs).any())


def is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _range(tensor: torch.Tensor) -> Range:
    """Return the range of a tensor's finite values; zeros if there are none."""
    values = tensor.detach()
    finite = values[values.isfinite()]
    nonfinite = values.numel() - finite.numel()
    if not finite.numel():
        return Range(0.0, 0.0, nonfinite)
    low, high = finite.aminmax()
    return Range(float(low), float(high), nonfinite)


def _name_of(func: Any) -> str:
    return str(func._schema.name.removeprefix("aten::"))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---- lines of the user's code


def _is_users(file: str) -> bool:
    """Return whether a file is neither torch's nor narrowcast's.

    Files of other libraries count as the user's: a line in one of them is better than none.
    """
    return not file.startswith((_FOLDER_OF_TORCH, _FOLDER_OF_NARROWCAST))


def _site_of_stack() -> Site | None:
    """Return the innermost line of the user's code that runs now, of the frames inside of the replay."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _FILE_THAT_REPLAYS:
        if _is_users(frame.f_code.co_filename):
            return (frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _site_of_node(node: Any) -> Site | None:
    """Return the innermost line of the user's code that made a node, as ``_site_of_stack`` does."""
    if node is None:
        return None
    for entry in reversed(node.metadata.get(TRACEBACK, [])):
        line = _STACK_LINE.search(entry)
        if line is None:
            continue
        if line["file"] == _FILE_THAT_REPLAYS:
            return None
        if _is_users(line["file"]):
            return (line["file"], int(line["line"]))
    return None

"""Recompute in fp32 what a model returns straight from a sigmoid, softmax or log_softmax.

bf16 rounds a sigmoid above 0.998 to 1, where its gradient is 0. A loss outside of the model, which an FP32
script computes from what the model returns, then stops training. So while a model of ``run`` is called, these
operators note their results, each with the operator's input (``noting``). What the model returns of them is
computed again, in fp32, from that input, in the autograd graph (``DirectResults.recomputed``). A result is
recognized by its memory, and so are views of it. What ``gather`` takes out of a noted result is noted as
well.

Autograd saves the result of these operators and not their input, which therefore has to be kept until the
model returns. The latest one always is, since it is usually what the model returns. Of earlier ones, such as
the scores of attention in each layer, only a few are kept, and only small ones. The others are dropped: their
results stay in the low format, and ``run`` says so if the model returns one. An input is dropped too as soon
as the memory of its result is freed, as happens in evaluation.

While torch.compile traces, the operators run on fake tensors, whose memory can be told apart too. The
recomputation is then traced into the compiled graph.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting._torch_internals import (
    compile_id,
    constant_while_tracing,
    has_hooks,
    is_proxy_tracing,
    is_transforming,
    keep_graphs_with_regions,
    let_dynamo_trace,
    saves_by_hooks,
    skipped_by_dynamo,
)
from narrowcast.casting.kernels._operators import CLASSES, LOW
from narrowcast.casting.models._tree import map_tensors, say_nothing, tensors_inside
from narrowcast.casting.regions._scopes import PROMOTING, thread

_Kernel = Callable[..., Any]
_MOST_EARLIER = 8
"""How many inputs are kept besides the latest one."""
_MOST_EARLIER_BYTES = 2 * 2**20
"""How large each of these may be."""
NOTED = ("sigmoid", "sigmoid_", "_softmax", "_log_softmax")
"""The operators whose results are noted; ``softmax`` and ``log_softmax`` are composites that call theirs."""
GATHER = "gather"
"""Takes log-probabilities of actions or tokens out of a noted result; its own result is noted too."""
living: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every ``NotesOfResults`` that is alive, to have ``gather`` note too once there is a result to take from."""
_NODE_NAMES = {
    "sigmoid": "SigmoidBackward0",
    "sigmoid_": "SigmoidBackward0",
    "_softmax": "SoftmaxBackward0",
    "_log_softmax": "LogSoftmaxBackward0",
    GATHER: "GatherBackward0",
}
"""Operator -> the name of its node in the autograd graph."""
_FLAG_DEVICE = PROMOTING[0]
"""``call_compiled`` enables autocast for this device type, as a flag that traced code reads."""
# Nodes of torch's own operators; custom functions have no number at the end of their names.
_TORCH_NODE = re.compile(r"\w+Backward\d+")


class _Result:
    """One noted result: what it was computed from, and how to recognize it.

    Attributes:
        name: the name of the operator, as ``"softmax"``; for a ``gather``, that of the operator whose result
            it takes from.
        node_name: the name of the operator's node in the autograd graph, as ``"SoftmaxBackward0"``.
        dim: the dimension that the operator was called with; None for a sigmoid.
        input: the input of the operator; for a ``gather``, its index. None: no longer kept.
        input_version: the version of ``input`` when the operator was called.
        source: for a ``gather``, the part of another noted result that it takes from; None for the others.
        below: the autograd node that computed the input; None: a leaf, or nothing is recorded. For a
            ``gather``, that of the tensor it takes from.
        nbytes: the size of what is kept for the result.
        storage: a weak reference to the memory of the result.
        version: the version of the result when it was noted; if it has another one now, somebody wrote to it.
        stride: the strides of the result.
        wide: whether autograd records its new computation -> the result in fp32.
    """

    __slots__ = (
        "below", "dim", "input", "input_version", "name", "nbytes", "node_name", "source", "storage",
        "stride", "version", "wide",
    )  # fmt: skip

    def __init__(self, op: str, value: torch.Tensor, dim: Any, below: Any) -> None:
        self.name = op.strip("_")
        self.node_name = _NODE_NAMES[op]
        self.dim = dim
        self.input: torch.Tensor | None = value
        self.input_version = _version(value)
        self.below = below
        self.source: _Part | None = None
        self.nbytes = value.nbytes
        # ``DirectResults._note`` sets these three once the operator has returned its result.
        self.version: int | None = None
        self.stride: tuple[int, ...] = ()
        self.storage: Callable[[], Any] = lambda: None

        self.wide: dict[bool, torch.Tensor] = {}

    @classmethod
    def of_gather(cls, op: str, index: torch.Tensor, dim: Any, below: Any, source: _Part) -> _Result:
        """Return the result of a ``gather`` by ``index`` from ``source``, a part of another noted result."""
        result = cls(op, index, dim, below)
        result.name = source.result.name
        result.source = source
        # Its source is kept with it, even when the memory of the source's result is freed.
        result.nbytes += source.result.nbytes
        return result

    def is_computed_by(self, node: Any) -> bool:
        """Return whether ``node`` of the autograd graph is the call of this operator."""
        if node.name() != self.node_name:
            return False
        below = node.next_functions[0][0]
        # The input was a leaf: below the operator is the node that accumulates its gradient.
        if self.below is None:
            return getattr(below, "variable", None) is self.input
        return below is self.below

    def was_dropped(self) -> bool:
        """Return whether something that it was computed from is no longer kept."""
        if self.input is None:
            return True
        return self.source is not None and self.source.result.was_dropped()

    def is_unchanged(self) -> bool:
        """Return whether everything that it was computed from is kept, and nobody has written to it."""
        if self.input is None or _version(self.input) != self.input_version:
            return False
        return self.source is None or self.source.result.is_unchanged()

    def in_fp32(self, recorded: bool) -> torch.Tensor:
        """Return the result in fp32; kept, as a model may return several views. ``recorded``: by autograd."""
        if recorded not in self.wide:
            self.wide[recorded] = self._computed(recorded)
        return self.wide[recorded]

    def _computed(self, recorded: bool) -> torch.Tensor:
        assert self.input is not None
        if self.source is not None:
            return self.source.in_fp32(recorded).gather(self.dim, self.input)
        wide = self.input.float()
        if self.name == "sigmoid":
            return torch.sigmoid(wide)
        if self.name == "softmax":
            return torch.softmax(wide, self.dim)
        return torch.log_softmax(wide, self.dim)


class _Part:
    """A noted result or a view of it."""

    __slots__ = ("offset", "result", "size", "stride")

    def __init__(self, result: _Result, tensor: torch.Tensor) -> None:
        self.result = result
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def in_fp32(self, recorded: bool) -> torch.Tensor:
        whole = self.result.in_fp32(recorded)
        # The tensor is the whole result, and no view of it.
        if self.size == whole.size() and self.stride == self.result.stride:
            return whole
        # Take from the fp32 result the view that the tensor is of the low result. The same strides and offset
        # hold, because both results lie in memory alike: float() and the operators choose the strides of what
        # they return by those of their input. Strides may differ only in dimensions of size 1, where they
        # address nothing.
        return whole.as_strided(self.size, self.stride, self.offset)


class DirectResults:
    """The noted results of one call of a model in one thread, or of all that a thread traces.

    Attributes:
        count: how many results were noted so far.
        is_in_one_graph: ``torch.compile`` traced the whole model in this call, and so all that it returns.

    Args:
        say: called where a result stays low, with what the model did with it, operator, dtype and reason.
        traced: whether they are those of fake tensors, which take no memory.
    """

    def __init__(self, say: Callable[[str, str, torch.dtype, str], None], *, traced: bool = False) -> None:
        self._traced = traced
        self._say = say
        self.count = 0
        self.is_in_one_graph = False
        self._traces_before = 0  # how many results of fake tensors there were at ``begin``
        # Both by the identity of the storage of the result, oldest first. Another thread may free a result.
        self._kept: dict[int, _Result] = {}
        self._dropped: dict[int, _Result] = {}

    def begin(self) -> DirectResults | None:
        """Note results of this thread from now on; return what did so before, for ``end``."""
        self._traces_before = _count_traced()
        before: DirectResults | None = thread.results
        thread.results = self
        return before

    def end(self, before: DirectResults | None) -> None:
        """Note no more results, and drop everything that was kept."""
        thread.results = before
        self._kept.clear()
        self._dropped.clear()

    def compiled_low(self, output: Any) -> bool:
        """Return whether code compiled since ``begin`` may have computed a low tensor of ``output``."""
        # One graph computes again in fp32 what the whole model returns. And if no result of fake tensors was
        # noted since ``begin``, nothing was compiled that calls these operators.
        if self.is_in_one_graph or _count_traced() == self._traces_before:
            return False
        return any(tensor.dtype in LOW for tensor in tensors_inside(output))

    def recomputed(self, output: Any, did: str = "returned") -> Any:
        """Return ``output`` with the noted results in it in fp32; ``did``: what the model did with it."""
        if not self.has_any() or is_transforming():
            return output
        in_fp32 = functools.partial(self._tensor_in_fp32, did=did)
        # Say nothing of objects of unknown classes: the caller casts the output next, and that names them.
        return map_tensors(output, in_fp32, say_nothing)

    def has_any(self) -> bool:
        """Return whether a result was noted whose memory was not freed."""
        return bool(self._kept or self._dropped)

    def _tensor_in_fp32(self, tensor: torch.Tensor, did: str) -> torch.Tensor:
        """Return ``tensor`` in fp32 if it is of a noted result that can be computed again, else as it is."""
        if tensor.dtype not in LOW or not (self._traced or type(tensor) in CLASSES):
            return tensor
        result = self._result_in(tensor)
        if result is None:
            return tensor
        why = self._why_not(tensor, result)
        if why is not None:
            self._say(did, result.name, tensor.dtype, why)
            return tensor
        recorded = tensor.requires_grad
        with torch.set_grad_enabled(recorded):
            wide = _Part(result, tensor).in_fp32(recorded)
            # No version tells whether somebody wrote to an inference tensor.
            if tensor.is_inference():
                return _unless_changed(tensor, wide, result.name)
            return wide

    # ---- called by the kernels

    def call(self, op: str, go_on: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the operator and note its result."""
        value = args[0]
        if value.dtype not in LOW or is_transforming():
            return go_on()
        self._make_room()  # before more memory is taken
        below = value.grad_fn  # before sigmoid_ changes it; a clone has another
        if op == "sigmoid_":
            # It overwrites its input, so a copy is noted. Not for a part of a larger tensor, as a gate of a
            # recurrent cell: _note would not take its result.
            if not _is_whole(value):
                return go_on()
            value = value.clone()
        dim = args[1] if len(args) > 1 else None  # a sigmoid has none
        noted = _Result(op, value, dim, below)
        result = go_on()
        self._note(noted, result)
        return result

    def call_gather(self, op: str, go_on: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call ``gather`` and note its result, if it takes from a noted one."""
        value, dim, index = args[:3]
        source = None
        if self.has_any() and not is_transforming():
            source = self._result_in(value)
        if source is None or self._why_not(value, source) is not None:
            return go_on()
        noted = _Result.of_gather(op, index, dim, value.grad_fn, _Part(source, value))
        result = go_on()
        self._note(noted, result)
        return result

    def _note(self, noted: _Result, result: torch.Tensor) -> None:
        """Keep ``noted`` for the memory of ``result``, unless ``result`` is only a part of it."""
        if not _is_whole(result):
            return
        # Now there is a result that ``gather`` may take from, so have it note its results too. In models that
        # note nothing, it keeps PyTorch's kernel.
        #
        # For the results of one call, the first of them is the time to do so. Results of fake tensors are
        # counted over many calls, and a NotesOfResults may have been made since the first: ask each time.
        if self._traced or not self.count:
            for notes in list(living):
                notes.begin_gather()
        self.count += 1
        storage = result.untyped_storage()
        key = id(storage)
        kept, dropped = self._kept, self._dropped

        # Must not refer to noted: noted -> weak reference -> forget -> noted would keep its input until the
        # garbage collector runs.
        def forget(_: object = None) -> None:
            kept.pop(key, None)
            dropped.pop(key, None)

        forget()  # an earlier result in the same memory
        noted.storage = weakref.ref(storage, forget)
        noted.version = _version(result)
        noted.stride = result.stride()
        kept[key] = noted

    def _make_room(self) -> None:
        """Before another result: drop the inputs that are large, and the oldest if they are many."""
        if self._traced or not self._kept:
            return
        keys = list(self._kept)
        for key in keys[: max(0, len(keys) - _MOST_EARLIER)]:
            self._drop(key)
        # A gather adds results without making room, so any of them may be large.
        for key in keys:
            result = self._kept.get(key)
            if result is not None and result.nbytes > _MOST_EARLIER_BYTES:
                self._drop(key)

    def _drop(self, key: int) -> None:
        """Forget what a result was computed from; it is still recognized, to say that it stays low."""
        result = self._kept.pop(key, None)
        if result is not None:  # else another thread freed its memory meanwhile
            result.input = result.source = result.below = None
            result.wide.clear()
            self._dropped[key] = result

    def _result_in(self, tensor: torch.Tensor) -> _Result | None:
        """Return the noted result in whose memory ``tensor`` is, unless that was written to; else None."""
        if not _has_storage(tensor):
            return None
        # torch keeps one Python object for each storage as long as the storage lives.
        storage = tensor.untyped_storage()
        result = self._kept.get(id(storage)) or self._dropped.get(id(storage))
        if result is None or result.storage() is not storage:
            return None
        return result if _version(tensor) == result.version else None

    def _why_not(self, tensor: torch.Tensor, result: _Result) -> str | None:
        """Return why ``tensor``, which is in ``result``, cannot be computed again; None: it can."""
        if result.was_dropped():
            if result.nbytes <= _MOST_EARLIER_BYTES:
                return "too many results followed for its input to be kept"
            return f"its input of {result.nbytes / 2**20:.0f} MB was not kept until then"
        if not result.is_unchanged():
            return "its input was overwritten"
        return _what_stands_between(tensor, result) if tensor.requires_grad else None


def _what_stands_between(tensor: torch.Tensor, result: _Result) -> str | None:
    """Return what the backward pass would skip if ``tensor`` were computed again; None: nothing.

    The backward pass would go from ``tensor`` straight to the input of ``result``.
    """
    if has_hooks(tensor):  # those of FSDP gather the weights for the backward
        return "a hook waits for its gradient"
    # The tensor is in the memory of the result, so torch's own nodes between the two can only be views.
    node = tensor.grad_fn
    while node is not None and _TORCH_NODE.fullmatch(node.name()):
        if result.is_computed_by(node):
            return None
        node = node.next_functions[0][0]
    return "a reentrant checkpoint or a custom function stands between"


def noting(op: str, go_on: _Kernel) -> _Kernel:
    """Return a kernel that calls ``go_on`` and notes the result where a model of ``run`` is called."""

    call = DirectResults.call_gather if op == GATHER else DirectResults.call

    @skipped_by_dynamo
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        results = _results_for(args[0])
        if results is None:
            return go_on(keyset, *args, **kwargs)
        return call(results, op, lambda: go_on(keyset, *args, **kwargs), args)

    return kernel


def _results_for(value: torch.Tensor) -> DirectResults | None:
    """Return where a result of ``value`` is noted; None: nowhere."""
    if type(value) in CLASSES:
        results: DirectResults | None = thread.results
        return results
    return _traced_results() if is_proxy_tracing() else None


# ---- in code that torch.compile traces


def _traced_results() -> DirectResults:
    """Return the results of this thread's fake tensors, which live as long as a tracer needs them."""
    if thread.traced_results is None:
        thread.traced_results = DirectResults(_nothing, traced=True)
    results: DirectResults = thread.traced_results
    return results


def _count_traced() -> int:
    """Return how many results of fake tensors this thread has noted so far."""
    return 0 if thread.traced_results is None else _traced_results().count


def _nothing(*_: object) -> None:
    pass


def call_compiled(call: Callable[[], Any]) -> Any:
    """Call a compiled model that the script calls itself, so that traced code computes again what it returns.

    While ``call`` runs, autocast is enabled for the device type of ``PROMOTING``, on which nothing computes.
    This is a flag: by it traced code knows that the script called the model. Dynamo guards autocast's state,
    and compiles anew where it differs. The autocast dtype of that device type stays as it is; it says whether
    operators promote.
    """
    keep_graphs_with_regions()
    torch.set_autocast_enabled(_FLAG_DEVICE, True)
    try:
        return call()
    finally:
        torch.set_autocast_enabled(_FLAG_DEVICE, False)


@constant_while_tracing
def begin_traced_model() -> None:
    """Remember which compilation begins to trace the model that this thread calls."""
    thread.traced_from = compile_id()


@constant_while_tracing
def _end_traced_model() -> bool:
    """End the trace of a model; return whether a tracer has noted results, so that some may be recomputed.

    Dynamo calls this while it traces, and the traced code takes the returned value as a constant.
    """
    # The compilation that began to trace the model has come to its end, so no graph break lies between.
    if thread.results is not None and thread.traced_from == compile_id():
        thread.results.is_in_one_graph = True
    return _traced_results().has_any()


def recomputed_while_traced(output: Any) -> Any:
    """As ``DirectResults.recomputed``, at the end of a model that Dynamo traces."""
    if not _end_traced_model():
        return output
    # Have Dynamo put the calls below into the graph, instead of tracing into the function.
    _let_dynamo_trace_noted_or_real()

    def low_to_fp32(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in LOW:
            return tensor
        wide = _noted_or_real_in_fp32(tensor)
        # While Dynamo traces, the tensor is fake: if the call returns it low, it was not noted. Then use the
        # tensor itself, so that the graph leaves out the call. With ``backend="eager"`` the graph would make
        # the call with a real tensor, and cast that to fp32.
        return tensor if wide.dtype in LOW else wide

    return map_tensors(output, low_to_fp32, say_nothing)


def _noted_or_real_in_fp32(tensor: torch.Tensor, did: str = "returned") -> torch.Tensor:
    """Return the low ``tensor`` in fp32, but a fake tensor that was not noted as it is.

    ===================  ==========================================
    fake, and noted      in fp32, computed again
    fake, and not noted  as it is
    real                 in fp32: computed again if noted, else cast
    ===================  ==========================================

    The callers:

    - Dynamo, with fake tensors, while it traces. It puts the call into the graph.
    - A tracer below Dynamo, with fake tensors again, when it traces that graph.
    - The graph itself, with real tensors, where no tracer follows, as with ``backend="eager"``. This has to
      return fp32 then, as it did when Dynamo traced.
    - Eager code, with real tensors, in ``in_fp32_for``.
    """
    wide = tensor
    results = _results_for(tensor)
    if results is not None:
        wide = results.recomputed(tensor, did)
    is_real = type(tensor) in CLASSES
    return wide.float() if is_real else wide


_let_dynamo_trace_noted_or_real = let_dynamo_trace(_noted_or_real_in_fp32)


def in_fp32_for(did: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a low ``tensor`` in fp32: computed again if the model of ``run`` noted it, else cast.

    In a checkpoint it is cast: nothing is noted when the backward pass computes the forward again, and both
    forwards have to save equally many tensors. ``did``: what the model does with it, for notes.
    """
    if torch.compiler.is_dynamo_compiling():
        # Have Dynamo put the call below into the graph.
        _let_dynamo_trace_noted_or_real()
    elif saves_by_hooks():
        return tensor.float()
    return _noted_or_real_in_fp32(tensor, did).float()


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often ``tensor`` was written to; inference tensors do not count it."""
    return None if tensor.is_inference() else tensor._version


def _has_storage(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` lies in one plain storage, as sparse and nested tensors do not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is all of its memory."""
    return (
        _has_storage(tensor)
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _unless_changed(low: torch.Tensor, wide: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``wide``, or ``low`` in fp32 if somebody wrote to it since; without waiting for a GPU."""
    # A kernel of log_softmax that rounds the sum of exponentials is off by half an eps where the result is 0:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cpu/SoftMaxKernel.cpp
    atol = torch.finfo(low.dtype).eps if name == "log_softmax" else 1e-4
    # Rounding to bf16 moves a result by 2**-8 of itself at most, and rounding to fp16 by less: 2**-6 is four
    # times that. Below the smallest normal number of fp16, 6e-5, rounding moves it by more of itself, but by
    # less than 1e-4.
    low_in_fp32 = low.float()
    is_unchanged = torch.isclose(wide, low_in_fp32, rtol=2**-6, atol=atol, equal_nan=True).all()
    return torch.where(is_unchanged, wide, low_in_fp32)

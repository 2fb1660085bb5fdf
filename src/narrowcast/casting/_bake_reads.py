"""Which formats the values of weights are read in while a model is called.

Below autocast a use of a weight is one of three things: a cast of it, which autocast, a rule or the model's
own code asked for; a view, whose own uses count as the weight's; or an operator that reads it as it is. A
weight that is only ever cast to one format gives the same bits when it is stored in that format.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.casting._actions import tensors_in
from narrowcast.casting._torch_internals import (
    autocast_outside,
    call_with_autocast_inside,
    is_composite,
    storage_of,
)
from narrowcast.casting._tree import cast_where
from narrowcast.policy import autocast_key

_CASTS = frozenset({"aten::_to_copy", "aten::to"})
_FUSED = "aten::_transformer_encoder_layer_fwd"
# Operators that come with PyTorch; those of other libraries may call anything.
_OF_TORCH = frozenset({
    "aten", "prim", "prims", "quantized", "_quantized", "quantization", "symm_mem", "static_runtime", "c10d",
    "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "onednn", "mkldnn", "mkl",
    "mkldnn_prepacked", "streams", "sparse", "inductor", "_inductor_test", "inductor_prims", "profiler",
    "fsdp", "_test", "onnx", "onnx_symbolic", "_dtensor", "debugprims", "rngprims", "flex_lib", "_native",
    "debug_mode_ops", "export", "higher_order",
})  # fmt: skip
_OUR_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_NOTES = "_narrowcast_reads"


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that notes how ``weights`` are read in this thread.

    Attributes:
        formats: weight -> the formats that its values were rounded to where they were read; its own where
            something read it as it is, or asked for its format, on which the result may depend then.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.formats: dict[torch.nn.Parameter, set[torch.dtype]] = {weight: set() for weight in weights}
        self._times_read: Counter[torch.nn.Parameter] = Counter()
        self._casts: dict[int, tuple[StorageWeakRef, torch.nn.Parameter]] = {}
        self._by_storage: dict[int, list[tuple[int, int, torch.nn.Parameter]]] = {}
        for weight in self.formats:
            memory = memory_of(weight)
            if memory is not None:
                self._by_storage.setdefault(memory[0], []).append((*memory[1:], weight))

    def begin(self) -> None:
        for weight, formats in self.formats.items():
            vars(weight)[_NOTES] = (formats, threading.get_ident())
            weight.__class__ = _Noted
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *, here: bool = True) -> None:
        """``here``: in the thread where it began; a mode of another thread, which died, cannot be ended."""
        if here:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for weight in self.formats:
            weight.__class__ = torch.nn.Parameter
            vars(weight).pop(_NOTES, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((*args, *kwargs.values()))
        read = [(tensor, weight) for tensor in given for weight in self._weights_in(tensor)]
        before = {weight: self._times_read[weight] for _, weight in read}
        device = _casts_inside(func, given)
        if device is None:
            result = func(*args, **kwargs)
        else:
            with self:
                result = call_with_autocast_inside(func, device, args, kwargs)
        for tensor, weight in read:
            # By the operators that it called, or, as far as can be seen, by itself.
            seen_inside = is_composite(func) or self._times_read[weight] > before[weight]
            if device is not None and seen_inside:
                continue
            found = _read_as(func, tensor, args, result)
            if found is not None:
                self._note(weight, found)
            if found is not None and found != _dtype(weight):
                self._remember_casts(weight, result)
        if func._schema.is_mutable and self._casts:
            self._note_writes(func, args, kwargs)
        return result

    def note_results(self, results: Any) -> None:
        """Note what the watched call returns: what is handed on is to stay what it is."""

        def note(tensor: torch.Tensor) -> bool:
            for weight in [*self._weights_in(tensor), *self._cast_in(tensor)]:
                self._note(weight, _dtype(weight))
            return False

        cast_where(results, torch.float32, note)

    def _note(self, weight: torch.nn.Parameter, dtype: torch.dtype) -> None:
        self.formats[weight].add(dtype)
        self._times_read[weight] += 1

    def _remember_casts(self, weight: torch.nn.Parameter, result: Any) -> None:
        """A cast of a stored weight is the weight itself: one that is written to must be a copy."""
        for cast in tensors_in(result):
            storage = storage_of(cast)
            if storage is not None:
                # As long as the reference is there, no other storage is at its address.
                reference = StorageWeakRef(cast.untyped_storage())  # type: ignore[no-untyped-call]
                self._casts[storage] = (reference, weight)

    def _cast_in(self, tensor: torch.Tensor) -> list[torch.nn.Parameter]:
        storage = storage_of(tensor)
        return [] if storage not in self._casts else [self._casts[storage][1]]

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        declared = func._schema.arguments
        given = {one.name: value for one, value in zip(declared, args, strict=False)} | kwargs
        for one in declared:
            if one.alias_info is not None and one.alias_info.is_write:
                for tensor in tensors_in(given.get(one.name)):
                    for weight in self._cast_in(tensor):
                        self._note(weight, _dtype(weight))

    def _weights_in(self, tensor: torch.Tensor) -> list[torch.nn.Parameter]:
        """The weights whose memory ``tensor`` has a part of."""
        memory = memory_of(tensor)
        if memory is None:
            return []
        _, first, last = memory
        near = self._by_storage.get(memory[0], ())
        return [weight for start, end, weight in near if first < end and start < last]


def memory_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """The storage of ``tensor`` and the bytes of it from its first to after its last; None: it has none."""
    storage = storage_of(tensor)
    if storage is None or tensor.numel() == 0:
        return None
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    reach = sum(int(n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return storage, first, first + (reach + 1) * size


def _casts_inside(func: Any, given: list[torch.Tensor]) -> str | None:
    """The device whose region casts what ``func`` itself calls, though no table has it; None: none does.

    Such are composites, one fused kernel of PyTorch, and what other libraries define. What a mode calls runs
    with autocast off, and these would compute something else.
    """
    if not given:
        return None
    name: str = func._schema.name
    calls = name == _FUSED or is_composite(func) or name.partition("::")[0] not in _OF_TORCH
    device = given[0].device.type
    if not calls or not torch.amp.is_autocast_available(device) or not autocast_outside(device):
        return None
    listed = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), autocast_key(device))
    return None if listed else device


def _read_as(func: Any, tensor: torch.Tensor, args: tuple[Any, ...], result: Any) -> torch.dtype | None:
    """The format to which this call rounded what it read of ``tensor``; None: it only looked at it anew."""
    own = _dtype(tensor)
    if func._schema.name == "aten::copy_" and tensor is not args[0]:
        return _dtype(args[0]) if args[0].device == tensor.device else own
    if func._schema.is_mutable:
        return own
    results = tensors_in(result)
    storage = storage_of(tensor)
    if results and all(_dtype(one) == own and storage_of(one) == storage for one in results):
        return None
    if func._schema.name in _CASTS and results[0].device == tensor.device:
        # In another order in memory a product may add up in another order.
        return _dtype(results[0]) if results[0].stride() == tensor.stride() else own
    return own


def _dtype(tensor: torch.Tensor) -> torch.dtype:
    dtype: torch.dtype = torch.Tensor.dtype.__get__(tensor)  # type: ignore[attr-defined]
    return dtype


class _Noted(torch.nn.Parameter):
    """What a weight is during a watched call: Python code that asks for its format is noted.

    The class of the object is exchanged and put back, so that nothing else notices: PyTorch's own kernels and
    its checks for subclasses see a parameter as before.
    """

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        own = _dtype(self)
        formats, thread = vars(self).get(_NOTES, (None, 0))
        here = formats is not None and thread == threading.get_ident()
        if here and not _does_the_same_with_any(sys._getframe(1)):
            formats.add(own)
        return own


def _does_the_same_with_any(frame: FrameType) -> bool:
    """Whether the code that asks for the format of a weight computes the same whatever it hears."""
    if frame.f_code.co_filename.startswith(_OUR_FOLDER):
        return True
    if frame.f_code is torch.nn.RNNBase.check_input.__code__:
        return True  # asks whether autocast is on, too
    if frame.f_code is torch.nn.MultiheadAttention.forward.__code__:
        # The fused kernel is for weights in the format of the input; these never come to it.
        module = frame.f_locals["self"]
        return torch.is_autocast_enabled() or not module.batch_first or bool(module.num_heads % 2)
    return False

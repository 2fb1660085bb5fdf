"""Dispatch modes that make formats comparable: random numbers drawn in fp32, and FP32 without rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only  # no public name as of torch 2.13

NARROW = frozenset({torch.bfloat16, torch.float16})
# Tagged as ops that draw, but they choose a kernel, or make masks from a given seed.
_DRAW_NOTHING = frozenset({"_fused_sdp_choice", "_fill_mem_eff_dropout_mask_", "_cudnn_init_dropout_state"})
# Draw from a half-open interval: rounding must not reach its upper end.
_HALF_OPEN = frozenset({"rand", "rand_like", "uniform", "uniform_"})
# The arguments by which fused kernels take their dropout: attention, and recurrent layers.
_ATTENTION_DROPOUT = "dropout_p"
_DROPOUT_ARGUMENTS = (_ATTENTION_DROPOUT, "dropout")


class Fp32Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make random ops on bf16 and fp16 tensors draw in fp32 and cast the result.

    torch draws a bf16 normal from other random bits than an fp32 one: samples and masks differ, and so does
    everything that is drawn later. The order in which a tensor is filled follows its strides, which may
    differ between formats too, so every draw fills contiguous memory, which is then copied. Samples, masks
    and the state of the generator are then the same in fp32, bf16 and fp16. fp64 and integer tensors are
    drawn as usual. Gradients are those of the op itself.

    Casts round to nearest even, except that a uniform number never reaches the open end of its interval.
    Samples beyond 65504 are infinite in fp16.

    Attributes:
        undecidable: None, or a sentence that names an op whose random numbers cannot be drawn in fp32: a
            fused kernel of attention, or of a recurrent layer on CUDA, draws them inside.
        in_attention: whether one of these was attention, which torch can also compute without a fused kernel.
        made_narrow: whether any op returned a bf16 or fp16 tensor.
        paused: whether all ops run as usual; to be set where the mode cannot be left.
    """

    paused = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.undecidable: str | None = None
        self.in_attention = False
        self.made_narrow = False
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def rewind_generators(self) -> None:
        """Restore every generator that was passed to an op to its state when first seen."""
        for generator, state in self._generators.values():
            generator.set_state(state)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        result = self._draw(func, args, kwargs) if _draws(func) else func(*args, **kwargs)
        if not self.made_narrow:
            self.made_narrow = any(map(_is_narrow, tree_leaves(result)))
        return result

    def _draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # A composite op arrives here only in inference mode. Its parts have to come back to this mode, which
        # is off while it handles an op: hence ``with``.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result

        names = [argument.name for argument in func._schema.arguments]
        call = dict(zip(names, args, strict=False)) | kwargs
        generator = call.get("generator")
        if generator is not None and id(generator) not in self._generators:
            self._generators[id(generator)] = (generator, generator.get_state())

        for argument in _DROPOUT_ARGUMENTS:
            if argument in names:
                self._note_dropout_in_kernel(func, call, argument)
                return func(*args, **kwargs)
        return _drawn_in_fp32(func, call)

    def _note_dropout_in_kernel(self, func: Any, call: dict[str, Any], argument: str) -> None:
        """Note that a fused kernel draws its dropout, unless the probability in ``argument`` is 0."""
        drops = call.get(argument, 0.0) > 0 and call.get("train", True)
        if not drops:
            return
        if self.undecidable is None:
            self.undecidable = (
                f"{_name(func)} draws its dropout inside a fused kernel, so FP32 and mixed precision saw "
                "different masks."
            )
        if argument == _ATTENTION_DROPOUT:
            self.in_attention = True


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in NARROW


def _drawn_in_fp32(func: Any, call: dict[str, Any]) -> Any:
    """Call ``func`` on contiguous fp32 tensors; return results in the formats and strides of the plain call.

    Args:
        call: its arguments by name.
    """
    dtype = _result_dtype(func, call)
    call_in_fp32 = _in_fp32(func, call, dtype)
    results = func(**call_in_fp32)

    written = [arg.name for arg in func._schema.arguments if arg.is_write and arg.name in call]
    _write_back(func, call, call_in_fp32, written)
    # An op returns what it wrote into. Return the caller's tensor instead of ours.
    originals: dict[int, torch.Tensor] = {id(call_in_fp32[name]): call[name] for name in written}
    template = _template_of_strides(call, written)

    def as_asked(drawn: torch.Tensor) -> torch.Tensor:
        if id(drawn) in originals:
            return originals[id(drawn)]
        if drawn.dtype == torch.float32 and dtype in NARROW:
            drawn = _cast(func, call, drawn, dtype)
        if template is not None and template.shape == drawn.shape and not template.is_contiguous():
            return torch.empty_like(template, dtype=drawn.dtype, device=drawn.device).copy_(drawn)
        return drawn

    return tree_map_only(torch.Tensor, as_asked, results)


def _in_fp32(func: Any, call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of ``func`` for a draw in fp32, where ``call`` draws in ``dtype``."""
    call_in_fp32 = dict(call)
    for name, value in call.items():
        # Tensors of other formats stay as they are.
        if _is_narrow(value) or (isinstance(value, torch.Tensor) and value.dtype == torch.float32):
            call_in_fp32[name] = value.float().contiguous()
    if dtype in NARROW and any(argument.name == "dtype" for argument in func._schema.arguments):
        call_in_fp32["dtype"] = torch.float32
    return call_in_fp32


def _write_back(
    func: Any, call: dict[str, Any], call_in_fp32: dict[str, Any], written: Sequence[str]
) -> None:
    """Copy what ``func`` wrote into fp32 tensors to those of the caller; ``written``: names of arguments."""
    for name in written:
        if call_in_fp32[name] is not call[name]:
            call[name].copy_(_cast(func, call, call_in_fp32[name], call[name].dtype))


def _template_of_strides(call: dict[str, Any], written: Sequence[str]) -> torch.Tensor | None:
    """Return the tensor whose strides the results have; None: they are contiguous, or as ``call`` says."""
    if call.get("memory_format") not in (None, torch.preserve_format):
        return None
    # The first tensor that the op reads.
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and name not in written:
            return value
    return None


def _cast(func: Any, call: dict[str, Any], drawn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast what was drawn in fp32; what rounding takes to the open end of an interval stays below it."""
    narrow = drawn.to(dtype)
    if dtype in NARROW and _name(func) in _HALF_OPEN:
        end = float(call.get("to", 1.0))
        below = torch.nextafter(torch.tensor(end, dtype=dtype), torch.tensor(-float("inf"), dtype=dtype))
        is_rounded_up = (narrow.float() >= end) & (drawn < end)
        narrow = torch.where(is_rounded_up, below.to(narrow.device), narrow)
    return narrow


def _result_dtype(func: Any, call: dict[str, Any]) -> torch.dtype:
    """Return the dtype of what an op draws: that asked for, else of its first tensor, else its default."""
    dtype = call.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype
    for argument in func._schema.arguments:
        value = call.get(argument.name)
        if isinstance(value, torch.Tensor):
            return value.dtype
        if argument.name == "dtype" and argument.has_default_value() and argument.default_value is not None:
            # Of the ops that draw, only randint and randperm have a default dtype, int64.
            return torch.int64
    return torch.get_default_dtype()


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and _name(func) not in _DRAW_NOTHING


@cache
def _name(func: Any) -> str:
    """Return ``"bernoulli_"`` for ``aten::bernoulli_.float``."""
    name: str = func._schema.name
    return name.partition("::")[2]


# ---- FP32 without the rounding inside its ops

NO_FLOAT64 = ("mps", "meta")


class ExactOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make ops on fp32 tensors compute in float64 and round the result to fp32 once.

    What differs from plain FP32 is then FP32's own rounding noise. Take a bias before a batch norm: its
    gradient is exactly zero, and FP32 computes 1e-6 or so, depending on the order of its sums. Sums without
    rounding change 100 % of such a gradient, and 1e-5 of a meaningful one. To change the last bit of the
    weights would not show this noise: it changes only 1 % of such a gradient (measured).

    Ops that return views, write in place, draw random numbers or have no float64 kernel run as usual; running
    statistics of a normalization are not updated. Slow: for one step, not for training.

    Attributes:
        paused: whether all ops run as usual; to be set where the mode cannot be left.
    """

    paused = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # An op that is told its dtype computes and returns in that one, whatever its inputs are in.
        is_told = kwargs.get("dtype") is not None
        if self.paused or is_told or not _can_be_exact(func, tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        wide_args, wide_kwargs = _recast((args, kwargs), torch.float32, torch.float64)
        try:
            result = func(*wide_args, **wide_kwargs)
            # Fourier transforms, ``complex`` and ``polar`` make complex numbers of real ones.
            narrow = _recast(result, torch.complex128, torch.complex64)
            return _recast(narrow, torch.float64, torch.float32)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError):  # no kernel for float64; NotImplementedError is a RuntimeError
            return func(*args, **kwargs)


def _can_be_exact(func: Any, values: Sequence[Any]) -> bool:
    """Return whether an op has only fp32 inputs, and neither writes, nor returns a view, nor draws."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    schema = func._schema
    for part in (*schema.arguments, *schema.returns):
        if part.alias_info is not None:  # it writes, or returns a view
            return False

    formats = set()
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type in NO_FLOAT64 or value.layout != torch.strided:
            return False
        if value.is_floating_point() or value.is_complex():
            formats.add(value.dtype)
    return formats == {torch.float32}


def _recast(tree: Any, old: torch.dtype, new: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == old:
            return tensor.to(new)
        return tensor

    return tree_map_only(torch.Tensor, cast, tree)

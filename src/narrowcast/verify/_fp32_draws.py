"""Random numbers drawn in fp32 and then cast, so that a narrow format sees the masks and samples of fp32.

torch draws a bf16 normal from other random bits than an fp32 one: the samples differ, and so does the state
of the generator afterwards, with everything that is drawn later. A comparison of two formats would compare
two masks. And the order in which a tensor is filled follows its strides, which a convolution in bf16 may
choose differently from one in fp32; so every draw here fills contiguous memory, which is then copied over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = frozenset({torch.bfloat16, torch.float16})
# Carry the tag of ops that draw, and draw nothing: a choice among kernels, and masks made from a given seed.
_DRAW_NOTHING = frozenset({"_fused_sdp_choice", "_fill_mem_eff_dropout_mask_", "_cudnn_init_dropout_state"})
_BELOW_AN_END = frozenset({"rand", "rand_like", "uniform", "uniform_"})
_POSITIVE = frozenset({"exponential", "exponential_", "log_normal", "log_normal_"})


class Fp32Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it every random op whose tensors are bf16 or fp16 draws in fp32 and casts what it drew.

    fp32 tensors get the numbers that torch gives them where they are contiguous; others get those of a
    contiguous tensor. Samples, masks and the state of the generator afterwards are then the same in all three
    formats. fp64 and integer tensors are left as they are. Gradients are those of the op itself.

    A cast rounds to nearest even, with two exceptions that keep what an op promises: a uniform number never
    reaches the open end of its interval, and what is positive in fp32 never becomes zero. Beyond 65504 a
    sample in fp16 is infinite.

    Attributes:
        undecidable: None, or a sentence on random numbers that were drawn where they cannot be had in fp32:
            inside a fused kernel of attention or of a recurrent layer on CUDA.
        in_attention: whether that was attention, which torch can compute without a fused kernel.
        made_narrow: whether any op returned a bf16 or fp16 tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.undecidable: str | None = None
        self.in_attention = False
        self.made_narrow = False
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def rewind_generators(self) -> None:
        """Put every generator that was handed to an op back to where it was when first seen."""
        for generator, state in self._generators.values():
            generator.set_state(state)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._draw(func, args, kwargs or {}) if _draws(func) else func(*args, **(kwargs or {}))
        if not self.made_narrow:
            self.made_narrow = _is_narrow(result)
        return result

    def _draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with self:  # only in inference mode do ops that are made of others come down here whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        generator = given.get("generator")
        if generator is not None and id(generator) not in self._generators:
            self._generators[id(generator)] = (generator, generator.get_state())
        share = next(
            (name for name in ("dropout_p", "dropout") if any(a.name == name for a in arguments)), None
        )
        if share is not None:  # inside a kernel; 0 by default
            if given.get(share, 0.0) > 0 and given.get("train", True):
                self.undecidable = self.undecidable or _fused_reason(func)
                self.in_attention = self.in_attention or share == "dropout_p"
            return func(*args, **kwargs)
        if (
            _name(func) == "random_"
            and len(given) - ("generator" in given) == 1
            and _is_narrow(given["self"])
        ):
            self.undecidable = self.undecidable or (
                "Tensor.random_() without bounds draws from a range that depends on the format."
            )
            return func(*args, **kwargs)
        return _drawn_in_fp32(func, given)


def _drawn_in_fp32(func: Any, given: dict[str, Any]) -> Any:
    dtype = _result_dtype(func, given)
    call = dict(given)
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    template: torch.Tensor | None = None
    for argument in func._schema.arguments:
        value = given.get(argument.name)
        if not isinstance(value, torch.Tensor):
            continue
        call[argument.name] = _wide(value)
        if argument.is_write:
            written.append((value, call[argument.name]))
        elif template is None:
            template = value
    if dtype in _NARROW and any(argument.name == "dtype" for argument in func._schema.arguments):
        call["dtype"] = torch.float32
    if given.get("memory_format") not in (None, torch.preserve_format):
        template = None
    results = func(**call)
    for original, drawn in written:
        if drawn is not original:
            original.copy_(_cast(func, given, drawn, original.dtype))
    originals = iter([original for original, _ in written])
    several = isinstance(results, tuple)
    handed_on = [
        next(originals) if form.alias_info is not None else _as_asked(func, given, one, dtype, template)
        for form, one in zip(func._schema.returns, results if several else (results,), strict=True)
    ]
    return tuple(handed_on) if several else handed_on[0]


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Contiguous and fp32 in place of narrow; other formats than these three as they are."""
    if value.dtype not in _NARROW and value.dtype != torch.float32:
        return value
    return value.to(torch.float32).contiguous()


def _as_asked(
    func: Any, given: dict[str, Any], drawn: torch.Tensor, dtype: torch.dtype, template: torch.Tensor | None
) -> torch.Tensor:
    """What was drawn, in the format and with the strides that the op would have given it."""
    if drawn.dtype == torch.float32 and dtype in _NARROW:
        drawn = _cast(func, given, drawn, dtype)
    if template is not None and template.shape == drawn.shape and not template.is_contiguous():
        return torch.empty_like(template, dtype=drawn.dtype, device=drawn.device).copy_(drawn)
    return drawn


def _cast(func: Any, given: dict[str, Any], drawn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrow = drawn.to(dtype)
    if dtype not in _NARROW:
        return narrow
    if _name(func) in _BELOW_AN_END:
        end = float(given.get("to", 1.0))
        largest = torch.tensor(end, dtype=dtype)
        if float(largest) >= end:
            largest = torch.nextafter(largest, torch.tensor(-float("inf"), dtype=dtype))
        reached = (narrow.float() >= end) & (drawn < end)
        narrow = torch.where(reached, largest.to(narrow.device), narrow)
    elif _name(func) in _POSITIVE:
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest subnormal
        narrow = narrow.masked_fill((narrow == 0) & (drawn > 0), smallest)
    return narrow


def _result_dtype(func: Any, given: dict[str, Any]) -> torch.dtype:
    dtype = given.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype
    for argument in func._schema.arguments:
        value = given.get(argument.name)
        if isinstance(value, torch.Tensor):
            return value.dtype
        if argument.name == "dtype" and argument.has_default_value() and argument.default_value is not None:
            return torch.int64  # randint and randperm
    return torch.get_default_dtype()


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and _name(func) not in _DRAW_NOTHING


@cache
def _name(func: Any) -> str:
    """``"bernoulli_"`` of ``aten::bernoulli_.float``."""
    name: str = func._schema.name
    return name.partition("::")[2]


def _fused_reason(func: Any) -> str:
    return (
        f"{_name(func)} draws its dropout inside a fused kernel, so FP32 and mixed precision saw different "
        "masks."
    )


def _is_narrow(result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return result.dtype in _NARROW
    return isinstance(result, tuple | list) and any(map(_is_narrow, result))

"""How a kernel of ours calls an operator: with autocast off, or handed on as if the kernel were not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting._torch_internals import (
    after_autocast,
    boxed_redispatch,
    call_of,
    takes_numbers_for_tensors,
    without_key,
)


def pass_by(op: Any, device_type: str) -> Callable[..., Any]:
    """What PyTorch does with an operator that autocast has no kernel for; to be called with a keyset first.

    It goes on to what comes after autocast, and what it calls itself is cast as usual: a composite is made of
    such calls, and so are kernels like that of a sparse product. Arithmetic calls nothing; it goes on with
    autocast off instead, since a redispatch takes no numbers for tensors.
    """
    if takes_numbers_for_tensors(op):
        off, call = without_key(device_type), call_of(op)

        def with_autocast_off(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
            with off():
                return call(*args, **kwargs)

        return with_autocast_off
    redispatch, after = boxed_redispatch(op), after_autocast(device_type)
    if may_get_numbers(op):

        def with_tensors(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            return redispatch(keyset & after, *tensors_for_numbers(op, args), **kwargs)

        return with_tensors

    def go_on(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keyset & after, *args, **kwargs)

    return go_on


def plain_call(op: Any) -> Callable[..., Any]:
    """What ``op(...)`` of an ``OpOverload`` comes down to, with as few steps in Python as can be."""
    call = call_of(op)
    if takes_numbers_for_tensors(op) or not may_get_numbers(op):
        return call
    return lambda *args, **kwargs: call(*tensors_for_numbers(op, args), **kwargs)


# ---- numbers where an operator takes tensors


def may_get_numbers(op: Any) -> bool:
    """Whether C++ calls ``op`` with a number that it made a tensor of, and Python is given the number."""
    kinds = [str(argument.type) for argument in op._schema.arguments]
    return torch.Tag.pointwise in op.tags and kinds.count("Tensor") > 1


def tensors_for_numbers(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` of ``op`` with a tensor of no dimension for each number that stands for one."""
    places = [at for at, one in enumerate(op._schema.arguments[: len(args)]) if str(one.type) == "Tensor"]
    if all(isinstance(args[at], torch.Tensor) for at in places):
        return args
    tensors = [args[at] for at in places if isinstance(args[at], torch.Tensor)]
    made = {at: _tensor_of(args[at], tensors) for at in places if not isinstance(args[at], torch.Tensor)}
    return tuple(made.get(at, value) for at, value in enumerate(args))


def _tensor_of(number: float | complex, beside: list[torch.Tensor]) -> torch.Tensor:
    """A tensor that decides as little about the format of a result as the number would."""
    exact = torch.tensor(number, dtype=_EXACT[type(number)])
    if any(_rank(one.dtype) >= _rank(exact.dtype) for one in beside):
        if any(one.dim() for one in beside):
            return exact  # without dimensions, it gives way to what has any
        wanted = beside[0].dtype
        for one in beside[1:]:
            wanted = torch.promote_types(wanted, one.dtype)
        return exact.to(wanted)
    return torch.tensor(number)


_EXACT = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _rank(dtype: torch.dtype) -> int:
    """Where ``dtype`` stands among bool, integers, floating and complex formats."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)

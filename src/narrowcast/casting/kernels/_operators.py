"""Carry out the decisions about operators.

An action is prepared once for each scope and operator. It casts the eligible tensors among the arguments
(fp16, bf16 and fp32, on the region's device), in lists too, and calls the operator with autocast off, as the
kernels of PyTorch's own table do. Casts are recorded by autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from narrowcast.casting._torch_internals import (
    after_autocast,
    boxed_redispatch,
    call_of,
    has_kernel,
    is_of_pytorch,
    is_proxy_tracing,
    is_tracing,
    is_transforming,
    takes_numbers_for_tensors,
)
from narrowcast.casting.regions._scopes import lower_dtype
from narrowcast.casting.regions._weight_casts import cast_weight, is_cacheable
from narrowcast.errors import UnsupportedError
from narrowcast.policy import (
    CASTS_TO,
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_DTYPE,
    LOWER,
    PROMOTE,
    REFUSE,
    UNLISTED,
    WIDEST,
    Decision,
    Scope,
    autocast_key,
    dtype_of,
    native_table,
    operator,
    qualified,
)

Action = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called by a kernel with its keyset, and the arguments of the operator."""
LOW = (torch.float16, torch.bfloat16)
CASTABLE = (*LOW, torch.float32)
_MAY_BE_CAST = (torch.Tensor, list, tuple)
_APPENDED = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",  # up to 2.12
}
"""Overload -> the one that takes a ``dtype``."""


# ---- numbers where an operator takes tensors
#
# Two groups of operators may meet a number there:
# - Arithmetic, as addition (``takes_numbers_for_tensors``). Python may call it with a number: it stays one.
# - Other pointwise operators of two tensors or more, as ``remainder`` (``_positions_to_wrap``). PyTorch makes
#   a tensor of a number that a caller gives, but hands our kernel, which is in Python, the number: we make a
#   tensor of it before we call the operator.


def _positions_to_wrap(op: Any) -> tuple[int, ...]:
    """Return the positions of arguments of ``op`` at which a number has to become a tensor."""
    if torch.Tag.pointwise not in op.tags:
        return ()
    arguments = enumerate(op._schema.arguments)
    positions = tuple(index for index, argument in arguments if str(argument.type) == "Tensor")
    # With one tensor only, a number in its place would leave no tensor.
    return positions if len(positions) > 1 else ()


def _tensors_for_numbers(positions: tuple[int, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with a 0-dim tensor for each number at ``positions``."""
    # Most calls have no number: find that out without making a list, since this runs at each call.
    for index in positions:
        if index < len(args) and not isinstance(args[index], torch.Tensor):
            break
    else:
        return args

    present = [index for index in positions if index < len(args)]
    tensors = [args[index] for index in present if isinstance(args[index], torch.Tensor)]
    with_tensors = list(args)
    for index in present:
        if not isinstance(args[index], torch.Tensor):
            with_tensors[index] = _tensor_of(args[index], tensors)
    return tuple(with_tensors)


def _tensor_of(number: float | complex, beside: list[torch.Tensor]) -> torch.Tensor:
    """Return a 0-dim tensor of ``number`` that affects type promotion among tensors as the number would.

    PyTorch ranks tensors with dimensions, then 0-dim tensors, then numbers, and a lower rank counts only if
    its category is higher. We make a 0-dim tensor, so its dtype must not win where the number would not.
    """
    unrounded = torch.tensor(number, dtype=_DTYPE_OF[type(number)])
    category = _category(unrounded.dtype)
    if all(_category(tensor.dtype) < category for tensor in beside):
        return torch.tensor(number)  # the number decides, in the default dtype
    # A tensor with dimensions, of this category or a higher one, outranks a 0-dim tensor of any dtype.
    if any(tensor.dim() and _category(tensor.dtype) >= category for tensor in beside):
        return unrounded
    # Else 0-dim tensors decide, and ours would be one of them: it takes the dtype that they give without it.
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in beside))
    return unrounded.to(dtype)


_DTYPE_OF = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""Type of a number in Python -> the dtype that does not round it."""


def _category(dtype: torch.dtype) -> int:
    """Return the category of ``dtype`` in type promotion: bool, integer, floating, complex."""
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return int(dtype is not torch.bool)


# ---- calls of operators


def below_autocast(op: Any, device_type: str) -> Callable[..., Any]:
    """Return a function, called with a keyset first, that continues below autocast.

    PyTorch does so with an operator that has no autocast kernel. Operators that a composite or a sparse
    matmul calls inside are still cast. Arithmetic may be given numbers for tensors, which a redispatch
    refuses. So it is called with autocast off, which comes to the same, since it calls no other operator.
    """
    if takes_numbers_for_tensors(op):
        call = call_of(op)

        def with_autocast_off(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
            # Written out as in ``_running``: calling that would be slower.
            torch.set_autocast_enabled(device_type, False)
            try:
                return call(*args, **kwargs)
            finally:
                torch.set_autocast_enabled(device_type, True)

        return with_autocast_off
    redispatch = boxed_redispatch(op)
    keys_below = after_autocast(device_type)
    positions = _positions_to_wrap(op)
    if not positions:
        return lambda keyset, *args, **kwargs: redispatch(keyset & keys_below, *args, **kwargs)

    def with_tensors(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keyset & keys_below, *_tensors_for_numbers(positions, args), **kwargs)

    return with_tensors


def plain_call(op: Any) -> Callable[..., Any]:
    """Return what ``op(...)`` of an ``OpOverload`` calls, with as few steps in Python as possible."""
    call = call_of(op)
    positions = _positions_to_wrap(op)
    if takes_numbers_for_tensors(op) or not positions:
        return call
    return lambda *args, **kwargs: call(*_tensors_for_numbers(positions, args), **kwargs)


# ---- decisions as actions


def action_for(name: str, decision: Decision, scope: Scope) -> Action:
    """Prepare an action, at the first call of the operator ``name`` in ``scope``."""
    op, device = operator(name), scope.resolved.device_type
    if decision.compute == UNLISTED:
        go_on = below_autocast(op, device)
        return lambda keyset, args, kwargs: go_on(keyset, *args, **kwargs)
    if decision.compute == REFUSE:
        return _refusing(name, decision)
    if decision.compute == FP32_SET_DTYPE:
        return _setting_dtype(op, device)
    if decision.compute == FP32_APPEND_DTYPE:
        return _appending_dtype(op, operator(_APPENDED[name]), device)
    casts = _casts(decision.compute, device, functools.partial(lower_dtype, scope))
    run = _running(op, device, casts)
    if decision.output is None:
        return run
    return _casting_output(run, decision.output, device, scope)


def native_action(name: str, kind: str, device: str) -> Action:
    """Return the action of PyTorch's own kernel for ``name``, which is of ``kind`` on its table."""
    op = operator(name)
    if kind == FP32_SET_DTYPE:
        return _setting_dtype(op, device)
    return _running(op, device, _casts(kind, device, functools.partial(torch.get_autocast_dtype, device)))


def is_eligible(tensor: torch.Tensor, device: str) -> bool:
    """Return whether autocast may cast ``tensor``."""
    if tensor.dtype not in CASTABLE:
        return False
    # The attribute takes a fifth of the time of asking for the device.
    return tensor.is_cpu if device == "cpu" else tensor.device.type == device


# ---- the call


def _running(op: Any, device: str, casts: Callable[[Any, Any], tuple[Any, Any]] | None) -> Action:
    """Return the action that calls ``op`` with autocast off, its inputs cast first."""
    call = plain_call(op)

    def run(_keyset: Any, args: Any, kwargs: Any) -> Any:
        # Autocast is on, or this kernel would not have been called. It is off during the casts too, so that
        # no kernel decides about them or reports them.
        torch.set_autocast_enabled(device, False)
        try:
            if casts is not None:
                args, kwargs = casts(args, kwargs)
            return call(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, True)

    return run


def compute_dtype(
    compute: str, lower: torch.dtype, inputs: Iterable[torch.Tensor], device: str
) -> torch.dtype | None:
    """Return what ``compute`` of a decision casts ``inputs`` to; None: no cast.

    ``lower`` is the dtype of "lower" in the scope.
    """
    if depends_on_inputs(compute):
        return widest(inputs, device)
    name = CASTS_TO[compute]
    if name is None:
        return None
    return lower if name == LOWER else dtype_of(name)


def depends_on_inputs(compute: str) -> bool:
    """Return whether the dtypes of the inputs decide what they are cast to."""
    return CASTS_TO[compute] == WIDEST


def _casts(
    compute: str, device: str, find_lower: Callable[[], torch.dtype]
) -> Callable[[Any, Any], tuple[Any, Any]] | None:
    """Return a function that casts the arguments of an operator, or None if ``compute`` casts nothing.

    ``find_lower()`` returns the dtype of "lower" in the calling thread.
    """
    to = CASTS_TO[compute]
    if to is None:
        return None
    if to == LOWER:
        return lambda args, kwargs: cast_all(args, kwargs, find_lower(), device)

    if depends_on_inputs(compute):

        def cast_to_widest(args: Any, kwargs: Any) -> tuple[Any, Any]:
            tensors = tensors_in((*args, *kwargs.values()))
            return cast_all(args, kwargs, widest(tensors, device), device)

        return cast_to_widest

    dtype = dtype_of(to)
    return lambda args, kwargs: cast_all(args, kwargs, dtype, device)


def cast_all(args: Any, kwargs: Any, dtype: torch.dtype | None, device: str) -> tuple[Any, Any]:
    """Return the arguments of an operator with the eligible tensors in ``dtype``; None: as they are."""
    if dtype is None:
        return args, kwargs
    # From last to first, as PyTorch's kernels do: GCC evaluates arguments in that order. Backward undoes the
    # casts in reverse, so that the weight of a layer gets its gradient before the bias.
    if kwargs:
        kwargs = {name: _cast(value, dtype, device) for name, value in reversed(kwargs.items())}
    # A comprehension is fastest, and this runs at each call of an operator with a rule.
    backwards = reversed(args)
    cast = [_cast(value, dtype, device) if isinstance(value, _MAY_BE_CAST) else value for value in backwards]
    cast.reverse()
    return cast, kwargs


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    """Return eligible tensors in ``dtype``; the cast of a weight is kept for its next use."""
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not is_eligible(value, device):
            return value
        # Two fast checks first, since isinstance(value, torch.nn.Parameter) runs Python code.
        may_be_weight = type(value) is not torch.Tensor and value.dtype is torch.float32
        if may_be_weight and isinstance(value, torch.nn.Parameter) and is_cacheable(value):
            return cast_weight(value, dtype)
        return value.to(dtype)
    if isinstance(value, list | tuple):
        return type(value)([_cast(item, dtype, device) for item in value])
    return value


def widest(tensors: Iterable[torch.Tensor], device: str) -> torch.dtype | None:
    """Return the dtype to which eligible ``tensors`` promote, or None."""
    dtype: torch.dtype | None = None
    for tensor in tensors:
        if is_eligible(tensor, device):
            dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    return dtype


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results of an operator, in lists too."""
    if not isinstance(values, list | tuple):
        values = (values,)
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


def _casting_output(run: Action, output: str, device: str, scope: Scope) -> Action:
    def run_and_cast(keyset: Any, args: Any, kwargs: Any) -> Any:
        dtype = lower_dtype(scope) if output == LOWER else dtype_of(output)
        return _cast(run(keyset, args, kwargs), dtype, device)

    return run_and_cast


def _refusing(name: str, decision: Decision) -> Action:
    def refuse(_keyset: Any, _args: Any, _kwargs: Any) -> Any:
        advice = ""
        if name == "binary_cross_entropy":
            advice = (
                "; use binary_cross_entropy_with_logits, or a rule: "
                'nc.rule.op("binary_cross_entropy", compute="fp32")'
            )
        raise UnsupportedError(f"{name} was called, which is refused here ({decision.because}){advice}")

    return refuse


# ---- operators whose dtype argument PyTorch's tables set


def _setting_dtype(op: Any, device: str) -> Action:
    """Return the action that sets an unset ``dtype`` of ``op`` to fp32 if the first argument is eligible."""
    names = [argument.name for argument in op._schema.arguments]
    position = names.index("dtype")
    run = _running(op, device, None)

    def set_dtype(keyset: Any, args: Any, kwargs: Any) -> Any:
        is_positional = len(args) > position
        asked = args[position] if is_positional else kwargs.get("dtype")
        if asked is None and isinstance(args[0], torch.Tensor) and is_eligible(args[0], device):
            if is_positional:
                args = (*args[:position], torch.float32, *args[position + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        return run(keyset, args, kwargs)

    return set_dtype


def _appending_dtype(op: Any, with_dtype: Any, device: str) -> Action:
    """Return the action that calls ``with_dtype``, the overload of ``op`` with a ``dtype``, in fp32."""
    plain = _running(op, device, None)
    appended = _running(with_dtype, device, None)
    names = [argument.name for argument in op._schema.arguments]
    defaults = {}
    for argument in op._schema.arguments:
        if argument.has_default_value():
            defaults[argument.name] = argument.default_value

    def append_dtype(keyset: Any, args: Any, kwargs: Any) -> Any:
        if not is_eligible(args[0], device):
            return plain(keyset, args, kwargs)
        by_name = defaults | dict(zip(names, args, strict=False)) | kwargs
        # The other overload has no defaults for these, so give all of them.
        all_args = tuple(by_name[name] for name in names)
        return appended(keyset, all_args, {"dtype": torch.float32})

    return append_dtype


# ---- PyTorch's own kernels


CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that hold plain values; others may be fake or wrap several tensors."""
# Calls with tensors of other formats, such as fp8, go to PyTorch's own kernel.
_FORMATS = frozenset({
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip


def native_kernel(op: str, device_type: str) -> Callable[..., Any] | None:
    """Return a function that does what the present kernel on the autocast key does; None: there is no kernel.

    The function is called with a keyset first. Where PyTorch's kernel casts, the function runs an action of
    ours instead, since a kernel of PyTorch has two faults if Python calls it. It holds Python's lock, so no
    other thread runs while it computes. It may also wait for the lock of PyTorch's cache of weight casts,
    while the thread that clears the cache waits for Python's lock: a deadlock. Any other kernel is returned
    unchanged.

    Calls with arguments that the action does not handle go to PyTorch's kernel. Operators of ``PROMOTE`` are
    an exception, since their kernel raises an error if bf16 meets fp16.
    """
    key = autocast_key(device_type)
    if not has_kernel(qualified(op), key):
        return None
    fetched = torch.library.get_kernel(qualified(op), key)
    call: Callable[..., Any] = fetched.call_boxed
    kind = native_table(device_type).get(op)
    # The other kinds cast nothing: REFUSE raises an error, and FP32_APPEND_DTYPE (``norm`` on GPUs) calls
    # another overload. None: the operator is not on the table.
    if kind not in (LOWER, FP32, FP32_SET_DTYPE, PROMOTE) or not is_of_pytorch(fetched):
        return call
    action = native_action(op, kind, device_type)
    pytorchs_kernel = without_autocast_cache(call)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # In PROMOTE the action always runs; see the docstring.
        if kind != PROMOTE:
            plain = _are_plain(args) and (not kwargs or _are_plain(kwargs.values()))
            if not plain or is_transforming() or _is_traced():
                return pytorchs_kernel(keyset, *args, **kwargs)
        return action(keyset, args, kwargs)

    return kernel


def without_autocast_cache(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a fetched kernel so that it does not use PyTorch's cache, whose lock another thread may hold.

    Tracers, of which there is one at a time, use the cache: a weight is cast once in what they record.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        caches = torch.is_autocast_cache_enabled()
        if not caches or _is_traced():
            return call(*args, **kwargs)
        torch.set_autocast_cache_enabled(False)
        try:
            return call(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(caches)

    return kernel


def _is_traced() -> bool:
    return is_proxy_tracing() or is_tracing() or torch.compiler.is_compiling()


def _are_plain(values: Iterable[Any]) -> bool:
    """Return whether all tensors among ``values`` have a class of ``CLASSES`` and a dtype of ``_FORMATS``."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) not in CLASSES or value.dtype not in _FORMATS:
                return False
        elif isinstance(value, list | tuple) and not _are_plain(value):
            return False
    return True

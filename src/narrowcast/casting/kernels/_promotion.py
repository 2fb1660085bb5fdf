"""Promote inputs of different formats in operators where PyTorch raises an error.

An FP32 script does not expect two formats, but in some operators bf16 or fp16 meets fp32, and PyTorch raises
an error. The regions of ``run``, ``nc.apply``, ``nc.Stepper`` and ``nc.certify`` promote there: kernels for
these operators first call PyTorch's, and if that raises, they run the operator again:

- inputs of different formats are cast to the widest of them;
- an operator that writes in place casts its sources to the format of what it writes to;
- if all are low, and PyTorch has no kernel for the format, they are cast to fp32, which is reported once.

An operator with a number that fp16 cannot hold, such as ``masked_fill(mask, -1e9)``, runs in fp32 at once, or
in place with fp16's largest number.

So no result changes that PyTorch computes, except for the operators of ``_IN_FP32`` and ``_WITH_NUMBERS``. In
two cases no error can be waited for: fake tensors raise none, and under ``torch.func`` it is raised below a
layer, which would not record casts that are made there. Then the formats of the inputs decide, before
PyTorch's kernel is called.

Backward passes run outside of regions, and mostly need no promotion, since what they differentiate was called
with one format. The backward passes of norms need it under ``vmap``: outside of it they take an fp32 weight
beside a low input, under it they do not. The kernels for ``vmap`` promote as long as a promotion lives, in
whatever region the forward ran.

Products of sparse CSR matrices on a CPU have no low kernel either. The kernels that promote them are on the
dispatch key of that layout, so that other products do not become slower.

Norms raise only if their weights are low, which no ordinary model has, and are called often. A kernel in
Python would cost each call some 6 microseconds. So norms have no kernels: ``torch.layer_norm`` and the others
of ``_NORMS``, which ``torch.nn`` calls too, are replaced by functions that promote when PyTorch raises. This
costs each call from Python 0.2 to 0.4 microseconds while a promotion lives, in plain fp32 code too.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from narrowcast.casting._torch_internals import (
    Replacements,
    is_below_autograd,
    is_proxy_tracing,
    is_transforming,
    let_dynamo_trace,
    scripted_as,
    skipped_by_dynamo,
    traced_only_inline,
    without_key,
)
from narrowcast.casting.kernels._operators import (
    CLASSES,
    LOW,
    cast_all,
    is_eligible,
    plain_call,
    tensors_in,
    widest,
)
from narrowcast.casting.regions._scopes import is_promoting, promotion_here
from narrowcast.policy import PROMOTE, PROMOTED, TABLES, dtype_of, native_table, operator

_Kernel = Callable[..., Any]
# Wrong in low formats (matrix_exp of bf16 is infinite), or without a backward pass: addr and pinv multiply
# matrices of two formats there, and the others have no kernel.
_FP32 = """linalg_matrix_exp addr addr_ linalg_pinv linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor
    linalg_lu_solve pdist special_i1 special_i1e _sparse_mm _sparse_mm.reduce _sparse_addmm
    lgamma digamma polygamma mvlgamma special_gammaln special_digamma special_psi special_polygamma"""
# For a low input these return a third format, fp64 or (for fp16) complex32, with which the next operator
# raises. tests/policy/scripts/formats_with_promotion.py finds them. CUDA computes Fourier transforms of fp16,
# where sizes are powers of two, and its table does not cast them.
# https://docs.pytorch.org/docs/stable/fft.html
_THIRD_FORMAT = """bincount complex view_as_complex stft stft.center
    fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn
    fft_ihfft fft_ihfft2 fft_ihfftn"""
# Promoted only where oneDNN has no LSTM for a format of the policy (see why_no_lstm). lstm.input calls
# mkldnn_rnn_layer. That is promoted too, since it is on PyTorch's table for the CPU: below a layer of
# torch.func, where autocast is on again, it would cast the inputs down again.
_LSTM = frozenset(("lstm.input", "mkldnn_rnn_layer"))
_IN_FP32 = frozenset((*_FP32.split(), *_THIRD_FORMAT.split())) | _LSTM
# Found by tests/policy/scripts/mixed_inputs.py, which calls every operator with mixed formats, besides those
# of policy.PROMOTED, for which preset "safe" has rules.
_MIXED = """_chunk_cat _foreach_lerp.List _foreach_lerp_.List addbmm_ addmm_ addmv addmv_ allclose baddbmm_
    binomial chain_matmul inner linalg_multi_dot masked_fill.Tensor mv rrelu"""
# Operators whose number fp16 may not hold. Not clamp_min and hardtanh: every ReLU and ReLU6 calls them, with
# numbers that it holds.
_NUMBERS = """clamp clamp_ clamp_max constant_pad_nd fill_.Scalar full_like
    index_fill.int_Scalar index_fill_.int_Scalar masked_fill.Scalar masked_fill_.Scalar new_full pow.Scalar
    scatter.value scatter_.value threshold"""
_WITH_NUMBERS = frozenset(_NUMBERS.split())
_NO_LOW_KERNEL = """_dirichlet_grad _linalg_det _linalg_slogdet _linalg_solve_ex _pdist_forward
    _sample_dirichlet _sparse_log_softmax _sparse_mm_reduce_impl _sparse_softmax _standard_gamma
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn histc
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_matrix_norm
    linalg_matrix_norm.str_ord linalg_solve_triangular linalg_vander logdet sparse_sampled_addmm sspaddmm"""
# What the names of those functions in torch.special contain that have no low kernel.
_SPECIAL = re.compile("airy|bessel|erfcx|log_ndtr|ndtri|polynomial")
# PyTorch's table for the CPU casts to fp32 some operators that its table for CUDA lacks. CUDA has no low
# kernel for those of them whose names contain one of these parts.
_ON_CPU_TABLE_ALONE = re.compile(
    "linalg|fft|chol|lu_|qr|quantile|svd|inverse|triangular|polar|complex|grid_s|stft|ctc"
)
# The rules of vmap decompose these into operators that take one format only; outside of vmap these take an
# fp32 weight beside a low input. They run in backward passes, outside of regions:
# https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/functorch/BatchRulesNorm.cpp
_UNDER_VMAP = """cudnn_batch_norm_backward miopen_batch_norm_backward native_batch_norm_backward
    native_group_norm_backward native_layer_norm_backward"""
# These write a source into a copy of their first argument. PyTorch casts the source to its format, but raises
# under vmap: there the source is cast to that format, not both to the widest.
_WRITING_UNDER_VMAP = frozenset(("select_scatter", "slice_scatter"))
_NORMS = ("batch_norm", "group_norm", "instance_norm", "layer_norm")
# The argument of a norm that says whether it writes to its running statistics.
_WRITES_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
# MKL multiplies sparse CSR matrices in fp32 and fp64 alone; PyTorch Geometric's GraphUNet squares one:
# https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/mkl/SparseBlasImpl.cpp
SPARSE_PRODUCTS = ("addmm", "addmv.out", "mm")
living: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every promotion that is alive. The regions that compiled graphs open do not know theirs."""


@functools.cache
def lacking_low() -> frozenset[str]:
    """Return the operators to promote that have no kernel for low formats."""
    lacking = set(_NO_LOW_KERNEL.split())
    for name in dir(torch.special):
        if _SPECIAL.search(name):
            lacking.add(f"special_{name}")
    for op, kind in TABLES["cpu"].items():
        if kind != PROMOTE and _ON_CPU_TABLE_ALONE.search(op):
            lacking.add(op)
    return frozenset(lacking)


@functools.cache
def promoted() -> frozenset[str]:
    """Return the operators to promote on some device type."""
    taking_one_format = frozenset((*_MIXED.split(), *_overloads(PROMOTED.split())))
    return _IN_FP32 | _WITH_NUMBERS | lacking_low() | taking_one_format


@functools.cache
def promoted_on(device_type: str, formats: frozenset[str]) -> tuple[str, ...]:
    """Return the operators to promote on ``device_type``: those of this PyTorch that it does not cast there.

    ``formats``: the low formats of the policy, ``"bf16"`` or ``"fp16"`` or both.
    """
    ops = promoted() - native_table(device_type).keys() - _LSTM
    if device_type == "cpu" and any(why_no_lstm(dtype_of(name)) is not None for name in formats):
        ops |= _LSTM
    if "fp16" not in formats:
        ops -= _WITH_NUMBERS
    return tuple(op for op in sorted(ops) if _exists(op))


def _overloads(bases: Iterable[str]) -> Iterator[str]:
    """Yield overloads of operators and of their forms in place that take several tensors."""
    for base, suffix in itertools.product(bases, ("", "_")):
        name = f"{base}{suffix}"
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            # Some overloads take a number in place of a tensor, and only TorchScript calls "hacked_twin".
            if not re.search("out|value|scalar|dimname|twin", overload):
                yield name if overload == "default" else f"{name}.{overload}"


def _exists(op: str) -> bool:
    try:
        operator(op)
    except AttributeError:
        return False
    return True


@functools.cache
def why_no_lstm(dtype: torch.dtype) -> str | None:
    """Return the error of an LSTM in ``dtype`` on this CPU, or None. On some CPUs oneDNN has no kernel."""
    errors: list[str] = []
    # A new thread is in no mode and no region.
    trial = threading.Thread(target=_try_lstm, args=(dtype, errors))
    trial.start()
    trial.join()
    return errors[0] if errors else None


def _try_lstm(dtype: torch.dtype, errors: list[str]) -> None:
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_enabled("cpu", True)
    state = torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32)
    weight = torch.zeros(4, 1, device="cpu", dtype=torch.float32, requires_grad=True)
    try:
        torch.lstm(state, (state, state), (weight, weight), False, 1, 0.0, True, False, False)
    except RuntimeError as error:
        errors.append(str(error))


@functools.cache
def _again(name: str, device: str) -> Callable[..., Any]:
    """Return a function that runs an operator with its inputs cast to a format that it takes.

    It is called with the arguments of the operator; with the error of PyTorch, to be reported if the operator
    runs in fp32 (None: report nothing); and with whether the formats of the inputs decide, where PyTorch
    raises no error. It raises ``_Unchanged`` where casts would not help.
    """
    op = operator(name)
    in_fp32 = name in _IN_FP32
    lacks_low = name in lacking_low()
    off = without_key(device)
    call = plain_call(op)

    def again(args: Any, kwargs: Any, raised: str | None, by_formats: bool = False) -> Any:
        inputs = [tensor for tensor in tensors_in((*args, *kwargs.values())) if is_eligible(tensor, device)]
        formats = {tensor.dtype for tensor in inputs}
        # Below autograd a cast would not be recorded. There the error passes to the kernel of the operator
        # that made this call, which promotes instead.
        is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        if not formats or (is_recorded and is_below_autograd()):
            raise _Unchanged

        # The format to cast to.
        dtype: torch.dtype | None = torch.float32
        if op._schema.is_mutable:
            dtype = _dtype_written(args, device)
        elif len(formats) > 1 and not in_fp32:
            dtype = widest(inputs, device)

        # Below a layer of torch.func ``mv`` is decomposed into a matmul, which autocast would cast to the low
        # format. ``_lower_is`` prevents that, so an ``mv`` of fp32 runs here too, though nothing is cast.
        stays_fp32 = by_formats and name == "mv" and formats == {torch.float32}
        if not (in_fp32 or stays_fp32):
            # No cast would change anything: the error is the script's own, and a second call in place would
            # write twice.
            if formats == {dtype}:
                raise _Unchanged
            if by_formats and _takes_formats(inputs, name, lacks_low):
                raise _Unchanged
        if _would_lose_statistics(name, args, kwargs, dtype):
            raise _Unchanged

        lower = _lower_is(dtype, device) if is_transforming() else nullcontext()
        with off(), lower:
            cast_args, cast_kwargs = cast_all(args, kwargs, dtype, device)
            result = call(*cast_args, **cast_kwargs)
        # Inputs of several formats are only promoted, which is not reported.
        if raised is not None and (len(formats) == 1 or in_fp32) and not stays_fp32:
            _report_error("lstm" if name in _LSTM else name, raised)
        return result

    return again


def _would_lose_statistics(name: str, args: Any, kwargs: Any, dtype: torch.dtype | None) -> bool:
    """Return whether a norm would write its running statistics to a cast of them."""
    writes = _WRITES_STATISTICS.get(name)
    if writes is None:
        return False
    names = [argument.name for argument in operator(name)._schema.arguments]
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    statistics = tensors_in((by_name["running_mean"], by_name["running_var"]))
    return bool(by_name[writes]) and any(tensor.dtype != dtype for tensor in statistics)


@contextmanager
def _lower_is(dtype: torch.dtype | None, device: str) -> Iterator[None]:
    """Return a context in which a region on ``device`` casts to ``dtype``.

    Below a layer of ``torch.func`` autocast is on again, for the parts into which an operator falls there.
    The layer has recorded the operator in ``dtype``, and its backward pass cannot mix that with another.
    """
    before = torch.get_autocast_dtype(device)
    if dtype is not None:
        torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(device, before)


def promoting(name: str, go_on: _Kernel, device: str) -> _Kernel:
    """Return a kernel that calls ``go_on``, PyTorch's, and runs the operator again where that raises.

    Operators of ``_IN_FP32`` run in fp32 at once, and those of ``_WITH_NUMBERS`` by their numbers.
    """
    if name in _WITH_NUMBERS:
        return _within_range(name, go_on, device)
    again = _again(name, device)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # Below a layer of torch.func a cast would not be recorded, and fake tensors raise no error.
        by_formats = is_transforming() or (type(args[0]) not in CLASSES and is_proxy_tracing())
        if by_formats and is_promoting():
            with suppress(_Unchanged):
                return again(args, kwargs, "it has no kernel for it", by_formats=True)
        try:
            return go_on(keyset, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        # These three, not Exception: torch.utils.checkpoint ends a recomputation that has saved its last
        # tensor by an exception of its own.
        except (RuntimeError, TypeError, ValueError) as error:
            if not is_promoting():
                raise
            try:
                # Its text alone: the error refers to this frame, and a frame that refers to it makes a cycle.
                return again(args, kwargs, str(error))
            except _Unchanged:
                raise error from None
            except Exception as error_in_fp32:
                # In FP32 the script would see this error alone.
                error_in_fp32.__context__ = None
                raise

    def fp32_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if is_promoting():
            why = None  # not reported
            runs_in_fp32 = True
            # An LSTM runs in fp32 only if oneDNN has no kernel. ``why_no_lstm`` tries one outside of all
            # regions: there this kernel calls PyTorch's, and so does not begin another trial.
            if name in _LSTM:
                why = why_no_lstm(torch.get_autocast_dtype(device))
                runs_in_fp32 = why is not None
            if runs_in_fp32:
                with suppress(_Unchanged):
                    return again(args, kwargs, why)
        return go_on(keyset, *args, **kwargs)

    return fp32_kernel if name in _IN_FP32 else kernel


def promoted_under_vmap() -> tuple[str, ...]:
    """Return the operators whose kernels for ``vmap`` promote while there are promotions."""
    return tuple(op for op in (*_UNDER_VMAP.split(), *sorted(_WRITING_UNDER_VMAP)) if _exists(op))


def promoting_under_vmap(name: str, go_on: _Kernel) -> _Kernel:
    """Return a kernel that calls ``go_on``, PyTorch's for ``vmap``, and promotes where that raises."""

    @skipped_by_dynamo
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return go_on(keyset, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            device = args[0].device.type
            inputs = [tensor for tensor in tensors_in(args) if is_eligible(tensor, device)]
            dtype = args[0].dtype
            if name not in _WRITING_UNDER_VMAP:
                dtype = widest(inputs, device)
            if all(tensor.dtype == dtype for tensor in inputs):
                raise  # the error is the script's own
            # Autograd casts gradients to the formats of what they belong to.
            wide, kwargs = cast_all(args, kwargs, dtype, device)
            return go_on(keyset, *wide, **kwargs)

    return kernel


def promoting_sparse(name: str, go_on: _Kernel) -> _Kernel:
    """Return a kernel that calls ``go_on``, PyTorch's for sparse CSR matrices, in fp32 where that raises.

    Autocast and autograd are above it and expect a result of the low format.
    """

    @skipped_by_dynamo
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return go_on(keyset, *args, **kwargs)
        except NotImplementedError as error:
            dtype = args[0].dtype
            if dtype not in LOW:
                raise
            wide, wide_kwargs = cast_all(args, kwargs, torch.float32, "cpu")
            result = go_on(keyset, *wide, **wide_kwargs)
            _report_error(name, str(error))
            return kwargs["out"].copy_(result) if "out" in kwargs else result.to(dtype)

    return kernel


def _promoting_norm(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a maker of what replaces ``torch.layer_norm`` or another norm."""

    def make(below: Callable[..., Any]) -> Callable[..., Any]:
        let_dynamo_trace_norm = let_dynamo_trace(below)

        @traced_only_inline
        @functools.wraps(below)
        def norm(*args: Any, **kwargs: Any) -> Any:
            # Dynamo traces this only where a script calls ``torch.layer_norm`` itself: graphs contain calls
            # of ``F.layer_norm``, which come here, and promote, when the graph runs. A call of the script
            # becomes one of PyTorch's own norm, which promotes nothing. Dynamo must first be told to put
            # that into the graph, since it was replaced (see ``let_dynamo_trace``).
            if torch.compiler.is_dynamo_compiling():
                let_dynamo_trace_norm()
                return below(*args, **kwargs)
            # Fake tensors raise no error where their formats meet.
            if args and type(args[0]) not in CLASSES and is_proxy_tracing() and is_promoting():
                with suppress(_Unchanged):
                    return _again(name, args[0].device.type)(args, kwargs, None, by_formats=True)
            try:
                return below(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if not is_promoting() or not args or not isinstance(args[0], torch.Tensor):
                    raise
                try:
                    return _again(name, args[0].device.type)(args, kwargs, str(error))
                except _Unchanged:
                    raise error from None

        norm.__module__, norm.__qualname__ = "torch", name  # for pickle
        scripted_as(norm, f"aten::{name}")
        return norm

    return make


NORMS = Replacements(*((torch, name, _promoting_norm(name)) for name in _NORMS))
"""The functions that stand for norms of torch while a promotion lives."""


def _dtype_written(args: Any, device: str) -> torch.dtype:
    """Return the dtype of what an operator writes to in place, its first argument."""
    dtypes = {tensor.dtype for tensor in tensors_in(args[:1]) if is_eligible(tensor, device)}
    if len(dtypes) != 1:
        raise _Unchanged  # with several, one would be cast, and what is written to the cast would be lost
    return dtypes.pop()


def _within_range(name: str, go_on: _Kernel, device: str) -> _Kernel:
    """Return a kernel for an operator that takes a number, which fp16 may not hold."""
    op = operator(name)
    off = without_key(device)
    call = plain_call(op)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # full_like and new_full may be asked for another dtype.
        dtype = kwargs.get("dtype") or tensors_in(args)[0].dtype
        # Tensors among the arguments come back as the same objects, which a list compares by identity.
        fits = dtype != torch.float16 or list(map(_within_fp16, args)) == list(args)
        if fits or not is_promoting():
            return go_on(keyset, *args, **kwargs)
        # What is written in place keeps its format, and below autograd a cast would not be recorded.
        if op._schema.is_mutable or is_below_autograd():
            _report(name, "writes fp16's largest number", "fp16 cannot hold the number")
            return go_on(keyset, *map(_within_fp16, args), **kwargs)
        _report(name, "runs in fp32", "fp16 cannot hold the number")
        wide, kwargs = cast_all(args, kwargs, torch.float32, device)
        with off():
            return call(*wide, **kwargs)

    return kernel


def _within_fp16(value: Any) -> Any:
    """Clamp a finite number to the range of fp16; return infinity, NaN and other arguments as they are."""
    if isinstance(value, int | float) and 65504 < abs(value) < math.inf:
        return math.copysign(65504, value)
    return value


def _takes_formats(inputs: list[torch.Tensor], name: str, lacks_low: bool) -> bool:
    """Return whether PyTorch's operator takes inputs of these formats.

    It takes one format, unless it has no low kernel. Norms also take fp32 parameters beside a low input.
    """
    first = inputs[0].dtype
    others = {tensor.dtype for tensor in inputs[1:]}
    if name in _NORMS and first != torch.float32 and others == {torch.float32}:
        return True
    return others <= {first} and not lacks_low


class _Unchanged(Exception):  # noqa: N818
    """Casts would not help."""


def _report_error(name: str, raised: str) -> None:
    """Report an operator that runs in fp32, since PyTorch raised an error with the text ``raised``."""
    # The first sentence only: oneDNN appends advice to set an environment variable, which does not help here.
    first_sentence = raised.partition("\n")[0].partition(". ")[0]
    error = textwrap.shorten(first_sentence, 200, placeholder=" ...")
    _report(name, "runs in fp32", f"PyTorch raised an error in the low format: {error}")


def _report(name: str, what: str, why: str) -> None:
    """Tell the promotion of this thread's region, or all if a compiled graph has entered the region."""
    base_name = name.partition(".")[0].lstrip("_")

    here = promotion_here()
    promotions = list(living) if here is None else [here]
    for promotion in promotions:
        promotion(base_name, f"{what}, since {why}")

"""The low formats: stochastic rounding to them, and models cast down in place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from narrowcast.errors import SettingError, UnsupportedError
from narrowcast.weights._torch_internals import NORM_BASE

LOW_DTYPES = (torch.bfloat16, torch.float16)

_FLOAT16_SMALLEST_NORMAL = 2.0**-14
_FLOAT16_SUBNORMAL_UNIT = 2.0**-24
_WIDE_DTYPES = (torch.float32, torch.float64)


def is_batch_or_instance_norm(module: torch.nn.Module) -> bool:
    """Return whether this is a batch or instance normalization with weights or running statistics.

    As apex's ``keep_batchnorm_fp32``, which also keeps instance normalization.
    """
    return isinstance(module, NORM_BASE) and bool(module.affine or module.track_running_stats)


def lower(
    model: torch.nn.Module,
    dtype: torch.dtype,
    *,
    keep_fp32: Callable[[torch.nn.Module], bool] | None = is_batch_or_instance_norm,
) -> dict[torch.Tensor, torch.Tensor]:
    """Cast a model's parameters and floating buffers to ``dtype``, in place; return their float32 values.

    >>> import torch
    >>> from narrowcast.weights import hold, lower
    >>> model = torch.nn.Linear(2, 2)
    >>> originals = lower(model, torch.bfloat16)
    >>> model.weight.dtype
    torch.bfloat16
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> handle = hold(optimizer, "masters", originals=originals)

    Every parameter remains the same object, so that optimizers, tied layers and hooks keep working. Frozen
    parameters are cast too, and existing gradients with their parameters. Integer, complex and 8-bit tensors
    are left alone. Call it before the first forward pass, before DDP and before sharding.

    Args:
        model: any module on any device.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        keep_fp32: called with each module; True keeps the module's own parameters and buffers as they are,
            also where other modules share them. None keeps nothing.

    Returns:
        The float32 values by parameter, for ``hold(originals=...)``. Only of parameters that were float32 or
        float64 and were cast.

    Raises:
        SettingError: another ``dtype``.
        UnsupportedError: a parameter that is lazy or a tensor subclass, such as a DTensor. Nothing was cast.

    Values are rounded to nearest even: NaN stays NaN, values above the largest number become infinite,
    float16 subnormals are kept.
    """
    if dtype not in LOW_DTYPES:
        raise SettingError(f"a model is lowered to torch.bfloat16 or torch.float16, not to {dtype}")
    modules = list(model.modules())
    kept: set[torch.Tensor] = set()
    if keep_fp32 is not None:
        for module in filter(keep_fp32, modules):
            kept.update(module.parameters(recurse=False))
            kept.update(module.buffers(recurse=False))
    parameters = [p for p in model.parameters() if p not in kept and _is_cast(p, dtype)]
    buffers = [b for b in model.buffers() if b not in kept and _is_cast(b, dtype)]
    for tensor in (*parameters, *buffers):
        _check_plain(tensor)

    originals: dict[torch.Tensor, torch.Tensor] = {}
    with torch.no_grad():
        for parameter in parameters:
            if parameter.dtype in _WIDE_DTYPES:
                originals[parameter] = parameter.detach().to(torch.float32)
            # torch refuses a gradient of another dtype than its parameter's.
            gradient = parameter.grad
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
            if gradient is not None:
                parameter.grad = gradient.to(dtype)
        for buffer in buffers:
            buffer.data = buffer.data.to(dtype)

    for module in modules:
        if isinstance(module, torch.nn.RNNBase):
            # cuDNN needs the weights in one piece of memory and warns at every call otherwise.
            module.flatten_parameters()
    return originals


def _is_cast(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype in (*_WIDE_DTYPES, *LOW_DTYPES) and tensor.dtype != dtype


def _check_plain(tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError(
            "a lazy module has no values to lower yet: call the model once on an example, then lower it"
        )
    kind = type(tensor.data).__name__
    if tensor.layout is not torch.strided:
        kind = f"{tensor.layout} tensor"
    if kind != "Tensor":
        raise UnsupportedError(
            f"a tensor of shape {tuple(tensor.shape)} is a {kind}, which cannot change "
            "its format in place: lower the model before it is sharded or quantized"
        )


# ---- stochastic rounding


def round_stochastically(
    values: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Round each value to one of its two neighbours in ``dtype`` at random, so that the mean is exact.

    The neighbour of larger magnitude is taken with a probability equal to the fraction of the way to it; a
    number of ``dtype`` does not change. The probability is exact for bfloat16. For float16 it is exact for
    multiples of 2**-55 and otherwise off by less than 2**-31: values below 2**-55 become zero.

    ``values`` are float32, in any shape and strides; the result has those of ``values.to(dtype)``.
    ``generator`` is of their device, by default torch's own.

    The sign is kept, also of zero. Subnormals are rounded like other numbers. Infinities and NaNs remain.
    Between the largest finite number and the next power of two the far neighbour is infinity; above that the
    result is infinite.

    Source: Gupta et al. 2015, arXiv 1502.02551, section 3.
    """
    with torch.no_grad():
        return rounded_with(values, dtype, _noise(values, dtype, generator))


def _noise(values: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None) -> torch.Tensor:
    """Return random int32 numbers with as many bits as ``rounded_with`` needs for ``dtype``."""
    if dtype == torch.bfloat16:
        words = torch.empty((values.numel() + 3) // 4, dtype=torch.int64, device=values.device)
        # Each int64 gives four numbers of 16 bits. Without limits random_ leaves its sign bit at zero.
        words.random_(torch.iinfo(torch.int64).min, None, generator=generator)
        sixteen_bits = words.view(torch.int16)[: values.numel()].to(torch.int32)
        return sixteen_bits.bitwise_and_(0xFFFF).view(values.shape)
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    return noise.random_(generator=generator)


def rounded_with(values: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor) -> torch.Tensor:
    """Round away from zero where ``noise`` plus the fraction to drop is 1 or more.

    ``noise`` is int32 and holds the bits of a fraction: 16 for bfloat16, 31 for float16.
    """
    # Noise is added to the bits to drop. It carries into the kept bits with a probability equal to the
    # dropped fraction; the mask then clears the dropped bits. bfloat16 drops 16 bits of a float32. float16
    # drops 13, so only the upper 13 of the 31 bits of noise are used.
    bits = values.view(torch.int32)
    if dtype == torch.bfloat16:
        rounded = ((bits + noise) & -0x10000).view(torch.float32)
    else:
        rounded = ((bits + (noise >> 18)) & -0x2000).view(torch.float32)
        # Subnormals have a fixed spacing, so more than 13 bits are dropped.
        steps = values.abs().clamp(max=_FLOAT16_SMALLEST_NORMAL) / _FLOAT16_SUBNORMAL_UNIT
        whole = steps.floor()
        fraction = ((steps - whole) * 2.0**31).to(torch.int32)
        away = noise > (2**31 - 1) - fraction
        subnormal = ((whole + away) * _FLOAT16_SUBNORMAL_UNIT).copysign(values)
        rounded = torch.where(values.abs() < _FLOAT16_SMALLEST_NORMAL, subnormal, rounded)
    # A NaN's bits plus noise may become an infinity or a number.
    return torch.where(values.isnan(), values, rounded).to(dtype)

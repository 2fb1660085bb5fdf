"""A float32 model cast down in place, its float32 values for those who will need them, and what is lost."""

from __future__ import annotations

from collections.abc import Callable

import torch

from narrowcast.errors import SettingError, UnsupportedError
from narrowcast.weights._rounding import LOW_DTYPES

_WIDE_DTYPES = (torch.float32, torch.float64)


def is_batch_or_instance_norm(module: torch.nn.Module) -> bool:
    """Whether this is a batch or instance normalization with weights or running statistics of its own.

    apex's ``keep_batchnorm_fp32``, and instance normalization too. A layer that has neither has nothing to
    keep.
    """
    return isinstance(module, torch.nn.modules.batchnorm._NormBase) and bool(
        module.affine or module.track_running_stats
    )


def lower(
    model: torch.nn.Module,
    dtype: torch.dtype,
    *,
    keep_fp32: Callable[[torch.nn.Module], bool] | None = is_batch_or_instance_norm,
) -> dict[torch.Tensor, torch.Tensor]:
    """Cast a model's parameters and floating buffers to ``dtype``, in place, and hand out what they were.

    Every parameter stays the object that it is, so that optimizers, tied layers and hooks go on seeing it;
    frozen ones are cast too, and a gradient that is there is cast with its parameter. Integer, complex and
    8-bit tensors stay. Values are rounded to nearest even: NaN stays NaN, what is past the largest number
    becomes an infinity, float16 subnormals are kept. Do this before the first forward pass, before DDP and
    before sharding.

    Args:
        model: any module on any device.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        keep_fp32: says of each module whether its own parameters and buffers stay as they are, those that
            other modules share with it too; None keeps nothing.

    Returns:
        The values that were, in float32, by parameter: for ``hold(originals=...)``. Only of parameters that
        were float32 or float64 and were cast. Their memory is freed when the dict is.

    Raises:
        SettingError: a ``dtype`` that is not one of the two.
        UnsupportedError: a parameter that is lazy or a tensor subclass, such as a DTensor. Nothing was cast.
    """
    if dtype not in LOW_DTYPES:
        raise SettingError(f"a model is lowered to torch.bfloat16 or torch.float16, not to {dtype}")
    modules = list(model.modules())
    kept = {
        tensor
        for module in modules
        if keep_fp32 is not None and keep_fp32(module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    parameters = [p for p in model.parameters() if p not in kept and _is_cast(p, dtype)]
    buffers = [b for b in model.buffers() if b not in kept and _is_cast(b, dtype)]
    for tensor in (*parameters, *buffers):
        _check(tensor)
    originals: dict[torch.Tensor, torch.Tensor] = {}
    with torch.no_grad():
        for parameter in parameters:
            if parameter.dtype in _WIDE_DTYPES:
                originals[parameter] = parameter.detach().to(torch.float32)
            _cast_parameter(parameter, dtype)
        for buffer in buffers:
            buffer.data = buffer.data.to(dtype)
    for module in modules:
        if isinstance(module, torch.nn.RNNBase):
            # cuDNN wants the weights in one piece of memory, and warns at every call where they are not.
            module.flatten_parameters()
    return originals


def _is_cast(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype in (*_WIDE_DTYPES, *LOW_DTYPES) and tensor.dtype != dtype


def _check(tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError(
            "a lazy module has no values to lower yet: call the model once on an example, then lower it"
        )
    if type(tensor.data) is not torch.Tensor:
        raise UnsupportedError(
            f"a tensor of shape {tuple(tensor.shape)} is a {type(tensor.data).__name__}, which cannot change "
            "its format in place: lower the model before it is sharded or quantized"
        )


def _cast_parameter(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def lost_eps(optimizer: torch.optim.Optimizer) -> float | None:
    """An ``eps`` of ``optimizer`` that is 0 in fp16, where weights and so its state are; None: there is none.

    It divides 0 by 0 where a gradient is 0, and the weights become NaN.
    """
    for group in optimizer.param_groups:
        eps = group.get("eps")
        in_fp16 = any(parameter.dtype == torch.float16 for parameter in group["params"])
        if in_fp16 and isinstance(eps, float) and 0 < eps <= 2.0**-25:
            return eps
    return None

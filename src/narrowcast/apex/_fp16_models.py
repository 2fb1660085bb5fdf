"""``apex.fp16_utils``'s helpers: models in half, and float32 copies of their parameters kept by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from narrowcast.errors import SettingError
from narrowcast.weights import lower

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class tofp16(nn.Module):  # noqa: N801 - apex's name
    """A layer that casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.half()


def _has_affine_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BATCH_NORMS) and module.affine


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 - apex's name
    """Every batch norm in ``module``, and ``module`` if it is one, in float32, in place.

    Returns:
        ``module``.
    """
    for part in module.modules():
        if isinstance(part, _BATCH_NORMS):
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """``network`` in float16 but for its batch norms, in place, behind a layer that casts the input.

    Batch norms that are in float32 keep every bit; apex rounded them to float16 and back.

    Raises:
        UnsupportedError: a parameter that is lazy or a tensor subclass.
    """
    lower(network, torch.float16, keep_fp32=lambda module: isinstance(module, _BATCH_NORMS))
    return nn.Sequential(tofp16(), BN_convert_float(network))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """``module``'s own floating parameters and buffers to ``dtype``, in place, its children's not."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(dtype)
            if gradient is not None:
                tensor.grad = gradient.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters and buffers to ``dtype``, in place, but for those of affine batch norms.

    Returns:
        ``network``.
    """
    for module in network.modules():
        if not _has_affine_batch_norm(module):
            convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """``network`` in float16 but for its affine batch norms, called with inputs cast to float16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.network(*(tensor.half() for tensor in inputs))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """The parameters that train, and float32 copies of them for the optimizer.

    ``narrowcast.weights.hold`` keeps such copies for any optimizer by itself.

    Args:
        model: any; parameters of several formats too.
        flat_master: one copy in a row instead, with a gradient of zeros.

    Returns:
        The model's parameters, and one copy for each, or a list of the one flat copy.
    """
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies: list[torch.Tensor] = [p.detach().clone().float() for p in params]
    if flat_master:
        copies = [nn.Parameter(torch.cat([copy.reshape(-1) for copy in copies]))]
        copies[0].grad = torch.zeros_like(copies[0])
    return params, [copy.requires_grad_() for copy in copies]


def model_grads_to_master_grads(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy gradients, widened and otherwise as they are, over those of the copies.

    Where a parameter has none, its copy has none then; in a flat copy that is an error.

    Raises:
        SettingError: a parameter without a gradient and ``flat_master``; lists of different lengths.
    """
    if flat_master:
        if missing := [tuple(p.shape) for p in model_params if p.grad is None]:
            raise SettingError(
                f"a flat copy takes a gradient of each parameter, and {len(missing)} have none, the first of "
                f"shape {missing[0]}: use flat_master=False, where such parameters are left alone"
            )
        flat = master_params[0].grad
        assert flat is not None
        flat.copy_(torch.cat([_gradient(p).reshape(-1).float() for p in model_params]))
        return
    for param, master in _pairs(model_params, master_params):
        if param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = param.grad.detach().to(master.dtype, copy=True)
        else:
            master.grad.copy_(param.grad.detach())


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


def master_params_to_model_params(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy the float32 copies over the parameters, rounded to nearest even.

    Raises:
        SettingError: lists of different lengths, or a flat copy of another size.
    """
    masters = list(master_params)
    if flat_master:
        sizes = [parameter.numel() for parameter in model_params]
        if sum(sizes) != masters[0].numel():
            raise SettingError(
                f"a flat copy of these parameters has {sum(sizes)} elements, got one of {masters[0].numel()}"
            )
        flat = torch.split(masters[0].detach(), sizes)
        masters = [part.view(p.shape) for part, p in zip(flat, model_params, strict=True)]
    with torch.no_grad():
        for param, master in _pairs(model_params, masters):
            param.copy_(master)


def _pairs(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    params, masters = list(model_params), list(master_params)
    if len(params) != len(masters):
        raise SettingError(
            f"expected a copy for each of {len(params)} parameters, got {len(masters)}: give both lists of "
            "prep_param_lists, and flat_master=True where it was given there"
        )
    return list(zip(params, masters, strict=True))


def to_python_float(t: Any) -> float:
    """A tensor of one element, or the first item of a sequence, as a number; waits for the device."""
    return float(t.item() if hasattr(t, "item") else t[0])


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_``."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

"""The names of torchao, which promises none of them to stay: the only file that imports it.

Imported on the first fp8 rule that meets a model, by ``_fp8_linear.load``.
"""

from __future__ import annotations

from typing import Any

import torch
from torchao.float8 import Float8LinearConfig, LinearMMConfig, ScaledMMConfig, convert_to_float8_training
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

from narrowcast.errors import UnsupportedError


@torch.compiler.allow_in_graph
class _Product(matmul_with_hp_or_float8_args):  # type: ignore[misc]
    """torchao's product and its gradients; where they would be wrong or fail in riddles, an error."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, settings: Any, config: Any) -> Any:
        result = matmul_with_hp_or_float8_args.forward(ctx, input, weight, settings, config)
        # As torch.nn.Linear: a view that was made in here could not be changed in place (ReLU(inplace=True)).
        return torch.ops.aten._unsafe_view(result, result.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "expected a backward without create_graph=True through an fp8 linear layer, whose gradient "
                'has no gradient; keep it out with a rule, as nc.rule.module("critic", compute="bf16")'
            )
        device = grad.device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return matmul_with_hp_or_float8_args.backward(ctx, grad)
        # Autocast, where backward is called inside a region, would cast what already is in fp8.
        with torch.autocast(device, enabled=False):
            return matmul_with_hp_or_float8_args.backward(ctx, grad)


def _settings(config: Float8LinearConfig, *, emulated: bool, padded: bool) -> Any:
    def of(gemm: Any, pad: bool) -> Any:
        return ScaledMMConfig(emulated, gemm.use_fast_accum, False, pad)

    return LinearMMConfig(
        of(config.gemm_config_output, False),
        of(config.gemm_config_grad_input, False),
        of(config.gemm_config_grad_weight, padded),
    )


_CONFIGS = {
    "fp8_tensorwise": Float8LinearConfig.from_recipe_name("tensorwise"),
    "fp8_rowwise": Float8LinearConfig.from_recipe_name("rowwise"),
}
# Made here and looked up later, so that torch.compile meets constants.
_SETTINGS = {
    (recipe, emulated, padded): (_settings(config, emulated=emulated, padded=padded), config)
    for recipe, config in _CONFIGS.items()
    for emulated in (False, True)
    for padded in (False, True)
}


def product(input: torch.Tensor, weight: torch.Tensor, recipe: str, *, emulated: bool) -> torch.Tensor:
    """``input @ weight.t()`` through fp8, with gradients through fp8, in the format of ``input``.

    ``input`` is (..., in features), ``weight`` (out features, in features). The instructions want 16 rows of
    ``input`` or a multiple for the gradient of the weight, which sums over them: zeros fill them up.
    """
    padded = not emulated and input.shape[:-1].numel() % 16 != 0
    settings, config = _SETTINGS[recipe, emulated, padded]
    result: torch.Tensor = _Product.apply(input, weight.t(), settings, config)
    return result


def prepare_compiler() -> None:
    """Let torchao keep ``torch.compile`` from a fault in Triton that writes wrong fp8 numbers on a GPU.

    It does so whenever it converts a model (https://github.com/triton-lang/triton/issues/11111).
    """
    convert_to_float8_training(torch.nn.Linear(16, 16, device="meta"))

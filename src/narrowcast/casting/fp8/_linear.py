"""A linear layer that multiplies in fp8, with torchao's matmuls and recipes.

The only file that imports torchao, whose names may change. It is imported when the first fp8 rule meets a
model.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.casting._torch_internals import has_autocast, torch_autocast
from narrowcast.casting.fp8._use import Fp8Use, has_fp8
from narrowcast.casting.kernels._operators import CASTABLE
from narrowcast.casting.regions._scopes import region_dtype
from narrowcast.errors import MissingModuleError, UnsupportedError
from narrowcast.policy import FP8_RECIPES, Rule

_INSTALL = "pip install 'narrowcast[fp8]'"


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def _without_notices() -> Iterator[None]:
    """Suppress what torchao logs while it is imported, about parts that are not used here; but not errors."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(_is_an_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_an_error)


try:
    with _without_notices():
        from torchao.float8 import (
            Float8LinearConfig,
            LinearMMConfig,
            ScaledMMConfig,
            convert_to_float8_training,
        )
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
except ImportError as _error:
    if isinstance(_error, ModuleNotFoundError) and _error.name == "torchao":
        raise MissingModuleError(
            f"expected torchao for a rule with an fp8 recipe, and it is not installed: {_INSTALL}"
        ) from _error
    _version = getattr(sys.modules.get("torchao"), "__version__", "one that cannot be imported")
    raise MissingModuleError(
        f"expected torchao 0.18 or newer for a rule with an fp8 recipe, got {_version} ({_error}): {_INSTALL}"
    ) from _error


class Fp8Linear(torch.nn.Linear):
    """The class of a ``torch.nn.Linear`` while an fp8 rule is in force for it.

    The object stays, with parameters, hooks, mode and every reference to it; only its class changes, as under
    ``torch.nn.utils.parametrize``. It is copied, pickled and moved between devices like any module.

    Attributes:
        fp8_rule: the rule that converted it.
        fp8_recipe: ``"fp8_tensorwise"`` or ``"fp8_rowwise"``.
        fp8_emulated: whether fp8 numbers are multiplied in fp32, where the device has no instructions.
        fp8_use: shared with the other layers of its model.
    """

    fp8_rule: Rule
    fp8_recipe: str
    fp8_emulated: bool
    fp8_use: Fp8Use

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map (..., in features) to (..., out features), in the region's format.

        An empty input, and formats that autocast leaves alone (fp64, integers), are computed by
        ``torch.nn.Linear``.
        """
        castable = (input.dtype in CASTABLE) and (self.weight.dtype in CASTABLE)
        if self.fp8_use.removed or not castable or input.numel() == 0:
            return super().forward(input)
        device = input.device.type
        if not has_autocast(device) or not torch.is_autocast_enabled(device):
            return self._multiply(input)
        dtype = region_dtype(device)
        # With autocast on, tensors that are in fp8 already would be cast, also by a rule for "mm".
        with torch_autocast(device, enabled=False):
            return self._multiply(input.to(dtype))

    def _multiply(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # torchao's tensors implement no composite operators. Outside of inference mode these are
            # decomposed before they reach the tensors, in inference mode they are not.
            with torch.inference_mode(False), torch.no_grad():
                return self._multiply(input)
        output = _matmul(input, self.weight, self.fp8_recipe, emulated=self.fp8_emulated)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Fp8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._choose_instructions()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._choose_instructions()

    def _choose_instructions(self) -> None:
        """Use fp8 instructions if the device of the weight has them."""
        self.fp8_emulated = not has_fp8(self.weight.device)
        if not self.fp8_emulated:
            # A fault in Triton makes torch.compile write wrong fp8 numbers on a GPU. torchao works around it
            # when it converts any model, so one is converted that is thrown away:
            # https://github.com/triton-lang/triton/issues/11111
            convert_to_float8_training(torch.nn.Linear(16, 16, device="meta"))

    def extra_repr(self) -> str:
        if self.fp8_use.removed:
            return super().extra_repr()
        emulated = ", emulated" if self.fp8_emulated else ""
        return f"{super().extra_repr()}, {self.fp8_recipe}{emulated}"


def convert_layer(module: torch.nn.Linear, rule: Rule, use: Fp8Use) -> Fp8Linear:
    """Make ``module`` an ``Fp8Linear``: the same object, which is returned."""
    vars(module).update(fp8_rule=rule, fp8_recipe=rule.compute, fp8_use=use)
    module.__class__ = Fp8Linear
    assert isinstance(module, Fp8Linear)
    module._choose_instructions()
    return module


# ---- torchao's matmul


@torch.compiler.allow_in_graph
class _Matmul(matmul_with_hp_or_float8_args):  # type: ignore[misc]
    """torchao's matmul and its gradients, with an error where a gradient would be wrong."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, settings: Any, config: Any) -> Any:
        result = matmul_with_hp_or_float8_args.forward(ctx, input, weight, settings, config)
        # A view that was made in here could not be changed in place, which ReLU(inplace=True) would do.
        return torch.ops.aten._unsafe_view(result, result.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "expected a backward without create_graph=True through an fp8 linear layer, whose gradient "
                'has no gradient; keep it out with a rule, as nc.rule.module("critic", compute="bf16")'
            )
        device = grad.device.type
        if not has_autocast(device) or not torch.is_autocast_enabled(device):
            return matmul_with_hp_or_float8_args.backward(ctx, grad)
        # If backward is called inside a region, autocast would cast tensors that are in fp8 already.
        with torch_autocast(device, enabled=False):
            return matmul_with_hp_or_float8_args.backward(ctx, grad)


def _settings(config: Float8LinearConfig, *, emulated: bool, padded: bool) -> Any:
    """Return torchao's settings of the three matmuls: for the output, and for the two gradients.

    ``padded``: whether the matmul for the gradient of the weight pads its operands.
    """
    output, grad_input, grad_weight = (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    )
    matmul = functools.partial(ScaledMMConfig, emulate=emulated, fp8_output=False)
    return LinearMMConfig(
        output=matmul(use_fast_accum=output.use_fast_accum, pad_inner_dim=False),
        grad_input=matmul(use_fast_accum=grad_input.use_fast_accum, pad_inner_dim=False),
        grad_weight=matmul(use_fast_accum=grad_weight.use_fast_accum, pad_inner_dim=padded),
    )


def _all_settings() -> dict[tuple[str, bool, bool], tuple[Any, Float8LinearConfig]]:
    """Return (recipe, emulated, padded) -> the last two arguments of ``_Matmul.apply``."""
    settings = {}
    for recipe in FP8_RECIPES:
        config = Float8LinearConfig.from_recipe_name(recipe.removeprefix("fp8_"))
        for emulated, padded in itertools.product((False, True), repeat=2):
            settings[recipe, emulated, padded] = (
                _settings(config, emulated=emulated, padded=padded),
                config,
            )
    return settings


# Looked up at each call, so that torch.compile meets constants.
_SETTINGS = _all_settings()


def _matmul(input: torch.Tensor, weight: torch.Tensor, recipe: str, *, emulated: bool) -> torch.Tensor:
    """Multiply ``input @ weight.t()`` in fp8, and its gradients too; return it in the format of ``input``.

    ``input`` is (..., in features), ``weight`` (out features, in features).
    """
    # The gradient of the weight sums over the rows of input, and the instructions want a multiple of 16 of
    # them. torchao can add rows of zeros, but then copies its operands even where it adds none.
    padded = not emulated and input.shape[:-1].numel() % 16 != 0
    settings, config = _SETTINGS[recipe, emulated, padded]
    result: torch.Tensor = _Matmul.apply(input, weight.t(), settings, config)
    return result

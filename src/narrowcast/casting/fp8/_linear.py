"""A linear layer that multiplies in fp8, with torchao's products and recipes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.casting._scopes import region_dtype
from narrowcast.errors import MissingModuleError

CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
_INSTALL = "pip install 'narrowcast[fp8]'"


class Fp8Use:
    """What the layers that one call of ``apply_fp8`` turned have in common, copies of them included.

    Attributes:
        emulate: fp8 numbers are multiplied in fp32 on every device.
        removed: the layers compute as ``torch.nn.Linear`` again.
    """

    def __init__(self, emulate: bool, removed: bool = False) -> None:
        self.emulate = emulate
        self.removed = removed

    def __deepcopy__(self, _memo: object) -> Fp8Use:
        return self

    def __reduce__(self) -> Any:
        return Fp8Use, (self.emulate, self.removed)


class Fp8Linear(torch.nn.Linear):
    """What a ``torch.nn.Linear`` is while an fp8 rule is in force for it.

    The object stays, and with it parameters, hooks, mode and every reference to it: only its class changes,
    as under ``torch.nn.utils.parametrize``. It is copied, pickled and moved between devices like any module.

    Attributes:
        fp8_recipe: ``"fp8_tensorwise"`` or ``"fp8_rowwise"``.
        fp8_emulated: whether fp8 numbers are multiplied in fp32, for want of instructions or since it was
            asked for.
        fp8_use: what it shares with the other layers.
    """

    fp8_recipe: str
    fp8_emulated: bool
    fp8_use: Fp8Use

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As ``torch.nn.Linear`` does: (..., in features) to (..., out features), in the region's format.

        An empty input, and formats that autocast leaves alone (fp64, integers), go where they always went.
        """
        formats = (input.dtype in CASTABLE) and (self.weight.dtype in CASTABLE)
        if self.fp8_use.removed or not formats or input.numel() == 0:
            return super().forward(input)
        device = input.device.type
        region = _format_of_region(device)
        if region is None:
            return self._multiply(input)
        # Autocast would cast what already is in fp8, as would a rule for "mm".
        with torch.autocast(device, enabled=False):
            return self._multiply(input.to(region))

    def _multiply(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # Where torchao's tensors lack operators that autograd would have taken apart for them.
            with torch.inference_mode(False), torch.no_grad():
                return self._multiply(input)
        output: torch.Tensor = _torchao.product(
            input, self.weight, self.fp8_recipe, emulated=self.fp8_emulated
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Fp8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._settle()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        load()
        self._settle()

    def _settle(self) -> None:
        """Where the weight is on another device: whether that has the instructions."""
        self.fp8_emulated = self.fp8_use.emulate or not has_fp8(self.weight.device)
        if not self.fp8_emulated:
            _torchao.prepare_compiler()

    def extra_repr(self) -> str:
        what = "" if self.fp8_use.removed else f", {self.fp8_recipe}{', emulated' * self.fp8_emulated}"
        return super().extra_repr() + what


def turn(module: torch.nn.Linear, recipe: str, use: Fp8Use) -> Fp8Linear:
    """Make ``module`` an ``Fp8Linear``: the same object, which is returned."""
    module.fp8_recipe, module.fp8_use = recipe, use  # type: ignore[assignment]
    module.__class__ = Fp8Linear
    assert isinstance(module, Fp8Linear)
    module._settle()
    return module


def turn_back(module: Fp8Linear) -> None:
    """Make it a ``torch.nn.Linear`` again, unless its class has changed since, as by ``fully_shard``."""
    if type(module) is Fp8Linear:
        for name in Fp8Linear.__annotations__:
            vars(module).pop(name, None)
        module.__class__ = torch.nn.Linear  # type: ignore[assignment]


def has_fp8(device: torch.device) -> bool:
    """Whether ``device`` multiplies fp8: CUDA 8.9 and newer (Ada, Hopper, Blackwell), AMD's MI300 and newer.

    Source: the requirements of ``torch._scaled_mm``, aten/src/ATen/native/cuda/ScaledBlas.cpp.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.version.hip is not None:
        architecture = str(torch.cuda.get_device_properties(device).gcnArchName)
        return architecture.startswith(("gfx94", "gfx95", "gfx12"))
    return torch.cuda.get_device_capability(device) >= (8, 9)


def load() -> None:
    """Import torchao, on the first call.

    Raises:
        MissingModuleError: it is not installed, or too old.
    """
    global _torchao  # noqa: PLW0603 (torch.compile follows a name of this module, not an import)
    if _torchao is not None:
        return
    try:
        with _without_notices():
            from narrowcast.casting.fp8 import _torchao as found
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and sys.modules.get("torchao") is None:
            raise MissingModuleError(
                f"expected torchao for a rule with an fp8 recipe, and it is not installed: {_INSTALL}"
            ) from error
        version = getattr(sys.modules.get("torchao"), "__version__", "one that cannot be imported")
        raise MissingModuleError(
            f"expected torchao 0.18 or newer for a rule with an fp8 recipe, got {version} ({error}): "
            f"{_INSTALL}"
        ) from error
    _torchao = found


_torchao: Any = None


@contextmanager
def _without_notices() -> Iterator[None]:
    """Without what is logged while torchao is imported about parts of it that are not used here."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(_is_an_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _format_of_region(device_type: str) -> torch.dtype | None:
    """What a linear layer hands on here; None outside of regions."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return region_dtype(device_type)

"""Find the device types of modules, count moves of weights, and check device types and dtypes of regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting.models._tree import tensors_inside
from narrowcast.errors import DeviceError, PolicyError
from narrowcast.machine import check_device
from narrowcast.policy import PRESET_TABLE

_FORMATS = (torch.bfloat16, torch.float16, torch.float32)


class _Moves:
    """Counts how often weights of any module were moved or cast, by ``to``, ``cuda``, ``half`` and the like.

    While the count stays the same, the device types that were found for a model still hold.
    """

    def __init__(self) -> None:
        self.count = 0

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Module._apply``, which all methods that move or cast a module call, and count the calls."""

        def _apply(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        return _apply


moves = _Moves()


def device_types(module: torch.nn.Module | None, args: Any, kwargs: Any) -> list[str]:
    """Return the device types of the weights of ``module``; if there are none, those of its inputs.

    Without weights and inputs, the type of torch's default device. "meta" is left out.
    """
    devices = weight_device_types(module) if module is not None else []
    if not devices:
        inputs = tensors_inside((args, kwargs))
        devices = list(dict.fromkeys(tensor.device.type for tensor in inputs))
    if not devices:
        devices = [torch.get_default_device().type]
    return [device for device in devices if device != "meta"]


def weight_device_types(module: torch.nn.Module) -> list[str]:
    """Return the device types of parameters and buffers of ``module``, each once."""
    devices: dict[str, None] = {}  # keeps the order of the weights, which a set would not
    for part in module.modules():
        for weight in (*part._parameters.values(), *part._buffers.values()):
            if weight is not None:
                devices[weight.device.type] = None
    return list(devices)


def check_device_type(device_type: Any, *, enabled: bool) -> None:
    """Refuse a device type that torch cannot autocast, or, if ``enabled``, that this machine lacks."""
    if not isinstance(device_type, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
    # Regions are opened at each step, so skip the checks for a CPU, which every build of torch can autocast.
    if device_type != "cpu":
        # A policy was given in the place of the device type, as in nc.autocast("bf16").
        if device_type in PRESET_TABLE:
            here = "cuda" if torch.cuda.is_available() else "cpu"
            raise DeviceError(
                f"expected a device type first, got the policy {device_type!r}: "
                f'nc.autocast("{here}", policy="{device_type}")'
            )
        check_device(device_type, present=enabled)


def check_dtype(device_type: str, dtype: Any) -> None:
    """Refuse a dtype that autocast on ``device_type`` does not compute in."""
    if dtype not in _FORMATS:
        hint = f'; write policy="{dtype}" for a preset' if isinstance(dtype, str) else ""
        raise PolicyError(
            f"expected a format that {device_type} can autocast to, got {dtype!r}{hint}. "
            f"Supported: {', '.join(map(str, _FORMATS))}"
        )
    if device_type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise PolicyError(
            f"expected a format that this CUDA device can compute in, got torch.bfloat16 on "
            f"{torch.cuda.get_device_name()}; use torch.float16 with a GradScaler"
        )

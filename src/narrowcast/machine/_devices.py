"""Device types that torch's autocast knows, and whether this machine has one."""

from __future__ import annotations

import torch

from narrowcast.errors import DeviceError, near_names

_AUTOCAST_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")


def known_device_types() -> tuple[str, ...]:
    """Device types with an autocast of their own, an extension's renamed ``privateuse1`` included."""
    extension = torch._C._get_privateuse1_backend_name()
    return (*_AUTOCAST_DEVICE_TYPES, extension)


def check_device(device_type: str) -> None:
    """Refuse a device type that torch does not know or that this machine lacks.

    Raises:
        DeviceError: with near names for an unknown one, with the fix for an absent one.
    """
    if device_type not in known_device_types():
        raise DeviceError(
            f"unknown device type {device_type!r} (a type such as 'cuda', without an index). "
            + near_names(device_type, known_device_types())
        )
    if device_type == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch sees no GPU" if built else "this torch is a CPU build"
        raise DeviceError(
            f"device 'cuda' was asked for and {why}. Use device 'cpu', or install a CUDA build of torch "
            "on a machine with a GPU (python -c 'import torch; print(torch.cuda.is_available())')."
        )
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device 'mps' was asked for and this machine has none. Use device 'cpu'.")

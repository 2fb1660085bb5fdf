"""Which parameters can be held."""

from __future__ import annotations

import torch

from narrowcast.errors import SettingError, UnsupportedError
from narrowcast.weights._torch_internals import is_dtensor


def check_parameter(low: torch.Tensor, seen: set[torch.Tensor], original: torch.Tensor | None) -> None:
    """Refuse what cannot be held, and an original that does not fit.

    Raises:
        SettingError: one of ``seen``; an original of another shape, format or device.
        UnsupportedError: a tensor subclass other than DTensor.
    """
    shape = tuple(low.shape)
    if low in seen:
        raise SettingError(
            f"a parameter of shape {shape} comes twice in this optimizer: leave it in one group only"
        )
    if type(low.data) is not torch.Tensor and not is_dtensor(low):
        raise UnsupportedError(
            f"a parameter of shape {shape} is a {type(low.data).__name__}: plain tensors and DTensors can be "
            "held, so leave it out of this optimizer"
        )
    wanted = (torch.float32, low.shape, low.device)
    if original is not None and (original.dtype, original.shape, original.device) != wanted:
        raise SettingError(
            f"the original of a parameter of shape {shape} on {low.device} must be a float32 tensor of that "
            f"shape there, not {str(original.dtype).removeprefix('torch.')} of shape "
            f"{tuple(original.shape)} on {original.device}"
        )

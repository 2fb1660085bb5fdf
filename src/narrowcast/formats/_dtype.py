"""Formats and torch dtypes, one to one. torch is imported only when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.errors import SettingError
from narrowcast.formats._format import Format
from narrowcast.formats._standard import (
    BFLOAT16,
    E4M3FNUZ,
    E5M2FNUZ,
    FLOAT16,
    FLOAT32,
    OCP_E4M3,
    OCP_E5M2,
)

if TYPE_CHECKING:
    import torch

_DTYPE_NAMES = {
    FLOAT32: "float32",
    BFLOAT16: "bfloat16",
    FLOAT16: "float16",
    OCP_E4M3: "float8_e4m3fn",
    OCP_E5M2: "float8_e5m2",
    E4M3FNUZ: "float8_e4m3fnuz",
    E5M2FNUZ: "float8_e5m2fnuz",
}


def torch_dtype(format: Format) -> torch.dtype:
    """The torch dtype that stores ``format``, code for code.

    Raises:
        SettingError: no dtype stores it. TF32 is a way to compute on float32 tensors, not to store them.

    Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.dtype

    >>> from narrowcast.formats import OCP_E4M3, torch_dtype
    >>> torch_dtype(OCP_E4M3)
    torch.float8_e4m3fn
    """
    import torch

    if format not in _DTYPE_NAMES:
        stored = ", ".join(known.name for known in _DTYPE_NAMES)
        raise SettingError(f"no torch dtype stores {format.name}: use one that is stored ({stored})")
    dtype = getattr(torch, _DTYPE_NAMES[format])
    assert isinstance(dtype, torch.dtype)
    return dtype


def from_torch_dtype(dtype: torch.dtype) -> Format:
    """The format that tensors of ``dtype`` are stored in.

    Raises:
        SettingError: ``dtype`` is an integer, complex, float64 or other type that has no record here.

    Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.dtype
    """
    for format, name in _DTYPE_NAMES.items():
        if str(dtype) == f"torch.{name}":
            return format
    known = ", ".join(f"torch.{name}" for name in _DTYPE_NAMES.values())
    raise SettingError(f"{dtype} is not a format of narrowcast.formats: use one of {known}")

"""Number formats as records, with exact scalar decoding, encoding and rounding.

This is the slow reference for the fast versions. Importing it does not import torch.
"""

from __future__ import annotations

from narrowcast.formats._codec import decode, encode
from narrowcast.formats._format import (
    BFLOAT16,
    E4M3FNUZ,
    E5M2FNUZ,
    FLOAT16,
    FLOAT32,
    OCP_E4M3,
    OCP_E5M2,
    TF32,
    Format,
    torch_dtype,
)
from narrowcast.formats._rounding import RoundingMode, round_to

__all__ = [
    "BFLOAT16",
    "E4M3FNUZ",
    "E5M2FNUZ",
    "FLOAT16",
    "FLOAT32",
    "OCP_E4M3",
    "OCP_E5M2",
    "TF32",
    "Format",
    "RoundingMode",
    "decode",
    "encode",
    "round_to",
    "torch_dtype",
]

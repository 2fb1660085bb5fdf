"""Number formats as records, what every code means, and how a number is rounded, exactly and one at a time.

Nothing here is fast, and importing it does not import torch: it is what the fast versions are held against.
"""

from __future__ import annotations

from narrowcast.formats._codec import decode, encode
from narrowcast.formats._dtype import torch_dtype
from narrowcast.formats._format import Format
from narrowcast.formats._rounding import RoundingMode, round_to
from narrowcast.formats._standard import (
    BFLOAT16,
    E4M3FNUZ,
    E5M2FNUZ,
    FLOAT16,
    FLOAT32,
    OCP_E4M3,
    OCP_E5M2,
    TF32,
)

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

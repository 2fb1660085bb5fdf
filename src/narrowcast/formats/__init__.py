"""Number formats as records, and exact rounding to them. Importing it does not import torch.

>>> from narrowcast.formats import FLOAT16, round_to
>>> FLOAT16.max, round_to(FLOAT16, 1 + 2**-11)
(65504.0, 1.0)
"""

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
    round_to,
    torch_dtype,
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
    "round_to",
    "torch_dtype",
]

# Names that this module had in earlier versions -> what to write instead.
_REPLACED = {
    "decode": "torch.tensor(code, dtype=torch.uint8).view(dtype) decodes a code of an fp8 format",
    "encode": "torch.tensor(x).to(dtype).view(torch.uint8) encodes a number in an fp8 format",
    "RoundingMode": "round_to rounds to nearest, ties to even",
}


def __getattr__(name: str) -> object:
    # Python calls this for each name that the module lacks.
    hint = ""
    if name in _REPLACED:
        hint = f": {_REPLACED[name]}"
    raise AttributeError(f"module 'narrowcast.formats' has no attribute {name!r}{hint}")

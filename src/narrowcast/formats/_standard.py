"""The formats that PyTorch computes or stores in, each with the document that defines it."""

from __future__ import annotations

from narrowcast.formats._format import Format, Specials

FLOAT32 = Format(
    name="FLOAT32",
    standard="IEEE 754-2019 binary32",
    storage_bits=32,
    exponent_bits=8,
    significand_bits=23,
    bias=127,
    specials=Specials.IEEE,
)
"""IEEE 754 single precision."""

# The whitepaper does not say how a float32 is rounded to it, and hardware differs: PTX has a conversion with
# ties away from zero (cvt.rna.tf32.f32, sm_80) and one with ties to even (cvt.rn.tf32.f32, sm_90).
TF32 = Format(
    name="TF32",
    standard="NVIDIA A100 Tensor Core GPU Architecture whitepaper, 2020, TensorFloat-32",
    storage_bits=32,
    exponent_bits=8,
    significand_bits=10,
    bias=127,
    specials=Specials.IEEE,
)
"""NVIDIA's TensorFloat-32: the range of float32 with the precision of float16."""

# Intel's document asks for no subnormals in arithmetic; PyTorch's conversions keep them, as round_to does.
BFLOAT16 = Format(
    name="BFLOAT16",
    standard="Google Brain bfloat16; Intel BFLOAT16 Hardware Numerics Definition, 338302-001US, 2018",
    storage_bits=16,
    exponent_bits=8,
    significand_bits=7,
    bias=127,
    specials=Specials.IEEE,
)
"""The range of float32 with 8 significant bits."""

FLOAT16 = Format(
    name="FLOAT16",
    standard="IEEE 754-2019 binary16",
    storage_bits=16,
    exponent_bits=5,
    significand_bits=10,
    bias=15,
    specials=Specials.IEEE,
)
"""IEEE 754 half precision."""

OCP_E4M3 = Format(
    name="OCP_E4M3",
    standard="OCP 8-bit Floating Point Specification (OFP8) 1.0, E4M3",
    storage_bits=8,
    exponent_bits=4,
    significand_bits=3,
    bias=7,
    specials=Specials.NAN_ALL_ONES,
)
"""fp8 of the Open Compute Project with NaN and no infinities; up to 448."""

OCP_E5M2 = Format(
    name="OCP_E5M2",
    standard="OCP 8-bit Floating Point Specification (OFP8) 1.0, E5M2",
    storage_bits=8,
    exponent_bits=5,
    significand_bits=2,
    bias=15,
    specials=Specials.IEEE,
)
"""fp8 of the Open Compute Project with NaN and infinities; up to 57344."""

E4M3FNUZ = Format(
    name="E4M3FNUZ",
    standard="Graphcore, AMD and Qualcomm, arXiv 2206.02915, 2022, 1.4.3 with bias 8",
    storage_bits=8,
    exponent_bits=4,
    significand_bits=3,
    bias=8,
    specials=Specials.NAN_NEGATIVE_ZERO,
)
"""fp8 without infinities and negative zero; up to 240."""

E5M2FNUZ = Format(
    name="E5M2FNUZ",
    standard="Graphcore, AMD and Qualcomm, arXiv 2206.02915, 2022, 1.5.2 with bias 16",
    storage_bits=8,
    exponent_bits=5,
    significand_bits=2,
    bias=16,
    specials=Specials.NAN_NEGATIVE_ZERO,
)
"""fp8 without infinities and negative zero; up to 57344."""

FORMATS = (FLOAT32, TF32, BFLOAT16, FLOAT16, OCP_E4M3, OCP_E5M2, E4M3FNUZ, E5M2FNUZ)
"""All of them."""

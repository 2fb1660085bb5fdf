"""The presets: policies that have a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a name stands for.

    Attributes:
        meaning: one line for a person.
        fields: of the ``Policy``, its rules aside.
        rules: keyword arguments of each ``Rule``; rules are made when the preset is, since PyTorch is asked
            for the operators' names then.
        for_scripts: whether ``narrowcast run`` takes it; not where only ``nc.Stepper`` can keep it.
    """

    meaning: str
    fields: dict[str, Any]
    rules: tuple[dict[str, str], ...] = ()
    for_scripts: bool = True


# What stops with an error in a region where floating inputs differ in format, on the CPU or on CUDA; found by
# tests/policy/test_safe_preset.py, which gives every operator such inputs. Where only one of the two stops,
# the rule does as the table of the other device; where both do, inputs are promoted. Not among them:
# - batch_norm and instance_norm: they write to their running statistics, and a cast would be written to;
#   native_batch_norm and its like, native_layer_norm and fake_quantize_*: they take parameters in fp32 beside
#   narrow inputs, which a rule would widen;
# - in-place forms, x[i] = y among them, which no rule can be for;
# - fractional_max_pool2d and 3d: only samples that a caller passes to a private argument can differ;
#   linear_cross_entropy: an experiment of PyTorch's in Python.
_AS_CUDA_DOES = "addmv chain_matmul linalg_multi_dot mv"
_AS_CPU_DOES = """cholesky_solve grid_sampler_2d grid_sampler_3d linalg_householder_product linalg_lstsq
    linalg_matrix_rank linalg_solve linalg_tensorsolve lu_solve nanquantile orgqr ormqr polar quantile
    triangular_solve"""
_PROMOTED = """bilinear complex cross dot embedding_bag heaviside histogram histogramdd index_add index_copy
    index_put index_reduce isclose lerp linalg_cross linalg_ldl_solve linalg_lu_solve linalg_pinv
    linalg_solve_ex linalg_solve_triangular masked_scatter meshgrid put scatter scatter_add scatter_reduce
    sparse_sampled_addmm special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_zeta tensordot vdot
    _sparse_mm.reduce _weight_norm"""
_NORMS = "group_norm layer_norm rms_norm"

# What apex computes in fp32 and PyTorch's table for CUDA, which came of apex's lists, does not: cross_entropy
# is taken apart there, into a log_softmax that is told to stay in the input's format. The others:
# - softmin, interpolate and normalize are Python functions around softmax, upsample_* and norms;
#   log_sigmoid stands for multilabel_soft_margin_loss, a Python function that is in fp32 from there on;
# - local_response_norm squares its input with mul, and a rule for that would be one for every product of a
#   model: only rule.module_type("torch.nn.LocalResponseNorm", compute="fp32") reaches it;
# - interpolate(mode="area") is adaptive_avg_pool*, which apex leaves alone elsewhere;
# - in-place powers are never cast, and apex's fp32 Tensor.cpu() was a fault.
# What apex's lists lack, often because it is younger (rms_norm, einsum, attention), is as on PyTorch's table.
_APEX_FP32 = "cross_entropy_loss ctc_loss gelu grid_sampler log_sigmoid std var"


def _each(ops: str, **effect: str) -> tuple[dict[str, str], ...]:
    return tuple({"op": op, **effect} for op in ops.split())


ALL: dict[str, Preset] = {
    "auto": Preset(
        meaning="the fastest safe format that the device has instructions for",
        fields={"compute": "auto"},
    ),
    "bf16": Preset(
        meaning="matrix products and convolutions in bfloat16, by the device's own table",
        fields={"compute": "bf16"},
    ),
    "fp16": Preset(
        meaning="matrix products and convolutions in float16, by the device's own table",
        fields={"compute": "fp16"},
    ),
    "fp32": Preset(meaning="everything in float32", fields={"compute": "fp32"}),
    "safe": Preset(
        meaning="auto, with mixed inputs promoted, norms handed on narrow, binary_cross_entropy in fp32",
        fields={"compute": "auto"},
        rules=(
            *_each(_NORMS, compute="fp32", output="lower"),
            *_each("binary_cross_entropy", compute="fp32"),
            *_each(_AS_CPU_DOES, compute="fp32"),
            *_each(_AS_CUDA_DOES, compute="lower"),
            *_each(_PROMOTED, compute="promote"),
        ),
    ),
    "O0": Preset(meaning="apex's O0: everything in float32", fields={"compute": "fp32"}),
    "O1": Preset(
        meaning="apex's O1: each operator in the format that suits it, one table everywhere",
        fields={"compute": "auto", "tables": "cuda"},
        rules=_each(_APEX_FP32, compute="fp32"),
    ),
    "O2": Preset(
        meaning="weights in a low format too, with fp32 masters; batch norms in float32",
        fields={"compute": "auto", "master_weights": True},
        for_scripts=False,
    ),
    "O3": Preset(
        meaning="apex's O3: everything in a low format, without masters or a loss scale",
        fields={"compute": "auto", "low_weights": True},
        for_scripts=False,
    ),
}
"""Preset name -> what it stands for."""

PRESETS = {name: preset.meaning for name, preset in ALL.items()}
"""Preset name -> one line for a person."""

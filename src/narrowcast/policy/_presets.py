"""The presets: settings and rules of each named policy, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RulesForOperators(NamedTuple):
    """The same rule for each of several operators; ``ops`` is their names, separated by spaces."""

    ops: str
    compute: str
    output: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named policy, as ``Policy.preset`` creates it.

    It has no ``Rule`` objects, because creating one imports torch.

    Attributes:
        meaning: description in one line.
        rules: its rules, in their order.
        compute, tables, master_weights, low_weights: as in ``Policy``.
    """

    meaning: str
    compute: str
    rules: tuple[RulesForOperators, ...] = ()
    tables: str = "native"
    master_weights: bool = False
    low_weights: bool = False

    @property
    def for_scripts(self) -> bool:
        """Whether ``narrowcast run`` accepts it: only ``nc.Stepper`` holds weights in a low format."""
        return not (self.master_weights or self.low_weights)


# Operators that fail in a region on CPU or CUDA when the formats of their floating inputs differ, found by
# tests/policy/test_safe_preset.py, which calls every operator that way. If one device fails, the rule follows
# the table of the other; if both fail, inputs are promoted. Not included:
# - batch_norm and instance_norm write to their running statistics, and a cast would be written to instead;
#   native_batch_norm, native_layer_norm and fake_quantize_* take fp32 parameters with narrow inputs, which a
#   rule would widen;
# - in-place forms, such as x[i] = y, are never cast;
# - fractional_max_pool2d and 3d: only samples passed to a private argument can differ;
#   linear_cross_entropy is experimental Python.
_AS_CUDA_DOES = "addmv chain_matmul linalg_multi_dot mv"
_AS_CPU_DOES = """cholesky_solve grid_sampler_2d grid_sampler_3d linalg_householder_product linalg_lstsq
    linalg_matrix_rank linalg_solve linalg_tensorsolve lu_solve nanquantile orgqr ormqr polar quantile
    triangular_solve"""
PROMOTED = """bilinear complex cross dot embedding_bag heaviside histogram histogramdd index_add index_copy
    index_put index_reduce isclose lerp linalg_cross linalg_ldl_solve linalg_lu_solve linalg_pinv
    linalg_solve_ex linalg_solve_triangular masked_scatter meshgrid put scatter scatter_add scatter_reduce
    sparse_sampled_addmm special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_zeta tensordot vdot
    _sparse_mm.reduce _weight_norm"""
"""Operators whose mixed inputs preset ``safe`` promotes."""

# Operators that apex computes in fp32 and PyTorch's table for CUDA does not. PyTorch decomposes cross_entropy
# into a log_softmax in the input's format. Other differences:
# - softmin, interpolate and normalize are Python functions around softmax, upsample_* and norms;
#   log_sigmoid covers multilabel_soft_margin_loss, a Python function that stays in fp32 after it;
# - local_response_norm squares its input with mul, and a rule for mul would affect the whole model: use
#   rule.module_type("torch.nn.LocalResponseNorm", compute="fp32");
# - interpolate(mode="area") is adaptive_avg_pool*, which apex does not cast elsewhere;
# - in-place powers are never cast, and apex's fp32 Tensor.cpu() was a bug.
# Operators that apex's lists lack (rms_norm, einsum, attention) follow PyTorch's table.
_APEX_FP32 = "cross_entropy_loss ctc_loss gelu grid_sampler log_sigmoid std var"

PRESET_TABLE: dict[str, Preset] = {
    "auto": Preset(
        meaning="the fastest safe format of the device, by rates measured on it or by a table",
        compute="auto",
    ),
    "bf16": Preset(
        meaning="matmuls and convolutions in bfloat16, by the device's own table",
        compute="bf16",
    ),
    "fp16": Preset(
        meaning="matmuls and convolutions in float16, by the device's own table",
        compute="fp16",
    ),
    "fp32": Preset(meaning="everything in float32", compute="fp32"),
    "safe": Preset(
        meaning="auto, with mixed inputs promoted, norm outputs lowered, binary_cross_entropy in fp32",
        compute="auto",
        rules=(
            RulesForOperators("group_norm layer_norm rms_norm", compute="fp32", output="lower"),
            RulesForOperators("binary_cross_entropy", compute="fp32"),
            RulesForOperators(_AS_CPU_DOES, compute="fp32"),
            RulesForOperators(_AS_CUDA_DOES, compute="lower"),
            RulesForOperators(PROMOTED, compute="promote"),
        ),
    ),
    "O0": Preset(meaning="apex's O0: everything in float32", compute="fp32"),
    "O1": Preset(
        meaning="apex's O1: each operator in the format that suits it, one table everywhere",
        compute="auto",
        tables="cuda",
        rules=(RulesForOperators(_APEX_FP32, compute="fp32"),),
    ),
    "O2": Preset(
        meaning="weights in a low format too, with fp32 masters; batch norms in float32",
        compute="auto",
        master_weights=True,
    ),
    "O3": Preset(
        meaning="apex's O3: everything in a low format, without masters or a loss scale",
        compute="auto",
        low_weights=True,
    ),
}
"""Preset name -> preset."""

PRESETS = {name: preset.meaning for name, preset in PRESET_TABLE.items()}
"""Preset name -> description in one line."""

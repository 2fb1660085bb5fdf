"""PyTorch's own autocast tables as data: which operator a region casts how, by type of device.

Read from ``aten/src/ATen/autocast_mode.h`` and ``autocast_mode.cpp`` of PyTorch 2.13, with what 2.11, 2.12
and 2.15 list beside it. Each version lists a part of this; ``native_table`` asks the dispatcher which.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from narrowcast.policy._torch_internals import has_torchs_own_kernel, operator_names

LOWER = "lower"
"""Computed in the region's format."""
FP32 = "fp32"
"""Computed in fp32."""
FP32_SET_DTYPE = "fp32 by dtype="
"""Computed with the op's own optional ``dtype`` set to fp32, where the caller left it unset."""
FP32_APPEND_DTYPE = "fp32 by the overload with dtype"
"""``norm``, handed on to the overload that takes a ``dtype``."""
PROMOTE = "promote"
"""Computed in the widest format among the inputs."""
REFUSE = "refuse"
"""An error."""

_CUDA_BASE = {
    LOWER: """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
        linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention""",
    FP32: """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
        upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    FP32_SET_DTYPE: """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList""",
    FP32_APPEND_DTYPE: "norm.Scalar norm.ScalarOpt_dim",
    PROMOTE: """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
        scatter_add""",
    REFUSE: "binary_cross_entropy",
}
_CPU = {
    LOWER: """conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm
        addmm _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention
        _native_multi_head_attention""",
    PROMOTE: "stack cat index_copy",
    FP32: """_grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d
        binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve
        cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor
        fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn
        fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d
        fractional_max_pool3d geqrf grid_sampler grid_sampler_2d grid_sampler_3d hinge_embedding_loss
        huber_loss inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str
        linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
        linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd
        linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d
        max_unpool2d max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss
        multilabel_margin_loss_forward nanquantile nanquantile.scalar nll_loss nll_loss2d orgqr ormqr pinverse
        poisson_nll_loss polar prod prod.dim_int qr quantile quantile.scalar reflection_pad1d reflection_pad2d
        replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center
        svd trace triangular_solve triplet_margin_loss view_as_complex""",
}
_MPS = {
    LOWER: """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution _mps_convolution prelu addmm addmv addr
        matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell
        scaled_dot_product_attention""",
    PROMOTE: "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add",
    FP32: """acos asin batch_norm binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
        cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm.dim group_norm
        hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord linalg_vector_norm log log10 log1p log2 log_softmax.int logsumexp
        margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss
        nll_loss2d nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar
        pow.Tensor_Tensor prod prod.dim_int reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss
        softmax.int softplus sum sum.dim_IntList tan triplet_margin_loss""",
}


# Overloads for named tensors, until 2.12.
_NAMED = {
    FP32_SET_DTYPE: """cumprod.dimname cumsum.dimname log_softmax.Dimname prod.dim_Dimname softmax.Dimname
        sum.dim_DimnameList""",
    FP32_APPEND_DTYPE: "norm.names_ScalarOpt_dim",
}
_CPU_NAMED = {PROMOTE: "index_copy.dimname", FP32: "prod.dim_Dimname"}
_MPS_NAMED = {FP32: _NAMED[FP32_SET_DTYPE]}  # that table does not set dtype, and has no norm
# Since 2.15; that CUDA's casts it as the CPU's does is inferred, from its family and its one signature.
_SINCE_2_15 = {FP32: "linalg_matrix_sqrth"}
# In builds with cuDNN only, which the kernels of recurrent layers are in.
_CUDNN = {LOWER: "cudnn_convolution cudnn_convolution_transpose _cudnn_rnn"}


def _by_op(*parts: dict[str, str]) -> Mapping[str, str]:
    return MappingProxyType(
        {op: kind for part in parts for kind, names in part.items() for op in names.split()}
    )


TABLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": _by_op(_CPU, _CPU_NAMED, _SINCE_2_15),
        "cuda": _by_op(_CUDA_BASE, _CUDNN, _NAMED, _SINCE_2_15),
        "mps": _by_op(_MPS, _MPS_NAMED),
        **dict.fromkeys(("xpu", "mtia", "maia"), _by_op(_CUDA_BASE, _NAMED)),
    }
)
"""Type of device -> operator (``"softmax.int"``) -> how a region casts it, in some version of PyTorch."""

ONE_DEVICE_ONLY = frozenset({"mkldnn_rnn_layer", "_cudnn_rnn"})
"""What recurrent layers call on one type of device; the table of another has nothing to say about it."""

_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "mps": "AutocastMPS",
    "xpu": "AutocastXPU",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
    "hpu": "AutocastHPU",
    "xla": "AutocastXLA",
    "ipu": "AutocastIPU",
}


def autocast_key(device_type: str) -> str:
    """Name of the dispatch key that a region on ``device_type`` switches on."""
    return _KEYS.get(device_type, "AutocastPrivateUse1")


@functools.cache
def native_table(device_type: str) -> Mapping[str, str]:
    """``TABLES[device_type]`` as far as the installed PyTorch has it; empty for a device without data.

    The same at every moment, whichever rules are in force.
    """
    key = autocast_key(device_type)
    known = set(operator_names())
    table = TABLES.get(device_type, {})
    return MappingProxyType(
        {
            op: k
            for op, k in table.items()
            if f"aten::{op}" in known and has_torchs_own_kernel(f"aten::{op}", key)
        }
    )

"""Names and overloads of PyTorch's operators, and its autocast tables as data.

The names are the dispatcher's: ``"softmax"`` for all overloads, ``"softmax.int"`` for one, ``"mylib::op"``
for another library. Rules exclude overloads that write to an argument (in-place and ``out=`` forms), as
PyTorch's autocast does: a cast argument would be a copy, and the write would be lost.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from narrowcast.errors import PolicyError
from narrowcast.policy._torch_internals import has_torchs_own_kernel, operator_names

# What may stand before an operator in Python. torch.linalg.cross is linalg_cross in the dispatcher.
_PREFIX = re.compile(
    r"(torch\.)?nn\.(functional\.)?|F\.|(torch\.)?Tensor\.|torch\.((?P<kept>linalg|special|fft)\.)?|aten(::|\.)"
)
# Python name -> the dispatcher's name, for suggestions.
_MEANT = {
    "cross_entropy": "cross_entropy_loss",
    "grid_sample": "grid_sampler",
    "logsigmoid": "log_sigmoid",
    "multi_head_attention_forward": "scaled_dot_product_attention",
    "sdpa": "scaled_dot_product_attention",
    "softmin": "softmax",
    "vecdot": "linalg_vecdot",
    "BatchNorm2d": "batch_norm",
    "Conv2d": "conv2d",
    "CrossEntropyLoss": "cross_entropy_loss",
    "GroupNorm": "group_norm",
    "LayerNorm": "layer_norm",
    "Linear": "linear",
    "RMSNorm": "rms_norm",
    "Softmax": "softmax",
}


def canonical_op(name: object) -> str:
    """Return the dispatcher's name of an operator, as ``"softmax"`` for ``"torch.softmax"``.

    Raises:
        PolicyError: PyTorch has no such operator, or autocast never casts it.
    """
    if not isinstance(name, str) or not name:
        raise PolicyError(f'expected the name of an operator, as "softmax" or "softmax.int", got {name!r}')
    word = _without_prefix(name)
    base = base_of(word)
    if overloads_of(word):
        # "linear.default" is the only overload of "linear"; "sum.default" is one of several.
        is_only_overload = word.endswith(".default") and len(overloads_of(base)) == 1
        return base if is_only_overload else word
    if _names(base):
        raise PolicyError(_not_for_rules(name, base))
    raise PolicyError(f"PyTorch has no operator {name!r}. {_guess(base)}")


def overloads_of(name: str) -> tuple[str, ...]:
    """Return the overloads of ``name`` that rules can select, as ``"softmax.int"``; may be empty."""
    overloads = _names(base_of(name))
    if "." in name:
        only = qualified(name).removesuffix(".default")
        overloads = tuple(overload for overload in overloads if overload == only)
    return _for_rules(overloads)


def every_operator() -> tuple[str, ...]:
    """Return every overload that rules can select, from all imported libraries."""
    return _for_rules(operator_names())


def _for_rules(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix("aten::") for name in names if _why_excluded(name) is None)


def operator(name: str) -> Any:
    """Return the ``torch._ops.OpOverload`` called ``name``, as ``"softmax.int"``."""
    import torch

    namespace, _, rest = qualified(name).partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def base_of(name: str) -> str:
    """Return the name without the overload: ``"softmax"`` for ``"softmax.int"``."""
    return name.partition(".")[0]


def qualified(name: str) -> str:
    """Return the name of an operator as the dispatcher spells it, ``"aten::softmax.int"``."""
    return name if "::" in name else f"aten::{name}"


def _without_prefix(name: str) -> str:
    if name.startswith("torch.ops."):
        library, _, rest = name.removeprefix("torch.ops.").partition(".")
        return rest if library == "aten" else f"{library}::{rest}"
    prefix = _PREFIX.match(name)
    if prefix is None:
        return name
    rest = name[prefix.end() :]
    if prefix["kept"]:
        return f"{prefix['kept']}_{rest}"
    return rest


# ---- the dispatcher's operators


def _names(base: str) -> tuple[str, ...]:
    """Return the qualified names of all overloads of ``base``."""
    name = qualified(base)
    # The operators of aten never change, but other libraries may have defined some since.
    if name not in _by_base() or not name.startswith("aten::"):
        _by_base.cache_clear()
    return _by_base().get(name, ())


@functools.cache
def _by_base() -> dict[str, tuple[str, ...]]:
    """Return all operators: qualified name without overload -> the qualified names of its overloads."""
    grouped: dict[str, list[str]] = {}
    for name in operator_names():
        grouped.setdefault(base_of(name), []).append(name)
    return {base: tuple(sorted(names)) for base, names in grouped.items()}


@functools.cache
def _why_excluded(overload: str) -> str | None:
    """Return why rules cannot select an overload, or None if they can."""
    try:
        schema = operator(overload)._schema
    except (AttributeError, RuntimeError):
        return "has no schema"  # in the dispatcher, but unknown to Python
    if schema.is_mutable:
        return "writes to an argument"
    if not any("Tensor" in str(argument.type) for argument in schema.arguments):
        return "takes no tensor"
    return None


# ---- messages


def _not_for_rules(name: str, base: str) -> str:
    known = ", ".join(sorted(overloads_of(base)))
    if known:
        return f"operator {base!r} has no overload {name!r} for rules. Known: {known}."
    # Each reason once, in the order of the overloads.
    reasons: dict[str, None] = {}
    for overload in _names(base):
        reason = _why_excluded(overload)
        if reason is not None:
            reasons[reason] = None
    advice = ""
    if base.endswith("_") and overloads_of(base.rstrip("_")):
        advice = f'; write the rule for "{base.rstrip("_")}"'
    return f"autocast never casts {name!r}, which {' or '.join(reasons)}{advice}"


def _guess(word: str) -> str:
    import torch

    if word in _MEANT:
        return f'Did you mean "{_MEANT[word]}"?'
    if word.islower() and callable(getattr(torch.nn.functional, word, None)):
        return "It is a Python function: write rules for the operators that it calls."
    if "::" in word:
        return f"Import the library that defines {word.partition('::')[0]!r} first."
    names = [base.removeprefix("aten::") for base in _by_base() if not base.startswith("aten::_")]
    near = difflib.get_close_matches(word.lower(), names, n=3)
    if near:
        return "Did you mean " + " or ".join(f'"{name}"' for name in near) + "?"
    return 'For an operator of another library, import the library and write "mylib::op".'


# ---- PyTorch's autocast tables
#
# Read from aten/src/ATen/autocast_mode.h and autocast_mode.cpp of PyTorch 2.13, with the additions
# of 2.11, 2.12 and 2.15. Each version lists a part of them; native_table asks the dispatcher which.

LOWER = "lower"
"""Computed in the region's format."""
FP32 = "fp32"
"""Computed in fp32."""
FP32_SET_DTYPE = "fp32 by dtype="
"""Computed with the operator's optional ``dtype`` set to fp32 if the caller did not set it."""
FP32_APPEND_DTYPE = "fp32 by the overload with dtype"
"""``norm``, redirected to the overload with a ``dtype``."""
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
        conv_transpose2d.input convolution _mps_convolution prelu addmm addmv addr matmul einsum mm mv linear
        addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell scaled_dot_product_attention""",
    PROMOTE: "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add",
    FP32: """acos asin batch_norm binary_cross_entropy_with_logits cdist conv_transpose3d.input cosh
        cosine_embedding_loss cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm.dim
        group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_norm
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
_MPS_NAMED = {FP32: _NAMED[FP32_SET_DTYPE]}  # the MPS table sets no dtype and has no norm
# Since 2.15. That CUDA casts it as the CPU does is inferred from the other matrix functions.
_SINCE_2_15 = {FP32: "linalg_matrix_sqrth"}
# Only in builds with cuDNN.
_CUDNN = {LOWER: "cudnn_convolution cudnn_convolution_transpose _cudnn_rnn"}


def _by_op(*parts: dict[str, str]) -> Mapping[str, str]:
    """Return operator -> how it is cast, from tables that list the operators of each way."""
    kind_of = {}
    for part in parts:
        for kind, ops in part.items():
            kind_of.update(dict.fromkeys(ops.split(), kind))
    return MappingProxyType(kind_of)


TABLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": _by_op(_CPU, _CPU_NAMED, _SINCE_2_15),
        "cuda": _by_op(_CUDA_BASE, _CUDNN, _NAMED, _SINCE_2_15),
        "mps": _by_op(_MPS, _MPS_NAMED),
        **dict.fromkeys(("xpu", "mtia", "maia"), _by_op(_CUDA_BASE, _NAMED)),
    }
)
"""Device type -> operator (``"softmax.int"``) -> how a region casts it, over all versions of PyTorch."""

ONE_DEVICE_ONLY = frozenset({"mkldnn_rnn_layer", "_cudnn_rnn"})
"""Operators of recurrent layers that exist on one device type only."""

_WITH_OWN_KEY = ("cpu", "cuda", "mps", "xpu", "mtia", "maia", "hpu", "xla", "ipu")


def autocast_key(device_type: str) -> str:
    """Return the dispatch key of autocast, as ``"AutocastCUDA"``; devices without their own share one."""
    return f"Autocast{device_type.upper()}" if device_type in _WITH_OWN_KEY else "AutocastPrivateUse1"


@functools.cache
def native_table(device_type: str) -> Mapping[str, str]:
    """Return ``TABLES[device_type]`` limited to the installed PyTorch; empty for an unknown device."""
    key = autocast_key(device_type)
    installed = set(operator_names())
    table = {}
    for op, kind in TABLES.get(device_type, {}).items():
        name = f"aten::{op}"
        if name in installed and has_torchs_own_kernel(name, key):
            table[op] = kind
    return MappingProxyType(table)

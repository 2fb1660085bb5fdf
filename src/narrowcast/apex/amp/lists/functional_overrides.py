"""Functions of ``torch.nn.functional``."""

from torch.nn import functional as MODULE

__all__ = ["BANNED_FUNCS", "FP16_FUNCS", "FP32_FUNCS", "MODULE"]

FP16_FUNCS = [
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
    "linear",
]  # fmt: skip
FP32_FUNCS = [
    "interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax", "gelu", "layer_norm",
    "group_norm", "local_response_norm", "normalize", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss",
    "nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss",
    "triplet_margin_loss", "ctc_loss",
]  # fmt: skip
BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "binary_cross_entropy computes log(x) of numbers that half rounds to 0 or 1, so that the loss would "
        "be infinite. Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) in place of a sigmoid before "
        "it, which is safe in any format; or call it in float32: register it with "
        "amp.register_float_function(torch.nn.functional, 'binary_cross_entropy') before amp.initialize, or "
        "cast its inputs",
    )
]

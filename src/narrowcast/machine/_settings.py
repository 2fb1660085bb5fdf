"""Settings of torch that change what FP32 itself computes."""

from __future__ import annotations

import torch


def arithmetic_settings() -> dict[str, str | bool]:
    """How FP32 products are computed now, as JSON-ready values.

    float32_matmul_precision is torch's: ``"highest"`` is FP32, ``"high"`` allows TF32 or three bf16 products,
    ``"medium"`` one bf16 product. The ``allow_tf32`` flags are cuDNN's and cuBLAS's; without a CUDA device
    they change nothing. A script may set them itself, so ask at its end.
    """
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda_matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }

"""The lines that warnings name, and one of a low sigmoid in front of ``binary_cross_entropy``.

bf16 rounds sigmoid(7) to 1. If the target is 0, the gradient of the sigmoid is 0, and training stops without
an error. Only calls on a CPU are checked; regions on CUDA refuse them.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting._torch_internals import is_proxy_tracing, is_tracing, is_transforming

warned: list[str] = []  # once a process


def stacklevel_outside(package: str | tuple[str, ...]) -> int:
    """Return the ``stacklevel`` with which the calling function names the first line outside ``package``.

    That is the beginning of the names of modules, or several.
    """
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        level, frame = level + 1, frame.f_back
    return level


def watched_cross_entropy(below: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(below)
    def binary_cross_entropy(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not warned and (lost := _lost(input, target)):
            warned.append(
                f"{lost} of {input.numel()} outputs of a sigmoid are rounded to 0 or 1 where the target of "
                "binary_cross_entropy is another, and get no gradient: use BCEWithLogitsLoss without the "
                'sigmoid, or a policy with nc.rule.op("sigmoid", compute="fp32")'
            )
            warnings.warn(warned[0], UserWarning, stacklevel=stacklevel_outside("torch."))
        return below(input, target, *args, **kwargs)

    return binary_cross_entropy


def _lost(probabilities: torch.Tensor, target: torch.Tensor) -> int:
    """Return how many ``probabilities`` of a sigmoid in a low format are 1 or 0, and should not be."""
    node, low, name = probabilities.grad_fn, probabilities.dtype.itemsize == 2, ""
    for _ in range(6):  # views and casts after the sigmoid
        if node is None or (name := node.name()) == "SigmoidBackward0":
            break
        low = low or name == "ToCopyBackward0"
        node = node.next_functions[0][0] if node.next_functions else None
    if not low or name != "SigmoidBackward0" or probabilities.shape != target.shape:
        return 0
    if not probabilities.is_cpu or is_transforming() or is_tracing() or is_proxy_tracing():
        return 0
    wrong = ((probabilities == 1) & (target < 1)) | ((probabilities == 0) & (target > 0))
    return int(wrong.sum())

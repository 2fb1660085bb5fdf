"""The ``stacklevel`` of warnings, and the warning of a low-precision sigmoid before ``binary_cross_entropy``.

bf16 rounds sigmoid(7) to 1. If the target is 0, the gradient of the sigmoid is 0, and training stops without
an error. Only calls on a CPU are checked: in regions on CUDA, ``binary_cross_entropy`` raises.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting._torch_internals import is_proxy_tracing, is_tracing, is_transforming

warned: list[str] = []
"""The warning, after it was given: it is given once in a process."""


def stacklevel_outside(package: str | tuple[str, ...]) -> int:
    """Return the ``stacklevel`` with which the calling function names the first line outside ``package``.

    Args:
        package: the prefix of the names of modules to pass over, or several prefixes.
    """
    # 1 is the line in the calling function, 2 the line that called it, which is in frame 2 seen from here.
    level = 2
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        level += 1
        frame = frame.f_back
    return level


def watched_cross_entropy(below: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``binary_cross_entropy``, to warn of outputs of a sigmoid that get no gradient."""

    @functools.wraps(below)
    def binary_cross_entropy(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if not warned and not torch.compiler.is_compiling():
            count_lost = _count_lost(input, target)
            if count_lost:
                warned.append(
                    f"{count_lost} of {input.numel()} outputs of a sigmoid are rounded to 0 or 1 where the "
                    "target of binary_cross_entropy is another, and get no gradient: use BCEWithLogitsLoss "
                    'without the sigmoid, or a policy with nc.rule.op("sigmoid", compute="fp32")'
                )
                warnings.warn(warned[0], UserWarning, stacklevel=stacklevel_outside("torch."))
        return below(input, target, *args, **kwargs)

    return binary_cross_entropy


def _count_lost(probabilities: torch.Tensor, target: torch.Tensor) -> int:
    """Return how many outputs of a low-precision sigmoid are 1 or 0 where the target is another."""
    if not probabilities.is_cpu or probabilities.shape != target.shape:
        return 0
    if is_transforming() or is_tracing() or is_proxy_tracing():
        return 0
    if not _is_of_low_sigmoid(probabilities):
        return 0
    wrong = ((probabilities == 1) & (target < 1)) | ((probabilities == 0) & (target > 0))
    return int(wrong.sum())


def _is_of_low_sigmoid(probabilities: torch.Tensor) -> bool:
    """Return whether ``probabilities`` come from a sigmoid in a low format.

    Up to five operators may follow the sigmoid, such as views; which ones is not checked. If one of them is a
    cast, the sigmoid is assumed to have been in a low format.
    """
    is_low = probabilities.dtype.itemsize == 2
    node = probabilities.grad_fn
    for _ in range(6):
        if node is None:
            return False
        if node.name() == "SigmoidBackward0":
            return is_low
        if node.name() == "ToCopyBackward0":
            is_low = True
        node = node.next_functions[0][0] if node.next_functions else None
    return False

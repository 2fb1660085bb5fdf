"""Distributions of torch that are made from probabilities in bf16 or fp16, in regions that promote.

``Categorical(probs=...)`` mostly raises for these, since rounded probabilities do not add up to 1 within
1e-6. Others clamp probabilities to the eps of their format, 0.008 in bf16: the logarithm of a smaller one is
wrong, and its gradient is zero. So these distributions take their probabilities in fp32. Under ``run``, those
that come straight from a sigmoid or a softmax are computed again in fp32; all others are only cast.
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributions/utils.py
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting._torch_internals import Replacements
from narrowcast.casting.kernels._direct_results import in_fp32_for
from narrowcast.casting.kernels._operators import LOW
from narrowcast.casting.regions._scopes import is_promoting


def _of_probabilities() -> list[type]:
    """Return the distributions of torch that have a constructor of their own, with an argument ``probs``.

    One that inherits its constructor runs that of its parent, which is replaced.
    """
    made_from_probabilities = []
    for name in torch.distributions.__all__:
        kind = getattr(torch.distributions, name)
        has_own = inspect.isclass(kind) and "__init__" in vars(kind)
        if has_own and "probs" in _parameters(kind.__init__):
            made_from_probabilities.append(kind)
    return made_from_probabilities


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _taking_fp32(below: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that, in regions that promote, casts probabilities in bf16 or fp16 to fp32."""
    position = _parameters(below).index("probs")

    @functools.wraps(below)
    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807
        if is_promoting():
            if len(args) > position:
                args = (*args[:position], _in_fp32(args[position]), *args[position + 1 :])
            elif "probs" in kwargs:
                kwargs["probs"] = _in_fp32(kwargs["probs"])
        below(*args, **kwargs)

    return __init__


def _in_fp32(probs: Any) -> Any:
    if not isinstance(probs, torch.Tensor) or probs.dtype not in LOW:
        return probs
    # Where a noted result cannot be computed again and is only cast, a message says what the model did with
    # it: "Net made a distribution of a softmax that was computed in bf16, since ...".
    return in_fp32_for("made a distribution of", probs)


DISTRIBUTIONS = Replacements(*((kind, "__init__", _taking_fp32) for kind in _of_probabilities()))
"""The constructors that stand for torch's as long as a ``Promotion`` lives."""

"""Limits that decide when a gradient is lost: the verdict of a certificate and the page both go by them."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Error over noise of all parameters together. Noise is the difference of two batches, with twice the variance
# of one. So a random error of 0.05 of the noise adds 2 * 0.05**2 = 0.5 % to the variance of a step, as a
# batch smaller by 0.5 % would; one of 0.1 adds 2 %. Measured on a CPU, batches of 8 to 512, at the start and
# after 60 steps, largest found: bf16 embeddings 0.006, LSTM and GRU 0.009, LayerNorm 0.019, transformer
# 0.019, VAE 0.038, MLP with ReLU 0.049, small convolutions with batch norm and ReLU 0.082 (rounding turns
# single ReLUs on or off); fp16 with a fitting scale 0.016. Gradients 2**-10 too small for fp16 0.55 and up.
# Between the two limits a network that rounds badly and one that loses a little of its gradient look the
# same.
TOTAL_LIMIT = 0.05
TOTAL_FAILS = 0.1
# Error of one parameter, over its noise or its gradient, whichever is larger: with few elements one of them
# may be small by chance (a bias of one element reached 0.22 of its noise at a relative error of 0.025), but
# rarely both. The largest found in the models above is 0.13 (a batch norm's bias, batches of 8). The error of
# a gradient that is flushed to zero is the gradient itself, and its noise is at most 1.4 times as large: the
# ratio is 0.7 or more.
PARAMETER_LIMIT = 0.25
# Relative error of one parameter, where there is no noise. It holds from ENOUGH_ELEMENTS elements on: the
# gradient of fewer may be small by chance.
LOST = 0.5
ENOUGH_ELEMENTS = 16
# Relative error of outputs: about thirteen roundoffs of bf16 (2**-8).
OUTPUT_LIMIT = 0.05


def parameter_error(
    error_norm: float | None, noise_norm: float | None, gradient_norm: float | None
) -> float | None:
    """Divide a parameter's error by its noise or its gradient, whichever is larger.

    Return None if the error is None, or if both of these are zero or None.
    """
    yardstick = max(noise_norm or 0.0, gradient_norm or 0.0)
    if error_norm is None or yardstick == 0:
        return None
    return error_norm / yardstick


def parameter_limit(shape: Sequence[int], *, has_noise: bool) -> float:
    """Return the error above which one parameter's gradient is lost; infinity: it is too small to tell."""
    if has_noise:
        return PARAMETER_LIMIT
    if math.prod(shape) >= ENOUGH_ELEMENTS:
        return LOST
    return math.inf

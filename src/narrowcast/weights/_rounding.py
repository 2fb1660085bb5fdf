"""Stochastic rounding to bfloat16 and float16, with no loop and no host sync."""

from __future__ import annotations

import torch

from narrowcast.errors import UnsupportedError

LOW_DTYPES = (torch.bfloat16, torch.float16)

_HALF_SMALLEST_NORMAL = 2.0**-14
_HALF_SUBNORMAL_UNIT = 2.0**-24


def round_stochastically(
    values: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> torch.Tensor:
    """``values`` rounded to one of its two neighbours in ``dtype``, at random, so that the mean is exact.

    The neighbour of larger magnitude is taken with a probability equal to the fraction of the way to it, and
    a number of ``dtype`` always stays as it is. The probability is exact for bfloat16. For float16 it is
    exact where the value is a multiple of 2**-55, and below that off by less than 2**-31: what is under
    2**-55 becomes a zero. The sign is kept, that of zero too. Subnormals are rounded like other numbers.
    Infinities stay, NaNs stay NaNs. Between the largest finite number and the next power of two the far
    neighbour is infinity, with its probability; from there on the result is infinite.

    Args:
        values: float32, any shape, strides and device.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        generator: of the device of ``values``; None draws from torch's default one.

    Returns:
        A new tensor of ``dtype`` with the shape, strides and device of ``values``.

    Raises:
        UnsupportedError: another dtype, on either side.

    Source: Gupta et al. 2015, arXiv 1502.02551, section 3; ``formats.round_to`` is the slow reference.
    """
    if dtype not in LOW_DTYPES or values.dtype != torch.float32:
        raise UnsupportedError(
            f"stochastic rounding goes from float32 to bfloat16 or float16, not from {_name(values.dtype)} "
            f"to {_name(dtype)}: convert the values to float32 first, or round to nearest with .to({dtype})"
        )
    with torch.no_grad():
        return rounded_with(values, dtype, _noise(values, dtype, generator))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _noise(values: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None) -> torch.Tensor:
    """Random integers, int32, of as many bits as ``rounded_with`` takes for ``dtype``."""
    if dtype == torch.bfloat16:
        words = torch.empty((values.numel() + 3) // 4, dtype=torch.int64, device=values.device)
        # Without its limits random_ leaves the sign bit of an int64 at zero.
        words.random_(torch.iinfo(torch.int64).min, None, generator=generator)
        sixteen_bits = words.view(torch.int16)[: values.numel()].to(torch.int32)
        return sixteen_bits.bitwise_and_(0xFFFF).view(values.shape)
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    return noise.random_(generator=generator)


def rounded_with(values: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor) -> torch.Tensor:
    """``values`` rounded away from zero where ``noise``, complemented, is below the fraction to round.

    ``noise`` is int32, of 16 bits for bfloat16 and 31 for float16.
    """
    bits = values.view(torch.int32)
    if dtype == torch.bfloat16:
        rounded = ((bits + noise) & -0x10000).view(torch.float32)
    else:
        rounded = ((bits + (noise >> 18)) & -0x2000).view(torch.float32)
        # Below the smallest normal number the step no longer shrinks, so that more bits than 13 are dropped.
        steps = values.abs().clamp(max=_HALF_SMALLEST_NORMAL) / _HALF_SUBNORMAL_UNIT
        whole = steps.floor()
        fraction = ((steps - whole) * 2.0**31).to(torch.int32)
        away = noise > (2**31 - 1) - fraction
        subnormal = ((whole + away) * _HALF_SUBNORMAL_UNIT).copysign(values)
        rounded = torch.where(values.abs() < _HALF_SMALLEST_NORMAL, subnormal, rounded)
    # A NaN's bits plus noise may spell an infinity or a number.
    return torch.where(values.isnan(), values, rounded).to(dtype)

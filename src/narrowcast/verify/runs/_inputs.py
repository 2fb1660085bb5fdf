"""Columns of a model's input whose numbers a narrow format rounds away, as raw temperatures in kelvin."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from narrowcast.attach import is_functorch_wrapped
from narrowcast.casting import tensors_inside

_MOST_ROWS = 4096
# Fewer rows do not tell the spread of a column.
_FEWEST_ROWS = 8
# Training tolerates a smaller share: it is the limit of the gradients' error, too.
_SHARE_LIMIT = 0.05


class RoundedColumn(msgspec.Struct, frozen=True):
    """A column of an input: its mean, its spread, and how large the rounding error is beside the spread.

    Attributes:
        column: from 0; ``columns``: how many the input has.
        mean: over the rows; ``spread``: the standard deviation.
        share: standard deviation of the rounding error over ``spread``.
        share_standardized: the same after the mean is subtracted and the column divided by its spread.
    """

    column: int
    columns: int
    mean: float
    spread: float
    share: float
    share_standardized: float


def most_rounded_column(inputs: Any, dtype: torch.dtype) -> RoundedColumn | None:
    """Return the column of all inputs that loses most of its spread in ``dtype``; None: none loses much.

    Only fp32 tensors of two dimensions (a row a sample) or three (sequences of such rows) are looked at.
    Images and tokens are passed over, since a pixel or a token has no column of its own.
    """
    worst: RoundedColumn | None = None
    for tensor in tensors_inside(inputs):
        if tensor.dtype != torch.float32 or tensor.ndim not in (2, 3) or tensor.layout != torch.strided:
            continue
        if type(tensor) is not torch.Tensor or tensor.is_meta or is_functorch_wrapped(tensor):
            continue
        rows = tensor.detach().flatten(0, -2)
        # Of very many rows, evenly spaced ones are enough.
        rows = rows[:: max(1, math.ceil(len(rows) / _MOST_ROWS))]
        if len(rows) < _FEWEST_ROWS or not rows.shape[1]:
            continue
        found = _most_rounded(rows.cpu().double(), dtype)
        if found is not None and (worst is None or found.share > worst.share):
            worst = found
    return worst


def _most_rounded(rows: torch.Tensor, dtype: torch.dtype) -> RoundedColumn | None:
    """Return the column of a float64 matrix that loses most of its spread; None: none loses much."""
    mean, spread = rows.mean(0), rows.std(0)
    share = _rounding(rows, dtype) / spread
    # A constant column has nothing to lose, and one with a NaN or an overflow fails in other ways.
    share[~share.isfinite()] = 0.0
    column = int(share.argmax())
    if share[column] < _SHARE_LIMIT:
        return None
    standardized = (rows[:, column] - mean[column]) / spread[column]
    return RoundedColumn(
        column=column,
        columns=rows.shape[1],
        mean=float(mean[column]),
        spread=float(spread[column]),
        share=float(share[column]),
        share_standardized=float(_rounding(standardized, dtype)),
    )


def _rounding(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the standard deviation of the rounding error along the first dimension."""
    # Programs round from fp32, so a double is first rounded to that.
    in_fp32 = values.float()
    return (in_fp32.to(dtype).double() - in_fp32.double()).std(0)

"""What a step trace holds: weights and gradients at one moment; exact as JSON, to four decimals as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from narrowcast.observe.capture import json_ready

TRACE_SCHEMA = 1
_WIDTHS = {"stage": 8, "tensor": 21, "weight": 22, "gradient": 23}
_GAP = "  "
_MOST_SHOWN = 2
_FIXED_FROM, _FIXED_BELOW = 5e-5, 1e7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """Every weight and gradient at one moment of a step, as copies on the devices of their own.

    Attributes:
        name: ``"forward"`` (as the step began), ``"backward"``, ``"unscale"``, ``"before step"``, ``"step"``,
            ``"zeroed"`` or ``"end"``.
        weights: by the name of the parameter, in the parameter's shape and dtype.
        gradients: as ``weights``; None where there was none. Sparse ones are dense here.
    """

    name: str
    weights: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]


def described(tensor: torch.Tensor | None, most_values: int | None = None) -> dict[str, Any] | None:
    """A tensor as JSON: dtype, shape, the counts and extremes of its numbers, and the numbers, exact.

    ``norm`` is that of all numbers in float64, NaN or infinite where one of them is; ``min`` and ``max`` are
    those of the finite ones, null where there are none. ``values`` are nested lists in the tensor's shape,
    null past ``most_values`` of them; NaN and infinities are text, since JSON has none.
    """
    if tensor is None:
        return None
    numbers = _wide(tensor)
    flat = numbers.flatten()
    finite = flat[flat.isfinite()]
    extremes = finite.aminmax() if finite.numel() else None
    whole = most_values is None or numbers.numel() <= most_values
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "norm": json_ready(float(torch.linalg.vector_norm(flat))),
        "min": None if extremes is None else float(extremes.min),
        "max": None if extremes is None else float(extremes.max),
        "nan": int(flat.isnan().sum()),
        "infinite": int(flat.isinf().sum()),
        "values": json_ready(numbers.tolist()) if whole else None,
    }


def stage_as_json(stage: Stage, most_values: int | None) -> dict[str, Any]:
    """One stage: weight and gradient of each parameter by name."""
    return {
        "stage": stage.name,
        "parameters": {
            name: {
                "weight": described(weight, most_values),
                "gradient": described(stage.gradients[name], most_values),
            }
            for name, weight in stage.weights.items()
        },
    }


def table_head() -> list[str]:
    """The line that names the columns, and one under it."""
    return [_row(_WIDTHS), _row({name: "-" * width for name, width in _WIDTHS.items()})]


def stage_lines(stage: Stage, label: str) -> list[str]:
    """Rows of one stage; nothing is wider than 80 columns, and long names go on in the next line."""
    rows: list[tuple[str, str, str]] = []
    for name, weight in stage.weights.items():
        shape = [] if weight.numel() <= _MOST_SHOWN else [f"  {_shape(weight)}"]
        cells = ([*_broken(name, _WIDTHS["tensor"]), *shape], _cell(weight), _cell(stage.gradients[name]))
        rows += zip_longest(*cells, fillvalue="")
    labels = textwrap.wrap(label, _WIDTHS["stage"], subsequent_indent=" ")  # else "step" begins a stage
    named = zip_longest(labels, rows, fillvalue="")
    return [_row(dict(zip(_WIDTHS, (text, *(row or ("", "", ""))), strict=True))) for text, row in named]


def tensor_line(name: str, tensor: torch.Tensor) -> str:
    """An input or output in one line: dtype, shape, and its numbers or what they come to."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name}  {dtype} {_shape(tensor)}  {', '.join(' '.join(line.split()) for line in _cell(tensor))}"


def number_text(value: float) -> str:
    """To four decimals; where these would show a zero, or far too many digits, as a power of ten.

    >>> number_text(-242.25), number_text(0.0), number_text(1e-7), number_text(float("inf"))
    ('-242.2500', '0.0000', '1.0000e-07', 'inf')
    """
    if value == 0 or _FIXED_FROM <= abs(value) < _FIXED_BELOW or not math.isfinite(value):
        return f"{value:.4f}"
    return f"{value:.4e}"


def _cell(tensor: torch.Tensor | None) -> list[str]:
    if tensor is None:
        return ["none"]
    if tensor.numel() <= _MOST_SHOWN:
        return [", ".join(map(number_text, _wide(tensor).flatten().tolist())) or "empty"]
    told = described(tensor, 0)
    assert told is not None
    lines = [f"norm {number_text(float(told['norm']))}"]
    if told["min"] is not None:
        lines += [f"min  {number_text(told['min'])}", f"max  {number_text(told['max'])}"]
    if bad := told["nan"] + told["infinite"]:
        lines.append(f"{bad} not finite")
    return lines


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64 on the host, which is exact; complex numbers as pairs of real ones."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.cpu().double()


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"


def _broken(name: str, width: int) -> list[str]:
    return [name[start : start + width] for start in range(0, len(name), width)] or [""]


def _row(cells: Mapping[str, Any]) -> str:
    texts = (name if isinstance(text, int) else text for name, text in cells.items())
    padded = (text.ljust(width) for text, width in zip(texts, _WIDTHS.values(), strict=True))
    return _GAP.join(padded).rstrip()

"""Define the opt levels of apex: the settings of each, and which of them may be changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from narrowcast.errors import AmpError

LOW_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """The settings of one ``amp.initialize``.

    Attributes:
        enabled: False if ``amp.initialize`` was called with ``enabled=False``.
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``.
        cast_model_type: the type of the model's weights and inputs; None leaves both alone (O1).
        patch_torch_functions: whether functions are cast by ``amp.lists`` (O1).
        keep_batchnorm_fp32: whether batch norms stay in float32 where weights are cast to half. O0 and O1,
            which cast no weights to half, have None.
        master_weights: whether the optimizer updates float32 masters; None under O1.
        loss_scale: ``"dynamic"``, or a fixed number.
        cast_model_outputs: the type of the model's floating outputs; None: float32 where the model is cast
            (O0, O2, O3), and no cast under O1.
        half_type: the format of FP16 functions under O1, and of weights under O2 and O3.
    """

    enabled: bool = True
    opt_level: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    cast_model_outputs: torch.dtype | None = None
    half_type: torch.dtype = torch.float16

    @property
    def options(self) -> dict[str, Any]:
        """All settings by name, as scripts of apex read them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


# The table of apex's documentation: https://nvidia.github.io/apex/amp.html
_LEVELS = {
    "O0": Properties(
        opt_level="O0",
        cast_model_type=torch.float32,
        patch_torch_functions=False,
        keep_batchnorm_fp32=None,
        master_weights=False,
        loss_scale=1.0,
    ),
    "O1": Properties(
        opt_level="O1",
        cast_model_type=None,
        patch_torch_functions=True,
        keep_batchnorm_fp32=None,
        master_weights=None,
        loss_scale="dynamic",
    ),
    "O2": Properties(
        opt_level="O2",
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale="dynamic",
    ),
    "O3": Properties(
        opt_level="O3",
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        keep_batchnorm_fp32=False,
        master_weights=False,
        loss_scale=1.0,
    ),
}
DISABLED = replace(_LEVELS["O0"], enabled=False)
"""What scripts read where amp is turned off: the values of O0, though no weight or loss is touched."""


def properties(opt_level: Any, *, half_type: Any = None, **asked: Any) -> Properties:
    """Return the settings of a level, replaced by those in ``asked`` that are not None."""
    if opt_level not in _LEVELS:
        raise AmpError(
            f"expected opt_level to be 'O0', 'O1', 'O2' or 'O3', got {opt_level!r}; the first character is "
            "the letter O, not the number zero"
        )
    settings = {}
    for name, value in asked.items():
        if value is not None:
            settings[name] = _checked(opt_level, name, value)

    if half_type not in (None, *LOW_DTYPES):
        raise AmpError(f"expected half_type to be torch.float16 or torch.bfloat16, got {half_type!r}")
    model_type = settings.get("cast_model_type")
    if model_type in LOW_DTYPES and half_type not in (None, model_type):
        raise AmpError(
            f"expected cast_model_type and half_type to be one format, got {model_type} and {half_type}; "
            "leave half_type out"
        )

    # Under O2 and O3 there is one half format: that of the weights.
    chosen = replace(_LEVELS[opt_level], **settings)
    if chosen.cast_model_type not in LOW_DTYPES:
        return replace(chosen, half_type=half_type or torch.float16)
    half = half_type or chosen.cast_model_type
    return replace(chosen, cast_model_type=half, half_type=half)


def _checked(opt_level: str, name: str, value: Any) -> Any:
    """Check one setting and convert it to its type."""
    if opt_level == "O1" and name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
        # What O1 does in any case: the weights stay in float32.
        if name == "cast_model_type" and (value is False or value is torch.float32):
            return None
        raise AmpError(
            f"expected no {name} with opt_level='O1', which casts around functions and leaves the weights in "
            f"float32, got {value!r}; to cast the model choose 'O2' or 'O3', and for functions in bfloat16 "
            "give half_type=torch.bfloat16"
        )
    if name == "loss_scale":
        return _checked_scale(value)
    if name in ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights"):
        # Scripts pass on text from their command line.
        if name != "master_weights" and isinstance(value, str):
            value = {"True": True, "False": False}.get(value, value)
        if not isinstance(value, bool):
            raise AmpError(f"expected {name} to be True, False or None, got {value!r}")
        if name == "patch_torch_functions" and value and opt_level != "O1":
            raise AmpError("expected patch_torch_functions=True only with opt_level='O1', which sets it")
        return value
    # As in apex, False means that the model is not cast.
    if name == "cast_model_type" and value is False:
        return None
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise AmpError(f"expected {name} to be a floating torch.dtype, as torch.float16, got {value!r}")
    return value


def _checked_scale(value: Any) -> float | str:
    if isinstance(value, str) and value == "dynamic":
        return value
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise AmpError(f"expected loss_scale to be 'dynamic' or a finite number above 0, got {value!r}")
    return scale

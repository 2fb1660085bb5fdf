"""apex's opt levels as frozen values: what each sets, what may be changed, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from narrowcast.errors import AmpError

LOW_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """What one call of ``amp.initialize`` asks for.

    Attributes:
        enabled: False where amp was asked to do nothing.
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``.
        cast_model_type: what the model's weights and inputs are cast to; None: to nothing (O1).
        patch_torch_functions: whether functions cast by the lists (O1).
        keep_batchnorm_fp32: whether batch norms keep their weights in float32; None where that means nothing.
        master_weights: whether the optimizer works on float32 masters; None where that means nothing.
        loss_scale: ``"dynamic"``, or a number that stays.
        cast_model_outputs: what the model's floating outputs are cast to; None: float32 where the model is
            cast (O0, O2, O3), as they come under O1.
        half_type: the format that half means: of FP16 functions under O1, of weights under O2 and O3.
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
        """All of it by name, as scripts of apex read it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_LEVELS: dict[str, dict[str, Any]] = {
    "O0": {
        "cast_model_type": torch.float32,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": None,
        "master_weights": False,
        "loss_scale": 1.0,
    },
    "O1": {
        "cast_model_type": None,
        "patch_torch_functions": True,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": "dynamic",
    },
    "O2": {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    },
    "O3": {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": 1.0,
    },
}
DISABLED = Properties(enabled=False, opt_level="O0", **_LEVELS["O0"])
"""Where amp was asked to do nothing."""


def properties(
    opt_level: Any,
    *,
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: Any = None,
    half_type: Any = None,
) -> Properties:
    """The level with what was given in its place; None leaves the level's own.

    Raises:
        AmpError: no such level, or a setting that the level excludes or that cannot be read.
    """
    if opt_level not in _LEVELS:
        raise AmpError(
            f"expected opt_level to be 'O0', 'O1', 'O2' or 'O3', got {opt_level!r}; the first character is "
            "the letter O, not the number zero"
        )
    chosen = dict(_LEVELS[opt_level])
    casts_functions = opt_level == "O1"
    if patch_torch_functions is not None:
        chosen["patch_torch_functions"] = _patching(patch_torch_functions, casts_functions)
    if cast_model_type is not None:
        chosen["cast_model_type"] = _model_type(cast_model_type, casts_functions)
    if keep_batchnorm_fp32 is not None:
        chosen["keep_batchnorm_fp32"] = _keeping(keep_batchnorm_fp32, casts_functions)
    if master_weights is not None:
        chosen["master_weights"] = _masters(master_weights, casts_functions)
    if loss_scale is not None:
        chosen["loss_scale"] = _scale(loss_scale)
    if cast_model_outputs is not None:
        chosen["cast_model_outputs"] = _floating("cast_model_outputs", cast_model_outputs)
    return Properties(opt_level=opt_level, **_in_one_half(chosen, half_type, cast_model_type))


def _in_one_half(chosen: dict[str, Any], half_type: Any, given: Any) -> dict[str, Any]:
    """``chosen`` with one format for half, whichever of the two settings named it."""
    if half_type is not None and half_type not in LOW_DTYPES:
        raise AmpError(f"expected half_type to be torch.float16 or torch.bfloat16, got {half_type!r}")
    model_type = chosen["cast_model_type"]
    if model_type not in LOW_DTYPES:
        return {**chosen, "half_type": half_type or torch.float16}
    if given is None:
        model_type = half_type or model_type
    elif half_type not in (None, model_type):
        raise AmpError(
            f"expected cast_model_type and half_type to be one format, got {model_type} and {half_type}; "
            "leave half_type out"
        )
    return {**chosen, "cast_model_type": model_type, "half_type": model_type}


def _patching(value: Any, casts_functions: bool) -> bool:
    if value and not casts_functions:
        raise AmpError(
            "expected patch_torch_functions=True only with opt_level='O1', which sets it itself; choose "
            "opt_level='O1', or leave it out"
        )
    return bool(value)


def _model_type(value: Any, casts_functions: bool) -> torch.dtype | None:
    if casts_functions:
        if value is not False and value is not torch.float32:
            raise AmpError(
                "expected no cast_model_type with opt_level='O1', which casts around functions and leaves "
                f"the weights in float32, got {value!r}; to cast the model choose 'O2' or 'O3', and for "
                "functions in bfloat16 give half_type=torch.bfloat16"
            )
        return None
    return None if value is False else _floating("cast_model_type", value)


def _keeping(value: Any, casts_functions: bool) -> bool:
    if casts_functions:
        raise AmpError(
            "expected no keep_batchnorm_fp32 with opt_level='O1', where every weight stays in float32, got "
            f"{value!r}; leave it out"
        )
    known: dict[Any, bool] = {"True": True, "False": False}
    value = known.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise AmpError(
            "expected keep_batchnorm_fp32 to be True, False, None or the string 'True' or 'False', got "
            f"{value!r}"
        )
    return value


def _masters(value: Any, casts_functions: bool) -> bool:
    if casts_functions:
        raise AmpError(
            "expected no master_weights with opt_level='O1', where the weights themselves are float32, got "
            f"{value!r}; leave it out, or choose 'O2'"
        )
    if not isinstance(value, bool):
        raise AmpError(f"expected master_weights to be True, False or None, got {value!r}")
    return value


def _scale(value: Any) -> float | str:
    if isinstance(value, str) and value == "dynamic":
        return value
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise AmpError(f"expected loss_scale to be 'dynamic' or a finite number above 0, got {value!r}")
    return scale


def _floating(name: str, value: Any) -> torch.dtype:
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise AmpError(f"expected {name} to be a floating torch.dtype, as torch.float16, got {value!r}")
    return value

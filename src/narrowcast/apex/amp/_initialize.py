"""``amp.initialize``: prepare models and optimizers for one of apex's levels."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.apex.amp._casts import Casts, Handle, planned_casts
from narrowcast.apex.amp._levels import DISABLED, Properties, properties
from narrowcast.apex.amp._models import cast_model, check_models
from narrowcast.apex.amp._optimizers import PreparedOptimizer, check_optimizers, optimizer_of
from narrowcast.apex.amp._process_state import maybe_print, process_state
from narrowcast.apex.amp._scale_loss import loss_scalers_for


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    half_type: torch.dtype | None = None,
) -> Any:
    """Prepare models and optimizers for mixed precision, as apex's ``amp.initialize``.

    | level | weights | functions | loss scale |
    |---|---|---|---|
    | ``"O0"`` | float32 | as they come | 1 |
    | ``"O1"`` | as they are | half or float32 by ``amp.lists`` | dynamic |
    | ``"O2"`` | half, batch norms in float32, float32 masters in the optimizer | as they come | dynamic |
    | ``"O3"`` | half | as they come | 1 |

    O0, O2 and O3 cast floating inputs of the models to their type and outputs to float32, in any nesting, and
    their ``state_dict()`` is in float32. O1 casts in each call of a model, in any thread. In this thread it
    also casts calls outside of models, on the models' device types. A second ``initialize`` with O1 replaces
    the casts outside of models; with another level it leaves them. Neither changes the casts in models of the
    first, unless a model is given again. Nothing undoes ``initialize``. Backward passes cast nothing. Move
    models to their device before, and wrap them in DDP after. Casts of weights are kept from one backward
    pass to the next and follow every write, except those through ``.data`` between two forward passes: call
    ``nc.drop_casts()`` after them.

    O1 is the policy preset ``"O1"`` with the user's edits of ``amp.lists``: functions on no list follow
    PyTorch's autocast table for CUDA. Values that overflow half become infinite, NaN stays NaN, subnormals
    are kept; float64, integers and complex numbers stay under O1.

    Source: apex ``amp/frontend.py`` and ``amp/_initialize.py``.

    Args:
        models: a ``torch.nn.Module`` or a list of them, on any device.
        optimizers: an optimizer, a list of them, or None. Apex's LARC, and other wrappers that hold the
            optimizer as ``optim`` and call its ``step`` in their own, are optimizers too.
        enabled: False changes nothing; ``scale_loss`` then yields losses unchanged.
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``.
        cast_model_type: replaces the level's type of weights: ``torch.float16``, ``torch.bfloat16`` or
            another floating type.
        patch_torch_functions, keep_batchnorm_fp32, master_weights: replace the level's own settings.
        loss_scale: a number above 0, or ``"dynamic"``.
        cast_model_outputs: the type of floating outputs of the models, in place of float32; under O1, which
            casts no outputs by itself, they are then cast too.
        num_losses: how many losses have a scale of their own.
        verbosity: 0 turns the messages off.
        min_loss_scale, max_loss_scale: limits of a dynamic scale.
        half_type: not in apex: ``torch.float16`` (as in apex) or ``torch.bfloat16`` for half.

    Returns:
        What was given, in the same shape.

    Raises:
        AmpError: a level or setting that does not exist or does not go with the level; a model that is half
            or wrapped already; an object that is no optimizer, or an optimizer that was initialized before.
        OrderError: a region of autocast is open in this thread.
        TypeError: ``models`` is neither a module nor a list of modules.
        PolicyError: ``amp.lists`` names what PyTorch has no operator for, or contradicts itself; or a model
            has a policy already.
    """
    process_state.verbosity = verbosity
    model_list = _list_of_models(models)
    optimizer_list = _list_of_optimizers(optimizers)

    # Scripts turn amp off by enabled=False and keep their other calls of amp. The loop only checks the types.
    if not enabled:
        for optimizer in optimizer_list:
            optimizer_of(optimizer)
        process_state.opt_properties = DISABLED
        process_state.loss_scalers = []
        return _as_given(models, optimizers)

    # Check settings, models and optimizers before anything is changed. Casting weights and making masters,
    # below, may still refuse a weight or an optimizer.
    wanted = properties(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
        half_type=half_type,
    )
    check_models(model_list, wanted)
    check_optimizers(optimizer_list)
    scalers = loss_scalers_for(wanted, num_losses, min_loss_scale, max_loss_scale)
    casts: Casts | None = None
    if wanted.patch_torch_functions:
        casts = planned_casts(wanted.half_type, model_list)
    _report(wanted)

    handle: Handle | None = None
    if casts is not None:
        handle = Handle(casts, model_list)
    # Masters start from the float32 values that the weights had before the cast.
    originals: dict[torch.Tensor, torch.Tensor] = {}
    for model in model_list:
        originals |= cast_model(model, wanted)
    # A PreparedOptimizer attaches itself to its optimizer, replaces its step, and makes the masters.
    for optimizer in optimizer_list:
        PreparedOptimizer(optimizer_of(optimizer), wanted, scalers, originals)

    process_state.opt_properties = wanted
    process_state.loss_scalers = scalers
    # The casts of an earlier O1 stay in force under another level.
    if handle is not None:
        process_state.handle = handle
    return _as_given(models, optimizers)


def _list_of_models(models: Any) -> list[torch.nn.Module]:
    model_list = models if isinstance(models, list) else [models]
    if not model_list:
        raise TypeError("expected models to be a torch.nn.Module or a list of them, got an empty list")
    for model in model_list:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"expected models to be a torch.nn.Module or a list of them, got {type(model).__name__}"
            )
    return model_list


def _list_of_optimizers(optimizers: Any) -> list[Any]:
    if optimizers is None:
        return []
    return optimizers if isinstance(optimizers, list) else [optimizers]


def _as_given(models: Any, optimizers: Any) -> Any:
    return models if optimizers is None else (models, optimizers)


def _report(wanted: Properties) -> None:
    weights = "as they are"
    if wanted.cast_model_type is not None:
        weights = _word(wanted.cast_model_type)
    functions = "as they come"
    if wanted.patch_torch_functions:
        functions = f"{_word(wanted.half_type)} or float32 by the lists"
    scale = wanted.loss_scale
    if not isinstance(scale, str):
        scale = f"{scale:g}"
    maybe_print(f"amp: {wanted.opt_level}: weights {weights}, functions {functions}, loss scale {scale}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

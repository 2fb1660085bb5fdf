"""``amp.initialize``: prepare models and optimizers for one of apex's levels; ``amp.shutdown``: undo it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowcast.apex.amp._amp_state import _amp_state, maybe_print
from narrowcast.apex.amp._casts import Handle, registered, start_casts
from narrowcast.apex.amp._levels import DISABLED, Properties, properties
from narrowcast.apex.amp._models import CastModel, check_models
from narrowcast.apex.amp._optimizers import optimizer_of, prepare_optimizers
from narrowcast.apex.amp._scale_loss import LossScaler, loss_scalers_for
from narrowcast.casting import undo_on_error

# Undoes each call of ``initialize`` that is in force, in their order.
_in_force: list[Callable[[], object]] = []


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
    also casts calls outside of models, on the models' device types, until ``shutdown()``. A second
    ``initialize`` replaces the casts outside of models and leaves the models of the first as they are.
    Backward passes cast nothing. Move models to their device before, and wrap them in DDP after. Casts of
    weights are kept from one backward pass to the next and follow every write, except those through ``.data``
    between two forward passes: call ``nc.drop_casts()`` after them.

    Values that overflow half become infinite, NaN stays NaN, subnormals are kept; float64, integers and
    complex numbers stay under O1. Source: apex ``amp/frontend.py`` and ``amp/_initialize.py``.

    Args:
        models: a ``torch.nn.Module`` or a list of them, on any device.
        optimizers: an optimizer, a list of them, or None. Apex's LARC, and other wrappers that hold the
            optimizer as ``optim`` and call its ``step`` in their own, are optimizers too.
        enabled: False leaves everything as it is; ``scale_loss`` then yields losses unchanged.
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``.
        cast_model_type: replaces the level's type of weights: ``torch.float16``, ``torch.bfloat16`` or
            another floating type.
        patch_torch_functions, keep_batchnorm_fp32, master_weights: replace the level's own settings.
        loss_scale: a number above 0, or ``"dynamic"``.
        cast_model_outputs: the type of floating outputs, in place of float32; under O1 they are cast too.
        num_losses: how many losses have a scale of their own.
        verbosity: 0 turns the messages off.
        min_loss_scale, max_loss_scale: limits of a dynamic scale.
        half_type: not in apex: ``torch.float16`` (as in apex) or ``torch.bfloat16`` for half.

    Returns:
        What was given, in the same shape.

    Raises:
        AmpError: a level or setting that does not exist or does not go with the level; a model that is half
            or wrapped already; an optimizer that was initialized before.
        OrderError: a region of autocast is open in this thread.
        TypeError: models or optimizers of another kind.
        PolicyError: a name on ``amp.lists`` for which PyTorch has no operator.
    """
    _amp_state.verbosity = verbosity
    model_list, optimizer_list = _models(models), _optimizers(optimizers)
    if not enabled:
        for one in optimizer_list:
            optimizer_of(one)
        _amp_state.opt_properties, _amp_state.loss_scalers = DISABLED, []
        return _as_given(models, optimizers)
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
    check_models(model_list)
    scalers = loss_scalers_for(wanted, num_losses, min_loss_scale, max_loss_scale)
    _report(wanted)
    _start(model_list, optimizer_list, wanted, scalers)
    return _as_given(models, optimizers)


def shutdown() -> None:
    """Undo every ``initialize`` and registration; models and optimizers keep their present values.

    Weights that were half are in their old type again, from the masters if there are any. Raises
    ``OrderError``, with everything still in force, in another thread than that of ``initialize``, and while a
    region of autocast is open that was opened since.
    """
    while _in_force:
        _in_force[-1]()
        _in_force.pop()
    registered.clear()
    _amp_state.reset()


def _start(
    models: list[torch.nn.Module], optimizers: list[Any], wanted: Properties, scalers: list[LossScaler]
) -> None:
    cast_models: list[CastModel] = []
    undo_optimizers: Callable[[], dict[torch.Tensor, torch.Tensor]] = dict
    handle: Handle | None = None

    def undo() -> None:
        if handle is not None:
            handle.remove()
        values = undo_optimizers()
        for one in reversed(cast_models):
            one.undo({**one.originals, **values})

    with undo_on_error(models, map(optimizer_of, optimizers)) as on_error:
        on_error.callback(undo)
        for model in models:
            cast_models.append(CastModel(model, wanted))
        originals = {low: full for one in cast_models for low, full in one.originals.items()}
        undo_optimizers = prepare_optimizers(optimizers, wanted, scalers, originals, models)
        if wanted.patch_torch_functions:
            handle = start_casts(models, wanted.half_type)
    for one in cast_models:
        one.originals.clear()
    _amp_state.opt_properties, _amp_state.loss_scalers = wanted, scalers
    _amp_state.handle = handle
    _in_force.append(undo)


def _models(given: Any) -> list[torch.nn.Module]:
    found = given if isinstance(given, list) else [given]
    wrong = [type(one).__name__ for one in found if not isinstance(one, torch.nn.Module)]
    if wrong or not found:
        got = wrong[0] if wrong else "an empty list"
        raise TypeError(f"expected models to be a torch.nn.Module or a list of them, got {got}")
    return found


def _optimizers(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [] if given is None else [given]


def _as_given(models: Any, optimizers: Any) -> Any:
    return models if optimizers is None else (models, optimizers)


def _report(wanted: Properties) -> None:
    weights = "as they are" if wanted.cast_model_type is None else _word(wanted.cast_model_type)
    lists = f"{_word(wanted.half_type)} or float32 by the lists"
    functions = lists if wanted.patch_torch_functions else "as they come"
    scale = wanted.loss_scale if wanted.loss_scale == "dynamic" else f"{wanted.loss_scale:g}"
    maybe_print(f"amp: {wanted.opt_level}: weights {weights}, functions {functions}, loss scale {scale}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

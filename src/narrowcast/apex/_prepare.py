"""All optimizers of one ``amp.initialize``, made ready together or not at all."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from narrowcast.apex._levels import Properties
from narrowcast.apex._loss_scaler import LossScaler, loss_scalers_for
from narrowcast.apex._optimizers import PreparedOptimizer, optimizer_of, prepared
from narrowcast.apex._state import amp_state
from narrowcast.errors import AmpError


class PreparedOptimizers:
    """All optimizers of one ``amp.initialize``; held weakly: what is in force is no reason to keep them."""

    def __init__(self, loss_scalers: list[LossScaler]) -> None:
        self.loss_scalers = loss_scalers
        self._before = amp_state.loss_scalers
        self._each: list[weakref.ref[PreparedOptimizer]] = []

    def add(self, one: PreparedOptimizer) -> None:
        self._each.append(weakref.ref(one))

    def undo(self) -> dict[torch.Tensor, torch.Tensor]:
        """Every optimizer as it was; the float32 values of weights that had masters, by weight."""
        values: dict[torch.Tensor, torch.Tensor] = {}
        for reference in reversed(self._each):
            one = reference()
            values.update({} if one is None else one.undo())
        self._each.clear()
        if amp_state.loss_scalers is self.loss_scalers:
            amp_state.loss_scalers = self._before
        return values


def prepare_optimizers(
    optimizers: Sequence[Any],
    properties: Properties,
    *,
    num_losses: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    originals: Mapping[torch.Tensor, torch.Tensor] | None = None,
    models: Sequence[torch.nn.Module] = (),
) -> PreparedOptimizers:
    """Make optimizers ready for ``scale_loss``; under O2 their half parameters are replaced by masters.

    ``amp._amp_state.loss_scalers`` is from then on the list of these losses' scalers.

    Args:
        originals: float32 values, by half weight, that masters start from where they round to it.
        models: those that the optimizers' parameters are of.

    Raises:
        AmpError: an optimizer that was prepared before, twice in the list, or is no optimizer; a number of
            losses that is none. Nothing was changed then.
        ScaleError: a scale or limits that cannot scale a loss. Nothing was changed then.
    """
    found = [optimizer_of(one) for one in optimizers]
    for position, optimizer in enumerate(found):
        before = prepared(optimizer)
        if (before is not None and before.properties.enabled) or any(
            optimizer is other for other in found[:position]
        ):
            raise AmpError(
                f"this {type(optimizer).__name__} was given to amp.initialize before: give each optimizer "
                "once, and call amp.initialize once for it"
            )
    scalers = loss_scalers_for(properties, num_losses, min_loss_scale, max_loss_scale)
    done = PreparedOptimizers(scalers)
    try:
        for optimizer in found:
            before = prepared(optimizer)
            if before is not None:
                before.undo()  # amp was asked to do nothing with it
            done.add(PreparedOptimizer(optimizer, properties, scalers, originals or {}, models))
    except BaseException:
        done.undo()
        raise
    amp_state.loss_scalers = scalers
    return done

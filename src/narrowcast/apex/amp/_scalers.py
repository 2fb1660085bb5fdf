"""One loss scale for each loss; ``amp.state_dict``, ``amp.load_state_dict`` and ``amp.master_params``."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from narrowcast.apex.amp._amp_state import _amp_state, maybe_print
from narrowcast.apex.amp._levels import Properties
from narrowcast.apex.amp._optimizers import optimizer_of, prepared
from narrowcast.errors import AmpError
from narrowcast.scaling import Dynamic, Static, from_apex

_START = 2.0**16


class LossScaler:
    """The scale of one loss; ``amp.initialize`` makes ``num_losses`` of them.

    A dynamic scale starts at ``min(max_loss_scale, 2**16)``. It is halved when gradients overflow, but not
    below ``min_loss_scale``, and doubled after 2000 good ``scale_loss`` blocks in a row, but not beyond
    ``max_loss_scale``. ``min_loss_scale=None`` means 2**-126, below which float32 cannot divide. Source: apex
    ``amp/scaler.py``.
    """

    # Without a __dict__, so that writing an attribute of apex that is not here raises AttributeError.
    __slots__ = ("_good_blocks", "value")

    def __init__(
        self,
        loss_scale: float | str,
        *,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self._good_blocks = 0
        self.value: Dynamic | Static
        if isinstance(loss_scale, str):
            value = Dynamic(rule="apex", scale=min(_START, max_loss_scale), max_scale=max_loss_scale)
            if min_loss_scale:
                value = replace(value, scale=max(value.scale, min_loss_scale), min_scale=min_loss_scale)
            self.value = value
        else:
            self.value = Static(scale=loss_scale)

    def loss_scale(self) -> float:
        """Return the factor that the loss is multiplied by."""
        return self.value.scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return isinstance(self.value, Dynamic)

    @property
    def _loss_scale(self) -> float:
        return self.value.scale

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self.value = replace(self.value, scale=float(scale))

    @property
    def _unskipped(self) -> int:
        return self.value.good_steps if isinstance(self.value, Dynamic) else self._good_blocks

    @_unskipped.setter
    def _unskipped(self, count: int) -> None:
        if isinstance(self.value, Dynamic):
            self.value = replace(self.value, good_steps=count)
        else:
            self._good_blocks = count

    def after_block(self, *, overflow: bool) -> None:
        """Update the scale, once for each ``scale_loss`` block whose gradients were checked."""
        self.value = self.value.after_step(overflow=overflow)
        self._good_blocks = 0 if overflow else self._good_blocks + 1


def loss_scalers_for(
    properties: Properties, num_losses: int, min_loss_scale: float | None, max_loss_scale: float
) -> list[LossScaler]:
    """Return one scaler for each loss."""
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise AmpError(f"expected num_losses to be a whole number of at least 1, got {num_losses!r}")
    return [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that ``optimizer`` updates: under O2 float32 masters in place of half weights.

    Their gradients are unscaled at the end of each ``scale_loss`` block and scaled inside it: clip after the
    block. Reading them inside a block is reported once for each optimizer.
    """
    found = optimizer_of(optimizer)
    mine = prepared(found)
    if mine is not None:
        mine.refresh()
        mine.say_that_gradients_are_scaled()
    for group in found.param_groups:
        yield from group["params"]


def state_dict(destination: Any = None) -> Any:
    """Return the scale of each loss of the latest ``amp.initialize``, in the format of apex.

    It does not hold the masters: under O2 ``model.state_dict()`` does. The entries go into ``destination``,
    or into a new ``OrderedDict``: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``.
    """
    _require_initialized("state_dict")
    state = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        state[f"loss_scaler{number}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return state


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load the scales of a state, of apex or of narrowcast, into the losses of the latest ``amp.initialize``.

    Losses are matched by position, with a warning if their numbers differ. A dynamic scale outside the limits
    of ``amp.initialize`` is set to the nearest limit, with a message.

    Raises:
        AmpError: ``amp.initialize`` was not called.
        ScaleError: this is no state of ``amp``. Nothing was changed. ``narrowcast.scaling.from_state`` reads
            states of other libraries.
    """
    _require_initialized("load_state_dict")
    scalers = _amp_state.loss_scalers
    if not state_dict and not scalers:
        return
    saved = from_apex(state_dict, dynamic=False)
    if len(saved) != len(scalers):
        warnings.warn(
            f"the state holds {len(saved)} loss scales, and amp.initialize made {len(scalers)}: the common "
            "ones are loaded. Give amp.initialize the num_losses of the run that was saved",
            stacklevel=2,
        )
    counts = [int(entry["unskipped"]) for key, entry in state_dict.items() if key.startswith("loss_scaler")]
    for number, (scaler, one, count) in enumerate(zip(scalers, saved, counts, strict=False)):
        _load(number, scaler, one.scale, count)


def _load(number: int, scaler: LossScaler, scale: float, count: int) -> None:
    value = scaler.value
    if isinstance(value, Static):
        scaler._loss_scale, scaler._unskipped = scale, count
        return
    kept = min(max(scale, value.min_scale), value.max_scale)
    # The count of a static scale has no limit. A dynamic scale grows at the next good block then.
    scaler.value = replace(value, scale=kept, good_steps=min(count, value.growth_interval - 1))
    if kept != scale:
        maybe_print(
            f"amp: loss scaler {number} is saved at {scale:g}, which is outside of min_loss_scale and "
            f"max_loss_scale: it goes on at {kept:g}"
        )


def _require_initialized(name: str) -> None:
    if _amp_state.opt_properties is None:
        raise AmpError(f"amp.{name} came before amp.initialize, which makes the loss scales: call it first")

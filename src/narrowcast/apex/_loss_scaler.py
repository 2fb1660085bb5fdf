"""One loss scale for each loss, as apex's objects: values of ``narrowcast.scaling`` that are replaced."""

from __future__ import annotations

from dataclasses import replace

from narrowcast.apex._levels import Properties
from narrowcast.errors import AmpError
from narrowcast.scaling import Dynamic, Static

START = 2.0**16


class LossScaler:
    """The scale of one loss: ``amp.initialize`` makes ``num_losses`` of them.

    A dynamic one starts at ``min(max_loss_scale, 2**16)``, is halved where gradients overflow, but not below
    ``min_loss_scale``, and doubled after 2000 good ``scale_loss`` blocks in a row, but not beyond
    ``max_loss_scale``. Beneath ``min_loss_scale=None`` is 2**-126, below which float32 cannot divide.

    Attributes:
        value: the scale now, ``scaling.Dynamic`` or ``scaling.Static``.

    Raises:
        ScaleError: limits or a scale that cannot scale a loss.

    Source: apex ``amp/scaler.py``.
    """

    def __init__(
        self,
        loss_scale: float | str,
        *,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self._good_blocks = 0
        self._has_overflow = False
        self.value: Dynamic | Static
        if isinstance(loss_scale, str):
            value = Dynamic(rule="apex", scale=min(START, max_loss_scale), max_scale=max_loss_scale)
            if min_loss_scale:
                value = replace(value, scale=max(value.scale, min_loss_scale), min_scale=min_loss_scale)
            self.value = value
        else:
            self.value = Static(scale=loss_scale)

    def loss_scale(self) -> float:
        """What the loss is multiplied by."""
        return self.value.scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
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

    @property
    def _min_loss_scale(self) -> float | None:
        return self.value.min_scale if isinstance(self.value, Dynamic) else None

    @_min_loss_scale.setter
    def _min_loss_scale(self, limit: float | None) -> None:
        self._limit(limit or Dynamic(rule="apex").min_scale, None)

    @property
    def _max_loss_scale(self) -> float | None:
        return self.value.max_scale if isinstance(self.value, Dynamic) else None

    @_max_loss_scale.setter
    def _max_loss_scale(self, limit: float) -> None:
        self._limit(None, limit)

    def _limit(self, low: float | None, high: float | None) -> None:
        if isinstance(self.value, Dynamic):
            low = self.value.min_scale if low is None else low
            high = self.value.max_scale if high is None else high
            scale = min(max(self.value.scale, low), high)
            self.value = replace(self.value, scale=scale, min_scale=low, max_scale=high)

    @property
    def _scale_seq_len(self) -> int:
        return self.value.growth_interval if isinstance(self.value, Dynamic) else 2000

    @_scale_seq_len.setter
    def _scale_seq_len(self, blocks: int) -> None:
        if isinstance(self.value, Dynamic):
            # Where it is behind already, the next good block makes it grow.
            good = min(self.value.good_steps, blocks - 1)
            self.value = replace(self.value, growth_interval=blocks, good_steps=max(good, 0))

    def after_block(self, *, overflow: bool) -> None:
        """Move, once for each ``scale_loss`` block whose gradients were looked at."""
        self.value = self.value.after_step(overflow=overflow)
        self._good_blocks = 0 if overflow else self._good_blocks + 1

    def clear_overflow_state(self) -> None:
        """Forget what ``_has_overflow`` says, as scripts that write it by hand do before a backward pass."""
        self._has_overflow = False

    def update_scale(self) -> bool:
        """Move by ``_has_overflow``, as scripts call it by hand; whether the step is to be skipped."""
        self.after_block(overflow=self._has_overflow)
        return self._has_overflow


def loss_scalers_for(
    properties: Properties, num_losses: int, min_loss_scale: float | None, max_loss_scale: float
) -> list[LossScaler]:
    """One scaler for each loss of ``amp.initialize``; none where amp was asked to do nothing.

    Raises:
        AmpError: ``num_losses`` is no whole number of at least 1.
        ScaleError: limits or a scale that cannot scale a loss.
    """
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise AmpError(f"expected num_losses to be a whole number of at least 1, got {num_losses!r}")
    if not properties.enabled:
        return []
    return [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]

"""``amp.scale_loss`` and the loss scales: scaled backward passes, checked gradients, saved states."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowcast.apex.amp._levels import Properties
from narrowcast.apex.amp._optimizers import (
    PreparedOptimizer,
    optimizer_of,
    prepared,
)
from narrowcast.apex.amp._process_state import maybe_print, process_state
from narrowcast.errors import AmpError, UnsupportedError
from narrowcast.gradients import check_apart
from narrowcast.scaling import Dynamic, Static, from_apex

_INITIAL_SCALE = 2.0**16


class LossScaler:
    """The scale of one loss; ``amp.initialize`` makes ``num_losses`` of them.

    A dynamic scale starts at ``min(max_loss_scale, 2**16)``, or at ``min_loss_scale`` if that is larger. It
    is halved when gradients overflow, but not below ``min_loss_scale``, and doubled after 2000 good
    ``scale_loss`` blocks in a row, but not beyond ``max_loss_scale``. ``min_loss_scale=None`` means 2**-126,
    below which float32 cannot divide. Source: apex ``amp/scaler.py``.
    """

    # Without a __dict__, setting an attribute of apex's scaler that is not here raises AttributeError.
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
        if not isinstance(loss_scale, str):
            self.value = Static(scale=loss_scale)
            return
        self.value = Dynamic(rule="apex", scale=min(_INITIAL_SCALE, max_loss_scale), max_scale=max_loss_scale)
        if min_loss_scale:
            scale = max(self.value.scale, min_loss_scale)
            self.value = replace(self.value, scale=scale, min_scale=min_loss_scale)

    def loss_scale(self) -> float:
        """Return the factor that the loss is multiplied by."""
        return self.value.scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return isinstance(self.value, Dynamic)

    # Private attributes of apex's scaler, which scripts read and write.
    @property
    def _loss_scale(self) -> float:
        return self.value.scale

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self.value = replace(self.value, scale=float(scale))

    @property
    def _unskipped(self) -> int:
        if isinstance(self.value, Dynamic):
            return self.value.good_steps
        return self._good_blocks

    @_unskipped.setter
    def _unskipped(self, count: int) -> None:
        if isinstance(self.value, Dynamic):
            self.value = replace(self.value, good_steps=count)
        else:
            self._good_blocks = count

    def after_block(self, *, overflow: bool) -> None:
        """Update the scale, once for each ``scale_loss`` block whose gradients were checked."""
        self.value = self.value.after_step(overflow=overflow)
        self._good_blocks += 1
        if overflow:
            self._good_blocks = 0


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


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Scale a loss for its backward pass, and unscale and check the gradients at the end of the block.

    Gradients from before the block stay: those of the block are unscaled, and then added to them. Under O2
    the masters have the unscaled gradients, in float32: clip ``amp.master_params(optimizer)``, after the
    block.

    If a gradient is NaN or infinite, the next ``optimizer.step()`` of every named optimizer does nothing and
    says so, also under a fixed scale, and a dynamic scale is halved. If only the sum with gradients from
    before the block is not finite, the step is skipped too, and the scale counts a good block. O0 with scale
    1 checks nothing. After an exception in the block, gradients are as they were before it, unless an earlier
    block with ``delay_unscale=True`` left them scaled: then call ``zero_grad``. The end of a block waits once
    for the GPU. Backward passes cast nothing under O1.

    Args:
        loss: any floating tensor, on any device, from which ``backward`` can be called.
        optimizers: the optimizers whose parameters get gradients from this loss, one or a list, as
            ``amp.initialize`` returned them.
        loss_id: which of the ``num_losses`` scales to use.
        delay_unscale: leave the gradients scaled, so that further blocks add to them; a step raises until
            a block without it. Needed for all but the last backward pass where DDP's ``no_sync`` is used.
        model: has no effect, as in apex.
        delay_overflow_check: must be False: the gradients of every block are checked at its end.

    Yields:
        ``loss`` in float32 times the scale; ``loss`` itself after ``initialize(enabled=False)``.

    Raises:
        AmpError: wrong use, such as a block before ``amp.initialize`` or inside another block, gradients with
            another scale, a loss that is scaled already, or a backward pass of the wrong loss or after the
            block.
        SettingError: a parameter that two of the optimizers share.
        UnsupportedError: ``delay_overflow_check=True``.

    Source: apex ``amp/handle.py``; https://nvidia.github.io/apex/advanced.html
    """
    named = _prepared_optimizers(optimizers)
    if named is None:
        yield loss
        return
    if not isinstance(loss, torch.Tensor):
        raise AmpError(f"expected the loss to be a torch.Tensor, got {type(loss).__name__}")
    if delay_overflow_check:
        raise UnsupportedError(
            "delay_overflow_check=True is not supported: leave it out, and the gradients are checked at the "
            "end of the block"
        )
    scaler = _scaler_for(named, loss_id)
    # Plain float32 training, as under O0, needs neither a scale nor a check.
    if not any(optimizer.scales for optimizer in named):
        yield loss.float()
        return

    scale = scaler.loss_scale()
    scaled = _scaled(loss, scale)
    backward = _BackwardPass(scale)
    # With scale 1 it does not matter which loss went backward, and without a graph none can.
    if scale == 1.0 or not scaled.requires_grad:
        backward.was_seen = True
    else:
        scaled.register_hook(backward.see)  # type: ignore[no-untyped-call]
    try:
        with _opened(named, scale):
            yield scaled
            backward.check(named)
            overflows = _end_block(named, scale, delay_unscale=delay_unscale)
    finally:
        backward.is_over = True
    if not delay_unscale:
        _update(scaler, loss_id, named, overflows)


@contextmanager
def _opened(named: Sequence[PreparedOptimizer], scale: float) -> Iterator[None]:
    """Begin a block of these optimizers and end it; if it raises, restore their earlier gradients."""
    begun: list[PreparedOptimizer] = []
    try:
        for optimizer in named:
            if optimizer.in_block:
                raise AmpError(
                    "a scale_loss block came within another one of the same optimizer, which would unscale "
                    "its gradients twice: end the first block before"
                )
            optimizer.refresh()
            optimizer.gradients.begin(scale)
            optimizer.in_block = True
            begun.append(optimizer)
        yield
    except BaseException:
        for optimizer in begun:
            optimizer.gradients.abandon()
        raise
    finally:
        for optimizer in begun:
            optimizer.in_block = False


def _end_block(
    named: Sequence[PreparedOptimizer], scale: float, *, delay_unscale: bool
) -> list[torch.Tensor]:
    """Unscale the gradients of a block, unless that is delayed.

    Return two flags for each optimizer, which are above 0 if a value is not finite: one for the gradients of
    the block, one for their sums with earlier gradients. Return no flags if unscaling is delayed.
    """
    # Check all optimizers before the gradients of the first are changed.
    for optimizer in named:
        optimizer.gradients.check_graph()
    overflows = []
    for optimizer in named:
        if delay_unscale:
            optimizer.gradients.delay_unscale(scale)
        else:
            overflows.append(optimizer.gradients.unscale(scale))
    return overflows


def _update(
    scaler: Any, loss_id: int, named: Sequence[PreparedOptimizer], overflows: Sequence[torch.Tensor]
) -> None:
    """Update the scale, and mark the optimizers whose next step is skipped; waits once for the device."""
    # Copy the flags of all optimizers to the host at once, since each copy waits for the device.
    device = overflows[0].device
    flags = torch.stack([pair.to(device) for pair in overflows]).tolist()
    overflow = any(of_block > 0 for of_block, _ in flags)
    scale_before = scaler.loss_scale()
    scaler.after_block(overflow=overflow)
    scale = scaler.loss_scale()

    # As in apex, an overflow in the gradients of one optimizer skips the steps of all.
    for optimizer, (_, of_sum) in zip(named, flags, strict=True):
        if overflow:
            change = f"reducing loss scale to {scale}"
            if scale == scale_before:
                change = f"stays at {scale}"
            optimizer.skip = f"Gradient overflow.  Skipping step, loss scaler {loss_id} {change}"
        elif of_sum > 0 and optimizer.skip is None:
            optimizer.skip = (
                "Skipping step, gradients from before the scale_loss block are not finite: clear them "
                "with zero_grad()"
            )


def _scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    scale_of_loss = vars(loss).get("_scaled_by_amp")
    if scale_of_loss is not None:
        raise AmpError(
            f"this loss is scaled by {scale_of_loss:g} already, by another scale_loss block: give the loss "
            "itself, and name the optimizers of one backward pass in one block, "
            "scale_loss(loss, [first, second])"
        )
    if scale == 1.0:
        return loss.float()
    scaled = loss.float() * scale
    vars(scaled)["_scaled_by_amp"] = scale
    return scaled


@dataclass
class _BackwardPass:
    """Watch whether the scaled loss of a block goes backward, and when.

    It has no reference to the loss, so that the graph is freed as soon as the script drops the loss.
    """

    scale: float
    was_seen: bool = False
    is_over: bool = False

    def see(self, _gradient: torch.Tensor) -> None:
        """Hook of the scaled loss: note its backward pass, and refuse one after the block."""
        if self.is_over:
            raise AmpError(
                f"a loss that is scaled by {self.scale:g} went backward after its scale_loss block, so that "
                "nothing would unscale its gradients: call backward inside the block"
            )
        self.was_seen = True

    def check(self, named: Sequence[PreparedOptimizer]) -> None:
        """Raise if the block produced gradients, but not by a backward pass of the scaled loss."""
        if self.was_seen:
            return
        for optimizer in named:
            # Earlier gradients are kept apart, so that these came in the block. After a delayed block they
            # may be from that one.
            if optimizer.gradients.delayed_scale is None and optimizer.gradients.has_gradients():
                raise AmpError(
                    "gradients came in a scale_loss block whose own loss did not go backward: they are not "
                    f"scaled, and would be divided by {self.scale:g}: call backward of what the block "
                    "yields, with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"
                )


def _prepared_optimizers(optimizers: Any) -> list[PreparedOptimizer] | None:
    """Return the prepared optimizers of a block; None after ``initialize(enabled=False)``."""
    if process_state.opt_properties is None:
        raise AmpError(
            "scale_loss came before amp.initialize: call model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=...) first"
        )
    optimizer_list = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if not optimizer_list:
        raise AmpError("expected an optimizer or a list of them, got an empty list")

    known: list[PreparedOptimizer] = []
    unknown: list[Any] = []
    for optimizer in optimizer_list:
        prepared_optimizer = prepared(optimizer_of(optimizer))
        if prepared_optimizer is None:
            unknown.append(optimizer)
        else:
            known.append(prepared_optimizer)
    # After initialize(enabled=False) no optimizer is known, and scripts call scale_loss all the same.
    if not known and not process_state.opt_properties.enabled:
        return None
    if unknown:
        raise AmpError(
            f"this {type(unknown[0]).__name__} was not given to amp.initialize, so its gradients would stay "
            "scaled: initialize it with its model, and name in scale_loss what amp.initialize returned"
        )
    if len(known) > 1:
        check_apart([prepared_optimizer.optimizer for prepared_optimizer in known])
    return known


def _scaler_for(named: Sequence[PreparedOptimizer], loss_id: int) -> Any:
    # Each amp.initialize makes its own scalers. If a block has optimizers of two, the last optimizer decides.
    scalers = named[-1].loss_scalers
    if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(scalers):
        raise AmpError(
            f"expected loss_id from 0 to {len(scalers) - 1}, got {loss_id!r}: give amp.initialize as "
            "num_losses how many losses have a scale of their own"
        )
    return scalers[loss_id]


# ---- masters and states


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that ``optimizer`` updates: under O2 float32 masters in place of half weights.

    Their gradients are unscaled at the end of each ``scale_loss`` block and scaled inside it: clip after the
    block.
    """
    torch_optimizer = optimizer_of(optimizer)
    prepared_optimizer = prepared(torch_optimizer)
    if prepared_optimizer is not None:
        prepared_optimizer.refresh()
    for group in torch_optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: Any = None) -> Any:
    """Return the scale of each loss of the latest ``amp.initialize``, in the format of apex.

    It does not hold the masters: under O2 ``model.state_dict()`` does. The entries go into ``destination``,
    or into a new ``OrderedDict``: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``.
    """
    _require_initialized("state_dict")
    state = destination
    if state is None:
        state = OrderedDict()
    for number, scaler in enumerate(process_state.loss_scalers):
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
        ScaleError: ``state_dict`` is not a state of ``amp``. Nothing was changed.
            ``narrowcast.scaling.from_state`` reads states of other libraries.
    """
    _require_initialized("load_state_dict")
    scalers = process_state.loss_scalers
    if not state_dict and not scalers:
        return
    saved = from_apex(state_dict, dynamic=False)
    counts = []
    for key, entry in state_dict.items():
        if key.startswith("loss_scaler"):
            counts.append(int(entry["unskipped"]))

    # The number of losses may differ in an evaluation, or after a change of the script.
    if len(saved) != len(scalers):
        warnings.warn(
            f"the state holds {len(saved)} loss scales, and amp.initialize made {len(scalers)}: the common "
            "ones are loaded. Give amp.initialize the num_losses of the run that was saved",
            stacklevel=2,
        )
    for number, (scaler, loss_scale, count) in enumerate(zip(scalers, saved, counts, strict=False)):
        _load(number, scaler, loss_scale.scale, count)


def _load(number: int, scaler: LossScaler, scale: float, count: int) -> None:
    value = scaler.value
    if isinstance(value, Static):
        scaler._loss_scale = scale
        scaler._unskipped = count
        return
    kept = min(max(scale, value.min_scale), value.max_scale)
    # A state of a static scale may have counted more good blocks than a dynamic scale takes to grow. With the
    # limited count, the scale grows at the next good block.
    scaler.value = replace(value, scale=kept, good_steps=min(count, value.growth_interval - 1))
    if kept != scale:
        maybe_print(
            f"amp: loss scaler {number} is saved at {scale:g}, which is outside of min_loss_scale and "
            f"max_loss_scale: it goes on at {kept:g}"
        )


def _require_initialized(name: str) -> None:
    if process_state.opt_properties is None:
        raise AmpError(f"amp.{name} came before amp.initialize, which makes the loss scales: call it first")

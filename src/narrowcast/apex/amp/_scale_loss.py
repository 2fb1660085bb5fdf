"""``amp.scale_loss``: a backward pass from a scaled loss, after which gradients are unscaled and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.apex.amp._accumulation import Versions, any_not_zero
from narrowcast.apex.amp._amp_state import _amp_state
from narrowcast.apex.amp._optimizers import PreparedOptimizer, active, optimizer_of, prepared
from narrowcast.errors import AmpError, UnsupportedError
from narrowcast.gradients import check_apart


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

    Gradients from before the block are added to, unscaled to unscaled. Under O2 the unscaled gradients are
    those of the masters, in float32: clip ``amp.master_params(optimizer)``, after the block.

    If a gradient is NaN or infinite, the next ``optimizer.step()`` of every named optimizer does nothing and
    says so, also under a fixed scale, and a dynamic scale is halved. If only the sum with gradients from
    before the block is not finite, the step is skipped too, and the scale counts a good block. O0 with scale
    1 checks nothing. After an exception in the block, gradients are as they were before it, except those
    that stay scaled. The end of a block waits once for the GPU. Backward passes cast nothing under O1.

    Args:
        loss: any floating tensor, on any device, from which ``backward`` can be called.
        optimizers: the optimizers whose parameters get gradients from this loss, one or a list, as
            ``amp.initialize`` returned them.
        loss_id: which of the ``num_losses`` scales to use.
        delay_unscale: leave the gradients scaled, to be added to in further blocks; a step is refused until
            a block without it. Needed for all but the last backward pass where DDP's ``no_sync`` is used.
        model: has no effect, as in apex.
        delay_overflow_check: must be False: the gradients of every block are checked at its end.

    Yields:
        ``loss`` in float32 times the scale; ``loss`` itself where amp was asked to do nothing.

    Raises:
        AmpError: wrong use, as a block before ``amp.initialize`` or within another one, gradients that are
            scaled by another scale, a loss that is scaled already, or a backward pass from the wrong loss or
            after the block. The next step or block of an optimizer raises it too if gradients came in a block
            that did not name it.
        SettingError: a parameter that two of the optimizers share.
        UnsupportedError: ``delay_overflow_check=True``.

    Source: apex ``amp/handle.py``; https://nvidia.github.io/apex/advanced.html
    """
    named = _named(optimizers)
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
    if not any(one.scales for one in named):
        yield loss.float()
        return
    scale = scaler.loss_scale()
    scaled = _scaled(loss, scale)
    backward = _Backward(scale, scaled)
    _begin(named, scale, delayed=delay_unscale)
    before = {one: one.gradients.versions() for one in active} if scale != 1.0 else {}
    try:
        yield scaled
        backward.check({one: before.get(one, {}) for one in named})
        found = [one.gradients.end(scale, delayed=delay_unscale) for one in named]
    except BaseException:
        for one in named:
            one.gradients.abandon(delayed=delay_unscale)
        raise
    finally:
        backward.is_over = True
        for one in named:
            one.in_block = False
        for one, versions in before.items():
            if one not in named and one.gradients.written_since(versions):
                one.gradients.scaled_by_others = scale
    flags = [pair for pair in found if pair is not None]
    if flags:
        _update(scaler, loss_id, named, flags)


def _update(
    scaler: Any, loss_id: int, named: Sequence[PreparedOptimizer], found: Sequence[torch.Tensor]
) -> None:
    """Update the scale, and mark the optimizers whose next step is skipped; waits once for the device."""
    flags = torch.stack([pair.to(found[0].device) for pair in found]).tolist()
    overflow = any(new > 0 for new, _ in flags)
    before = scaler.loss_scale()
    scaler.after_block(overflow=overflow)
    after = scaler.loss_scale()
    for one, (_, total) in zip(named, flags, strict=True):
        if overflow:
            scale = f"stays at {after}" if after == before else f"reducing loss scale to {after}"
            one.skip = f"Gradient overflow.  Skipping step, loss scaler {loss_id} {scale}"
        elif total > 0 and one.skip is None:
            one.skip = (
                "Skipping step, gradients from before the scale_loss block are not finite: clear them "
                "with zero_grad()"
            )


def _scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    found = vars(loss).get("_scaled_by_amp")
    if found is not None:
        raise AmpError(
            f"this loss is scaled by {found:g} already, by another scale_loss block: give the loss itself, "
            "and name the optimizers of one backward pass in one block, scale_loss(loss, [first, second])"
        )
    if scale == 1.0:
        return loss.float()
    scaled = loss.float() * scale
    vars(scaled)["_scaled_by_amp"] = scale
    return scaled


class _Backward:
    """Checks that the scaled loss of a block goes backward in the block, and not after it.

    It has no reference to the loss, so that the graph is freed as soon as the script drops it.
    """

    def __init__(self, scale: float, scaled: torch.Tensor) -> None:
        self._scale = scale
        self.is_over = False
        # Nothing to check: the scale makes no difference, or there is no graph.
        self._was_seen = scale == 1.0 or not scaled.requires_grad
        if not self._was_seen:
            hooked: Any = scaled
            hooked.register_hook(self._see)

    def check(self, before: Mapping[PreparedOptimizer, Versions]) -> None:
        """Raise if gradients were written since ``before`` and the scaled loss did not go backward."""
        if self._was_seen:
            return
        # zero_grad() writes too.
        if any(any_not_zero(one.gradients.written_since(versions)) for one, versions in before.items()):
            raise AmpError(
                "gradients came in a scale_loss block whose own loss did not go backward: they are not "
                f"scaled, and would be divided by {self._scale:g}: call backward of what the block yields, "
                "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"
            )

    def _see(self, _gradient: torch.Tensor) -> None:
        if self.is_over:
            raise AmpError(
                f"a loss that is scaled by {self._scale:g} went backward after its scale_loss block, so that "
                "nothing would unscale its gradients: call backward inside the block"
            )
        self._was_seen = True


def _named(optimizers: Any) -> list[PreparedOptimizer] | None:
    """Return the optimizers of a block; None where amp was asked to do nothing with them."""
    given = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if _amp_state.opt_properties is None:
        raise AmpError(
            "scale_loss came before amp.initialize: call model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=...) first"
        )
    if not given:
        raise AmpError("expected an optimizer or a list of them, got an empty list")
    found = [prepared(optimizer_of(one)) for one in given]
    known = [one for one in found if one is not None]
    if not known and not _amp_state.opt_properties.enabled:
        return None
    if len(known) < len(found):
        kind = type(given[found.index(None)]).__name__
        raise AmpError(
            f"this {kind} was not given to amp.initialize, so its gradients would stay scaled: initialize it "
            "with its model, and name in scale_loss what amp.initialize returned"
        )
    if len(known) > 1:
        check_apart([one.optimizer for one in known])
    return known


def _scaler_for(named: Sequence[PreparedOptimizer], loss_id: int) -> Any:
    scalers = named[-1].loss_scalers
    if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(scalers):
        raise AmpError(
            f"expected loss_id from 0 to {len(scalers) - 1}, got {loss_id!r}: give amp.initialize as "
            "num_losses how many losses have a scale of their own"
        )
    return scalers[loss_id]


def _begin(named: Sequence[PreparedOptimizer], scale: float, *, delayed: bool) -> None:
    begun: list[PreparedOptimizer] = []
    try:
        for one in named:
            if one.in_block:
                raise AmpError(
                    "a scale_loss block came within another one of the same optimizer, which would unscale "
                    "its gradients twice: end the first block before"
                )
            one.check_that_models_have_its_parameters()
            one.refresh()
            one.gradients.begin(scale, delayed=delayed)
            one.in_block = True
            begun.append(one)
    except BaseException:
        for one in begun:
            one.gradients.abandon(delayed=delayed)
            one.in_block = False
        raise

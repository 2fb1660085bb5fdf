"""``amp.scale_loss``: a backward pass from a scaled loss, after which gradients are unscaled and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.apex._accumulation import any_not_zero
from narrowcast.apex._findings import Finding, settle
from narrowcast.apex._optimizers import PreparedOptimizer, optimizer_of, others_watched, prepared
from narrowcast.apex._state import amp_state
from narrowcast.errors import AmpError
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
    """Scale a loss for its backward pass; at the end of the block gradients are unscaled and checked.

    Gradients that were there before the block are added to, unscaled to unscaled. Under O2 the unscaled ones
    are the masters', in float32: clip ``amp.master_params(optimizer)``, after the block. Where a gradient is
    NaN or infinite the next ``optimizer.step()`` of every named optimizer does nothing and says so, also
    under a scale that stays, and a dynamic scale is halved. Where only the sum with what was there before is
    not finite, the step is left out too, and the scale counts a good block. A level that casts nothing, at
    scale 1, looks at nothing: O0 is plain float32 training.

    After an exception in the block gradients are as they were before it, but for those that stay scaled. A
    GPU is waited for once, when the block ends, and once more before it under O2 where gradients of half
    weights were written since the last, as by ``model.zero_grad(set_to_none=False)``. Backward passes cast
    nothing under O1.

    Args:
        loss: any floating tensor, on any device, from which ``backward`` can be called.
        optimizers: the optimizers, as ``amp.initialize`` returned them, one or a list, whose parameters
            get gradients from this loss.
        loss_id: which of the ``num_losses`` scales is this loss's.
        model: without effect, as in apex.
        delay_unscale: leave the gradients scaled, to be added to in further blocks; a step is refused until
            a block without it. Needed for all but the last backward pass where DDP's ``no_sync`` is used.
        delay_overflow_check: unscale and leave the check to the next step of the optimizers, or to the end of
            their next block without it. The scale moves then; a step on a NaN or infinity is left out too.

    Yields:
        ``loss`` in float32 times the scale; ``loss`` itself where amp was asked to do nothing.

    Raises:
        AmpError: ``amp.initialize`` was not called, or not with these optimizers; ``loss_id`` out of range;
            a block within a block of the same optimizer; gradients that are still scaled by another scale,
            or that came in a block of other optimizers and were not cleared; a loss that is scaled already,
            goes backward after the block, or does not where gradients came in it.
        SettingError: a parameter that two of the optimizers share.

    Source: apex ``amp/handle.py``; https://nvidia.github.io/apex/advanced.html
    """
    named = _named(optimizers)
    if named is None:
        yield loss
        return
    if not isinstance(loss, torch.Tensor):
        raise AmpError(f"expected the loss to be a torch.Tensor, got {type(loss).__name__}")
    scaler = _scaler_for(named, loss_id)
    if not any(one.scales for one in named):
        yield loss.float()
        for one in named:
            one.after_first_block(1.0)
        return
    scale = scaler.loss_scale()
    scaled = _scaled(loss, scale)
    _begin(named, scale, delayed=delay_unscale)
    try:
        with others_watched(named, scale), _Backward(scale).expected(scaled, named):
            yield scaled
        for one in named:
            one.after_first_block(scale)
        found = [one.gradients.end(scale, delayed=delay_unscale) for one in named]
    except BaseException:
        for one in named:
            one.gradients.abandon(delayed=delay_unscale)
        raise
    finally:
        for one in named:
            one.in_block = False
    flags = [pair for pair in found if pair is not None]
    if flags:
        Finding(scaler, loss_id, named, flags)
        if not delay_overflow_check:
            settle(_unread(named))


_MARK = "_scaled_by_amp"


def _scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    if (before := vars(loss).get(_MARK)) is not None:
        raise AmpError(
            f"this loss is scaled by {before:g} already, by another scale_loss block: give the loss itself, "
            "and name the optimizers of one backward pass in one block, scale_loss(loss, [first, second])"
        )
    if scale == 1.0:
        return loss.float()
    scaled = loss.float() * scale
    vars(scaled)[_MARK] = scale
    return scaled


class _Backward:
    """Sees to it that what one block yields goes backward in it, and nowhere else; holds no graph."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._is_open = self._was_seen = False

    @contextmanager
    def expected(self, scaled: torch.Tensor, named: Sequence[PreparedOptimizer]) -> Iterator[None]:
        """Around the block; without effect where the scale makes no difference or there is no graph."""
        if self._scale == 1.0 or not scaled.requires_grad:
            yield
            return
        hooked: Any = scaled
        hooked.register_hook(self._see)
        before = [one.gradients.writes() for one in named]
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        if self._was_seen:
            return
        now = [one.gradients.writes() for one in named]
        # zero_grad() writes too.
        if any_not_zero(one for a, b in zip(before, now, strict=True) for one in b.since(a)):
            raise AmpError(
                "gradients came in a scale_loss block whose own loss did not go backward: they are not "
                f"scaled, and would be divided by {self._scale:g}: call backward of what the block yields, "
                "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"
            )

    def _see(self, _gradient: torch.Tensor) -> None:
        if not self._is_open:
            raise AmpError(
                f"a loss that is scaled by {self._scale:g} went backward after its scale_loss block, so that "
                "nothing would unscale its gradients: call backward inside the block"
            )
        self._was_seen = True


def _named(optimizers: Any) -> list[PreparedOptimizer] | None:
    """The optimizers of a block; None where amp was asked to do nothing with them."""
    given = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if amp_state.opt_properties is None:
        raise AmpError(
            "scale_loss came before amp.initialize: call model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=...) first"
        )
    if not given:
        raise AmpError("expected an optimizer or a list of them, got an empty list")
    found = [prepared(optimizer_of(one)) for one in given]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        if not amp_state.opt_properties.enabled and not known:
            return None
        kind = type(given[found.index(None)]).__name__
        raise AmpError(
            f"this {kind} was not given to amp.initialize, so its gradients would stay scaled: initialize it "
            "with its model, and name in scale_loss what amp.initialize returned"
        )
    if not all(one.properties.enabled for one in known):
        if any(one.properties.enabled for one in known):
            raise AmpError(
                "some of these optimizers were initialized with enabled=False: give those their own block"
            )
        return None
    if len({id(p) for one in known for p in _parameters(one)}) < sum(len(_parameters(one)) for one in known):
        check_apart([one.optimizer for one in known])
    return known


def _parameters(one: PreparedOptimizer) -> list[torch.Tensor]:
    return [parameter for group in one.optimizer.param_groups for parameter in group["params"]]


def _scaler_for(named: Sequence[PreparedOptimizer], loss_id: int) -> Any:
    # Of several calls of initialize the latest one's.
    scalers = max(named, key=lambda one: one.number).loss_scalers
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
            one.refresh()
            one.gradients.begin(scale, delayed=delayed)
            one.in_block = True
            begun.append(one)
    except BaseException:
        for one in begun:
            one.gradients.abandon(delayed=delayed)
            one.in_block = False
        raise


def _unread(named: Sequence[PreparedOptimizer]) -> list[Finding]:
    found: list[Finding] = []
    for one in named:
        found += [finding for finding in one.findings if finding not in found]
    return found

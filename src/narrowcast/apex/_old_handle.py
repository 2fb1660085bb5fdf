"""``amp.init``: the handle of apex's first interface, which casts functions and wraps optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from narrowcast.apex._handle import Handle, start_casts
from narrowcast.apex._initialize import in_force
from narrowcast.apex._levels import Properties, properties
from narrowcast.apex._optimizers import optimizer_of, prepared
from narrowcast.apex._prepare import prepare_optimizers
from narrowcast.apex._scale_loss import scale_loss
from narrowcast.apex._state import amp_state


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    half_type: torch.dtype = torch.float16,
) -> OldHandle | NoOpHandle:
    """Cast functions by the lists in this thread from now on, as apex's ``amp.init``, until ``remove()``.

    ``initialize`` with O1 does so and makes models and optimizers ready too; scripts should call that. With
    this one ``handle.wrap_optimizer(optimizer)`` makes an optimizer ready.

    Args:
        enabled: False casts nothing.
        loss_scale: a number above 0 or ``"dynamic"``, for the losses of optimizers that are wrapped.
        enable_caching: False casts a weight anew at each use.
        verbose: without effect.
        allow_banned: compute what ``BANNED_FUNCS`` refuses in float32.
        half_type: as for ``initialize``.

    Raises:
        AmpError: a loss scale or a half type that cannot be.
        OrderError: a region of autocast is open in this thread.
        PolicyError: a name on ``amp.lists`` that stands for nothing.
    """
    wanted = properties("O1", loss_scale=loss_scale, half_type=half_type)
    if not enabled:
        nothing = amp_state.handle = NoOpHandle()
        return nothing
    handle = start_casts(
        [], wanted.half_type, allow_banned=allow_banned, caching=enable_caching, kind=OldHandle
    )
    handle.properties = wanted
    amp_state.handle = handle
    in_force(handle.remove)
    return handle


class OldHandle(Handle):
    """What ``init`` returns.

    Attributes:
        properties: those of its ``init``.
    """

    properties: Properties

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Make an optimizer ready for ``optimizer.scale_loss(loss)``, which it has from now on.

        apex returned an object of its own around it, which is no ``torch.optim.Optimizer``.

        Args:
            num_loss: how many losses have a scale of their own; they come in one order in every step.

        Returns:
            ``optimizer``.
        """
        made = prepare_optimizers([optimizer], self.properties, num_losses=num_loss)
        in_force(made.undo)
        amp_state.opt_properties = self.properties
        number = itertools.cycle(range(num_loss))
        made.each[0].offer("scale_loss", lambda loss: scale_loss(loss, optimizer, loss_id=next(number)))
        return optimizer

    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> AbstractContextManager[torch.Tensor]:
        """``amp.scale_loss`` for an optimizer, which is wrapped if it was not."""
        if prepared(optimizer_of(optimizer)) is None:
            self.wrap_optimizer(optimizer)
        return scale_loss(loss, optimizer)


class NoOpHandle:
    """A handle that casts nothing."""

    def is_active(self) -> bool:
        """False."""
        return False

    def remove(self) -> None:
        """Without effect."""

    def _deactivate(self) -> None:
        self.remove()

    def _clear_cache(self) -> None:
        pass

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """``optimizer``, whose ``scale_loss(loss)`` hands the loss on."""
        optimizer_of(optimizer).scale_loss = self.scale_loss  # type: ignore[attr-defined]
        return optimizer

    @contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any = None) -> Iterator[torch.Tensor]:
        """Yields ``loss``."""
        yield loss

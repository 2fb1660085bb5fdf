"""``amp.init``: the handle of apex's first interface, which casts functions and wraps optimizers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from narrowcast.apex._casts import Casts
from narrowcast.apex._handle import Handle, start_casts
from narrowcast.apex._initialize import in_force
from narrowcast.apex._levels import DISABLED, Properties, properties
from narrowcast.apex._optimizers import PreparedOptimizer, optimizer_of, prepared
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
    handle = amp_state.handle = start_casts(
        [],
        wanted.half_type,
        allow_banned=allow_banned,
        caching=enable_caching,
        kind=functools.partial(OldHandle, wanted),
    )
    in_force(handle.remove)
    return handle


class OldHandle(Handle):
    """What ``init`` returns.

    Attributes:
        properties: those of its ``init``.
    """

    def __init__(
        self, properties: Properties, casts: Casts, devices: Iterable[str], caching: bool = True
    ) -> None:
        super().__init__(casts, devices, caching)
        self.properties = properties

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Make an optimizer ready for ``optimizer.scale_loss(loss)``, which it has from now on.

        apex returned an object of its own around it, which is no ``torch.optim.Optimizer``.

        Args:
            num_loss: how many losses have a scale of their own; they come in one order, of which a step
                begins anew.

        Returns:
            ``optimizer``.
        """
        made = _ready(optimizer, self.properties, num_loss)
        amp_state.opt_properties = self.properties
        made.offer("scale_loss", functools.partial(_scale_next, made, num_loss))
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
        _ready(optimizer, DISABLED, num_loss).offer("scale_loss", self.scale_loss)
        return optimizer

    @contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any = None) -> Iterator[torch.Tensor]:
        """Yields ``loss``."""
        yield loss


def _ready(optimizer: Any, wanted: Properties, num_loss: int) -> PreparedOptimizer:
    in_force(prepare_optimizers([optimizer], wanted, num_losses=num_loss).undo)
    made = prepared(optimizer_of(optimizer))
    assert made is not None
    return made


@contextmanager
def _scale_next(made: PreparedOptimizer, num_loss: int, loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """A block for the next loss of a step; one that raised does not count."""
    with scale_loss(loss, made.optimizer, loss_id=made.losses % num_loss) as scaled:
        yield scaled
    made.losses += 1

"""``amp.init``: the handle of apex's first interface, which casts functions and nothing else."""

from __future__ import annotations

import torch

from narrowcast.apex._function_casts import Handle, start_casts
from narrowcast.apex._initialize import in_force
from narrowcast.apex._levels import properties
from narrowcast.apex._state import amp_state


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    half_type: torch.dtype = torch.float16,
) -> Handle | NoOpHandle:
    """Cast functions by the lists in this thread from now on, as apex's ``amp.init``, until ``remove()``.

    ``initialize`` with O1 does so and makes models and optimizers ready too; scripts should call that.

    Args:
        enabled: False casts nothing.
        loss_scale: a number above 0 or ``"dynamic"``; only checked, as losses are ``initialize``'s part.
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
    handle = start_casts([], wanted.half_type, allow_banned=allow_banned, caching=enable_caching)
    amp_state.handle = handle
    in_force(handle.remove)
    return handle


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

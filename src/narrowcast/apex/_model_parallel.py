"""``apex.transformer.amp.GradScaler``: ranks that hold parts of one model step together, or none does."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from narrowcast.errors import SettingError
from narrowcast.gradients import GradScaler as _GradScaler

# Where a script that trains parts of a model on several ranks keeps its groups.
_PARALLEL_STATES = ("apex.transformer.parallel_state", "megatron.core.parallel_state")


class GradScaler(_GradScaler):
    """``narrowcast.GradScaler`` for one model that is spread over the ranks of a group.

    Whether a gradient is not finite is agreed on by the maximum over the group, so that its ranks skip the
    same steps and keep the same scale. ``clip_grad_norm_`` adds the ranks' norms up; parameters that several
    ranks of the group hold copies of count once a copy.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in
            ``narrowcast.GradScaler``.
        process_group: the model-parallel group; by default that of ``apex.transformer.parallel_state`` or
            ``megatron.core.parallel_state``, where the script has imported and set up one of them.

    Raises:
        SettingError: several ranks, and no group is known.

    Source: apex ``transformer/amp/grad_scaler.py``.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: Any | None = None,
    ) -> None:
        group = _known_group() if process_group is None and enabled else process_group
        super().__init__(
            None,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            process_group=group,
            sharded=True,
        )


def _known_group() -> Any | None:
    for name in _PARALLEL_STATES:
        state = sys.modules.get(name)
        if state is not None and state.model_parallel_is_initialized():
            return state.get_model_parallel_group()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise SettingError(
            f"expected process_group=, the ranks that the model is spread over, since neither "
            f"{' nor '.join(_PARALLEL_STATES)} is imported and set up here: pass the group that "
            "torch.distributed.new_group gave; where each rank holds a whole model, use narrowcast.GradScaler"
        )
    return None

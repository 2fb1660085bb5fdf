"""The float32 values of held parameters, set from outside."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from narrowcast.weights._held import HeldWeights
from narrowcast.weights._keepers import release
from narrowcast.weights._torch_internals import local, version_of


def set_values(held: HeldWeights, values: Mapping[int, torch.Tensor]) -> None:
    """Give some of the held parameters other values, the low ones and what is kept alike.

    Args:
        held: the handle of a held optimizer.
        values: by place in ``held.parameters``; any floating dtype, of the parameter's shape, on any device;
            a DTensor where the parameter is one. Rounded to float32, then to the low format, both to
            nearest; NaN and infinities are kept.
    """
    pairs = held._pairs
    with torch.no_grad():
        for place, value in values.items():
            pair = pairs[place]
            full = local(value.detach()).to(local(pair.low).device, torch.float32)
            local(pair.low).copy_(full)
            held._keeper.start(pair, full)
            if pair.opened and held._keeper.releases:
                release(pair)
            pair.opened, pair.seen = False, version_of(pair.low)

"""The finite check: one read of every gradient, the answer left on the device until somebody asks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NonfiniteFlags:
    """For each of several gradients, whether it holds a NaN or an infinity. Not yet read from the device."""

    count: int
    flags_by_group: tuple[tuple[tuple[int, ...], torch.Tensor], ...]

    def read(self) -> list[bool]:
        """The flags as Python values, in the order of the gradients; waits for the device, once a group."""
        flags = [False] * self.count
        for positions, group_flags in self.flags_by_group:
            for position, flag in zip(positions, group_flags.tolist(), strict=True):
                flags[position] = flag
        return flags

    def any(self, device: torch.device) -> torch.Tensor:
        """1.0 where any of them is set, else 0.0: 0-dim, float32, on ``device``; waits for nothing."""
        if not self.flags_by_group:
            return torch.zeros((), device=device)
        each = [flags.any().to(device, non_blocking=True) for _, flags in self.flags_by_group]
        return torch.stack(each).any().float()


def nonfinite_flags(gradients: Sequence[torch.Tensor]) -> NonfiniteFlags:
    """Check each gradient for NaN and infinities without waiting for the device.

    Args:
        gradients: floating or complex tensors of any shape, on any devices, dense or sparse. A sparse
            one is checked after equal indices were summed, which is what an optimizer will use.

    The largest magnitude decides, so finite values never overflow the check as their squares would;
    a NaN anywhere makes that magnitude NaN. Subnormals and -0.0 are finite. On a CPU, where the largest
    magnitude takes ten times as long as the Euclidean norm and nothing is asynchronous, the norm is read
    first, and only what is not finite by it is looked at again.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for position, gradient in enumerate(gradients):
        values = gradient.detach()
        if values.is_sparse:
            values = values.coalesce().values()
        if values.is_complex():
            values = torch.view_as_real(values)
        if values.numel():
            groups[values.device, values.dtype].append((position, values))
    flags_by_group = []
    for members in groups.values():
        positions = tuple(position for position, _ in members)
        flags_by_group.append((positions, _flags([values for _, values in members])))
    return NonfiniteFlags(len(gradients), tuple(flags_by_group))


def _flags(members: list[torch.Tensor]) -> torch.Tensor:
    """Of tensors on one device and of one dtype, none of them empty."""
    if members[0].device.type != "cpu":
        return ~torch.isfinite(torch.stack(list(torch._foreach_norm(members, math.inf))))
    flags = ~torch.isfinite(torch.stack(list(torch._foreach_norm(members, 2.0))))
    for position in flags.nonzero().flatten().tolist():
        flags[position] = ~torch.isfinite(members[position]).all()
    return flags

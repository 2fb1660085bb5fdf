"""Norms of gradients that are on several devices and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.gradients import _torch_internals
from narrowcast.gradients._optimizer_gradients import MeshPlacement, OptimizerGradients

_SAME = 1e-3  # norms of copies agree to rounding; norms of different gradients do not


def norm_of_norms(stacks: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm of norms, which are 1-dim tensors on any device."""
    if not stacks:
        return torch.zeros((), dtype=torch.float32, device=device)
    on_device = [stack.to(device, non_blocking=True) for stack in stacks]
    norms = on_device[0]
    if len(on_device) > 1:
        norms = torch.cat(on_device)
    total: torch.Tensor = torch.linalg.vector_norm(norms, order)
    return total


def norm_over_ranks(
    gradients: OptimizerGradients,
    norms_by_group: Sequence[tuple[Sequence[int], torch.Tensor]],
    order: float,
    device: torch.device,
    groups: Sequence[Any],
    sharded_group: Any | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm over all ranks, and whether ranks with copies differ.

    Args:
        norms_by_group: the positions of gradients of one device and dtype, and the norm of each.
        device: where the result is to be.
        groups: the process groups that decide together, one collective for each.
        sharded_group: the group whose ranks hold different gradients that are no DTensors; None: copies.
    """
    # The norms of gradients with the same placement add up first. Every rank has the same placements in the
    # same order; plain gradients first.
    meshes = gradients.meshes or [None] * len(gradients.values)
    norms_by_placement: dict[MeshPlacement | None, dict[int, torch.Tensor]] = {None: {}}
    for mesh in meshes:
        norms_by_placement.setdefault(mesh, {})
    for positions, stack in norms_by_group:
        for position, norm in zip(positions, stack.unbind(), strict=True):
            norms_by_placement[meshes[position]][position] = norm
    powers = []
    for norms in norms_by_placement.values():
        positions_in_order = sorted(norms)
        powers.append(_power([norms[position] for position in positions_in_order], order, device))

    # Parts of one gradient add up over the ranks of a group. Copies have to agree.
    ranks_differ = torch.zeros((), dtype=torch.bool, device=device)
    for group in groups:
        row = torch.stack(powers)
        gathered = row.new_empty(dist.get_world_size(group) * len(row))
        _torch_internals.all_gather(gathered, row, group)
        for index, placement in enumerate(norms_by_placement):
            of_ranks = gathered[index :: len(row)]
            split_groups = (sharded_group,) if placement is None else placement.sharded
            is_split = group in split_groups
            largest = of_ranks.amax()
            powers[index] = largest
            if not is_split:
                differ = largest > of_ranks.amin() * (1 + _SAME)
                ranks_differ = ranks_differ | (differ & torch.isfinite(largest))
            elif order != math.inf:
                powers[index] = of_ranks.sum()

    total = torch.stack(powers)
    if order == math.inf:
        return total.amax(), ranks_differ
    return total.sum() ** (1 / order), ranks_differ


def _power(norms: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm to the power of its order, which ranks add up.

    In fp64 if the device has it, so that it is finite if the norm is. NaN becomes infinity, because maxima
    over ranks treat NaN in different ways.
    """
    norm = norm_of_norms([norm.reshape(1) for norm in norms], order, device)
    power = norm if device.type == "mps" else norm.double()
    if order != math.inf:
        power = power**order
    return torch.nan_to_num(power, nan=math.inf, posinf=math.inf)

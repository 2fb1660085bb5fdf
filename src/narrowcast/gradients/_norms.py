"""Norms of gradients that are on several devices and ranks.

Over ranks, powers of norms add up: the sum of squares for the Euclidean norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.gradients import _torch_internals
from narrowcast.gradients._devices import on_device
from narrowcast.gradients._optimizer_gradients import MeshPlacement, OptimizerGradients

# Ranks are taken to hold copies of the same gradients if the powers of their norms differ by no more than
# this. Rounding makes less of a difference, and gradients of different batches more.
_RELATIVE_TOLERANCE = 1e-3


def norm_of_norms(stacks: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm of all norms together, given as 1-dim tensors on any device."""
    if not stacks:
        return torch.zeros((), dtype=torch.float32, device=device)
    stacks_there = [on_device(stack, device) for stack in stacks]
    norms = stacks_there[0]
    if len(stacks_there) > 1:
        norms = torch.cat(stacks_there)
    total: torch.Tensor = torch.linalg.vector_norm(norms, order)
    return total


@torch.no_grad()
def norm_of_gradients(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the Euclidean norm of all gradients of ``parameters`` together, without a host sync.

    The result is 0-dim, on the device of the first gradient, and summed in fp32 (in fp64 for fp64). No
    gradient is changed. None if there are no gradients, or if one is neither a plain dense tensor nor sparse
    COO, such as a DTensor.
    """
    values: list[torch.Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if type(gradient) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()  # coalescing adds up, as an optimizer does
        if gradient.layout != torch.strided:
            return None
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        values.append(gradient)
    if not values:
        return None

    stacks = []
    for _, _, _, members in _torch_internals.by_device_and_dtype(values):
        stacks.append(torch.stack(_torch_internals.norms(members, 2.0)))
    return norm_of_norms(stacks, 2.0, values[0].device)


def norm_over_ranks(
    gradients: OptimizerGradients,
    norms_by_dtype: Sequence[tuple[Sequence[int], torch.Tensor]],
    order: float,
    device: torch.device,
    process_groups: Sequence[Any],
    sharded_group: Any | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm over all ranks, and whether ranks with copies differ.

    Args:
        norms_by_dtype: for each device and dtype, the positions of its gradients, and the norm of each.
        device: where the result is to be.
        process_groups: the groups of ranks that decide together; there is one collective for each.
        sharded_group: the process group in which each rank holds different plain gradients. None: all ranks
            hold copies of the plain gradients. (DTensors have placements, which say it.)
    """
    powers = _power_by_placement(gradients, norms_by_dtype, order, device)
    ranks_differ = torch.zeros((), dtype=torch.bool, device=device)
    for group in process_groups:
        # Each rank sends a row with one power for each placement. The rows arrive one after the other.
        row = torch.stack(list(powers.values()))
        gathered = row.new_empty(dist.get_world_size(group) * len(row))
        _torch_internals.all_gather(gathered, row, group)
        for index, placement in enumerate(powers):
            power_of_each_rank = gathered[index :: len(row)]
            largest = power_of_each_rank.amax()
            # The groups in which each rank holds another part of these gradients.
            split_groups = (sharded_group,) if placement is None else placement.sharded
            is_split = group in split_groups

            # The powers of parts add up over the ranks of the group. Copies have to agree.
            if is_split and order != math.inf:
                powers[placement] = power_of_each_rank.sum()
            else:
                powers[placement] = largest
            if not is_split:
                differ = largest > power_of_each_rank.amin() * (1 + _RELATIVE_TOLERANCE)
                # Gradients that are not finite skip the step; they are no sign of a wrong set-up.
                ranks_differ = ranks_differ | (differ & torch.isfinite(largest))

    total = torch.stack(list(powers.values()))
    if order == math.inf:
        return total.amax(), ranks_differ
    return total.sum() ** (1 / order), ranks_differ


def _power_by_placement(
    gradients: OptimizerGradients,
    norms_by_dtype: Sequence[tuple[Sequence[int], torch.Tensor]],
    order: float,
    device: torch.device,
) -> dict[MeshPlacement | None, torch.Tensor]:
    """Return, for each placement, the power of the norm of its gradients; None stands for plain tensors."""
    # Ranks compare and add up by position in a row, so each needs all placements in the same order: None
    # first, even if no gradient is plain, then the others in the order of the optimizer's gradients.
    placements = gradients.meshes or [None] * len(gradients.values)
    norms_by_placement: dict[MeshPlacement | None, dict[int, torch.Tensor]] = {None: {}}
    for placement in placements:
        norms_by_placement.setdefault(placement, {})
    for positions, stack in norms_by_dtype:
        for position, norm in zip(positions, stack.unbind(), strict=True):
            norms_by_placement[placements[position]][position] = norm

    # Sum up in the order of positions, so that ranks with copies round alike: torch lists devices and dtypes
    # in no fixed order.
    powers: dict[MeshPlacement | None, torch.Tensor] = {}
    for placement, norms in norms_by_placement.items():
        in_order = [norms[position] for position in sorted(norms)]
        powers[placement] = _power(in_order, order, device)
    return powers


def _power(norms: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm to the power of its order; for the order infinity, the norm.

    The power is in fp64 if the device has it, so that it is finite if the norm is. NaN becomes infinity,
    because maxima over ranks treat NaN in different ways.
    """
    norm = norm_of_norms([norm.reshape(1) for norm in norms], order, device)
    power = norm if device.type == "mps" else norm.double()
    if order != math.inf:
        power = power**order
    return torch.nan_to_num(power, nan=math.inf, posinf=math.inf)

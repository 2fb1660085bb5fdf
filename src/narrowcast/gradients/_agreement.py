"""What several processes agree on about a step, in one collective a group of them.

A flag that only one rank raises would let the others step: their weights would part, or the next collective
would hang.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.gradients import _torch_internals
from narrowcast.gradients._finite import NonfiniteFlags
from narrowcast.gradients._held import HeldGradients, MeshPlacement

_SAME = 1e-3  # norms of copies agree to rounding; of different gradients they do not
_CHUNK, _SMALL = 1024, 512  # elements: of what one norm is taken of, of a gradient that is worth copying


def groups_of(held: HeldGradients, process_group: Any | None) -> list[Any]:
    """The process groups that decide together on these gradients."""
    groups: list[Any] = [] if process_group is None else [process_group]
    for placement in held.meshes or ():
        if placement is not None:
            groups += [g for g in (*placement.sharded, *placement.copied) if g not in groups]
    return groups


def any_rank(flag: torch.Tensor, groups: Sequence[Any]) -> torch.Tensor:
    """``flag``, above 0 where it is on any rank. In place."""
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return flag


@dataclass(frozen=True, slots=True)
class TotalNorm:
    """The norm of all gradients of all ranks together.

    Attributes:
        norm: 0-dim float32; not finite where a gradient of any rank is not.
        apart: 0-dim bool, whether ranks that should hold copies hold different gradients; None: no ranks.
        flags: which gradients of this rank are not finite, by their own norms; None where those were not
            needed.
        clipped: 0-dim bool, whether clipping by it gave gradients to step on, where something clipped.
    """

    norm: torch.Tensor
    apart: torch.Tensor | None
    flags: NonfiniteFlags | None
    clipped: torch.Tensor | None = None


def total_norm(
    held: HeldGradients,
    order: float,
    device: torch.device,
    process_group: Any | None,
    *,
    sharded: bool,
    wide: bool = False,
) -> TotalNorm:
    """One read of the gradients and one collective a process group.

    Args:
        held: the gradients; of sparse ones the values are taken as they are.
        order: of the norm; above 0.
        device: where the answer goes.
        process_group: ranks that hold copies of the plain gradients, or with ``sharded`` parts of them.
        wide: the norm in fp64, where that of finite gradients would overflow.
    """
    groups = groups_of(held, process_group)
    if not groups and _is_small(held):
        flat = torch.split(_torch_internals.flattened(held.values), _CHUNK)
        stacks = [torch.stack(_torch_internals.norms(flat, order, wide=wide))]
        return TotalNorm(_narrowed(_joined(stacks, order, device), wide=wide), None, None)
    stacks = [
        torch.stack(_torch_internals.norms(members, order, wide=wide)) for _, _, _, members in held.groups
    ]
    flags = NonfiniteFlags(
        len(held.values),
        tuple(
            (tuple(positions), ~torch.isfinite(stack))
            for (_, _, positions, _), stack in zip(held.groups, stacks, strict=True)
        ),
    )
    if not groups:
        return TotalNorm(_narrowed(_joined(stacks, order, device), wide=wide), None, flags)
    each = _in_order(held, stacks)
    meshes = held.meshes or [None] * len(each)
    # Every rank has the same placements in the same order; plain gradients first.
    placements: list[MeshPlacement | None] = [None]
    placements += dict.fromkeys(placement for placement in meshes if placement is not None)
    parts = [
        _power([norm for norm, place in zip(each, meshes, strict=True) if place == wanted], order, device)
        for wanted in placements
    ]
    apart = torch.zeros((), dtype=torch.bool, device=device)
    for group in groups:
        row = torch.stack(parts)
        gathered = row.new_empty(dist.get_world_size(group) * len(row))
        _torch_internals.all_gather(gathered, row, group)
        for index, placement in enumerate(placements):
            ranks = gathered[index :: len(row)]
            split = (sharded and group is process_group) if placement is None else group in placement.sharded
            parts[index] = ranks.sum() if split and order != math.inf else ranks.amax()
            if not split:
                differ = ranks.amax() > ranks.amin() * (1 + _SAME)
                apart = apart | (differ & torch.isfinite(ranks.amax()))
    total = torch.stack(parts)
    norm = total.amax() if order == math.inf else total.sum() ** (1 / order)
    return TotalNorm(_narrowed(norm, wide=wide), apart, flags)


def _is_small(held: HeldGradients) -> bool:
    """Whether copying many small gradients side by side is faster than reading one after the other."""
    if len(held.groups) != 1 or held.groups[0][0].type != "cpu":
        return False
    return len(held.values) > 1 and all(value.numel() <= _SMALL for value in held.values)


def _in_order(held: HeldGradients, stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each gradient, 0-dim, in the order of the gradients."""
    each: list[torch.Tensor] = [torch.empty(0)] * len(held.values)
    for (_, _, positions, _), stack in zip(held.groups, stacks, strict=True):
        for position, norm in zip(positions, stack.unbind(), strict=True):
            each[position] = norm
    return each


def _joined(stacks: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The norm of norms, which are 1-dim tensors on any device."""
    if not stacks:
        return torch.zeros((), device=device)
    there = [stack.to(device, non_blocking=True) for stack in stacks]
    norms = there[0] if len(there) == 1 else torch.cat(there)
    total: torch.Tensor = torch.linalg.vector_norm(norms, order)
    return total


def _narrowed(norm: torch.Tensor, *, wide: bool) -> torch.Tensor:
    return norm if wide else norm.float()


def _power(norms: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """What ranks add up: the norm to the power of its order, in fp64 where there is one, so that it is finite
    when the norm is. NaN becomes infinity, which sums and maxima hand on alike.
    """
    norm = _joined([norm.reshape(1) for norm in norms], order, device)
    norm = norm if device.type == "mps" else norm.double()
    power = norm if order == math.inf else norm**order
    return torch.nan_to_num(power, nan=math.inf, posinf=math.inf)

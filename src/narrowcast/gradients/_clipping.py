"""Clipping: one read of the gradients gives their norm and the check, on one rank or on many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.gradients import _torch_internals
from narrowcast.gradients._check import GradientCheck, Scaling, multiply, process_groups, versions_of
from narrowcast.gradients._optimizer_gradients import (
    FlatCopies,
    MeshPlacement,
    NonfiniteFlags,
    OptimizerGradients,
)

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_SAME = 1e-3  # norms of copies agree to rounding; norms of different gradients do not
_LARGEST_DIVISOR = 2.0**127  # of a deferred division; the inverse of infinity would be 0


@torch.no_grad()
def clip(
    gradients: OptimizerGradients,
    scaling: Scaling,
    max_norm: float,
    order: float,
    *,
    defer: bool,
    flat: FlatCopies,
) -> GradientCheck:
    """Unscale, check and clip in one read; with ``defer`` in the optimizer's step, where possible.

    A norm that is not finite skips the step, also of finite gradients whose squares overflow.
    """
    total = total_norm(gradients, order, scaling, flat=flat)
    defer = defer and not scaling.below_one
    clip_here = _clip_on_host if scaling.factor.device.type == "cpu" else _clip_on_device
    return clip_here(gradients, scaling, max_norm, total, defer=defer)


def _clip_on_host(
    gradients: OptimizerGradients, scaling: Scaling, max_norm: float, total: TotalNorm, *, defer: bool
) -> GradientCheck:
    """Clip where reading a number costs nothing: gradients are multiplied only if that changes them."""
    groups = process_groups(gradients, scaling)
    inverse = scaling.inverse()
    norm = total.norm * inverse if scaling.scales else total.norm
    norm_is_finite = math.isfinite(norm)
    clipping = _clipping(max_norm, norm)
    kept = float(clipping)
    finite = norm_is_finite and kept >= 0.0  # a max_norm in a tensor may be NaN or negative
    check = GradientCheck(
        torch.full((), float(not finite), device="cpu"),
        overflowed=not finite,
        any_checked=bool(gradients.values or groups),
        gradients=gradients,
        one_rank=not groups,
        flags=None if norm_is_finite else gradients.flags(),
        norm=norm,
        ranks_differ=total.ranks_differ,
    )
    if not scaling.scales and kept == 1.0:
        return check

    # Gradients of a step that will be skipped stay as they are.
    fits = not finite or (kept > 0.0 and scaling.number() / kept < _LARGEST_DIVISOR)
    if defer and fits:
        check.divisor = scaling.factor / clipping
        check.versions = versions_of(gradients)
    else:
        multiply(gradients, inverse * clipping)
    return check


def _clip_on_device(
    gradients: OptimizerGradients, scaling: Scaling, max_norm: float, total: TotalNorm, *, defer: bool
) -> GradientCheck:
    """Clip without reading anything from the device."""
    # The kernel that unscales gradients also unscales their norm, and checks it.
    found_inf = torch.zeros((), device=scaling.factor.device)
    inverse = scaling.inverse()
    norm = total.norm
    _torch_internals.multiply_and_check([norm], found_inf, inverse)
    if scaling.below_one:
        _check_number(norm, found_inf)
    clipping = _clipping(max_norm, norm)
    groups = process_groups(gradients, scaling)
    check = GradientCheck(
        found_inf,
        overflowed=None,
        any_checked=bool(gradients.values or groups),
        gradients=gradients,
        one_rank=not groups,
        flags=total.flags,
        norm=norm,
        ranks_differ=total.ranks_differ,
    )
    if isinstance(max_norm, torch.Tensor):
        found_inf.masked_fill_(~(clipping >= 0), 1.0)  # it may be NaN or negative
    if not defer:
        multiply(gradients, inverse * clipping if scaling.scales else clipping)
        return check

    check.divisor = scaling.factor / clipping
    check.versions = versions_of(gradients)
    # A division by infinity would train on zeros. To a norm of 0 that is what the caller wants.
    if isinstance(max_norm, torch.Tensor):
        found_inf.masked_fill_(~torch.isfinite(check.divisor) & (clipping > 0), 1.0)
    elif max_norm > 0.0 and scaling.scales:
        _check_number(check.divisor, found_inf)
    return check


def _clipping(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Return the factor that ``torch.nn.utils.clip_grad_norm_`` multiplies gradients by."""
    return (max_norm / (norm + _EPSILON)).clamp(max=1.0)


def _check_number(number: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Set ``found_inf`` to 1 if ``number`` is not finite, in one kernel."""
    _torch_internals.multiply_and_check([number], found_inf, torch.ones_like(found_inf))


@torch.no_grad()
def clip_unscaled(
    gradients: OptimizerGradients,
    max_norm: float,
    order: float,
    scaling: Scaling,
    *,
    flat: FlatCopies | None = None,
) -> TotalNorm:
    """Clip gradients that are unscaled; return their norm before clipping."""
    total = total_norm(gradients, order, scaling, flat=flat)
    clipping = _clipping(max_norm, total.norm)
    if scaling.factor.device.type != "cpu":
        is_finite = torch.isfinite(total.norm) & (clipping >= 0)
        total.found_inf = (~is_finite).float()
        multiply(gradients, clipping)
        return total

    # On the host gradients are multiplied only if that changes them.
    kept = float(clipping)
    if not (math.isfinite(total.norm) and kept >= 0.0):
        total.found_inf = torch.ones((), device="cpu")
        total.flags = gradients.flags()  # before they are multiplied by NaN
    if kept != 1.0:
        multiply(gradients, clipping)
    return total


@torch.no_grad()
def clamp(gradients: OptimizerGradients, value: float) -> None:
    """Clamp gradients to [-value, value] in place; NaN stays NaN."""
    for _, _, _, members in gradients.groups:
        _torch_internals.clamp(members, -value, value)


# ---- norms over all ranks


@dataclass(slots=True)
class TotalNorm:
    """The norm of all gradients of all ranks together.

    Attributes:
        norm: 0-dim float32; not finite if a gradient of any rank is not.
        ranks_differ: as in ``GradientCheck``.
        flags: which gradients of this rank are not finite, from their own norms; None on a CPU, where they
            are read again if needed.
        found_inf: 0-dim float32, above 0 if the gradients are not finite after clipping; None if the host
            knows that they are, and without clipping.
    """

    norm: torch.Tensor
    ranks_differ: torch.Tensor | None = None
    flags: NonfiniteFlags | None = None
    found_inf: torch.Tensor | None = None


def total_norm(
    gradients: OptimizerGradients, order: float, scaling: Scaling, *, flat: FlatCopies | None = None
) -> TotalNorm:
    """Compute the norm in one read of the gradients and one collective for each process group.

    Of sparse gradients the values are read as they are. The result is on the device of the scale's factor.
    ``flat`` is memory for small gradients.
    """
    device = scaling.factor.device
    groups = process_groups(gradients, scaling)

    # Small gradients on a CPU, as one tensor.
    rows = None if groups or flat is None else flat.of(gradients)
    if rows is not None:
        norms = _torch_internals.norms_of_rows(rows, order)
        return TotalNorm(_norm_of_norms([norms], order, device).float())

    # One kernel for each device and dtype.
    stacks = []
    norms_by_group = []
    for _, _, positions, members in gradients.groups:
        stack = torch.stack(_torch_internals.norms(members, order))
        stacks.append(stack)
        norms_by_group.append((positions, stack))
    flags = None
    if device.type != "cpu":
        flags = NonfiniteFlags(len(gradients.values), tuple(norms_by_group))
    if not groups:
        return TotalNorm(_norm_of_norms(stacks, order, device).float(), flags=flags)
    norm, ranks_differ = _norm_over_ranks(gradients, norms_by_group, order, scaling, groups)
    return TotalNorm(norm.float(), ranks_differ, flags)


def _norm_over_ranks(
    gradients: OptimizerGradients,
    norms_by_group: Sequence[tuple[Sequence[int], torch.Tensor]],
    order: float,
    scaling: Scaling,
    groups: Sequence[Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm over all ranks, and whether ranks with copies differ."""
    device = scaling.factor.device

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
        in_order = [norms[position] for position in sorted(norms)]
        powers.append(_power(in_order, order, device))

    # Parts of one gradient add up over the ranks of a group. Copies have to agree.
    ranks_differ = torch.zeros((), dtype=torch.bool, device=device)
    for group in groups:
        row = torch.stack(powers)
        gathered = row.new_empty(dist.get_world_size(group) * len(row))
        _torch_internals.all_gather(gathered, row, group)
        for index, placement in enumerate(norms_by_placement):
            of_ranks = gathered[index :: len(row)]
            if placement is None:
                is_split = scaling.sharded and group is scaling.process_group
            else:
                is_split = group in placement.sharded
            largest = of_ranks.amax()
            powers[index] = of_ranks.sum() if is_split and order != math.inf else largest
            if not is_split:
                differ = largest > of_ranks.amin() * (1 + _SAME)
                ranks_differ = ranks_differ | (differ & torch.isfinite(largest))

    total = torch.stack(powers)
    if order == math.inf:
        return total.amax(), ranks_differ
    return total.sum() ** (1 / order), ranks_differ


def _norm_of_norms(stacks: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm of norms, which are 1-dim tensors on any device."""
    if not stacks:
        return torch.zeros((), device=device)
    there = [stack.to(device, non_blocking=True) for stack in stacks]
    norms = there[0] if len(there) == 1 else torch.cat(there)
    total: torch.Tensor = torch.linalg.vector_norm(norms, order)
    return total


def _power(norms: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm to the power of its order, which ranks add up.

    In fp64 if the device has it, so that it is finite if the norm is. NaN becomes infinity, because maxima
    over ranks treat NaN in different ways.
    """
    norm = _norm_of_norms([norm.reshape(1) for norm in norms], order, device)
    if device.type != "mps":
        norm = norm.double()
    power = norm if order == math.inf else norm**order
    return torch.nan_to_num(power, nan=math.inf, posinf=math.inf)

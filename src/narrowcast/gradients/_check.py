"""The gradient check: unscale, check and clip the gradients of an optimizer, on one rank or on many.

If the optimizer's step can divide by itself (``fused=True``), nothing is written here: one read gives the
norm and the finite check, and the division is deferred to the step.

Ranks agree in one collective for each process group. If only one rank skipped its step, the others would
diverge or wait for ever in the next collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.errors import OrderError
from narrowcast.gradients import _torch_internals
from narrowcast.gradients._optimizer_gradients import (
    MeshPlacement,
    NonfiniteFlags,
    OptimizerGradients,
    gradients_of,
)

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")
_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_SAME = 1e-3  # norms of copies agree to rounding; norms of different gradients do not
_CHUNK, _SMALL = 1024, 512  # elements: of a piece of the flattened copy, of a gradient that is worth copying


@dataclass(frozen=True, slots=True)
class Scaling:
    """The loss scale of some gradients, and the ranks that decide on them together.

    Attributes:
        factor: the loss scale, 0-dim float32.
        below_one: whether it may be below 1, so that unscaling finite gradients may overflow.
        process_group: ranks that decide together; ``sharded``: each of them holds different gradients.
    """

    factor: torch.Tensor
    below_one: bool
    process_group: Any | None = None
    sharded: bool = False

    def inverse(self) -> torch.Tensor:
        # The reciprocal in fp64, as in torch/amp/grad_scaler.py; MPS has no fp64. A CPU's costs no kernels.
        factor, kind = self.factor, self.factor.device.type
        if kind == "cpu" and (scale := float(factor)) >= 2.0**-126:  # of less, torch.full would raise
            return torch.full((), 1.0 / scale, dtype=torch.float32, device=factor.device)
        return factor.reciprocal() if kind == "mps" else factor.double().reciprocal().float()


@dataclass(slots=True)
class GradientCheck:
    """The result of checking an optimizer's gradients, on the device until it is read.

    Attributes:
        found_inf: 0-dim float32 on the scale's device, above 0 if a gradient is not finite.
        any_checked: whether there was a gradient to check, on this rank or another.
        flags: which gradients are not finite, if that is already known.
        norm: norm of the unscaled gradients before clipping, 0-dim; None without clipping.
        ranks_differ: 0-dim, whether ranks that should hold copies hold different gradients; None: no ranks.
        divisor: what the gradients are still to be divided by; None if they are unscaled.
        versions: identity and version of each gradient while the division is deferred.
    """

    found_inf: torch.Tensor
    any_checked: bool
    gradients: OptimizerGradients
    flags: NonfiniteFlags | None = None
    norm: torch.Tensor | None = None
    ranks_differ: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    versions: list[int] | None = None

    def refuse_changes(self) -> None:
        """Raise OrderError if gradients were written to while their division was deferred."""
        if self.versions is not None and self.versions != _versions(self.gradients):
            raise OrderError(
                "the gradients were changed between clip_grad_norm_ and step, while they were still scaled "
                "(a fused optimizer divides them itself): change them after unscale_(optimizer) and before "
                "clip_grad_norm_(optimizer, ...), or clip with torch.nn.utils.clip_grad_norm_"
            )

    def nonfinite(self) -> NonfiniteFlags:
        """Return which gradients are not finite; reads them now if that is not known yet."""
        if self.flags is None:
            self.flags = self.gradients.flags()
        return self.flags

    @torch.no_grad()
    def divide_now(self) -> None:
        """Do the division that was deferred to the step."""
        if self.divisor is not None:
            self.refuse_changes()
            if known_on_host(self.found_inf):
                self.nonfinite()
            _multiply(self.gradients, self.divisor.reciprocal())
            self.divisor = self.versions = None


# ---- unscaling and checking


@torch.no_grad()
def unscale(gradients: OptimizerGradients, scaling: Scaling) -> GradientCheck:
    """Divide gradients by the scale, in place, and check them."""
    device = scaling.factor.device
    inverse = scaling.inverse()
    found = torch.zeros((), device=device)
    for where, _, _, members in gradients.groups:
        there = found if where == device else torch.zeros((), device=where)
        _torch_internals.multiply_and_check(members, there, inverse.to(where, non_blocking=True))
        if scaling.below_one:
            # The kernel checks before it multiplies, and dividing by 2**-20 may overflow.
            _torch_internals.multiply_and_check(members, there, torch.ones((), device=where))
        if there is not found:
            # Fused steps skip at exactly 1.
            torch.maximum(found, there.to(device, non_blocking=True), out=found)
    groups = _process_groups(gradients, scaling)
    _max_over_ranks(found, groups)
    check = GradientCheck(found, bool(gradients.values or groups), gradients)
    if known_on_host(found):
        # Before clipping by a NaN norm makes every gradient NaN.
        check.flags = gradients.flags()
    return check


@torch.no_grad()
def check_scaled(gradients: OptimizerGradients, scaling: Scaling) -> GradientCheck:
    """Check gradients and defer their division to the optimizer's step."""
    flags = gradients.flags()
    groups = _process_groups(gradients, scaling)
    found = _max_over_ranks(flags.any(scaling.factor.device), groups)
    return GradientCheck(found, bool(gradients.values or groups), gradients, flags, divisor=scaling.factor)


def unscale_by(optimizer: torch.optim.Optimizer, scale: float) -> torch.Tensor:
    """Divide every gradient of ``optimizer`` by ``scale``, in place, and check whether all are finite.

    For code that keeps a loss scale of its own. Gradients may be of any format, fp16 too, on any device,
    dense, sparse or DTensors. The division is a multiplication by the float32 nearest to ``1 / scale``, as in
    torch; with a scale of 1 nothing is written.

    Returns:
        0-dim float32 on the device of the first gradient (the CPU if there is none), above 0 if a gradient
        was or became NaN or infinite, on any rank. No host sync on a GPU.
    """
    gradients = gradients_of(optimizer, allow_fp16=True)
    check = check_scaled if scale == 1.0 else unscale
    return check(gradients, scaled_by(scale, gradients)).found_inf


def scaled_by(scale: float, gradients: OptimizerGradients) -> Scaling:
    """Return a number as the scale of some gradients, on the device of the first."""
    device = gradients.values[0].device if gradients.values else torch.device("cpu")
    return Scaling(torch.full((), scale, dtype=torch.float32, device=device), scale < 1.0)


# ---- clipping


@torch.no_grad()
def clip(
    gradients: OptimizerGradients, scaling: Scaling, max_norm: float, order: float, *, defer: bool
) -> GradientCheck:
    """Unscale, check and clip in one read; with ``defer`` in the optimizer's step, where possible."""
    device = scaling.factor.device
    total = total_norm(gradients, order, scaling)
    inverse = scaling.inverse()
    norm = total.norm * inverse
    finite = torch.isfinite(total.norm) & torch.isfinite(norm)
    groups = _process_groups(gradients, scaling)
    on_host = device.type == "cpu"
    if not groups and on_host and not finite and not any(gradients.flags().read()):
        # Finite gradients whose squares overflow. On an accelerator a second read would need a host sync, so
        # the step is skipped there.
        check = unscale(gradients, scaling)
        check.norm = clip_unscaled(gradients, max_norm, order, scaling).norm
        return check
    clipping = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    finite = finite & (clipping >= 0)  # a max_norm in a tensor may be NaN or negative
    check = GradientCheck((~finite).float(), bool(gradients.values or groups), gradients, norm=norm)
    check.ranks_differ = total.ranks_differ
    divisor = scaling.factor / clipping
    # A divisor beyond float32 has an inverse of 0.
    fits = torch.isfinite(divisor) | ~(clipping > 0)
    if defer and not scaling.below_one and (not on_host or bool(fits)):
        check.divisor, check.versions = divisor, _versions(gradients)
        check.found_inf = (~(finite & fits)).float()
        check.flags = None if on_host else total.flags  # on the CPU they are read again if needed
    else:
        check.flags = gradients.flags() if on_host and not finite else total.flags
        _multiply(gradients, inverse * clipping)
    return check


@torch.no_grad()
def clip_unscaled(
    gradients: OptimizerGradients, max_norm: float, order: float, scaling: Scaling
) -> TotalNorm:
    """Clip gradients that are unscaled; return their norm before clipping."""
    total = total_norm(gradients, order, scaling)
    norm = total.norm
    # All ranks compute the wide norm or none, because they have the same norm here.
    if (scaling.factor.device.type == "cpu" and not torch.isfinite(norm)) and (
        _process_groups(gradients, scaling) or not any(gradients.flags().read())
    ):
        norm = total_norm(gradients, order, scaling, wide=True).norm
    clipping = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    _multiply(gradients, clipping)
    return replace(total, norm=norm, clipped=torch.isfinite(norm) & (clipping >= 0))


@torch.no_grad()
def clamp(gradients: OptimizerGradients, value: float) -> None:
    """Clamp gradients to [-value, value] in place; NaN stays NaN."""
    for _, _, _, members in gradients.groups:
        _torch_internals.clamp(members, -value, value)


def _multiply(gradients: OptimizerGradients, factor: torch.Tensor) -> None:
    for where, dtype, _, members in gradients.groups:
        there = factor.to(where, non_blocking=True)
        if dtype.itemsize >= 4:
            _torch_internals.multiply(members, there)
        else:  # multiplies in fp32 and rounds once; _foreach_mul_ would round the factor first
            ignored = torch.zeros((), device=where)
            _torch_internals.multiply_and_check(members, ignored, there.float())


def _versions(gradients: OptimizerGradients) -> list[int]:
    """Return the identity of each ``p.grad`` and the version of the tensor that is read of it."""
    return [*map(id, map(_GRAD, gradients.parameters)), *map(_VERSION, gradients.values)]


def known_on_host(found_inf: torch.Tensor) -> bool | None:
    """Return whether a gradient was not finite, or None if that needs a host sync."""
    return bool(found_inf) if found_inf.device.type == "cpu" else None


# ---- norms over all ranks


@dataclass(frozen=True, slots=True)
class TotalNorm:
    """The norm of all gradients of all ranks together.

    Attributes:
        norm: 0-dim float32; not finite if a gradient of any rank is not.
        ranks_differ: as in ``GradientCheck``.
        flags: which gradients of this rank are not finite, from their own norms; None if those were not
            computed.
        clipped: 0-dim bool, whether the gradients are finite after clipping; None without clipping.
    """

    norm: torch.Tensor
    ranks_differ: torch.Tensor | None
    flags: NonfiniteFlags | None
    clipped: torch.Tensor | None = None


def total_norm(
    gradients: OptimizerGradients, order: float, scaling: Scaling, *, wide: bool = False
) -> TotalNorm:
    """Compute the norm in one read of the gradients and one collective for each process group.

    Of sparse gradients the values are read as they are. The result is on the device of the scale's factor;
    ``wide``: computed in fp64, for finite gradients whose norm overflows.
    """
    device = scaling.factor.device
    groups = _process_groups(gradients, scaling)
    if not groups and _are_small(gradients):
        flat = torch.split(_torch_internals.flattened(gradients.values), _CHUNK)
        stacks = [torch.stack(_torch_internals.norms(flat, order, wide=wide))]
        norm = _norm_of_norms(stacks, order, device)
        return TotalNorm(norm if wide else norm.float(), None, None)
    stacks = [
        torch.stack(_torch_internals.norms(members, order, wide=wide))
        for _, _, _, members in gradients.groups
    ]
    flags = NonfiniteFlags(
        len(gradients.values),
        tuple(
            (tuple(positions), ~torch.isfinite(stack))
            for (_, _, positions, _), stack in zip(gradients.groups, stacks, strict=True)
        ),
    )
    ranks_differ = None
    if groups:
        norm, ranks_differ = _norm_over_ranks(gradients, stacks, order, scaling, groups)
    else:
        norm = _norm_of_norms(stacks, order, device)
    return TotalNorm(norm if wide else norm.float(), ranks_differ, flags)


def _norm_over_ranks(
    gradients: OptimizerGradients,
    stacks: Sequence[torch.Tensor],
    order: float,
    scaling: Scaling,
    groups: Sequence[Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm over all ranks, and whether ranks with copies differ."""
    device = scaling.factor.device
    each: list[torch.Tensor] = [torch.empty(0)] * len(gradients.values)
    for (_, _, positions, _), stack in zip(gradients.groups, stacks, strict=True):
        for position, norm in zip(positions, stack.unbind(), strict=True):
            each[position] = norm
    meshes = gradients.meshes or [None] * len(each)
    # Every rank has the same placements in the same order; plain gradients first.
    placements: list[MeshPlacement | None] = [None]
    placements += dict.fromkeys(placement for placement in meshes if placement is not None)
    parts = [
        _power([norm for norm, place in zip(each, meshes, strict=True) if place == wanted], order, device)
        for wanted in placements
    ]
    ranks_differ = torch.zeros((), dtype=torch.bool, device=device)
    for group in groups:
        row = torch.stack(parts)
        gathered = row.new_empty(dist.get_world_size(group) * len(row))
        _torch_internals.all_gather(gathered, row, group)
        for index, placement in enumerate(placements):
            ranks = gathered[index :: len(row)]
            if placement is None:
                split = scaling.sharded and group is scaling.process_group
            else:
                split = group in placement.sharded
            parts[index] = ranks.sum() if split and order != math.inf else ranks.amax()
            if not split:
                differ = ranks.amax() > ranks.amin() * (1 + _SAME)
                ranks_differ = ranks_differ | (differ & torch.isfinite(ranks.amax()))
    total = torch.stack(parts)
    return (total.amax() if order == math.inf else total.sum() ** (1 / order)), ranks_differ


def _process_groups(gradients: OptimizerGradients, scaling: Scaling) -> list[Any]:
    """Return the process groups that decide together on these gradients."""
    groups: list[Any] = [] if scaling.process_group is None else [scaling.process_group]
    for placement in gradients.meshes or ():
        if placement is not None:
            groups += [g for g in (*placement.sharded, *placement.copied) if g not in groups]
    return groups


def _max_over_ranks(flag: torch.Tensor, groups: Sequence[Any]) -> torch.Tensor:
    """Set ``flag`` in place to its largest value on any rank."""
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return flag


def _are_small(gradients: OptimizerGradients) -> bool:
    """Return whether copying many small gradients side by side is faster than reading them one by one."""
    on_host = [where.type for where, _, _, _ in gradients.groups] == ["cpu"]
    return on_host and len(gradients.values) > 1 and all(one.numel() <= _SMALL for one in gradients.values)


def _norm_of_norms(stacks: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm of norms, which are 1-dim tensors on any device."""
    if not stacks:
        return torch.zeros((), device=device)
    there = [stack.to(device, non_blocking=True) for stack in stacks]
    total: torch.Tensor = torch.linalg.vector_norm(there[0] if len(there) == 1 else torch.cat(there), order)
    return total


def _power(norms: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm to the power of its order, which ranks add up.

    In fp64 if the device has it, so that it is finite if the norm is. NaN becomes infinity, because maxima
    over ranks treat NaN in different ways.
    """
    norm = _norm_of_norms([norm.reshape(1) for norm in norms], order, device)
    norm = norm if device.type == "mps" else norm.double()
    power = norm if order == math.inf else norm**order
    return torch.nan_to_num(power, nan=math.inf, posinf=math.inf)

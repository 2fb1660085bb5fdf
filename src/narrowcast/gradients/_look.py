"""One look at the gradients of an optimizer: unscaled, checked, and clipped where that was asked.

Where the optimizer's own step can divide (``fused=True``), nothing is written here: one read gives the norm
and the check, and the division rides into the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowcast.errors import OrderError
from narrowcast.gradients import _torch_internals
from narrowcast.gradients._agreement import TotalNorm, any_rank, groups_of, total_norm
from narrowcast.gradients._finite import NonfiniteFlags
from narrowcast.gradients._held import HeldGradients

_EPSILON = 1e-6  # that of torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class Scaling:
    """What gradients were made with, and who decides on them.

    Attributes:
        factor: the loss scale, 0-dim float32.
        below_one: it may be below 1, where unscaling finite gradients may overflow.
        process_group: ranks that decide together; ``sharded``: each of them holds parts of the gradients.
    """

    factor: torch.Tensor
    below_one: bool
    process_group: Any | None
    sharded: bool

    def inverse(self) -> torch.Tensor:
        # As torch does: the reciprocal in fp64, where the device has it.
        factor = self.factor
        return factor.reciprocal() if factor.device.type == "mps" else factor.double().reciprocal().float()


@dataclass(slots=True)
class Look:
    """What was found, on the device until somebody asks.

    Attributes:
        found_inf: 0-dim float32 on the scale's device, above 0 where a gradient is not finite.
        any_checked: whether there was a gradient to check, on this rank or another.
        flags: which gradients are not finite, where that is already known.
        norm: norm of the unscaled gradients before clipping, 0-dim, where something clipped.
        apart: 0-dim, whether ranks with copies of the gradients hold different ones.
        divisor: what the gradients are still to be divided by; None where they are unscaled.
    """

    found_inf: torch.Tensor
    any_checked: bool
    held: HeldGradients
    flags: NonfiniteFlags | None = None
    norm: torch.Tensor | None = None
    apart: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    versions: list[tuple[int, int]] | None = None

    def check_unchanged(self) -> None:
        """Refuse gradients that were written to while their division was still to come."""
        if self.versions is not None and self.versions != _versions(self.held):
            raise OrderError(
                "the gradients were changed between clip_grad_norm_ and step, while they were still scaled "
                "(a fused optimizer divides them itself): change them after unscale_(optimizer) and before "
                "clip_grad_norm_(optimizer, ...), or clip with torch.nn.utils.clip_grad_norm_"
            )

    def which(self) -> NonfiniteFlags:
        """Which gradients are not finite; looked at now where nobody has yet."""
        if self.flags is None:
            self.flags = self.held.flags()
        return self.flags


@torch.no_grad()
def unscale(held: HeldGradients, scaling: Scaling) -> Look:
    """Divide gradients by the scale, in place, and check them."""
    device = scaling.factor.device
    inverse = scaling.inverse()
    found = torch.zeros((), device=device)
    for where, _, _, members in held.groups:
        there = found if where == device else torch.zeros((), device=where)
        _torch_internals.multiply_and_check(members, there, inverse.to(where, non_blocking=True))
        if scaling.below_one:
            # Checked before it was multiplied, and 2**-20 makes an infinity of finite gradients.
            one = torch.ones((), device=where)
            _torch_internals.multiply_and_check(members, there, one)
        if there is not found:
            found += there.to(device, non_blocking=True)
    groups = groups_of(held, scaling.process_group)
    any_rank(found, groups)
    look = Look(found, bool(held.values or groups), held)
    if found_on_host(found):
        look.flags = held.flags()  # before anybody clips by a norm of NaN, which makes every gradient NaN
    return look


@torch.no_grad()
def measure(held: HeldGradients, scaling: Scaling) -> Look:
    """Check gradients and leave their division to the optimizer's step."""
    device = scaling.factor.device
    flags = held.flags()
    found = flags.any(device)
    groups = groups_of(held, scaling.process_group)
    any_rank(found, groups)
    return Look(found, bool(held.values or groups), held, flags, divisor=scaling.factor)


@torch.no_grad()
def clip(held: HeldGradients, scaling: Scaling, max_norm: float, order: float, *, may_ride: bool) -> Look:
    """Unscale, check and clip from one read of the gradients; in the optimizer's step if it ``may_ride``."""
    device = scaling.factor.device
    total = total_norm(held, order, device, scaling.process_group, sharded=scaling.sharded)
    scaled_norm = total.norm
    inverse = scaling.inverse()
    norm = scaled_norm * inverse
    finite = torch.isfinite(scaled_norm) & torch.isfinite(norm)
    groups = groups_of(held, scaling.process_group)
    if not groups and device.type == "cpu" and not finite and not any(held.flags().read()):
        # Finite gradients whose squares overflow. Where looking again costs a wait, the step is skipped.
        look = unscale(held, scaling)
        look.norm = clip_unscaled(held, max_norm, order, scaling).norm
        return look
    look = Look((~finite).float(), bool(held.values or groups), held, norm=norm, apart=total.apart)
    kept = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    finite = finite & (kept >= 0)  # a max_norm in a tensor may be NaN or negative
    look.found_inf = (~finite).float()
    divisor = scaling.factor / kept
    holds = torch.isfinite(divisor) | ~(kept > 0)  # else it is too large for fp32, and 1 / divisor is 0
    on_host = device.type == "cpu"
    if may_ride and not scaling.below_one and (not on_host or bool(holds)):
        look.divisor, look.versions = divisor, _versions(held)
        look.found_inf = (~(finite & holds)).float()
        look.flags = None if on_host else total.flags  # the host knows soon enough to look again
    else:
        look.flags = held.flags() if on_host and not finite else total.flags
        _multiply(held, inverse * kept)
    return look


@torch.no_grad()
def clip_unscaled(held: HeldGradients, max_norm: float, order: float, scaling: Scaling) -> TotalNorm:
    """Clip gradients that are unscaled; what they were before."""
    device = scaling.factor.device
    total = total_norm(held, order, device, scaling.process_group, sharded=scaling.sharded)
    norm = total.norm
    if device.type == "cpu" and not torch.isfinite(norm):
        # Every rank comes here or none. Ranks look again together, each where its own are finite.
        together = groups_of(held, scaling.process_group)
        if together or not any(held.flags().read()):
            group, sharded = scaling.process_group, scaling.sharded
            norm = total_norm(held, order, device, group, sharded=sharded, wide=True).norm
    kept = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    _multiply(held, kept)
    return replace(total, norm=norm, clipped=torch.isfinite(norm) & (kept >= 0))


def clip_by_torch(optimizer: torch.optim.Optimizer, max_norm: float, order: float) -> torch.Tensor:
    """torch's own clipping of all gradients of an optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, max_norm, order)
    full: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of DTensors it is one
    return full


@torch.no_grad()
def clamp(held: HeldGradients, value: float) -> None:
    """Clamp gradients to [-value, value] in place; NaN stays NaN."""
    for _, _, _, members in held.groups:
        _torch_internals.clamp(members, -value, value)


@torch.no_grad()
def materialise(look: Look) -> None:
    """Do the division that was still to come."""
    if look.divisor is not None:
        look.check_unchanged()
        if found_on_host(look.found_inf):
            look.which()
        _multiply(look.held, look.divisor.reciprocal())
        look.divisor = look.versions = None


def _multiply(held: HeldGradients, factor: torch.Tensor) -> None:
    for where, dtype, _, members in held.groups:
        there = factor.to(where, non_blocking=True)
        if dtype.itemsize >= 4:
            _torch_internals.multiply(members, there)
        else:  # in fp32 and rounded once; _foreach_mul_ would round the factor first
            ignored = torch.zeros((), device=where)
            _torch_internals.multiply_and_check(members, ignored, there.float())


def _versions(held: HeldGradients) -> list[tuple[int, int]]:
    """Which gradients the parameters hold, and how often what is read of them was written to."""
    pairs = zip(held.parameters, held.values, strict=True)
    return [(id(parameter.grad), value._version) for parameter, value in pairs]


def found_on_host(found_inf: torch.Tensor) -> bool | None:
    """Whether a gradient was not finite, where knowing it costs no wait; else None."""
    return bool(found_inf) if found_inf.device.type == "cpu" else None


def worst_of(looks: Sequence[Look]) -> torch.Tensor:
    """One flag for several looks: above 0 where it is in one of them."""
    device = looks[0].found_inf.device
    return torch.stack([look.found_inf.to(device, non_blocking=True) for look in looks]).amax()

"""The gradient check: unscale, check and clip the gradients of an optimizer, on one rank or on many.

On a CPU the host knows at once whether any gradient is not finite, and only then finds out which ones. If the
optimizer's step can divide by itself (``fused=True``), the division is deferred to the step.

Ranks agree in one collective for each process group. If only one rank skipped its step, the others would
diverge or wait for ever in the next collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.errors import OrderError
from narrowcast.gradients import _torch_internals
from narrowcast.gradients._devices import on_device
from narrowcast.gradients._norms import norm_of_norms, norm_over_ranks
from narrowcast.gradients._optimizer_gradients import (
    FlatCopies,
    NonfiniteFlags,
    OptimizerGradients,
    gradients_of,
    parameters_of,
)

# These attributes are read from every gradient at each step; map with attrgetter loops in C.
_GRAD, _VERSION, _NBYTES = attrgetter("grad"), attrgetter("_version"), attrgetter("nbytes")
_REQUIRES_GRAD = attrgetter("requires_grad")

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_LARGEST_DIVISOR = 2.0**127  # of a deferred division: dividing by infinity would train on zeros

_IN_PLACE_BYTES = 64 * 2**20
"""Up to this total size, gradients on an accelerator are checked in place, and may be held after the step
until their flag is read."""


@dataclass(slots=True)  # not frozen, since one is made at each step: that would take several times as long
class Scaling:
    """The loss scale of some gradients, and the ranks that decide on them together.

    Attributes:
        factor: the loss scale, 0-dim float32.
        below_one: whether the factor may be below 1, so that unscaling finite gradients may overflow.
        process_group: ranks that decide together.
        sharded: whether each of these ranks holds different gradients.
        scales: False without a loss scale (``Off``); the factor is then 1.
        on_host: the factor as a number, if the host knows it; else None.
    """

    factor: torch.Tensor
    below_one: bool
    process_group: Any | None = None
    sharded: bool = False
    scales: bool = True
    on_host: float | None = None

    def number(self) -> float:
        """Return the factor as a number; waits for the device."""
        if self.on_host is not None:
            return self.on_host
        return float(self.factor)

    def inverse(self) -> torch.Tensor:
        """Return what gradients are multiplied by to unscale them: 0-dim float32 on the factor's device."""
        factor, device_type = self.factor, self.factor.device.type
        if not self.scales:
            return factor  # 1, which is its own inverse
        if device_type == "mps":
            return factor.reciprocal()  # MPS has no fp64

        # On a CPU Python divides in fp64, without a kernel. But if a script wrote a factor below 2**-126, its
        # inverse may overflow float32: torch.full raises for that, and the kernels below return infinity.
        if device_type == "cpu" and self.number() >= 2.0**-126:
            return torch.full((), 1.0 / self.number(), dtype=torch.float32, device="cpu")
        # The reciprocal in fp64, as in torch/amp/grad_scaler.py.
        return factor.double().reciprocal().float()


@dataclass(slots=True)
class GradientCheck:
    """The result of checking an optimizer's gradients, on the device until it is read.

    Attributes:
        found_inf: 0-dim float32 on the scale's device, above 0 if a gradient is not finite.
        overflowed: the same as a bool; None if only the device knows, and reading it would be a host sync.
        any_checked: whether there was a gradient to check. Always True if several ranks decide together,
            since another rank may have had one.
        gradients: the gradients that were checked.
        one_rank: whether this rank decides alone.
        flags: which gradients are not finite; None if they were not looked for yet.
        norm: norm of the unscaled gradients before clipping, 0-dim; None without clipping.
        ranks_differ: 0-dim, whether ranks that should hold copies hold different gradients; None if only one
            rank decides, or without clipping.
        divisor: what the step is still to divide the gradients by; None if they are unscaled.
        versions: identity and version of each gradient when ``clip`` deferred the division, by which
            ``refuse_changes`` finds later changes. None otherwise, also after ``check_scaled``, since no code
            of the script runs between that and the step.
    """

    found_inf: torch.Tensor
    overflowed: bool | None
    any_checked: bool
    gradients: OptimizerGradients
    one_rank: bool = True
    flags: NonfiniteFlags | None = None
    norm: torch.Tensor | None = None
    ranks_differ: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    versions: list[int] | None = None

    def refuse_changes(self) -> None:
        """Raise OrderError if gradients were written to while their division was deferred."""
        if self.versions is not None and self.versions != versions_of(self.gradients):
            raise OrderError(
                "the gradients were changed between clip_grad_norm_ and step, while they were still scaled "
                "(a fused optimizer divides them itself): change them after unscale_(optimizer) and before "
                "clip_grad_norm_(optimizer, ...), or clip with torch.nn.utils.clip_grad_norm_"
            )

    def replace_flag(self, found_inf: torch.Tensor) -> None:
        """Have ``found_inf`` decide on the step from now on."""
        self.found_inf = found_inf
        self.overflowed = known_on_host(found_inf)

    def nonfinite(self) -> NonfiniteFlags:
        """Return which gradients are not finite; reads them now if that is not known yet."""
        if self.flags is None:
            self.flags = self.gradients.flags()
        return self.flags

    def can_look_later(self) -> bool:
        """Return whether gradients may be held and read once the host knows that one is not finite.

        Not if several ranks decide. ``found_inf`` is then the maximum over all ranks, so once something has
        written to the gradients, nothing tells whether those of this rank were finite. Not in a CUDA graph
        either, because the host takes no part in its replays. Nor if the gradients are too large to be held.
        """
        if self.flags is not None or not self.one_rank or _torch_internals.is_capturing():
            return False
        return _one_kernel_may_check(self.gradients)

    def look_later(self) -> Callable[[], list[bool]]:
        """Hold the gradients; return a function that reads which are not finite, after the step.

        The function flags all gradients if that can no longer be told, because something has written to them
        since: a zero_grad that keeps their memory, or a backward pass that uses it again.
        """
        gradients = self.gradients
        own_found_inf = self.found_inf
        versions = _versions_of_values(gradients)

        def look() -> list[bool]:
            # These were finite: the step was skipped because another optimizer's gradients were not.
            if not bool(own_found_inf):
                return [False] * len(gradients.values)
            if versions == _versions_of_values(gradients):
                flags = gradients.flags().read()
                # If none is flagged, something has written to the gradients past autograd (``.data``), which
                # leaves the versions as they are.
                if any(flags):
                    return flags
            return [True] * len(gradients.values)

        return look

    @torch.no_grad()
    def divide_now(self) -> None:
        """Divide now if the division was deferred to the step."""
        if self.divisor is not None:
            self.refuse_changes()
            _multiply(self.gradients, self.divisor.reciprocal())
            self.divisor = self.versions = None


def known_on_host(found_inf: torch.Tensor) -> bool | None:
    """Return whether ``found_inf`` is set, or None if only a host sync could tell."""
    if found_inf.device.type != "cpu":
        return None
    return bool(found_inf)


# ---- unscaling and checking


@torch.no_grad()
def unscale(gradients: OptimizerGradients, scaling: Scaling) -> GradientCheck:
    """Divide gradients by the scale, in place, and check them."""
    found_inf = _multiply_and_check(gradients, scaling.inverse())
    if scaling.below_one:
        # The kernel checks before it multiplies, but dividing by a small scale may overflow: check again.
        overflowed = _multiply_and_check(gradients, torch.ones_like(scaling.factor))
        found_inf = torch.maximum(found_inf, overflowed)
    return _over_ranks(found_inf, gradients, scaling)


@torch.no_grad()
def check_finite(gradients: OptimizerGradients, scaling: Scaling) -> GradientCheck:
    """Check gradients, and change none of them."""
    device = scaling.factor.device
    in_one_kernel = device.type == "cpu" or (
        not _process_groups(gradients, scaling) and _one_kernel_may_check(gradients)
    )
    if in_one_kernel:
        # The kernel multiplies by 1. On a CPU this takes a fifth of the time of one norm for each gradient.
        # For large gradients it takes a tenth more than the norms, because the kernel writes them back.
        factor_of_one = scaling.factor
        if scaling.scales:
            factor_of_one = torch.ones_like(scaling.factor)
        return _over_ranks(_multiply_and_check(gradients, factor_of_one), gradients, scaling)

    # One norm for each gradient, which also tells which ones are not finite.
    flags = gradients.flags()
    check = _over_ranks(flags.any(device), gradients, scaling)
    check.flags = flags
    return check


@torch.no_grad()
def check_scaled(gradients: OptimizerGradients, scaling: Scaling) -> GradientCheck:
    """Check gradients and defer their division to the optimizer's step."""
    check = check_finite(gradients, scaling)
    check.divisor = scaling.factor
    return check


def unscale_by(optimizer: torch.optim.Optimizer, scale: float) -> torch.Tensor:
    """Divide every gradient of ``optimizer`` by ``scale``, in place, and check whether all are finite.

    For code that keeps a loss scale of its own. Gradients may be of any format, fp16 too, on any device,
    dense, sparse or DTensors. The division is a multiplication by the float32 nearest to ``1 / scale``, as in
    torch; a scale of 1 changes no gradient.

    Returns:
        0-dim float32 on the device of the first gradient (the CPU if there is none), above 0 if a gradient
        was or became NaN or infinite: of DTensors on any rank, of plain tensors on this one. No host sync on
        a GPU.
    """
    gradients = gradients_of(optimizer, allow_fp16=True)
    scaling = scaled_by(scale, gradients)
    if scale == 1.0:
        return check_finite(gradients, scaling).found_inf
    return unscale(gradients, scaling).found_inf


def known_to_be_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``optimizer`` has plain gradients on the CPU, all of them finite; changes none of them.

    False decides nothing: finite gradients may be of a kind that this function does not check. It takes half
    the time of ``check_gradients``. So where gradients are mostly finite call it first, and
    ``check_gradients`` only if it returns False.
    """
    gradients = list(map(_GRAD, parameters_of(optimizer)))
    classes = set(map(type, gradients))
    if type(None) in classes:
        classes.remove(type(None))
        gradients = [gradient for gradient in gradients if gradient is not None]
    if not classes:
        return True
    if classes != {torch.Tensor} or gradients[0].device.type != "cpu" or any(map(_REQUIRES_GRAD, gradients)):
        return False

    found_inf = torch.zeros((), dtype=torch.float32, device="cpu")
    # The kernel raises for sparse and expanded gradients, and for those on other devices.
    with suppress(RuntimeError):
        factor_of_one = torch.ones((), dtype=torch.float32, device="cpu")
        _torch_internals.multiply_and_check(gradients, found_inf, factor_of_one)
        return not found_inf
    return False


def check_gradients(optimizer: torch.optim.Optimizer) -> GradientCheck:
    """Check the gradients that ``optimizer`` would use now, and change none; no host sync on a GPU."""
    gradients = gradients_of(optimizer, allow_fp16=True)
    scaling = scaled_by(1.0, gradients)
    # The kernel of ``check_finite`` writes to the gradients. That would spoil the graph of gradients that
    # ``backward(create_graph=True)`` computed.
    if not any(map(_REQUIRES_GRAD, gradients.values)):
        # For an expanded tensor, to which nothing can be written, the kernel raises.
        with suppress(RuntimeError):
            return check_finite(gradients, scaling)

    # Read the gradients only.
    with torch.no_grad():
        flags = gradients.flags()
        check = _over_ranks(flags.any(scaling.factor.device), gradients, scaling)
    check.flags = flags
    return check


def scaled_by(scale: float, gradients: OptimizerGradients) -> Scaling:
    """Return the ``Scaling`` of gradients whose scale is a number, on the device of the first gradient."""
    device = gradients.values[0].device if gradients.values else torch.device("cpu")
    factor = torch.full((), scale, dtype=torch.float32, device=device)
    return Scaling(factor, below_one=scale < 1.0, scales=scale != 1.0, on_host=scale)


def _multiply_and_check(gradients: OptimizerGradients, factor: torch.Tensor) -> torch.Tensor:
    """Multiply gradients in place, one kernel for each device and dtype; return 1.0 if one was not finite."""
    device = factor.device
    found_inf = torch.zeros((), dtype=torch.float32, device=device)
    for group_device, _, _, members in gradients.groups:
        if group_device == device:
            _torch_internals.multiply_and_check(members, found_inf, factor)
            continue
        found_there = torch.zeros((), dtype=torch.float32, device=group_device)
        factor_there = on_device(factor, group_device)
        _torch_internals.multiply_and_check(members, found_there, factor_there)
        # Not a sum, because torch's fused steps skip only if the flag is exactly 1.
        torch.maximum(found_inf, on_device(found_there, device), out=found_inf)
    return found_inf


def _over_ranks(found_inf: torch.Tensor, gradients: OptimizerGradients, scaling: Scaling) -> GradientCheck:
    """Set ``found_inf`` to its maximum over the ranks that decide together, and return the check with it."""
    groups = _process_groups(gradients, scaling)
    _max_over_ranks(found_inf, groups)
    any_checked = bool(gradients.values or groups)
    check = GradientCheck(found_inf, known_on_host(found_inf), any_checked, gradients, one_rank=not groups)
    if check.overflowed:
        # Find out now which gradients are not finite: clipping by a NaN norm may later make all of them NaN.
        check.flags = gradients.flags()
    return check


def _process_groups(gradients: OptimizerGradients, scaling: Scaling) -> list[Any]:
    """Return the process groups that decide together on these gradients."""
    groups: list[Any] = []
    if scaling.process_group is not None:
        groups.append(scaling.process_group)
    for placement in gradients.meshes or ():
        if placement is not None:
            for group in (*placement.sharded, *placement.copied):
                if group not in groups:
                    groups.append(group)
    return groups


def _max_over_ranks(flag: torch.Tensor, groups: Sequence[Any]) -> None:
    # On a mesh each rank is in several groups. After the last of them the flag is the maximum over all ranks.
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)


def _one_kernel_may_check(gradients: OptimizerGradients) -> bool:
    """Return whether to check gradients on accelerators in place, by one kernel for each device and dtype.

    Not if that kernel does not take one of the dtypes. Not if the gradients are large: the kernel writes them
    back, which then costs more than one kernel for each gradient. If True, they are also small enough to be
    held after the step.
    """
    for device, dtype, _, _ in gradients.groups:
        if not _torch_internals.checks_in_one_kernel(device, dtype):
            return False
    total_bytes: int = sum(map(_NBYTES, gradients.values))
    return total_bytes <= _IN_PLACE_BYTES


# ---- clipping


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
    """Unscale, check and clip gradients, with one read for the norm and the check.

    With ``defer`` gradients stay as they are where possible, and the optimizer's step does both the unscaling
    and the clipping, by one division. A norm that is not finite skips the step, even if the gradients are
    finite and only their squares overflow.
    """
    total = total_norm(gradients, order, scaling, flat=flat)
    # Dividing by a scale below 1 may overflow, and the step would not check again.
    defer = defer and not scaling.below_one
    clip_here = _clip_on_host if scaling.factor.device.type == "cpu" else _clip_on_device
    return clip_here(gradients, scaling, max_norm, total, defer=defer)


def _clip_on_host(
    gradients: OptimizerGradients, scaling: Scaling, max_norm: float, total: TotalNorm, *, defer: bool
) -> GradientCheck:
    """Clip where reading a number costs nothing: gradients are multiplied only if that changes them."""
    # Two numbers decide on the step: the norm, and the factor that clips the gradients.
    groups = _process_groups(gradients, scaling)
    inverse = scaling.inverse()
    norm = total.norm * inverse if scaling.scales else total.norm
    norm_is_finite = math.isfinite(norm)
    clipping = _clipping(max_norm, norm)
    clip_factor = float(clipping)
    is_finite = norm_is_finite and clip_factor >= 0.0  # a max_norm in a tensor may be NaN or negative
    check = GradientCheck(
        torch.full((), float(not is_finite), dtype=torch.float32, device="cpu"),
        overflowed=not is_finite,
        any_checked=bool(gradients.values or groups),
        gradients=gradients,
        one_rank=not groups,
        flags=None if norm_is_finite else gradients.flags(),
        norm=norm,
        ranks_differ=total.ranks_differ,
    )
    if not scaling.scales and clip_factor == 1.0:
        return check

    # Defer only to a finite divisor, since dividing by infinity would train on zeros. A step that is skipped
    # divides nothing, so then any divisor will do.
    divisor_is_small = clip_factor > 0.0 and scaling.number() / clip_factor < _LARGEST_DIVISOR
    may_defer = not is_finite or divisor_is_small
    if defer and may_defer:
        check.divisor = scaling.factor / clipping
        check.versions = versions_of(gradients)
    else:
        _multiply(gradients, inverse * clipping)
    return check


def _clip_on_device(
    gradients: OptimizerGradients, scaling: Scaling, max_norm: float, total: TotalNorm, *, defer: bool
) -> GradientCheck:
    """Clip without reading anything from the device."""
    # Unscale and check the norm, by the kernel that usually unscales and checks gradients.
    found_inf = torch.zeros((), dtype=torch.float32, device=scaling.factor.device)
    inverse = scaling.inverse()
    norm = total.norm
    _torch_internals.multiply_and_check([norm], found_inf, inverse)
    if scaling.below_one:
        _check_number(norm, found_inf)
    clipping = _clipping(max_norm, norm)
    groups = _process_groups(gradients, scaling)
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
        found_inf.masked_fill_(~(clipping >= 0), 1.0)  # a max_norm in a tensor may be NaN or negative
    if not defer:
        _multiply(gradients, inverse * clipping if scaling.scales else clipping)
        return check

    check.divisor = scaling.factor / clipping
    check.versions = versions_of(gradients)
    # Dividing by infinity would train on zeros. With max_norm=0 that is what the caller asked for.
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
    """Clip gradients that are unscaled; return their norm before clipping, and whether it was finite.

    ``found_inf`` of the result is also above 0 if ``max_norm`` is a tensor that is NaN or negative.
    """
    total = total_norm(gradients, order, scaling, flat=flat)
    clipping = _clipping(max_norm, total.norm)
    if scaling.factor.device.type != "cpu":
        is_finite = torch.isfinite(total.norm) & (clipping >= 0)
        total.found_inf = (~is_finite).float()
        _multiply(gradients, clipping)
        return total

    # On the host gradients are multiplied only if that changes them.
    clip_factor = float(clipping)
    if not (math.isfinite(total.norm) and clip_factor >= 0.0):
        total.found_inf = torch.ones((), dtype=torch.float32, device="cpu")
        total.flags = gradients.flags()  # before they are multiplied by NaN
    if clip_factor != 1.0:
        _multiply(gradients, clipping)
    return total


@torch.no_grad()
def clamp(gradients: OptimizerGradients, value: float) -> None:
    """Clamp gradients to [-value, value] in place; NaN stays NaN."""
    for _, _, _, members in gradients.groups:
        _torch_internals.clamp(members, -value, value)


# ---- norms


@dataclass(slots=True)
class TotalNorm:
    """The norm of all gradients of all ranks together.

    Attributes:
        norm: 0-dim float32; not finite if a gradient of any rank is not.
        ranks_differ: as in ``GradientCheck``.
        flags: which gradients of this rank are not finite, from their own norms; None on a CPU, where they
            are read again if needed.
        found_inf: 0-dim float32, above 0 if ``clip_unscaled`` found that the gradients cannot be used. None
            if it knows that they can, or from ``total_norm``.
    """

    norm: torch.Tensor
    ranks_differ: torch.Tensor | None = None
    flags: NonfiniteFlags | None = None
    found_inf: torch.Tensor | None = None


def total_norm(
    gradients: OptimizerGradients, order: float, scaling: Scaling, *, flat: FlatCopies | None = None
) -> TotalNorm:
    """Compute the norm in one read of the gradients and one collective for each process group.

    Sparse gradients have to be coalesced. The result is on the device of the scale's factor. ``flat`` is
    memory for copies of small gradients; None: each gradient is read where it is.
    """
    device = scaling.factor.device
    groups = _process_groups(gradients, scaling)

    # Small gradients on a CPU are read as one tensor.
    rows = None
    if flat is not None and not groups:
        rows = flat.of(gradients)
    if rows is not None:
        norms = _torch_internals.norms_of_rows(rows, order)
        return TotalNorm(norm_of_norms([norms], order, device).float())

    # One kernel for each device and dtype.
    stacks = []
    norms_by_dtype = []
    for _, _, positions, members in gradients.groups:
        stack = torch.stack(_torch_internals.norms(members, order))
        stacks.append(stack)
        norms_by_dtype.append((positions, stack))
    flags = None
    if device.type != "cpu":
        flags = NonfiniteFlags(len(gradients.values), tuple(norms_by_dtype))
    if not groups:
        return TotalNorm(norm_of_norms(stacks, order, device).float(), flags=flags)
    sharded_group = scaling.process_group if scaling.sharded else None
    norm, ranks_differ = norm_over_ranks(gradients, norms_by_dtype, order, device, groups, sharded_group)
    return TotalNorm(norm.float(), ranks_differ, flags)


# ---- writes


def _multiply(gradients: OptimizerGradients, factor: torch.Tensor) -> None:
    """Multiply gradients in place, one kernel for each device and dtype."""
    for device, dtype, _, members in gradients.groups:
        factor_there = on_device(factor, device)
        if dtype.itemsize >= 4:
            _torch_internals.multiply(members, factor_there)
        else:
            # This kernel multiplies in fp32 and rounds once; _foreach_mul_ would round the factor first.
            ignored = torch.zeros((), dtype=torch.float32, device=device)
            _torch_internals.multiply_and_check(members, ignored, factor_there.float())


def versions_of(gradients: OptimizerGradients) -> list[int]:
    """Return the id of each ``p.grad``, then the version of each tensor in ``gradients.values``."""
    return [*map(id, map(_GRAD, gradients.parameters)), *_versions_of_values(gradients)]


def _versions_of_values(gradients: OptimizerGradients) -> list[int]:
    # autograd's version of a tensor goes up at each write in place.
    return list(map(_VERSION, gradients.values))

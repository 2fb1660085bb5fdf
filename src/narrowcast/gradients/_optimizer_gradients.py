"""The gradients of one optimizer, as tensors to read and multiply in place, and the finite check."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from narrowcast.errors import ScaleError, SettingError, UnsupportedError, few
from narrowcast.gradients import _torch_internals
from narrowcast.gradients._devices import on_device

# With a thousand small gradients, reading attributes is most of what a check costs. map with attrgetter loops
# in C.
_GRAD, _IS_SPARSE, _SHAPE = attrgetter("grad"), attrgetter("is_sparse"), attrgetter("shape")

# The formats whose numbers are fp16: complex32 is a pair of them.
_FP16 = (torch.float16, torch.complex32)

# FlatCopies copies gradients of at most so many elements.
_MAX_COPIED_ELEMENTS = 512
# FlatCopies has one norm for each row of so many elements: the sum of more squares is less exact.
_ROW_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class NonfiniteFlags:
    """Whether each of several gradients holds a NaN or an infinity; stays on the device until it is read.

    Attributes:
        count: the number of gradients.
        norms_by_dtype: for each device and dtype, the positions of its gradients, and a 1-dim tensor with a
            norm of each, which is not finite if the gradient is not. Empty gradients may be left out.
    """

    count: int
    norms_by_dtype: tuple[tuple[Sequence[int], torch.Tensor], ...]

    def read(self) -> list[bool]:
        """Return the flags in the order of the gradients; waits once for each device and dtype."""
        flags = [False] * self.count
        for positions, norms in self.norms_by_dtype:
            for position, norm in zip(positions, norms.tolist(), strict=True):
                flags[position] = not math.isfinite(norm)
        return flags

    def any(self, device: torch.device) -> torch.Tensor:
        """Return 1.0 if any flag is set, else 0.0: 0-dim, float32, on ``device``.

        Without a host sync, unless ``device`` is a CPU and a gradient is not on it.
        """
        if not self.norms_by_dtype:
            return torch.zeros((), dtype=torch.float32, device=device)
        any_by_dtype = []
        for _, norms in self.norms_by_dtype:
            is_nonfinite = ~torch.isfinite(norms)
            any_by_dtype.append(on_device(is_nonfinite.any(), device))
        return torch.stack(any_by_dtype).any().float()


def nonfinite_flags(gradients: Sequence[torch.Tensor]) -> NonfiniteFlags:
    """Check each gradient for NaN and infinities without a host sync on an accelerator.

    Sparse gradients are coalesced first, because an optimizer uses the sums. The check reads the largest
    magnitude, which cannot overflow as a sum of squares can; a NaN makes it NaN. On a CPU the largest
    magnitude takes ten times as long as the Euclidean norm, so the norm is computed first, and only gradients
    whose norm is not finite are read again.
    """
    # Empty gradients have no largest magnitude, so leave them out. The keys are the positions of the others.
    kept: dict[int, torch.Tensor] = {}
    for position, gradient in enumerate(gradients):
        values = gradient.detach()
        if values.is_sparse:
            values = values.coalesce().values()
        if values.is_complex():
            values = _real(values)
        if values.numel():
            kept[position] = values
    if not kept:
        return NonfiniteFlags(len(gradients), ())

    # The groups count positions among the gradients that were kept; return positions among all.
    kept_positions = list(kept)
    norms_by_dtype = []
    for _, _, indices, members in _torch_internals.by_device_and_dtype(list(kept.values())):
        positions = [kept_positions[index] for index in indices]
        norms_by_dtype.append((positions, _norms(members)))
    return NonfiniteFlags(len(gradients), tuple(norms_by_dtype))


def _norms(members: list[torch.Tensor]) -> torch.Tensor:
    """Return a norm of each tensor, which is finite exactly if the tensor is.

    The tensors are of one device and dtype, and none is empty.
    """
    # The largest magnitude on an accelerator, and the Euclidean norm on a CPU, where it is faster.
    if members[0].device.type != "cpu":
        return torch.stack(_torch_internals.norms_in_own_dtype(members, math.inf))
    norms = torch.stack(_torch_internals.norms_in_own_dtype(members, 2.0))
    for position, norm in enumerate(norms.tolist()):
        if not math.isfinite(norm):
            # The squares of finite numbers may overflow; the largest magnitude cannot.
            norms[position] = members[position].abs().max()
    return norms


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """Where a DTensor is: the process groups whose ranks hold different parts, and those with copies."""

    sharded: tuple[torch.distributed.ProcessGroup, ...]
    copied: tuple[torch.distributed.ProcessGroup, ...]


@dataclass(slots=True)
class OptimizerGradients:
    """What ``gradients_of`` found.

    Attributes:
        parameters: those that have a gradient, in the optimizer's order.
        values: the tensor to read and multiply for each of these parameters: the gradient itself, the values
            of a sparse gradient, the local part of a DTensor, a complex gradient as pairs of real numbers.
        groups: the values grouped by device and dtype.
        dense: whether no gradient is sparse.
        meshes: the placement of each gradient, None for a plain tensor; None if all are plain.
    """

    parameters: list[torch.Tensor]
    values: list[torch.Tensor]
    groups: list[_torch_internals.Group]
    dense: bool
    meshes: list[MeshPlacement | None] | None = None

    @torch.no_grad()
    def flags(self) -> NonfiniteFlags:
        """Check each gradient; of a DTensor, its local part."""
        # nonfinite_flags leaves out empty values, which have no largest magnitude, and groups the others.
        if not all(map(torch.Tensor.numel, self.values)):
            return nonfinite_flags(self.values)
        checked = [(positions, _norms(members)) for _, _, positions, members in self.groups]
        return NonfiniteFlags(len(self.values), tuple(checked))


class FlatCopies:
    """Memory in which the small gradients of one optimizer are copied side by side.

    On a CPU the norm of each gradient costs more than a microsecond. One copy of a thousand gradients and the
    norm of all cost a quarter of a thousand norms. The memory is kept from step to step.
    """

    def __init__(self) -> None:
        self._rows = torch.empty(0, device="cpu")
        # For each gradient the part of the rows that it is copied to, in its shape.
        self._views: list[torch.Tensor] = []
        self._shapes: list[torch.Size] = []

    def of(self, gradients: OptimizerGradients) -> torch.Tensor | None:
        """Copy the gradients to rows, of which zeros fill up the last; return the rows.

        None if a gradient is not small. None too if there is only one gradient, or if the gradients are
        sparse, of several dtypes, or not on the CPU.
        """
        if len(gradients.groups) != 1 or len(gradients.values) == 1 or not gradients.dense:
            return None
        device, dtype, _, members = gradients.groups[0]
        if device.type != "cpu":
            return None

        # Mostly the shapes are those of the last step, so that they are small and the memory is there.
        if dtype != self._rows.dtype or self._shapes != list(map(_SHAPE, members)):
            if any(member.numel() > _MAX_COPIED_ELEMENTS for member in members):
                return None
            self._allocate(members, dtype)
        torch._foreach_copy_(self._views, members)
        return self._rows

    def _allocate(self, members: list[torch.Tensor], dtype: torch.dtype) -> None:
        self._shapes = list(map(_SHAPE, members))
        sizes = [member.numel() for member in members]
        count = sum(sizes)
        row_count = max(1, math.ceil(count / _ROW_ELEMENTS))
        self._rows = torch.zeros(row_count, _ROW_ELEMENTS, dtype=dtype, device="cpu")
        pieces = torch.split(self._rows.view(-1)[:count], sizes)
        self._views = [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


def parameters_of(*optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of optimizers, in the order of their groups."""
    parameters: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
    return parameters


def gradients_of(
    optimizer: torch.optim.Optimizer,
    *,
    allow_fp16: bool,
    summed: bool = False,
    names: Mapping[int, str] | None = None,
) -> OptimizerGradients:
    """Return the gradients that ``optimizer`` would use now.

    Sparse gradients are coalesced in two cases: in fp16, because the sums may overflow; and with ``summed``,
    in every format, because the norm of the parts is not the norm of their sum. Coalesced gradients replace
    ``parameter.grad``, and so do copies of lazily conjugated gradients.

    Args:
        optimizer: the optimizer whose parameters have the gradients.
        allow_fp16: accept gradients in fp16.
        summed: coalesce sparse gradients in every format.
        names: names of parameters by id, for the error.

    Raises:
        ScaleError: a gradient is in fp16, or a complex one of two fp16 numbers, without ``allow_fp16``.
        UnsupportedError: a DTensor gradient that is not yet reduced.
    """
    # Mostly all are plain tensors, so each property is read from all gradients at once, in C.
    parameters = parameters_of(optimizer)
    gradients = list(map(_GRAD, parameters))
    classes = set(map(type, gradients))
    if type(None) in classes:
        classes.remove(type(None))
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = list(map(_GRAD, parameters))

    # Take the local parts of DTensors, then the values of sparse gradients.
    values, meshes = gradients, None
    if not classes <= {torch.Tensor, torch.nn.Parameter}:
        values, meshes = _local_parts(gradients)
    dense = not any(map(_IS_SPARSE, values))
    if not dense:
        values = [_dense_values(p, value, summed) for p, value in zip(parameters, values, strict=True)]

    # Read complex gradients as pairs of real numbers, because the kernels of the check take only real ones.
    groups = _torch_internals.by_device_and_dtype(values) if values else []
    if any(dtype.is_complex for _, dtype, _, _ in groups):
        values = [_real(_resolved(p, value)) for p, value in zip(parameters, values, strict=True)]
        groups = _torch_internals.by_device_and_dtype(values)

    if not allow_fp16 and any(dtype is torch.float16 for _, dtype, _, _ in groups):
        raise ScaleError(_fp16_message(optimizer, parameters, names or {}))
    return OptimizerGradients(parameters, values, groups, dense, meshes)


def _resolved(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Replace a lazily conjugated gradient by a copy, since most optimizers refuse it; return the values."""
    # If ``values`` are those of a sparse gradient, or a local part, they must not replace the whole gradient.
    if values.is_conj() and values is parameter.grad:
        parameter.grad = values = values.resolve_conj()
    return values


def _real(values: torch.Tensor) -> torch.Tensor:
    """Return complex values as pairs of real numbers in the same memory, and others as they are.

    The memory of lazily conjugated values holds their conjugates. These will do: they have the same
    magnitudes, and multiplying or clamping them does the same to the values.
    """
    if values.is_conj():
        values = values.conj()
    return torch.view_as_real(values) if values.is_complex() else values


def _dense_values(parameter: torch.Tensor, gradient: torch.Tensor, summed: bool) -> torch.Tensor:
    """Return the values of a sparse gradient, coalesced as ``gradients_of`` says, and others as they are."""
    if not gradient.is_sparse:
        return gradient
    if summed or gradient.dtype is torch.float16:
        parameter.grad = gradient = gradient.coalesce()
    return gradient._values()


def _local_parts(
    gradients: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[MeshPlacement | None] | None]:
    """Return the local parts of DTensors, and other gradients as they are; and where the DTensors are.

    The placements are None for a plain gradient, or altogether None if there is no DTensor.
    """
    if not torch.distributed.is_available():  # then there are no DTensors
        return gradients, None
    from torch.distributed.tensor import DTensor, Partial, Replicate

    values: list[torch.Tensor] = []
    meshes: list[MeshPlacement | None] = []
    with torch.no_grad():
        for gradient in gradients:
            if not isinstance(gradient, DTensor):
                values.append(gradient)
                meshes.append(None)
                continue
            sharded: list[torch.distributed.ProcessGroup] = []
            copied: list[torch.distributed.ProcessGroup] = []
            for dimension, placement in enumerate(gradient.placements):
                if isinstance(placement, Partial):
                    raise UnsupportedError(
                        "expected gradients that are reduced, got a DTensor with the placements "
                        f"{gradient.placements}: redistribute it to Shard or Replicate before the step"
                    )
                # Any placement but Replicate is a kind of sharding. Do not ask for Shard: fully_shard makes a
                # _StridedShard of a dimension that is sharded already.
                groups = copied if isinstance(placement, Replicate) else sharded
                groups.append(gradient.device_mesh.get_group(dimension))
            values.append(gradient.to_local())
            meshes.append(MeshPlacement(sharded=tuple(sharded), copied=tuple(copied)))
    return values, (meshes if any(meshes) else None)


def check_apart(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise SettingError if two optimizers that step together share a parameter.

    Its gradient would be unscaled twice.
    """
    seen: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for parameter, label in parameter_labels(optimizer):
            other = seen.setdefault(id(parameter), optimizer)
            if other is not optimizer:
                raise SettingError(
                    f"a parameter ({label} of {type(optimizer).__name__}) is in two optimizers that step "
                    "together: leave it in one of them"
                )


def lost_eps(optimizer: torch.optim.Optimizer) -> float | None:
    """Return an ``eps`` of ``optimizer`` that rounds to 0 in fp16, if it has fp16 weights; else None.

    Where a gradient is 0, the optimizer would then divide 0 by 0 and make the weights NaN.
    """
    for group in optimizer.param_groups:
        eps = group.get("eps")
        in_fp16 = any(parameter.dtype == torch.float16 for parameter in group["params"])
        if in_fp16 and isinstance(eps, float) and 0 < eps <= 2.0**-25:
            return eps
    return None


def parameter_labels(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield each parameter with its name, or its position if the optimizer was given no names."""
    for number, group in enumerate(optimizer.param_groups):
        # From SGD(model.named_parameters()).
        names: Sequence[str] = group.get("param_names", ())
        for index, parameter in enumerate(group["params"]):
            if index < len(names):
                yield parameter, names[index]
                continue
            shape = "unknown"
            if not torch.nn.parameter.is_lazy(parameter):
                shape = str(tuple(parameter.shape))
            yield parameter, f"group {number}, parameter {index}, shape {shape}"


def labels_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], names: Mapping[int, str]
) -> list[str]:
    """Return labels for some parameters: from ``names``, by id, else the optimizer's own."""
    labels = {id(parameter): label for parameter, label in parameter_labels(optimizer)} | dict(names)
    return [labels.get(id(parameter), f"shape {tuple(parameter.shape)}") for parameter in parameters]


def _fp16_message(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], names: Mapping[int, str]
) -> str:
    in_fp16 = [p for p in parameters if p.grad is not None and p.grad.dtype in _FP16]
    labels = few(labels_of(optimizer, in_fp16, names), 5)
    # If none of these weights is in fp16, the script asked for gradients in fp16, by ``grad_dtype``.
    if all(parameter.dtype not in _FP16 for parameter in in_fp16):
        return (
            f"expected gradients in fp32, got fp16 for {labels}, as grad_dtype says: leave that at the "
            "parameter's own, or pass allow_fp16_gradients=True to nc.GradScaler to continue in fp16"
        )
    return (
        f"expected gradients in fp32, got fp16 for {labels}: an update smaller than 2**-11 of a weight "
        'in fp16 is lost. Keep fp32 master weights with nc.Stepper(model, optimizer, policy="O2"), or pass '
        "allow_fp16_gradients=True to nc.GradScaler to continue in fp16"
    )

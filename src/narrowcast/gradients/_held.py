"""The gradients that an optimizer holds at one moment, as tensors to read and to multiply in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from narrowcast.errors import ScaleError, SettingError, UnsupportedError
from narrowcast.gradients import _torch_internals
from narrowcast.gradients._finite import NonfiniteFlags, nonfinite_flags

# With a thousand small gradients, what is asked of each is what a step costs.
_GRAD, _IS_SPARSE = attrgetter("grad"), attrgetter("is_sparse")


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """Where the parts of a DTensor are: groups of ranks that hold different parts, and groups with copies."""

    sharded: tuple[torch.distributed.ProcessGroup, ...]
    copied: tuple[torch.distributed.ProcessGroup, ...]


@dataclass(slots=True)
class HeldGradients:
    """Gradients of one optimizer.

    Attributes:
        parameters: those that have a gradient, in the optimizer's order.
        values: for each what to read and to multiply: the gradient itself, the values of a sparse one, the
            local part of a DTensor.
        groups: the values by device and dtype, each with the position of every value.
        dense: whether no gradient is sparse.
        meshes: for each gradient where its parts are, None for a plain tensor; None where all are plain.
    """

    parameters: list[torch.Tensor]
    values: list[torch.Tensor]
    groups: list[_torch_internals.Group]
    dense: bool
    meshes: list[MeshPlacement | None] | None = None

    def flags(self) -> NonfiniteFlags:
        """For each parameter, whether its gradient is not finite; for a DTensor, its local part."""
        return nonfinite_flags(self.values)


def held_gradients(
    optimizer: torch.optim.Optimizer,
    *,
    allow_fp16: bool,
    summed: bool = False,
    names: Mapping[int, str] | None = None,
) -> HeldGradients:
    """The gradients that ``optimizer`` would use now.

    Equal indices of a sparse gradient are summed first where it is in fp16, as that may overflow, and where
    ``summed`` asks for it: a norm of the parts is not that of their sum. ``names`` are for the error.

    Raises:
        ScaleError: a gradient is in fp16 and that was not allowed.
        UnsupportedError: a DTensor gradient that is not yet reduced.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = list(map(_GRAD, parameters))
    kinds = set(map(type, gradients))
    if type(None) in kinds:
        kinds.remove(type(None))
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = list(map(_GRAD, parameters))
    values, dense, meshes = gradients, True, None
    if not kinds <= {torch.Tensor, torch.nn.Parameter}:
        values, meshes = _local_parts(gradients)
    if True in map(_IS_SPARSE, values):
        values, dense = [_dense_values(p, v, summed) for p, v in zip(parameters, values, strict=True)], False
    groups = _torch_internals.by_device_and_dtype(values) if values else []
    if not allow_fp16 and any(dtype is torch.float16 for _, dtype, _, _ in groups):
        raise ScaleError(_fp16_message(optimizer, parameters, names or {}))
    return HeldGradients(parameters, values, groups, dense, meshes)


def _dense_values(parameter: torch.Tensor, gradient: torch.Tensor, summed: bool) -> torch.Tensor:
    if not gradient.is_sparse:
        return gradient
    if summed or gradient.dtype is torch.float16:
        parameter.grad = gradient = gradient.coalesce()
    return gradient._values()


def _local_parts(
    gradients: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[MeshPlacement | None] | None]:
    if not torch.distributed.is_available():  # then there is no DTensor either
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
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                raise UnsupportedError(
                    "expected gradients that are reduced, got a DTensor with the placements "
                    f"{gradient.placements}: redistribute it to Shard or Replicate before the step"
                )
            mesh = gradient.device_mesh
            groups = [(mesh.get_group(dim), place) for dim, place in enumerate(gradient.placements)]
            values.append(gradient.to_local())
            # Not asked for Shard: what fully_shard makes of a dimension that is sharded already is none.
            meshes.append(
                MeshPlacement(
                    sharded=tuple(group for group, place in groups if not isinstance(place, Replicate)),
                    copied=tuple(group for group, place in groups if isinstance(place, Replicate)),
                )
            )
    return values, meshes if any(meshes) else None


def check_apart(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a parameter in two optimizers that step together: its gradient would be unscaled twice."""
    seen: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for parameter, label in parameter_labels(optimizer):
            other = seen.setdefault(id(parameter), optimizer)
            if other is not optimizer:
                raise SettingError(
                    f"a parameter ({label} of {type(optimizer).__name__}) is in two optimizers that step "
                    "together: leave it in one of them"
                )


def parameter_labels(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str]]:
    """Each parameter with its name, or its place where the optimizer was not given names."""
    for number, group in enumerate(optimizer.param_groups):
        names: Sequence[str] = group.get("param_names", ())
        for index, parameter in enumerate(group["params"]):
            place = f"group {number}, parameter {index}, shape {tuple(parameter.shape)}"
            yield parameter, names[index] if index < len(names) else place


def labels_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], names: Mapping[int, str]
) -> list[str]:
    """What to call some of an optimizer's parameters: by ``names``, else as the optimizer does."""
    labels = {id(parameter): label for parameter, label in parameter_labels(optimizer)} | dict(names)
    return [labels.get(id(parameter), f"shape {tuple(parameter.shape)}") for parameter in parameters]


def listed(labels: Sequence[str]) -> str:
    """The first five of several labels, and how many more there are."""
    return ", ".join(labels[:5]) + (f" and {len(labels) - 5} more" if len(labels) > 5 else "")


def _fp16_message(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], names: Mapping[int, str]
) -> str:
    narrow = [p for p in parameters if p.grad is not None and p.grad.dtype is torch.float16]
    half = labels_of(optimizer, narrow, names)
    return (
        f"expected gradients in fp32, got fp16 for {listed(half)}: an update smaller than 2**-11 of a weight "
        'in fp16 is lost. Keep fp32 master weights with nc.Stepper(model, optimizer, policy="O2"), or pass '
        "allow_fp16_gradients=True to nc.GradScaler to go on in fp16"
    )

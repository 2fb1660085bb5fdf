"""What an optimizer would do in float32, found without touching what it does."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from narrowcast.errors import UnsupportedError
from narrowcast.weights._state import tensors_in, widened
from narrowcast.weights._torch_internals import is_hook_table, step_without_hooks

# Wrapped around one optimizer by schedulers, or by holding it; bound to it, not to its shadow.
_BOUND = {"step", "zero_grad"}


def aimed_values(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    """The float32 value that each parameter would have after a step made in float32 from here.

    A copy of the optimizer steps on float32 copies of parameters, gradients and state. Nothing of the
    original changes: no hook is called, and the random state is put back.

    Raises:
        UnsupportedError: the optimizer has something that cannot be copied.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        shadows = {parameter: _shadow_of(parameter) for parameter in parameters}
        shadow = _shadow_optimizer(optimizer, shadows)
        # The type's step, not the instance's, which a scheduler may have replaced by one that counts.
        with _random_state_kept(parameters):
            step_without_hooks(optimizer)(shadow)
    return {parameter: value.detach() for parameter, value in shadows.items()}


def _shadow_of(parameter: torch.Tensor) -> torch.Tensor:
    shadow = torch.nn.Parameter(widened(parameter).detach().clone(), requires_grad=parameter.requires_grad)
    vars(shadow).update(vars(parameter))
    if parameter.grad is not None:
        shadow.grad = widened(parameter.grad).detach().clone()
    return shadow


def _shadow_optimizer(
    optimizer: torch.optim.Optimizer, shadows: dict[torch.Tensor, torch.Tensor]
) -> torch.optim.Optimizer:
    """A copy in which every reference to a parameter, wherever it is, is one to its shadow."""
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    known: dict[int, Any] = {id(parameter): shadow for parameter, shadow in shadows.items()}
    known[id(optimizer)] = shadow
    for tensor in tensors_in(list(optimizer.state.values())):
        if id(tensor) not in known:
            known[id(tensor)] = widened(tensor).detach().clone()
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _BOUND}
    for name in attributes:
        if is_hook_table(name):
            attributes[name] = OrderedDict()
    try:
        vars(shadow).update(copy.deepcopy(attributes, known))
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            "an optimizer with parameters in a low format is measured by a copy of it, and this "
            f"{type(optimizer).__name__} cannot be copied ({error}): hold it with narrowcast.weights.hold, "
            "which needs no copy"
        ) from error
    return shadow


def _random_state_kept(parameters: list[torch.Tensor]) -> Any:
    devices = {parameter.device for parameter in parameters if parameter.device.index is not None}
    device_type = next(iter(devices)).type if devices else "cuda"
    return torch.random.fork_rng([device.index for device in devices], device_type=device_type)

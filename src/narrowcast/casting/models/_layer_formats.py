"""The formats in which the parts of a model should compute, by its policy: layers, and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.casting.kernels._kernels import root_scope
from narrowcast.casting.models._tree import modules_by_path, scopes_by_path
from narrowcast.policy import CASTS_TO, FORMATS, LOWER, Policy, dtype_of, native_table

_OPERATORS: dict[type[torch.nn.Module], str] = {
    torch.nn.Linear: "linear",
    torch.nn.Conv1d: "conv1d",
    torch.nn.Conv2d: "conv2d",
    torch.nn.Conv3d: "conv3d",
    torch.nn.ConvTranspose1d: "conv_transpose1d",
    torch.nn.ConvTranspose2d: "conv_transpose2d.input",
    torch.nn.ConvTranspose3d: "conv_transpose3d.input",
}
"""The operator of each class of layers."""


def layer_formats(
    model: torch.nn.Module, policy: Policy, formats: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """Return the dtype that the outputs of each layer have in a region of ``policy``, by path.

    Left out are layers whose format depends on their inputs, layers that no region casts, and subclasses of
    torch's layers.

    Args:
        model: its parameters are on devices of ``formats``.
        policy: in force in the region.
        formats: device type -> the region's dtype there.
    """
    scopes = {}
    for device, dtype in formats.items():
        if not policy.is_plain:
            scopes[device] = scopes_by_path(model, policy, root_scope(policy, device, dtype))

    expected: dict[str, torch.dtype] = {}
    for path, module in modules_by_path(model):
        operator = _OPERATORS.get(type(module))
        if operator is None:
            continue
        weight: Any = module.weight
        device = weight.device.type
        if device == "meta":
            (device,) = formats  # the one device type that the weights will be moved to
        lower = formats[device]

        # Where no rule decides, PyTorch's table does: on MPS it has conv_transpose3d in fp32.
        word: str | None = CASTS_TO[native_table(device).get(operator, LOWER)]
        # Forward hooks see what the operator returns, before a rule for the module casts it.
        decision = None
        if device in scopes:
            decision = scopes[device][path].decide(operator)
        if decision is not None:
            word = decision.output or CASTS_TO[decision.compute]
        if word == LOWER:
            expected[path] = lower
        elif word in FORMATS:
            expected[path] = dtype_of(word)
    return expected


def weight_formats(
    model: torch.nn.Module, policy: Policy, device: str, lower: torch.dtype
) -> dict[str, torch.dtype]:
    """Return the dtype that each module of ``model`` may have its weights in, by path.

    It is ``lower`` if no rule says otherwise. If a rule leaves the format to the inputs, it is fp32. Rules
    for operators count only for linear and convolution layers.

    Args:
        model: on ``device``, or on "meta".
        policy: in force in the region.
        device: the device type of the region.
        lower: the region's dtype.
    """
    if policy.is_plain:
        return {path: lower for path, _ in modules_by_path(model)}

    wanted: dict[str, torch.dtype] = {}
    scopes = scopes_by_path(model, policy, root_scope(policy, device, lower))
    for path, module in modules_by_path(model):
        scope = scopes[path]
        rule = scope.rule
        operator = _OPERATORS.get(type(module))
        if operator is not None:
            decision = scope.decide(operator)
            rule = None if decision is None else decision.rule

        word: str | None = LOWER
        if rule is not None:
            word = CASTS_TO[rule.compute]
        if word == LOWER:
            wanted[path] = lower
        elif word in FORMATS:
            wanted[path] = dtype_of(word)
        else:
            wanted[path] = torch.float32
    return wanted

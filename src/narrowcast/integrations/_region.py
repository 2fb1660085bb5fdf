"""The region and the scaler of a policy, for a host that trains the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.casting import ModelRegion
from narrowcast.errors import PolicyError, SettingError
from narrowcast.gradients import GradScaler
from narrowcast.policy import Policy, format_name, resolve, with_fp32_weights
from narrowcast.scaling import Off


def formats_on(model: torch.nn.Module, policy: Policy) -> dict[str, torch.dtype]:
    """Return the dtype that ``policy`` computes in, by the types of the devices that ``model`` is on."""
    devices = dict.fromkeys(parameter.device.type for parameter in model.parameters())
    if not devices:
        raise SettingError(f"expected a model with parameters, got {type(model).__name__} without any")
    return {device: resolve(policy, device) for device in devices}


def host_policy(policy: Policy | str) -> Policy:
    """Return the policy for a host, which keeps the weights in fp32.

    Raises:
        PolicyError: the policy does not exist, or holds the weights in a low format.
    """
    return with_fp32_weights(policy)


def region_of(
    model: torch.nn.Module,
    policy: Policy,
    formats: Mapping[str, torch.dtype],
    *,
    caches: bool | None = None,
) -> ModelRegion:
    """Return the region that the host opens around forward pass and loss of ``model``.

    ``caches`` says whether the cast of a weight is kept until the region ends, as in ``PolicyRegion``.
    """
    how = "make another model: this one keeps the policy of the plugin that it was set up with"
    # Not strict, since a rule that selects nothing in this model may be for another model of the host.
    return ModelRegion(
        policy,
        formats,
        warnings.warn,
        model=model,
        warns=True,
        how_to_end=how,
        strict=False,
        caches=caches,
    )


def refuse_low_weights(model: torch.nn.Module) -> None:
    """Refuse a model whose trainable weights are in a low format, in which small updates are lost."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            raise PolicyError(
                f"expected trainable weights in fp32, which the policy casts, got {name!r} in "
                f"{format_name(parameter.dtype)}: load the model in fp32 (dtype=torch.float32), or call "
                "model.float() before the optimizer is made; for a model that is not trained, call "
                "model.requires_grad_(False)"
            )


def scaler_for(
    names: Mapping[int, str], formats: Mapping[str, torch.dtype], scaler: Any = None, *, on_scheduler: str
) -> GradScaler:
    """Return the scaler that was given, or the policy's: it scales in fp16, and checks in other formats.

    A step whose gradients are not finite is skipped in every format.

    Args:
        names: the names of parameters by their ``id``, for the results of steps.
        formats: the dtype of the region by device type.
        scaler: what the user gave.
        on_scheduler: for a message, what to write where a scheduler moves after a skipped step.
    """
    if scaler is None:
        loss_scale = None if torch.float16 in formats.values() else Off()
        scaler = GradScaler(loss_scale=loss_scale)
    if not isinstance(scaler, GradScaler):
        raise SettingError(
            f"expected an nc.GradScaler, got {type(scaler).__module__}.{type(scaler).__qualname__}: leave "
            "the argument out, or make it by nc.GradScaler(...)"
        )
    if names:
        scaler.name_parameters(names)
    scaler.advise_for_host(
        on_collapse=(
            "Look at the loss, and at the same steps in fp32; explain_skips=True tells where the first "
            "infinity arises. scaler=nc.GradScaler(patience=None) never raises this"
        ),
        on_scheduler=on_scheduler,
    )
    return scaler

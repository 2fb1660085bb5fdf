"""Set up a ``Stepper`` from its arguments: sort optimizers, make scalers, hold weights."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from narrowcast.casting import cast_floating
from narrowcast.errors import PolicyError, SettingError
from narrowcast.gradients import GradScaler, check_apart, lost_eps, parameters_of
from narrowcast.machine import best_format
from narrowcast.policy import Policy, as_policy, resolve
from narrowcast.scaling import Off, Static
from narrowcast.training._optimizer_group import OptimizerGroup, Settings
from narrowcast.weights import held_by, hold, lower


def formats_of(model: torch.nn.Module, policy: Policy | str) -> dict[str, torch.dtype]:
    """What ``policy`` computes in on each type of device that the model is on."""
    wanted = as_policy(policy)
    if not isinstance(model, torch.nn.Module):
        raise SettingError(
            f"expected a torch.nn.Module, got {type(model).__name__}; several models are one as "
            'torch.nn.ModuleDict({"g": generator, "d": discriminator})'
        )
    devices = dict.fromkeys(parameter.device.type for parameter in model.parameters())
    if not devices:
        raise SettingError(f"expected a model with parameters, got {type(model).__name__} without any")
    if "meta" in devices:
        raise SettingError(
            "expected a model with values, got parameters on the meta device: call "
            "model.to_empty(device=...), initialize it, and then make the optimizer"
        )
    formats = {device: resolve(wanted, device, low_weights=True) for device in devices}
    if wanted.holds_low_weights and wanted.compute == "auto":
        # A model that is in a low format already says which.
        low = {p.dtype for p in model.parameters()} & {torch.float16, torch.bfloat16}
        if len(low) == 1:
            formats = dict.fromkeys(devices, low.pop())
    return formats


def warn_of_other_format(device: str, before: str) -> None:
    """Say that a run goes on in the format that it was saved in, which ``auto`` would not choose now."""
    now = best_format(device)
    warnings.warn(
        f"resumed in {before} on {device}, as saved; auto would now choose {now.format} ({now.because})",
        stacklevel=4,
    )


def make_groups(
    model: torch.nn.Module,
    by_name: dict[str | None, list[torch.optim.Optimizer]],
    policy: Policy,
    formats: Mapping[str, torch.dtype],
    settings: Settings,
    scheduler: Any,
    scaler: Any,
    process_group: Any | None,
) -> dict[str | None, OptimizerGroup]:
    """A group for each named optimizer, or one under None."""
    _check_parameters(model, by_name)
    schedulers = _by_same_names("scheduler", scheduler, by_name)
    scalers = _by_same_names("scaler", scaler, by_name, shared=not isinstance(scaler, GradScaler))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if policy.master_weights:
        names |= _hold_weights(model, by_name, formats, names)
    if policy.low_weights:
        _lower_weights(model, formats, "O3")
    groups = {}
    for name, optimizers in by_name.items():
        made = _scaler_for(scalers[name], formats, process_group, low_weights=policy.low_weights)
        made.name_parameters(names)
        _warn_of_lost_updates(optimizers, low_weights=policy.low_weights)
        groups[name] = OptimizerGroup(optimizers, made, _as_list(schedulers[name]), settings)
    return groups


def optimizers_by_name(optimizer: Any) -> dict[str | None, list[torch.optim.Optimizer]]:
    given: Mapping[Any, Any] = optimizer if isinstance(optimizer, Mapping) else {None: optimizer}
    by_name = {name: _as_list(one) for name, one in given.items()}
    every = list(itertools.chain.from_iterable(by_name.values()))
    if not every or not all(isinstance(one, torch.optim.Optimizer) for one in every):
        raise SettingError(f"expected an optimizer, a list or a dict of optimizers, got {optimizer!r}")
    if len({id(one) for one in every}) != len(every):
        raise SettingError("the same optimizer was given twice")
    for optimizers in by_name.values():
        check_apart(optimizers)
    return by_name


def _check_parameters(model: torch.nn.Module, by_name: Mapping[Any, list[torch.optim.Optimizer]]) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in itertools.chain.from_iterable(by_name.values()):
        held = held_by(optimizer)
        mine = set(map(id, parameters_of(optimizer)))
        mine |= {id(low) for low, _ in held.parameters} if held else set()
        if not mine & known:
            raise SettingError(
                f"no parameter of this {type(optimizer).__name__} is one of the model's: make it from "
                "model.parameters(), after anything that replaces them (as .to_empty() does)"
            )


def _warn_of_lost_updates(optimizers: Sequence[torch.optim.Optimizer], *, low_weights: bool) -> None:
    """Warn of an eps that fp16 rounds to 0, and of weights in bf16; those in fp16 are refused later."""
    for optimizer in optimizers:
        name, warning = type(optimizer).__name__, None
        eps = lost_eps(optimizer) if low_weights else None
        if eps is not None:
            warning = (
                f"{name} keeps its state in fp16 with the weights, where its eps of {eps} is 0 and weights "
                'become NaN: give it eps=1e-4, or use policy="O2"'
            )
        if not low_weights and any(p.dtype == torch.bfloat16 for p in parameters_of(optimizer)):
            warning = (
                f"{name} updates weights held in bf16, which loses updates smaller than 2**-9 of a weight: "
                'policy="O2" keeps fp32 masters, nc.weights.hold less, and nc.weights.UpdateMeter measures '
                "the loss"
            )
        if warning is not None:
            warnings.warn(warning, UserWarning, stacklevel=4)


def _as_list(one: Any) -> list[Any]:
    if one is None:
        return []
    return list(one) if isinstance(one, Sequence) and not isinstance(one, str) else [one]


def _by_same_names(
    what: str, given: Any, by_name: Mapping[str | None, Any], *, shared: bool = False
) -> dict[str | None, Any]:
    if given is None:
        return dict.fromkeys(by_name)
    if isinstance(given, Mapping):
        if set(given) - set(by_name):
            raise SettingError(
                f"{what} has the names {sorted(given)}, and the optimizers {sorted(map(str, by_name))}"
            )
        return {name: given.get(name) for name in by_name}
    if len(by_name) > 1 and not shared:
        raise SettingError(
            f"expected a dict of {what}s by the names of the optimizers ({', '.join(map(str, by_name))})"
        )
    return dict.fromkeys(by_name, given)


def _scaler_for(
    given: Any, formats: Mapping[str, torch.dtype], process_group: Any | None, *, low_weights: bool
) -> GradScaler:
    if isinstance(given, GradScaler):
        if process_group is not None:
            raise SettingError("give process_group to the GradScaler, or leave the scaler to Stepper")
        return given
    if isinstance(given, torch.amp.GradScaler):
        raise SettingError("expected a nc.GradScaler, got torch's: its results do not tell what was skipped")
    if given is None and torch.float16 not in formats.values():
        given = Off()
    elif given is None and low_weights:
        given = Static(scale=1.0)  # apex's O3
    return GradScaler(loss_scale=given, process_group=process_group, allow_fp16_gradients=low_weights)


def cast_inputs(model: torch.nn.Module, formats: Mapping[str, torch.dtype]) -> Any:
    """Cast the inputs of a model with low weights to their format, as apex does; return the hook's handle.

    An operator that no table lists would otherwise get fp32 inputs and low weights.
    """

    def hook(_model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        for device, dtype in formats.items():
            if torch.is_autocast_enabled(device):
                args = cast_floating(args, dtype, only=(torch.float32,))
                kwargs = cast_floating(kwargs, dtype, only=(torch.float32,))
        return args, kwargs

    # TorchScript modules call hooks, but refuse the method.
    return torch.nn.Module.register_forward_pre_hook(model, hook, prepend=True, with_kwargs=True)


def _lower_weights(
    model: torch.nn.Module, formats: Mapping[str, torch.dtype], level: str
) -> Mapping[torch.Tensor, torch.Tensor] | None:
    """Cast the weights of ``model`` as apex's ``level`` does, and return their fp32 values; None in fp32."""
    dtypes = set(formats.values())
    if len(dtypes) > 1:
        raise PolicyError(f"policy {level!r} needs one format, and this model's devices have {dtypes}")
    dtype = dtypes.pop()
    if dtype == torch.float32:
        return None
    keep_fp32 = {"keep_fp32": None} if level == "O3" else {}
    low = [parameter.dtype == dtype for parameter in model.parameters()]
    if not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        wide = any(parameter.dtype == torch.float32 for parameter in model.parameters())
        return lower(model, dtype, **keep_fp32) if wide else {}
    if not (all(low) if keep_fp32 else any(low)):
        raise PolicyError(
            f"policy {level!r} casts the weights, and DistributedDataParallel has made its buckets for fp32: "
            f"call narrowcast.weights.lower(model, {dtype}{', keep_fp32=None' * bool(keep_fp32)}), wrap the "
            "model, then make the Stepper"
        )
    return {}


def _hold_weights(
    model: torch.nn.Module,
    by_name: Mapping[str | None, list[torch.optim.Optimizer]],
    formats: Mapping[str, torch.dtype],
    names: Mapping[int, str],
) -> dict[int, str]:
    """Cast the model, hold its optimizers' weights, and return the names of the masters."""
    originals = _lower_weights(model, formats, "O2")
    named: dict[int, str] = {}
    if originals is None:
        return named
    for optimizer in itertools.chain.from_iterable(by_name.values()):
        mine = set(parameters_of(optimizer))
        own = {p: value for p, value in originals.items() if p in mine}
        held = held_by(optimizer) or hold(optimizer, originals=own)
        named |= {id(master): names[id(low)] for low, master in held.parameters if id(low) in names}
    return named

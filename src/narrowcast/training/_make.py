"""Set up a ``Stepper`` from its arguments: sort optimizers, make scalers, hold weights."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from narrowcast.casting import cast_floating, stacklevel_outside
from narrowcast.errors import PolicyError, SettingError
from narrowcast.gradients import GradScaler, check_apart, lost_eps, parameters_of
from narrowcast.machine import best_format
from narrowcast.policy import Policy, as_policy, resolve
from narrowcast.scaling import Off, Static
from narrowcast.training._optimizer_group import OptimizerGroup, Settings
from narrowcast.weights import LOW_DTYPES, held_by, hold, lower


def formats_of(model: torch.nn.Module, policy: Policy | str) -> dict[str, torch.dtype]:
    """Return the dtype that ``policy`` computes in, for each type of device that the model is on."""
    policy = as_policy(policy)
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

    formats = {device: resolve(policy, device, low_weights=True) for device in devices}
    if policy.holds_low_weights and policy.compute == "auto":
        # A model whose low weights are all in one format stays in it, whatever "auto" would choose.
        low_dtypes = {parameter.dtype for parameter in model.parameters()}.intersection(LOW_DTYPES)
        if len(low_dtypes) == 1:
            formats = dict.fromkeys(devices, low_dtypes.pop())
    return formats


def warn_of_other_format(device: str, before: str) -> None:
    """Say that a run goes on in the format that it was saved in, which ``auto`` would not choose now."""
    now = best_format(device)
    warnings.warn(
        f"resumed in {before} on {device}, as saved; auto would now choose {now.format} ({now.because})",
        stacklevel=stacklevel_outside("narrowcast."),
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
    """Make a group for each named optimizer, or one under None."""
    _check_parameters(model, by_name)

    schedulers = _by_same_names("scheduler", scheduler, by_name)
    # A loss scale is a value that every group can have; a GradScaler belongs to one.
    scalers = _by_same_names("scaler", scaler, by_name, shared=not isinstance(scaler, GradScaler))

    # For the results of skipped steps, which name masters as their low parameters.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if policy.master_weights:  # O2
        names |= _hold_weights(model, by_name, formats, names)
    if policy.low_weights:  # O3
        _lower_weights(model, formats, "O3")

    groups = {}
    for name, optimizers in by_name.items():
        group_scaler = _scaler_for(scalers[name], formats, process_group, low_weights=policy.low_weights)
        group_scaler.name_parameters(names)
        for optimizer in optimizers:
            _warn_of_lost_updates(optimizer, low_weights=policy.low_weights)
        groups[name] = OptimizerGroup(optimizers, group_scaler, _as_list(schedulers[name]), settings)
    return groups


# ---- arguments by the names of the optimizers


def optimizers_by_name(optimizer: Any) -> dict[str | None, list[torch.optim.Optimizer]]:
    by_name: dict[str | None, list[torch.optim.Optimizer]]
    if isinstance(optimizer, Mapping):
        by_name = {name: _as_list(value) for name, value in optimizer.items()}
    else:
        by_name = {None: _as_list(optimizer)}

    all_optimizers = list(itertools.chain.from_iterable(by_name.values()))
    are_optimizers = [isinstance(obj, torch.optim.Optimizer) for obj in all_optimizers]
    if not all_optimizers or not all(are_optimizers):
        raise SettingError(f"expected an optimizer, a list or a dict of optimizers, got {optimizer!r}")
    if len(set(map(id, all_optimizers))) != len(all_optimizers):
        raise SettingError("the same optimizer was given twice")
    for optimizers in by_name.values():
        check_apart(optimizers)
    return by_name


def _by_same_names(
    what: str, argument: Any, by_name: Mapping[str | None, Any], *, shared: bool = False
) -> dict[str | None, Any]:
    """Return a dict from each optimizer's name to its part of ``argument``.

    With ``shared``, an argument that is no dict goes to every name.
    """
    if argument is None:
        return dict.fromkeys(by_name)
    if isinstance(argument, Mapping):
        if set(argument) - set(by_name):
            names = sorted(filter(None, by_name)) or "no names, which a dict of them gives"
            raise SettingError(f"{what} has the names {sorted(argument)}, and the optimizers have {names}")
        return {name: argument.get(name) for name in by_name}
    if len(by_name) > 1 and not shared:
        raise SettingError(
            f"expected a dict of {what}s by the names of the optimizers ({', '.join(map(str, by_name))})"
        )
    return dict.fromkeys(by_name, argument)


def _as_list(argument: Any) -> list[Any]:
    if argument is None:
        return []
    if isinstance(argument, Sequence) and not isinstance(argument, str):
        return list(argument)
    return [argument]


# ---- checks and warnings


def _check_parameters(model: torch.nn.Module, by_name: Mapping[Any, list[torch.optim.Optimizer]]) -> None:
    of_model = set(map(id, model.parameters()))
    for optimizer in itertools.chain.from_iterable(by_name.values()):
        # A held optimizer has masters in the place of the model's parameters.
        of_optimizer = set(map(id, parameters_of(optimizer)))
        held = held_by(optimizer)
        if held is not None:
            of_optimizer.update(id(low) for low, _ in held.parameters)
        if not of_optimizer & of_model:
            raise SettingError(
                f"no parameter of this {type(optimizer).__name__} is one of the model's: make it from "
                "model.parameters(), after anything that replaces them (as .to_empty() does)"
            )


def _warn_of_lost_updates(optimizer: torch.optim.Optimizer, *, low_weights: bool) -> None:
    """Warn of an eps that fp16 rounds to 0, and of weights in bf16; a step refuses weights in fp16."""
    name = type(optimizer).__name__
    if low_weights:
        eps = lost_eps(optimizer)
        if eps is not None:
            warnings.warn(
                f"{name} keeps its state in fp16 with the weights, where its eps of {eps} is 0 and weights "
                'become NaN: give it eps=1e-4, or use policy="O2"',
                UserWarning,
                stacklevel=4,
            )
    elif any(parameter.dtype == torch.bfloat16 for parameter in parameters_of(optimizer)):
        warnings.warn(
            f"{name} updates weights held in bf16, which loses updates smaller than 2**-9 of a weight: "
            'policy="O2" keeps fp32 masters, nc.weights.hold(optimizer, "kahan") keeps 2 bytes a weight '
            "in place of 4, and nc.weights.UpdateMeter measures what is lost",
            UserWarning,
            stacklevel=4,
        )


# ---- scalers and weights


def _scaler_for(
    scaler: Any, formats: Mapping[str, torch.dtype], process_group: Any | None, *, low_weights: bool
) -> GradScaler:
    """Return the scaler that was given, or make one of a loss scale."""
    if isinstance(scaler, GradScaler):
        if process_group is not None:
            raise SettingError("give process_group to the GradScaler, or leave the scaler to Stepper")
        return scaler
    if isinstance(scaler, torch.amp.GradScaler):
        raise SettingError("expected an nc.GradScaler, got torch's: its results do not tell what was skipped")

    loss_scale = scaler
    if loss_scale is None and torch.float16 not in formats.values():
        loss_scale = Off()
    elif loss_scale is None and low_weights:
        loss_scale = Static(scale=1.0)  # apex's O3
    return GradScaler(loss_scale=loss_scale, process_group=process_group, allow_fp16_gradients=low_weights)


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

    # Called on the class: a TorchScript module calls hooks, but its own method refuses to add them.
    return torch.nn.Module.register_forward_pre_hook(model, hook, prepend=True, with_kwargs=True)


def _lower_weights(
    model: torch.nn.Module, formats: Mapping[str, torch.dtype], level: str
) -> Mapping[torch.Tensor, torch.Tensor] | None:
    """Cast the weights of ``model`` as apex's ``level`` does, and return their fp32 values by parameter.

    Returns None if the format is fp32, where nothing is cast; an empty mapping if the caller has lowered the
    model already, so that no fp32 values are known.
    """
    dtypes = set(formats.values())
    if len(dtypes) > 1:
        raise PolicyError(f"policy {level!r} needs one format, and this model's devices have {dtypes}")
    dtype = dtypes.pop()
    if dtype == torch.float32:
        return None

    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        _check_lowered_before_ddp(model, dtype, level)
        return {}
    if all(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return {}
    if level == "O3":
        return lower(model, dtype, keep_fp32=None)  # batch norms too
    return lower(model, dtype)


def _check_lowered_before_ddp(model: torch.nn.Module, dtype: torch.dtype, level: str) -> None:
    """Refuse a model that was in fp32 when DDP wrapped it: its buckets of gradients keep that format."""
    is_low = [parameter.dtype == dtype for parameter in model.parameters()]
    if level == "O3":
        is_lowered = all(is_low)
        keep_option = ", keep_fp32=None"
    else:
        # O2 leaves batch norms in fp32.
        is_lowered = any(is_low)
        keep_option = ""
    if not is_lowered:
        raise PolicyError(
            f"policy {level!r} casts the weights, and DistributedDataParallel has made its buckets for fp32: "
            f"call narrowcast.weights.lower(model, {dtype}{keep_option}), wrap the model, then make the "
            "Stepper"
        )


def _hold_weights(
    model: torch.nn.Module,
    by_name: Mapping[str | None, list[torch.optim.Optimizer]],
    formats: Mapping[str, torch.dtype],
    names: Mapping[int, str],
) -> dict[int, str]:
    """Cast the model, hold its optimizers' weights, and return the names of the masters."""
    master_names: dict[int, str] = {}
    originals = _lower_weights(model, formats, "O2")
    if originals is None:
        return master_names
    for optimizer in itertools.chain.from_iterable(by_name.values()):
        held = held_by(optimizer)
        if held is None:
            # Masters start from the fp32 values, not from what the low format kept of them.
            parameters = set(parameters_of(optimizer))
            own_originals = {low: value for low, value in originals.items() if low in parameters}
            held = hold(optimizer, originals=own_originals)
        for low, master in held.parameters:
            if id(low) in names:
                master_names[id(master)] = names[id(low)]
    return master_names

"""Shard a model by ``fully_shard`` (FSDP2), each module in the format that a policy gives it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from narrowcast.casting import Applied, modules_by_path, weight_formats
from narrowcast.errors import OrderError, PolicyError, SettingError
from narrowcast.integrations._first_step import FirstStep
from narrowcast.integrations._region import host_policy
from narrowcast.policy import Policy, format_name, resolve
from narrowcast.weights import is_batch_or_instance_norm

_ModelT = TypeVar("_ModelT", bound=torch.nn.Module)
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
"""Modules without a forward, which ``fully_shard`` cannot take."""


def shard(
    model: _ModelT,
    mesh: DeviceMesh,
    policy: Policy | str,
    *,
    blocks: Iterable[torch.nn.Module] | None = None,
    fp32_outputs: bool = True,
    **options: Any,
) -> _ModelT:
    """Shard ``model`` in place by ``fully_shard``, so that it computes by ``policy``; return it::

        policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("head", compute="fp32"))
        shard(model, init_device_mesh("cuda", (8,)), policy, blocks=model.layers)
        optimizer = torch.optim.AdamW(model.parameters())
        stepper = nc.Stepper(model, optimizer, policy, max_norm=1.0)
        for tokens, targets in loader:
            with stepper.autocast():
                loss = loss_of(model(tokens), targets)
            stepper.step(loss)

    Each rank keeps its part of the weights and of the optimizer's states in fp32. FSDP gathers the weights
    of a module in the format that the module computes in, and reduces their gradients in fp32. The model has
    the policy as by ``nc.apply``, and so its calls follow rules for operators too, in any loop. Make the
    optimizer before the first call: after one without gradients FSDP leaves the model's own weights gathered.

    Weights are gathered in the low format unless a rule for their module keeps it in fp32, or a rule for
    linear layers or convolutions does. So are embeddings and norms, which autocast would leave in fp32. Batch
    and instance norms keep their weights in fp32, as their statistics. Each module that is kept in fp32
    inside a block, and each low one inside a module in fp32, is a group of its own: one more collective in
    each forward pass, and two in each backward pass.

    At the first forward pass with gradients, the outputs of linear layers and convolutions are compared with
    the policy, unless the whole model is compiled. If a gradient has an infinity or NaN, all ranks skip the
    step, since the reduction or the check of the ``Stepper`` spreads it to all.

    Args:
        model: weights in fp32, on the type of device of ``mesh`` or on "meta"; not sharded yet, and without
            a policy.
        mesh: of one dimension, over which the weights are sharded; or of two with names, where the first is
            that of copies.
        policy: as for ``nc.apply``; the ``Stepper`` gets the same.
        blocks: the modules that are gathered together and freed after their call, as ``model.layers``. By
            default all that the outermost ``Sequential``, ``ModuleList`` and ``ModuleDict`` of the model
            hold. What is in no block is gathered with the model itself.
        fp32_outputs: cast what the model returns to fp32, which takes memory of its own for large logits.
        options: of ``fully_shard``, for each group, as ``reshard_after_forward``.

    Raises:
        SettingError: the model or the mesh is none of those above; a block is not in the model, or is a list
            of blocks; or a weight is shared by modules that are gathered apart.
        OrderError: the model is sharded already.
        PolicyError: the policy cannot hold for this model; ``options`` have a ``mp_policy``; or, in the first
            forward pass, a layer did not follow the policy.
    """
    wanted = host_policy(policy)
    _check(model, mesh, options)
    dtype = resolve(wanted, mesh.device_type)
    formats = weight_formats(model, wanted, mesh.device_type, dtype)
    for path, module in modules_by_path(model):
        # Their statistics are in fp32, and such a norm needs its weights in the same format.
        if is_batch_or_instance_norm(module):
            formats[path] = torch.float32
    block_list = _default_blocks(model) if blocks is None else list(blocks)
    groups = _groups(model, formats, block_list)

    how = "make another model and shard it by the policy that you want"
    Applied(model, wanted, how_to_end=how)  # lasts as long as the model: nothing removes it
    first = FirstStep(model, wanted, {mesh.device_type: dtype}, advice="leave out the model's own autocast")
    for module, weight_dtype in reversed(groups):  # inner ones first, as fully_shard requires
        # The region casts inputs, and rules cast outputs: a cast by FSDP would not know the operators.
        output_dtype = torch.float32 if module is model and fp32_outputs else None
        precision = MixedPrecisionPolicy(weight_dtype, torch.float32, output_dtype, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, mp_policy=precision, **options)
    _end_after_first_call(model, first)
    return model


def _check(model: torch.nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    if "mp_policy" in options:
        raise PolicyError("expected no mp_policy, which is made of the policy for each module: leave it out")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise OrderError(
            f"expected a model that is not sharded, got a {type(model).__name__} that is, at least in part: "
            "call shard once, in the place of every fully_shard"
        )
    weights: set[str] = set()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            weights.add(f"{format_name(parameter.dtype)} on {parameter.device.type}")
    mesh_fits = False
    weights_fit = False
    if isinstance(mesh, DeviceMesh):
        mesh_fits = mesh.ndim == 1 or (mesh.ndim == 2 and mesh.mesh_dim_names is not None)
        weights_fit = weights in ({f"fp32 on {mesh.device_type}"}, {"fp32 on meta"})
    has_forward = not isinstance(model, _LISTS)
    if not (mesh_fits and weights_fit and has_forward):
        have = " and ".join(sorted(weights)) or "no format"
        raise SettingError(
            "expected a DeviceMesh of one dimension, or of two with names, and a model with a forward and "
            f"with weights in fp32 on the mesh's device, got {mesh!r} and a {type(model).__name__} with "
            f"weights in {have}: call model.float() or model.to(...), or make another mesh"
        )


def _default_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return what the outermost containers inside ``module`` hold."""
    holds_blocks = isinstance(module, (torch.nn.Sequential, *_LISTS))
    blocks = []
    for child in module.children():
        if holds_blocks and not isinstance(child, _LISTS):
            blocks.append(child)
        else:
            blocks += _default_blocks(child)
    return blocks


def _groups(
    model: torch.nn.Module, formats: dict[str, torch.dtype], blocks: list[torch.nn.Module]
) -> list[tuple[torch.nn.Module, torch.dtype]]:
    """Return the modules to shard, each with the format of the weights in it, outer ones first."""
    if not set(blocks) <= set(model.modules()):
        raise SettingError("expected blocks of the model, got a module that is not in it: pass model.layers")
    for block in blocks:
        if isinstance(block, _LISTS):
            its_blocks = "model.layers.values()" if isinstance(block, torch.nn.ModuleDict) else "model.layers"
            raise SettingError(
                f"expected blocks of the model, got a {type(block).__name__}, not the blocks in it: pass "
                f"blocks={its_blocks}"
            )

    groups = []
    group_of: dict[str, str] = {}  # path of a module -> path of its group, which gathers its weights
    holders: dict[torch.nn.Parameter, str] = {}
    for path, module in modules_by_path(model):
        # A path comes twice where a module is wrapped: the wrapper first, then what it wraps.
        parent, _, _ = path.rpartition(".")
        inherited = group_of.get(path, group_of.get(parent))  # None for the model itself
        is_apart = inherited is None or module in blocks or formats[path] != formats[inherited]
        has_weights = next(module.parameters(), None) is not None
        begins_group = is_apart and has_weights and not isinstance(module, _LISTS)
        if begins_group:
            groups.append((module, formats[path]))
        group = path if begins_group else inherited
        assert group is not None
        group_of[path] = group

        for name, parameter in module.named_parameters(recurse=False):
            holder = holders.setdefault(parameter, group)
            if holder != group:
                raise SettingError(
                    f"expected a weight that modules share in one group, got {name!r} of {path!r}, which "
                    f"belongs to {group!r} and to {holder!r}: untie it, or leave its modules out of blocks "
                    "and of rules that keep them in another format"
                )
    return groups


def _end_after_first_call(model: torch.nn.Module, first: FirstStep) -> None:
    """End ``first`` with the first forward pass that has gradients."""

    def end(*_: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            handle.remove()
            first.end()

    handle = model.register_forward_hook(end)

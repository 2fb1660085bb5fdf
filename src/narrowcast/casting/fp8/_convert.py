"""Rules with an fp8 recipe: which linear layers of a model multiply in fp8, and why others cannot."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter

from narrowcast.casting._tree import modules_by_path, scopes_by_path
from narrowcast.casting._weight_casts import stacklevel_outside
from narrowcast.errors import PolicyError, near_names
from narrowcast.policy import FP8_RECIPES, Policy, Rule, as_policy, class_names, names_module, resolved

CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
_MULTIPLE = 16
_SHOWN_PATHS = 8
_NO_INSTRUCTIONS = "has no fp8 instructions"


class Fp8Use:
    """Shared by the layers that one ``apply_fp8`` converted, and by their copies.

    Attributes:
        removed: the layers compute as ``torch.nn.Linear`` again.
    """

    def __init__(self, removed: bool = False) -> None:
        self.removed = removed

    def __deepcopy__(self, _memo: object) -> Fp8Use:
        return self


class Fp8Handle:
    """The result of ``apply_fp8``.

    Attributes:
        converted: path in the model -> recipe, for each layer that multiplies in fp8.
        left_out: path in the model -> why not, in words, for each other module that an fp8 rule selects.
        missed: fp8 rule -> error message, for each rule that meets no linear layer.
    """

    def __init__(self, left_out: dict[str, str], missed: dict[Rule, str]) -> None:
        self.converted: dict[str, str] = {}
        self.left_out = left_out
        self.missed = missed
        self.use = Fp8Use()
        self.layers: list[torch.nn.Linear] = []

    def remove(self) -> None:
        """Make the layers ``torch.nn.Linear`` again: the same objects with their parameters and hooks.

        Layers in copies of the model, and those whose class ``fully_shard`` or another library changed since,
        keep their class and compute as ``torch.nn.Linear``. Nothing happens the second time.
        """
        self.use.removed = True
        while self.layers:
            restore_layer(self.layers.pop())

    def __repr__(self) -> str:
        return f"Fp8Handle({len(self.converted)} converted, {len(self.left_out)} left out)"


def apply_fp8(
    model: torch.nn.Module, policy: Policy | str | PathLike[str], *, strict: bool = True
) -> Fp8Handle:
    """Convert the linear layers of ``model`` for which fp8 rules of ``policy`` win.

    A layer stays the same object, with its fp32 parameters, hooks and mode; its class becomes ``Fp8Linear``.
    Without fp8 rules nothing happens, and torchao is not imported. Call it before ``torch.compile`` and
    ``fully_shard``. Which rule wins is as for the operator ``linear`` called in that module.

    Layers convert if they are ``torch.nn.Linear`` and of no subclass (LoRA, parametrizations and the
    projections of ``torch.nn.MultiheadAttention`` compute otherwise), with a weight in fp32, bf16 or fp16
    whose in and out features are multiples of 16. On a CPU the same numbers are multiplied in fp32, with a
    warning. Layers on a GPU without fp8 instructions are left out with a warning, since bf16 is faster and
    more exact there.

    The numbers are described in docs/fp8.md.

    Args:
        model: any module; the paths of rules leave out wrappers (DDP, ``torch.compile``).
        policy: a ``Policy``, the name of a preset, or a file.
        strict: raise if an fp8 rule meets no linear layer.

    Raises:
        MissingModuleError: torchao is not installed (``pip install 'narrowcast[fp8]'``), or is too old.
        PolicyError: an fp8 rule meets no linear layer of ``model``, or the model has fp8 layers already.
        UnsupportedError: later, in a backward with ``create_graph=True`` through such a layer. The transforms
            of ``torch.func`` raise torch's own RuntimeError there.

    Sources: https://github.com/pytorch/ao/tree/main/torchao/float8; OCP 8-bit Floating Point Specification
    (OFP8) 1.0.
    """
    policy = as_policy(policy)
    rules = [one for one in policy.rules if one.compute in FP8_RECIPES]
    if not rules:
        return Fp8Handle({}, {})
    found = _sites(model, policy)
    missed = {rule: why for rule in rules if (why := _why_missed(rule, model)) is not None}
    if missed and strict:
        raise PolicyError(next(iter(missed.values())))
    from narrowcast.casting.fp8 import _linear  # imports torchao

    selected = [(site, rule) for site in found if (rule := _fp8_rule(site)) is not None]
    reasons = {site.path: _why_not(site.module) for site, _ in selected}
    handle = Fp8Handle({path: why for path, why in reasons.items() if why is not None}, missed)
    chosen = [(site, rule) for site, rule in selected if reasons[site.path] is None]
    _warn([site.module for site, _ in chosen], handle.left_out)  # first: a warning may be an error
    for site, rule in chosen:
        handle.layers.append(_linear.convert_layer(site.module, rule, handle.use))
        handle.converted[site.path] = rule.compute
    return handle


def unconverted(model: torch.nn.Module, policy: Policy) -> dict[str, str | None]:
    """Return the paths of layers that fp8 rules of ``policy`` select and that do not multiply in fp8.

    The value is why a layer cannot, or None if it could.
    """
    found = [site for site in _sites(model, policy, with_fp8=True) if _fp8_rule(site) is not None]
    return {site.path: _why_not(site.module) for site in found if not is_fp8(site.module)}


def is_fp8(module: torch.nn.Module) -> bool:
    """Return whether this layer multiplies in fp8."""
    use: Fp8Use | None = vars(module).get("fp8_use")
    return use is not None and not use.removed


def restore_layer(module: torch.nn.Module) -> None:
    """Make an fp8 layer a ``torch.nn.Linear`` again, unless its class has changed, as by ``fully_shard``."""
    if type(module).__name__ == "Fp8Linear":
        for name in type(module).__annotations__:
            vars(module).pop(name, None)
        module.__class__ = torch.nn.Linear


def has_fp8(device: torch.device) -> bool:
    """Return whether ``device`` multiplies fp8: CUDA 8.9 and newer, AMD's MI300 and newer.

    Source: the requirements of ``torch._scaled_mm``, aten/src/ATen/native/cuda/ScaledBlas.cpp.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.version.hip is not None:
        architecture = str(torch.cuda.get_device_properties(device).gcnArchName)
        return architecture.startswith(("gfx94", "gfx95", "gfx12"))
    return torch.cuda.get_device_capability(device) >= (8, 9)


# ---- which layers


class _Site(NamedTuple):
    """A module at its first path in the model, and the rule that decides ``linear`` inside it."""

    path: str
    module: Any
    winner: Rule | None


def _sites(model: torch.nn.Module, policy: Policy, *, with_fp8: bool = False) -> list[_Site]:
    """Return every module of ``model``.

    Raises:
        PolicyError: one is an fp8 layer already, unless ``with_fp8``.
    """
    for path, module in modules_by_path(model):
        if is_fp8(module) and not with_fp8:
            raise PolicyError(f"{path!r} is an fp8 layer already: remove() the handle of its policy first")
        if not is_fp8(module):
            restore_layer(module)  # in a copy of the model whose policy was removed
    root = resolved(policy, "cpu", "bf16").root  # which rule wins does not depend on the device
    scopes = scopes_by_path(model, policy, root)
    return [_Site(path, module, scopes[path].rule_of("linear")) for path, module in modules_by_path(model)]


def _why_missed(rule: Rule, model: torch.nn.Module) -> str | None:
    """Explain that an fp8 rule selects no linear layer; None if it does."""
    modules = modules_by_path(model)
    linears = [path for path, module in modules if isinstance(module, torch.nn.Linear)]
    selected = [p for p, module in modules if names_module(rule, p, class_names(type(module)))]
    inside = any(path == p or not p or path.startswith(f"{p}.") for path in linears for p in selected)
    if inside or (linears and not rule.is_for_modules):
        return None
    known = near_names(rule.module or "", linears[:_SHOWN_PATHS]) if linears else "The model has none."
    return f"expected a torch.nn.Linear for the rule {rule}, got none in {rule.target}. {known}"


def _fp8_rule(site: _Site) -> Rule | None:
    """Return the rule that wins at ``site`` if it has an fp8 recipe, or None."""
    rule = site.winner
    if rule is None or rule.compute not in FP8_RECIPES:
        return None
    if isinstance(site.module, torch.nn.Linear):
        return rule
    # A module with matrices of its own, as MultiheadAttention, is expected to follow a module rule.
    matrices = [p for p in site.module.parameters(recurse=False) if p.dim() > 1 and p.is_floating_point()]
    is_meant = rule.op is None or isinstance(site.module, torch.nn.MultiheadAttention)
    return rule if matrices and is_meant else None


def _why_not(module: torch.nn.Module) -> str | None:
    """Explain why ``module`` cannot multiply in fp8; None if it can."""
    kind = type(module).__name__
    if not isinstance(module, torch.nn.Linear):
        return f"is a {kind}, no torch.nn.Linear"
    if isinstance(module.weight, UninitializedParameter):
        return "has no shape before its first call: apply the policy after it"
    if kind == "NonDynamicallyQuantizableLinear":
        return "is not called: torch.nn.MultiheadAttention reads its weight"
    if type(module) is not torch.nn.Linear:
        return f"is a {kind}, which may compute otherwise than torch.nn.Linear"
    if "forward" in vars(module):
        return "has a forward of its own, which somebody put on the object"
    return _why_not_its_weight(module)


def _why_not_its_weight(module: torch.nn.Linear) -> str | None:
    if module.weight.dtype not in CASTABLE:
        return f"has a weight in {str(module.weight.dtype).removeprefix('torch.')}"
    if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
        return (
            f"has {module.in_features} in and {module.out_features} out features, and fp8 instructions take "
            f"multiples of {_MULTIPLE}"
        )
    device = module.weight.device
    if device.type not in ("cpu", "meta") and not has_fp8(device):
        return f"is on {device}, which {_NO_INSTRUCTIONS}"
    return None


def _warn(layers: list[torch.nn.Linear], left_out: dict[str, str]) -> None:
    devices = [layer.weight.device for layer in layers if layer.weight.device.type != "meta"]
    emulated = [device for device in devices if not has_fp8(device)]
    without = [why for why in left_out.values() if why.endswith(_NO_INSTRUCTIONS)]
    messages = []
    if emulated:
        messages.append(
            f"fp8 is emulated on {emulated[0].type} ({_count(emulated)}): the numbers are those of fp8, and "
            "it is slower than without"
        )
    if without:
        messages.append(f"no fp8 in {_count(without)}: the first {without[0]}")
    for message in messages:
        warnings.warn(message, UserWarning, stacklevel=stacklevel_outside("narrowcast."))


def _count(layers: Sequence[object]) -> str:
    return f"{len(layers)} linear layer{'s' * (len(layers) != 1)}"

"""Rules with an fp8 recipe: which linear layers of a model multiply in fp8, and why others cannot."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from narrowcast.casting.fp8._use import Fp8Use, has_fp8
from narrowcast.casting.kernels._operators import CASTABLE
from narrowcast.casting.models._tree import modules_by_path, scopes_by_path
from narrowcast.casting.regions._warnings import stacklevel_outside
from narrowcast.errors import PolicyError
from narrowcast.policy import FP8_RECIPES, Policy, Rule, resolved

_MULTIPLE = 16
"""fp8 instructions take matrices whose sizes are multiples of this."""


@dataclass(eq=False)
class Fp8Handle:
    """The layers of a model that multiply in fp8, and those that cannot.

    Attributes:
        converted: path in the model -> recipe, for each layer that multiplies in fp8.
        left_out: path in the model -> why not, in words, for each other module that an fp8 rule selects.
        use: shared with the layers, and with those in copies of the model.
        layers: those of ``converted``, until ``remove()``.
    """

    converted: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    use: Fp8Use = field(default_factory=Fp8Use)
    layers: list[torch.nn.Linear] = field(default_factory=list)

    def remove(self) -> None:
        """Make the layers ``torch.nn.Linear`` again: the same objects with their parameters and hooks.

        Layers in copies of the model, and those whose class ``fully_shard`` or another library changed since,
        compute as ``torch.nn.Linear`` but keep their class. Those in a copy become ``torch.nn.Linear`` when a
        policy with fp8 rules is next applied to the copy. Nothing happens the second time.
        """
        self.use.removed = True
        while self.layers:
            restore_layer(self.layers.pop())

    def __repr__(self) -> str:
        return f"Fp8Handle({len(self.converted)} converted, {len(self.left_out)} left out)"


def apply_fp8(model: torch.nn.Module, policy: Policy) -> Fp8Handle:
    """Convert the linear layers of ``model`` for which fp8 rules of ``policy`` win; see docs/fp8.md.

    A layer stays the same object, with its fp32 parameters, hooks and mode; its class becomes ``Fp8Linear``.
    Without fp8 rules nothing happens, and torchao is not imported. On a CPU the same numbers are multiplied
    in fp32, with a warning. Layers on a GPU without fp8 instructions are left out with a warning, since bf16
    is faster and more exact there.

    After an error no layer is converted.

    Raises:
        MissingModuleError: torchao is not installed (``pip install 'narrowcast[fp8]'``), or is too old.
        PolicyError: the model has fp8 layers already.
    """
    handle = Fp8Handle()
    if not policy_has_fp8(policy):
        return handle
    for path, module in modules_by_path(model):
        if is_fp8(module):
            raise PolicyError(f"{path!r} is an fp8 layer already: remove() the handle of its policy first")
    from narrowcast.casting.fp8 import _linear  # imports torchao

    _restore_copied_layers(model)
    sites_to_convert = []
    without_instructions: list[torch.nn.Linear] = []
    for site in _selected(model, policy):
        why_not = _why_not(site.module)
        if why_not is not None:
            handle.left_out[site.path] = why_not
            continue
        why_not_here = _why_not_on(site.module.weight.device)
        if why_not_here is not None:
            handle.left_out[site.path] = why_not_here
            without_instructions.append(site.module)
            continue
        sites_to_convert.append(site)

    # Before any layer is converted, since a warning filter may turn the warning into an error.
    _warn([site.module for site in sites_to_convert], without_instructions)
    try:
        for site in sites_to_convert:
            # Listed first, so that a layer whose conversion stops half-way is restored too.
            handle.layers.append(site.module)
            _linear.convert_layer(site.module, site.rule, handle.use)
            handle.converted[site.path] = site.rule.compute
    except BaseException:
        handle.remove()
        raise
    return handle


def policy_has_fp8(policy: Policy) -> bool:
    """Return whether a rule of ``policy`` names an fp8 recipe."""
    return any(rule.compute in FP8_RECIPES for rule in policy.rules)


def unconverted(model: torch.nn.Module, policy: Policy) -> dict[str, str | None]:
    """Return the paths of layers that fp8 rules of ``policy`` select and that do not multiply in fp8.

    The value is why a layer cannot, or None if it could.
    """
    reasons = {}
    for site in _selected(model, policy):
        if not is_fp8(site.module):
            reasons[site.path] = _why_not(site.module) or _why_not_on(site.module.weight.device)
    return reasons


def is_fp8(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a layer that multiplies in fp8 now."""
    use: Fp8Use | None = vars(module).get("fp8_use")
    return use is not None and not use.removed


def restore_layer(module: torch.nn.Module) -> None:
    """Make an fp8 layer a ``torch.nn.Linear`` again, unless its class has changed, as by ``fully_shard``."""
    # By the name of the class, so that torchao is not imported. What ``convert_layer`` set on the object is
    # exactly what is annotated in Fp8Linear.
    if type(module).__name__ == "Fp8Linear":
        for name in type(module).__annotations__:
            vars(module).pop(name, None)
        module.__class__ = torch.nn.Linear


def _restore_copied_layers(model: torch.nn.Module) -> None:
    """Restore layers that were copied from a model whose policy was removed."""
    for module in model.modules():
        if not is_fp8(module):
            restore_layer(module)


# ---- which layers


class _Site(NamedTuple):
    """A module, its first path in the model, and the fp8 rule that wins for ``linear`` inside it."""

    path: str
    module: Any
    rule: Rule


def _selected(model: torch.nn.Module, policy: Policy) -> list[_Site]:
    """Return the modules of ``model`` that fp8 rules select, whether they can multiply in fp8 or not."""
    # Which rule wins depends neither on the device nor on the format.
    root = resolved(policy, "cpu", "bf16").root
    scopes = scopes_by_path(model, policy, root)

    sites = []
    for path, module in modules_by_path(model):
        rule = scopes[path].rule_of("linear")
        if rule is not None and rule.compute in FP8_RECIPES and _is_expected_to_follow(module, rule):
            sites.append(_Site(path, module, rule))
    return sites


def _is_expected_to_follow(module: torch.nn.Module, rule: Rule) -> bool:
    """Return whether the author of ``rule``, which wins inside ``module``, expects it to multiply in fp8.

    If such a module cannot, it is listed with the reason; others, as a ReLU, are passed over. Expected are:

    - every ``torch.nn.Linear``;
    - by a rule for modules, each module with matrices of its own;
    - by a rule for the operator "linear", ``MultiheadAttention``, which calls it with its own weights.
    """
    if isinstance(module, torch.nn.Linear):
        return True
    own = module.parameters(recurse=False)
    has_matrices = False
    for weight in own:
        # The shape of a lazy parameter is not known yet.
        if not torch.nn.parameter.is_lazy(weight) and weight.dim() > 1 and weight.is_floating_point():
            has_matrices = True
    return has_matrices and (rule.op is None or isinstance(module, torch.nn.MultiheadAttention))


def _why_not(module: torch.nn.Module) -> str | None:
    """Explain why ``module`` cannot multiply in fp8 on any device; None if it can."""
    kind = type(module).__name__
    if not isinstance(module, torch.nn.Linear):
        return f"is a {kind}, no torch.nn.Linear"
    if kind == "NonDynamicallyQuantizableLinear":
        return "is not called: torch.nn.MultiheadAttention reads its weight"
    # ``unconverted`` may meet a layer that is still Fp8Linear, in a copy whose policy was removed
    # (``apply_fp8`` has restored those). It computes as torch.nn.Linear.
    if type(module) is not torch.nn.Linear and kind != "Fp8Linear":
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
    return None


def _why_not_on(device: torch.device) -> str | None:
    """Explain why no layer on ``device`` can multiply in fp8; None if they can, on a CPU by emulation."""
    if device.type in ("cpu", "meta") or has_fp8(device):
        return None
    return f"is on {device}, which has no fp8 instructions of CUDA"


def _warn(converted: Sequence[torch.nn.Linear], without_instructions: Sequence[torch.nn.Linear]) -> None:
    """Warn of layers that emulate fp8, and of those left out because their GPU has no fp8 instructions."""
    emulated = []
    for layer in converted:
        device = layer.weight.device
        if device.type != "meta" and not has_fp8(device):
            emulated.append(layer)

    messages = []
    if emulated:
        messages.append(
            f"fp8 is emulated on {emulated[0].weight.device.type} ({_count(emulated)}): the numbers are "
            "those of fp8, and it is slower than without"
        )
    if without_instructions:
        why_not = _why_not_on(without_instructions[0].weight.device)
        messages.append(f"no fp8 in {_count(without_instructions)}: the first {why_not}")
    for message in messages:
        warnings.warn(message, UserWarning, stacklevel=stacklevel_outside("narrowcast."))


def _count(layers: Sequence[torch.nn.Linear]) -> str:
    plural = "" if len(layers) == 1 else "s"
    return f"{len(layers)} linear layer{plural}"

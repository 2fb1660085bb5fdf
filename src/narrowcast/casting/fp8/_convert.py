"""Rules with an fp8 recipe: which linear layers of a model multiply in fp8, and why others cannot."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import MappingProxyType

import torch
from torch.nn.parameter import UninitializedParameter

from narrowcast.casting._paths import is_wrapper, modules_by_path
from narrowcast.casting.fp8._linear import CASTABLE, Fp8Linear, Fp8Use, has_fp8, load, turn, turn_back
from narrowcast.errors import PolicyError, near_names
from narrowcast.policy import FP8_RECIPES, Policy, Rule, Scope, as_policy, class_names, resolved, rules_for

_MULTIPLE = 16
_SHOWN_PATHS = 8
NO_INSTRUCTIONS = "has no fp8 instructions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A module in the model.

    Attributes:
        path: its path there, without the names of wrappers; the first, where there are several.
        module: itself.
        rules: those for modules that name it or one around it.
        winner: the rule that decides about ``linear`` when it is called here.
    """

    path: str
    module: torch.nn.Module
    rules: tuple[Rule, ...]
    winner: Rule | None


def sites(model: torch.nn.Module, policy: Policy, *, with_fp8: bool = False) -> list[Site]:
    """Every module of ``model``.

    Raises:
        PolicyError: one is an fp8 layer already, unless ``with_fp8``.
    """
    # Which rule wins does not depend on the device.
    root = resolved(policy, "cpu", "bf16").root
    scopes: dict[str, tuple[Scope, tuple[Rule, ...]]] = {}
    found = []
    for path, module in modules_by_path(model):
        if isinstance(module, Fp8Linear) and not with_fp8:
            if not module.fp8_use.removed:
                raise PolicyError(
                    f"{path!r} is an fp8 layer already: remove() the handle of its policy first"
                )
            turn_back(module)  # in a copy of the model whose policy was removed
        around, rules = scopes[path.rpartition(".")[0]] if path else (root, ())
        own = () if is_wrapper(module) else rules_for(policy, path, class_names(type(module)))
        scope, rules = scopes[path] = around.inside(own), (*rules, *own)
        found.append(Site(path=path, module=module, rules=rules, winner=scope.rule_of("linear")))
    return found


def why_missed(rule: Rule, found: list[Site]) -> str | None:
    """Why no linear layer, of whatever class, shape and device, is under an fp8 rule; None: one is."""
    linears = [site for site in found if isinstance(site.module, torch.nn.Linear)]
    if any(rule in site.rules or not rule.is_for_modules for site in linears):
        return None
    if not linears:
        return f"expected a torch.nn.Linear for the rule {rule}, got a model without one"
    # "blocks.*.fc" for what is in every block
    globs = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", site.path) for site in linears))
    known = near_names(rule.module or "", globs[:_SHOWN_PATHS]).removesuffix(".")
    more = f" and {len(globs) - _SHOWN_PATHS} more" if len(globs) > _SHOWN_PATHS else ""
    return f"expected a torch.nn.Linear for the rule {rule}, got none in {rule.target}. {known}{more}."


def recipe_for(site: Site) -> str | None:
    """The fp8 recipe of the rule that wins at ``site``; None where it is another rule, or none."""
    rule = site.winner
    if rule is None or rule.compute not in FP8_RECIPES:
        return None
    if isinstance(site.module, torch.nn.Linear):
        return rule.compute
    # What holds matrices of its own and multiplies by them itself would be expected to follow a module rule.
    matrices = [p for p in site.module.parameters(recurse=False) if p.dim() > 1 and p.is_floating_point()]
    is_meant = rule.op is None or isinstance(site.module, torch.nn.MultiheadAttention)
    return rule.compute if matrices and is_meant else None


def why_not(module: torch.nn.Module, emulate: bool | None) -> str | None:
    """Why ``module`` cannot multiply in fp8, for a person; None where it can."""
    return _why_not_its_class(module) or _why_not_its_weight(module, emulate)


def _why_not_its_class(module: torch.nn.Module) -> str | None:
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
    return None


def _why_not_its_weight(module: torch.nn.Module, emulate: bool | None) -> str | None:
    assert isinstance(module, torch.nn.Linear)
    if module.weight.dtype not in CASTABLE:
        return f"has a weight in {str(module.weight.dtype).removeprefix('torch.')}"
    if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
        return (
            f"has {module.in_features} in and {module.out_features} out features, and fp8 instructions take "
            f"multiples of {_MULTIPLE}"
        )
    device = module.weight.device
    may_emulate = emulate or (emulate is None and device.type in ("cpu", "meta"))
    if not may_emulate and not has_fp8(device):
        return f"is on {device}, which {NO_INSTRUCTIONS}"
    return None


class Fp8Handle:
    """What ``apply_fp8`` did to a model.

    Attributes:
        converted: path in the model -> recipe, for each layer that multiplies in fp8.
        left_out: path in the model -> why not, in words, for each other module that an fp8 rule is for.
    """

    def __init__(
        self,
        converted: Mapping[str, str],
        left_out: Mapping[str, str],
        use: Fp8Use,
        layers: list[Fp8Linear],
    ) -> None:
        self.converted = MappingProxyType(dict(converted))
        self.left_out = MappingProxyType(dict(left_out))
        self._use = use
        self._layers = layers

    def remove(self) -> None:
        """Make the layers ``torch.nn.Linear`` again: the same objects, parameters and hooks as ever.

        Layers in copies of the model, and those that ``fully_shard`` or another library has given a class of
        its own since, keep their class and compute as ``torch.nn.Linear``. Nothing happens the second time.
        """
        self._use.removed = True
        while self._layers:
            turn_back(self._layers.pop())

    def __repr__(self) -> str:
        return f"Fp8Handle({len(self.converted)} converted, {len(self.left_out)} left out)"


def apply_fp8(
    model: torch.nn.Module,
    policy: Policy | str | PathLike[str],
    *,
    emulate: bool | None = None,
    may_miss: Callable[[Rule], None] | None = None,
) -> Fp8Handle:
    """Let the linear layers of ``model`` for which fp8 rules of ``policy`` win multiply in fp8.

    A layer stays the same object, with its parameters (fp32 as before), hooks and mode; its class is
    ``Fp8Linear`` meanwhile. Without fp8 rules nothing happens, and torchao is not imported. Call it before
    ``torch.compile`` and ``fully_shard``.

    A layer converts if it is a ``torch.nn.Linear`` and of no subclass, which may compute otherwise (LoRA,
    parametrizations, the projections of ``torch.nn.MultiheadAttention``), with a weight in fp32, bf16 or fp16
    whose in and out features are multiples of 16. Which rule wins is as for the operator ``linear`` called in
    that module. A layer that is left out computes as if there were no fp8 rule. Code that reads the weight
    and does not call the layer never multiplies in fp8.

    Numbers. Input (..., in) and weight (out, in) are scaled so that their largest magnitude is 448, rounded
    to ``OCP_E4M3``, and multiplied with sums in fp32 (on hardware in what its fp8 instructions sum in); in
    backward likewise, gradients in ``OCP_E5M2`` (tensorwise, largest 57344) or ``OCP_E4M3`` (rowwise).
    Inside a region the input is cast to the region's format first and the output is in that; outside, the
    output is in the format of the input. The bias is added in the format of the output. The gradient of the
    weight is rounded to the format of the output, as under autocast, and then cast to that of the weight.

    - ``"fp8_tensorwise"``: one scale for a whole tensor.
    - ``"fp8_rowwise"``: one for each row or column along which the product sums, rounded down to a power of
      two, so that the largest magnitude is between 224 and 448.

    Magnitudes below 2.2e-6 of the largest one under their scale become zero (E5M2: 1.3e-10; twice that where
    scales are powers of two), larger ones are E4M3's subnormals below 3.5e-5 of it. Finite numbers do not
    overflow, as the scales follow each tensor, but for those above 0.94 of the largest fp32 number, which may
    be rounded up. The largest magnitude is taken for at least 1e-12: a tensor all below 2.2e-18 (E5M2:
    1.3e-22) is multiplied as zero. A NaN or an infinity makes its scale NaN or zero, and with it **every**
    number of the product under that scale NaN: all of it tensorwise, its row or column rowwise. So none is
    lost, and a ``GradScaler`` sees it, but one infinity in one sample makes the output of its whole batch NaN
    where bf16 would give one infinite row.

    Args:
        model: any module; the paths of rules leave out wrappers (DDP, ``torch.compile``).
        policy: a ``Policy``, the name of a preset, or a file.
        emulate: None: fp8 instructions where the device has them; on a CPU the same numbers are multiplied in
            fp32, which is slower than without fp8, and a warning says so; layers on a GPU without such
            instructions (compute capability below 8.9) are left out with a warning, since bf16 is faster and
            more exact there. True: emulated on every device, no warning. False: left out wherever the
            instructions are missing, on a CPU too.
        may_miss: called with each rule that meets no linear layer; without it that is an error.

    Returns:
        A handle with ``.converted``, ``.left_out`` and ``.remove()``.

    Raises:
        MissingModuleError: torchao is not installed (``pip install 'narrowcast[fp8]'``), or is too old.
        PolicyError: an fp8 rule meets no linear layer of ``model`` (near paths are shown), or the model has
            fp8 layers already.
        UnsupportedError: later, in a backward with ``create_graph=True`` through such a layer. The transforms
            of ``torch.func`` raise torch's own RuntimeError there.

    Sources: https://github.com/pytorch/ao/tree/main/torchao/float8; OCP 8-bit Floating Point Specification
    (OFP8) 1.0.
    """
    policy = as_policy(policy)
    rules = [one for one in policy.rules if one.compute in FP8_RECIPES]
    use = Fp8Use(emulate=bool(emulate))
    if not rules:
        return Fp8Handle({}, {}, use, [])
    found = sites(model, policy)
    for rule in rules:
        missed = why_missed(rule, found)
        if missed is not None and may_miss is None:
            raise PolicyError(missed)
        if missed is not None and may_miss is not None:
            may_miss(rule)
    load()
    chosen: dict[str, tuple[torch.nn.Linear, str]] = {}
    left_out: dict[str, str] = {}
    for site in found:
        recipe = recipe_for(site)
        if recipe is None:
            continue
        why = why_not(site.module, emulate)
        if why is None:
            assert isinstance(site.module, torch.nn.Linear)
            chosen[site.path] = (site.module, recipe)
        else:
            left_out[site.path] = why
    if emulate is None:  # before anything is changed, as a warning may be an error
        _warn([layer for layer, _ in chosen.values()], left_out)
    layers = [turn(layer, recipe, use) for layer, recipe in chosen.values()]
    return Fp8Handle({path: recipe for path, (_, recipe) in chosen.items()}, left_out, use, layers)


def unconverted(model: torch.nn.Module, policy: Policy) -> dict[str, str | None]:
    """Paths of the layers that fp8 rules of ``policy`` are for and that do not multiply in fp8.

    Each with why it cannot; None: it could.
    """
    found = [site for site in sites(model, policy, with_fp8=True) if recipe_for(site) is not None]
    return {
        site.path: why_not(site.module, emulate=None)
        for site in found
        if not isinstance(site.module, Fp8Linear)
    }


def _warn(layers: list[torch.nn.Linear], left_out: dict[str, str]) -> None:
    devices = [layer.weight.device for layer in layers if layer.weight.device.type != "meta"]
    emulated = [device for device in devices if not has_fp8(device)]
    without = [why for why in left_out.values() if why.endswith(NO_INSTRUCTIONS)]
    if emulated:
        warnings.warn(
            f"fp8 is emulated on {emulated[0].type} ({_count(emulated)}): the numbers are those of fp8, and "
            "it is slower than without",
            UserWarning,
            stacklevel=_frames_to_the_caller(),
        )
    if without:
        warnings.warn(
            f"no fp8 in {_count(without)}: the first {without[0]}",
            UserWarning,
            stacklevel=_frames_to_the_caller(),
        )


def _count(layers: Sequence[object]) -> str:
    return f"{len(layers)} linear layer{'s' * (len(layers) != 1)}"


def _frames_to_the_caller() -> int:
    """``stacklevel`` that names the user's line, whichever of our functions it called."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("narrowcast."):
        level, frame = level + 1, frame.f_back
    return level

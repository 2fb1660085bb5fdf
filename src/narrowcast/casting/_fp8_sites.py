"""Which modules of a model an fp8 rule is for, and why some of them cannot multiply in fp8."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch.nn.parameter import UninitializedParameter

from narrowcast.casting._fp8_linear import CASTABLE, Fp8Linear, has_fp8, turn_back
from narrowcast.casting._paths import is_wrapper, named_places
from narrowcast.errors import PolicyError, near_names
from narrowcast.policy import FP8_RECIPES, Policy, Rule, Scope, class_names, resolved, rules_for

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
    places: dict[str, tuple[Scope, tuple[Rule, ...]]] = {}
    found = []
    for path, module in named_places(model):
        if isinstance(module, Fp8Linear) and not with_fp8:
            if not module.fp8_use.removed:
                raise PolicyError(
                    f"{path!r} is an fp8 layer already: remove() the handle of its policy first"
                )
            turn_back(module)  # in a copy of the model whose policy was removed
        around, rules = places[path.rpartition(".")[0]] if path else (root, ())
        own = () if is_wrapper(module) else rules_for(policy, path, class_names(type(module)))
        place, rules = places[path] = around.inside(own), (*rules, *own)
        found.append(Site(path=path, module=module, rules=rules, winner=place.rule_of("linear")))
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

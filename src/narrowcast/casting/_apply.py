"""A policy applied to a model: hooks that open its region, and at each module the rules for it.

The model's own call opens the region of the policy. A module that rules name opens one inside it: its inputs
are cast to what the rule computes in, its outputs to what the rule hands on. The hooks hold the policy, so
that it is there in whatever thread calls the module: where no region of it is open, they open one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.casting._module_hooks import Hook, Shared, calls_under_way, hooks_on
from narrowcast.casting._paths import Structure, all_paths, is_wrapper
from narrowcast.casting._torch_internals import guard_hooks_of_modules
from narrowcast.casting.fp8 import apply_fp8, unconverted
from narrowcast.errors import OrderError, PolicyError, near_names
from narrowcast.policy import (
    FP8_RECIPES,
    Policy,
    Rule,
    as_policy,
    class_names,
    names_module,
    policy_name,
    rules_for,
    with_fp32_weights,
)

_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_Place = tuple[tuple[str, ...], torch.nn.Module]  # every path of a module, and itself
_applied: weakref.WeakKeyDictionary[torch.nn.Module, Applied] = weakref.WeakKeyDictionary()
# The hooks that nc.apply made and nobody removed; those on copies of a model are not among them.
_live: weakref.WeakSet[Hook] = weakref.WeakSet()


def apply(model: torch.nn.Module, policy: Policy | str) -> Applied:
    """Have ``model`` compute by ``policy`` whenever it is called, until ``handle.remove()``.

    Its calls open the region themselves, rules for modules included; what it returns stays in the formats in
    which it comes out. Compute the loss inside the model or outside it, and go backward outside. The policy
    goes with the model into threads (``DataParallel``), through activation checkpointing, and into copies.
    Modules that are added or replaced later have their rules from the model's next call on.
    Where a script turns autocast off inside the model, rules do not turn it on again.

    Args:
        model: any module; its parameters stay as they are. DDP and ``torch.compile`` may wrap it before or
            after.
        policy: the name of a preset, a ``Policy``, or the path of one.

    Returns:
        A handle, whose ``remove()`` takes every hook away; as a context manager it does so at its end.

    Raises:
        PolicyError: the policy does not exist, names modules that the model does not have, or needs weights
            in a low format; or the model has a policy already.
        OrderError: later, when a layer came for which there is an fp8 rule.
    """
    return Applied(model, with_fp32_weights(policy))


def is_applied(policy: Policy) -> bool:
    """Whether some model has the rules of ``policy`` for modules."""
    return any(one.policy is policy or one.policy == policy for one in _applied.values())


class Applied:
    """A policy on a model; ``remove()`` ends it. Also a context manager that does so at its end.

    Args:
        opens: whether the model's own call opens the region; not where somebody else does.
        may_miss: called with each rule that names nothing in the model; without it that is an error.
        admits: asked with the model at each of its calls; where it says no, no region is opened.

    Attributes:
        policy: what was applied.
        fp8: which linear layers multiply in fp8 and which were left out, with the reason of each.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy | str,
        *,
        opens: bool = True,
        may_miss: Callable[[Rule], None] | None = None,
        admits: Callable[[torch.nn.Module], bool] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise PolicyError(f"expected a torch.nn.Module to apply a policy to, got {type(model).__name__}")
        if model in _applied:
            raise PolicyError(
                f"this {type(model).__name__} has a policy already: call remove() on the handle of its "
                "nc.apply first"
            )
        self.policy = as_policy(policy)
        self._model = weakref.ref(model)
        places = all_paths(model)
        check_rules(self.policy, model, may_miss)
        _make_way(places, self.policy)
        self.fp8 = apply_fp8(model, self.policy, may_miss=may_miss)
        self._shared = Shared(self.policy, opens, admits)
        self._placed: list[_Placed] = []
        self._place_hooks(places)
        _applied[model] = self
        guard_hooks_of_modules()

    @property
    def handles(self) -> list[Any]:
        """Those of the hooks; in a copy that is made along with the model, those of the copy's hooks."""
        return [handle for one in self._placed for handle in (one.before, one.after)]

    def remove(self, *, copies: bool = True) -> None:
        """Take the policy away, by default from copies of the model too; calls under way end in it."""
        self._shared.removed = copies
        self._shared.ended = True
        under_way = {id(call.hook): call for call in calls_under_way(self.policy)}
        for one in self._placed:
            hook = one.hook()
            if hook is not None:
                _live.discard(hook)
            one.before.remove()
            if hook is not None and id(hook) in under_way:
                under_way[id(hook)].at_its_end.append(one.after)  # it closes what the call opened
            else:
                one.after.remove()
        self._placed.clear()
        self.fp8.remove()
        model = self._model()
        if model is not None and _applied.get(model) is self:
            del _applied[model]

    def __repr__(self) -> str:
        model, count = self._model(), sum(one.is_for_modules for one in self.policy.rules)
        kind = "no model" if model is None else type(model).__name__
        rules = f"{count} rule{'s' * (count != 1)} for modules"
        ended = ", removed" * self._shared.ended
        return f"Applied({kind}, {policy_name(self.policy)}, {rules}{ended})"

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _place_hooks(self, places: list[_Place]) -> None:
        model = places[0][1]
        for paths, module in places:
            rules = _rules_of(self.policy, paths, module)
            if "" in paths and (self._shared.opens or self.policy.names_modules):
                if module is model or not is_wrapper(module):
                    hook = _ModelHook(self._shared, rules, self._shared.opens)
                    hook._model = weakref.ref(model)
                    self._placed.append(_place(module, hook))
            elif rules:
                self._placed.append(_place(module, Hook(self._shared, rules, opening=False)))


class _ModelHook(Hook):
    """That of the model itself, which sees to it that parts that came later have theirs."""

    _structure: Structure | None = None

    @functools.cached_property
    def _names_modules(self) -> bool:
        # A policy does not change, and one made of apex's lists has 200 rules to look through.
        return self.policy.names_modules

    def follow_model(self, module: torch.nn.Module) -> None:
        if self._names_modules and (self._structure is None or not self._structure.holds()):
            placed = _follow(module, self._shared)
            if module in _applied:
                _applied[module]._placed += placed
            self._structure = Structure(module)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_structure": None}


def _follow(model: torch.nn.Module, shared: Shared) -> list[_Placed]:
    """Give every part of ``model`` the rules that are for it now; returns the hooks that are new.

    Raises:
        OrderError: a layer came that fp8 rules are for, which are put in force where the policy is applied.
        PolicyError: a part that came has another policy.
    """
    policy = shared.policy
    refuse_new_fp8(model, policy)
    placed = []
    for paths, module in all_paths(model):
        there = [(key, one) for key, one in hooks_on(module) if one._shared is shared]
        rules = _rules_of(policy, paths, module)
        if not there and not shared.compiled:
            _make_way([(paths, module)], policy)
        is_model = "" in paths and not shared.compiled  # whose hook stays
        if is_model or (there[0][1]._rules if there else ()) == rules:
            continue
        for key, _ in there:
            _take_away(module, key)
        if rules:
            placed.append(_place(module, Hook(shared, rules, opening=False)))
    return placed


class CompiledHooks:
    """The hooks of one ``nc.compile`` on the parts of a model that have rules; they end with this.

    They do nothing but in a region of their policy, which the compiled model opens.
    """

    def __init__(self, policy: Policy) -> None:
        self._shared = Shared(policy, opens=False, compiled=True)
        self._placed: list[_Placed] = []
        self._structure: Structure | None = None
        weakref.finalize(self, _remove, self._placed).atexit = False

    def follow(self, model: torch.nn.Module) -> None:
        """Give every part of ``model`` the rules that are for it now."""
        if self._structure is None or not self._structure.holds():
            self._placed += _follow(model, self._shared)
            self._structure = Structure(model)


def _remove(placed: list[_Placed]) -> None:
    for one in placed:
        one.before.remove()
        one.after.remove()


def refuse_new_fp8(model: torch.nn.Module, policy: Policy) -> None:
    """Refuse layers that came after fp8 rules for them were put in force."""
    if not any(one.compute in FP8_RECIPES for one in policy.rules):
        return
    for path, why in unconverted(model, policy).items():
        if why is None:
            raise OrderError(
                f"expected the layers that the model had when it got its policy, got a new one at {path!r} "
                "for which there is an fp8 rule: apply the policy again after the change (nc.apply: call "
                "remove() on the handle first)"
            )


@dataclass(frozen=True, slots=True)
class _Placed:
    """A hook on a module; the module holds it, and through it perhaps the model."""

    hook: weakref.ref[Hook]
    before: Any
    after: Any


def _place(module: torch.nn.Module, hook: Hook) -> _Placed:
    # First before and last after every other hook, so that those run inside, as the module's own code.
    _live.add(hook)
    before = module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True)
    return _Placed(
        weakref.ref(hook),
        before,
        module.register_forward_hook(hook.after, always_call=True, with_kwargs=True),
    )


def rules_at(policy: Policy, paths: tuple[str, ...], names: tuple[str, ...]) -> tuple[Rule, ...]:
    """The rules for a module that stands at ``paths``: a shared one cannot tell from which it is called."""
    named = {one for path in paths for one in rules_for(policy, path, names)}
    return tuple(one for one in policy.rules if one in named and one.compute not in FP8_RECIPES)


def _rules_of(policy: Policy, paths: tuple[str, ...], module: torch.nn.Module) -> tuple[Rule, ...]:
    return () if is_wrapper(module) else rules_at(policy, paths, class_names(type(module)))


def _make_way(places: list[_Place], policy: Policy) -> None:
    """Take away hooks that came with a copy of a model; refuse where a part has another policy."""
    for paths, module in places:
        for key, hook in hooks_on(module):
            if hook not in _live:
                _take_away(module, key)
            elif hook.policy != policy and not hook._shared.compiled:
                raise PolicyError(
                    f"{type(module).__name__} {paths[0]!r} in this model has another policy already: call "
                    "remove() on the handle of its nc.apply first"
                )


def _take_away(module: torch.nn.Module, key: int) -> None:
    for kind in _HOOK_DICTS:
        getattr(module, kind).pop(key, None)


def applied_to(model: torch.nn.Module, policy: Policy) -> Applied | None:
    """The handle of ``policy`` on ``model``; None where it has no policy.

    Raises:
        PolicyError: it has another one.
    """
    found = _applied.get(model)
    if found is not None and found.policy != policy:
        raise PolicyError(
            f"this {type(model).__name__} has another policy already: call remove() on the handle of its "
            "nc.apply first, or give that policy"
        )
    return found


def check_rules(
    policy: Policy,
    model: torch.nn.Module,
    may_miss: Callable[[Rule], None] | None = None,
) -> None:
    """Refuse a rule that names nothing in this model, or tell ``may_miss`` of it."""
    places = [(path, module) for paths, module in all_paths(model) for path in paths]
    named = [(path, class_names(type(module))) for path, module in places]
    for rule in policy.rules:
        if not rule.is_for_modules or any(names_module(rule, path, names) for path, names in named):
            continue
        if may_miss is not None:
            may_miss(rule)
            continue
        kinds = sorted({type(module).__name__ for _, module in places})
        if rule.module is not None:
            guess = near_names(rule.module, [path for path, _ in places if path][:40])
        else:
            guess = near_names(str(rule.module_type).rpartition(".")[2], kinds)
        raise PolicyError(f"this {type(places[0][1]).__name__} has no {rule.target}. {guess}")

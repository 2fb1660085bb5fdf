"""A policy applied to a model: hooks that open its region, and at each module the rules for it.

The model's own call opens the region of the policy. A module that rules name opens one inside it: its inputs
are cast to what the rule computes in, its outputs to what the rule hands on. The hooks hold the policy, so
that it is there in whatever thread calls the module: where no region of it is open, they open one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.casting._fp8 import apply_fp8
from narrowcast.casting._module_hooks import Hook, Shared, calls_under_way, hooks_on
from narrowcast.casting._paths import all_paths, is_wrapper
from narrowcast.casting._places import here
from narrowcast.casting._torch_internals import guard_hooks_of_modules
from narrowcast.errors import PolicyError, near_names
from narrowcast.policy import (
    FP8_RECIPES,
    Policy,
    Rule,
    as_policy,
    class_names,
    names_module,
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
_applied: weakref.WeakKeyDictionary[torch.nn.Module, Applied] = weakref.WeakKeyDictionary()
# The hooks that nc.apply made and nobody removed; those on copies of a model are not among them.
_live: weakref.WeakSet[Hook] = weakref.WeakSet()


def apply(model: torch.nn.Module, policy: Policy | str) -> Applied:
    """Have ``model`` compute by ``policy`` whenever it is called, until ``handle.remove()``.

    Its calls open the region themselves, rules for modules included; what it returns stays in the formats in
    which it comes out. Compute the loss inside the model or outside it, and go backward outside. The policy
    goes with the model into threads (``DataParallel``), through activation checkpointing, and into copies.
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
    """
    return Applied(model, with_fp32_weights(policy))


def is_applied(policy: Policy) -> bool:
    """Whether some model has the rules of ``policy`` for modules."""
    return any(one.policy is policy or one.policy == policy for one in _applied.values())


def refuse_other_models(policy: Policy) -> Any:
    """See that a region of ``policy`` calls only models to which it was applied; returns a handle."""
    covered: set[int] = set()

    def check(module: torch.nn.Module, _args: Any) -> None:
        if not any(weight is not None for weight in module._parameters.values()) or id(module) in covered:
            return
        if not any(place.resolved.rules == policy.rules for place in here.places.values()):
            return  # another thread, or a region of another policy
        covered.update(
            id(part) for model, one in _applied.items() if one.policy == policy for part in model.modules()
        )
        if id(module) not in covered and not calls_under_way(policy) and not hooks_on(module):
            raise PolicyError(
                f"{type(module).__name__} was called in a region whose policy has rules for modules, which "
                "were not applied to it: call nc.apply(model, policy) on the whole model first"
            )

    return torch.nn.modules.module.register_module_forward_pre_hook(check)


class Applied:
    """A policy on a model; ``remove()`` ends it. Also a context manager that does so at its end.

    Args:
        opens: whether the model's own call opens the region; not where somebody else does.
        may_miss: called with each rule that names nothing in the model; without it that is an error.

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
        self._shared = Shared(self.policy, opens)
        self._handles: list[Any] = []
        self._hooks: list[Hook] = []
        for paths, module in places:
            wraps = is_wrapper(module)
            rules = () if wraps else rules_at(self.policy, paths, class_names(type(module)))
            opening = opens and (module is model or ("" in paths and not wraps))
            if opening or rules:
                self._hook(module, Hook(self._shared, rules, opening))
        _applied[model] = self
        guard_hooks_of_modules()

    @property
    def handles(self) -> list[Any]:
        """Those of the hooks; in a copy that is made along with the model, those of the copy's hooks."""
        return list(self._handles)

    def remove(self, *, copies: bool = True) -> None:
        """Take the policy away, by default from copies of the model too; calls under way end in it."""
        self._shared.removed = copies
        self._shared.ended = True
        under_way = {id(call.hook): call for call in calls_under_way(self.policy)}
        for hook, before, after in zip(self._hooks, self._handles[::2], self._handles[1::2], strict=True):
            _live.discard(hook)
            before.remove()
            if id(hook) in under_way:
                under_way[id(hook)].at_its_end.append(after)  # it closes what the call opened
            else:
                after.remove()
        self._handles.clear()
        self._hooks.clear()
        self.fp8.remove()
        model = self._model()
        if model is not None and _applied.get(model) is self:
            del _applied[model]

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _hook(self, module: torch.nn.Module, hook: Hook) -> None:
        # First before and last after every other hook, so that those run inside, as the model's own code.
        self._hooks.append(hook)
        _live.add(hook)
        before = module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(hook.after, always_call=True)
        self._handles += [before, after]


def rules_at(policy: Policy, paths: tuple[str, ...], names: tuple[str, ...]) -> tuple[Rule, ...]:
    """The rules for a module that stands at ``paths``: a shared one cannot tell from which it is called."""
    named = {one for path in paths for one in rules_for(policy, path, names)}
    return tuple(one for one in policy.rules if one in named and one.compute not in FP8_RECIPES)


def _make_way(places: list[tuple[tuple[str, ...], torch.nn.Module]], policy: Policy) -> None:
    """Take away hooks that came with a copy of a model; refuse where a part has another policy."""
    for paths, module in places:
        for key, hook in hooks_on(module):
            if hook not in _live:
                for kind in _HOOK_DICTS:
                    getattr(module, kind).pop(key, None)
            elif hook.policy != policy:
                raise PolicyError(
                    f"{type(module).__name__} {paths[0]!r} in this model has another policy already: call "
                    "remove() on the handle of its nc.apply first"
                )


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

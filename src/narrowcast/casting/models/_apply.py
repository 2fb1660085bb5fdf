"""Apply a policy to a model: its calls open the region, and calls of the modules inside follow the rules.

Inside a module that rules select, the inputs are cast to what the rule computes in, and the outputs to the
rule's ``output``. A ``_module_calls.ModuleCall`` stands in front of each module and holds the policy, for any
thread that calls the module: where no region of the policy is open, the ModuleCall opens one.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from narrowcast.casting._devices import device_types
from narrowcast.casting._torch_internals import is_compiling_a_frame
from narrowcast.casting.fp8 import apply_fp8, is_fp8, policy_has_fp8, unconverted
from narrowcast.casting.kernels._kernels import dtype_and_scope
from narrowcast.casting.models._module_calls import ModuleCall, Shared, calls_on
from narrowcast.casting.models._tree import (
    all_paths,
    is_wrapper,
    modules_by_path,
    rules_of,
    scopes_by_path,
    undo_on_error,
)
from narrowcast.casting.regions._policy_region import PolicyRegion
from narrowcast.casting.regions._warnings import stacklevel_outside
from narrowcast.errors import OrderError, PolicyError, did_you_mean, not_copied
from narrowcast.policy import (
    FP8_RECIPES,
    LOWER,
    Policy,
    Rule,
    as_policy,
    base_of,
    class_names,
    names_module,
    policy_name,
    with_fp32_weights,
    without_prefix,
)

_applied: weakref.WeakKeyDictionary[torch.nn.Module, Applied] = weakref.WeakKeyDictionary()


def apply(model: torch.nn.Module, policy: Policy | str) -> Applied:
    """Make ``model`` compute by ``policy`` in every call, until ``handle.remove()``.

    Each call opens the region and applies rules for modules. Outputs stay in the formats in which they are
    computed. Compute the loss inside the model or outside, and call backward outside. The policy also holds
    in other threads (``DataParallel``), in activation checkpointing, and in copies of the model.
    Modules that are added or replaced later follow their rules from the model's next call on.
    If a script turns autocast off inside the model, rules do not turn it on again. TorchScript modules follow
    the region. If the model itself is a TorchScript module or a ``torch.fx.GraphModule``, its copies have no
    policy. If ``apply`` raises, nothing has changed.

    Args:
        model: any module; its parameters stay as they are. DDP and ``torch.compile`` may wrap it before or
            after.
        policy: the name of a preset, a ``Policy``, or the path of one.

    Returns:
        A handle, whose ``remove()`` ends the policy; as a context manager it does so at its end. If nothing
        has called the model by then, or by the end of the process, a warning says so, since methods other
        than the call open no region.

    Raises:
        PolicyError: the policy does not exist, names modules that the model does not have, or needs weights
            in a low format; or the model has a policy already, or no ``forward``, as ``ModuleList``, and no
            rule for its parts.
        OrderError: in a call, after a layer with an fp8 rule was added.
        UnsupportedError: in a call of a module whose ``forward`` is a generator.
    """
    resolved_policy = with_fp32_weights(policy)
    # A model without a forward opens no region itself. With rules for modules its parts do.
    is_module = isinstance(model, torch.nn.Module)
    if is_module and _has_no_forward(model) and not resolved_policy.names_modules:
        raise PolicyError(
            f"expected a model with a forward, whose calls open the region, got {type(model).__name__}, "
            "which has none: call nc.apply on the modules in it that are called, or open "
            '"with nc.autocast(...)" around their calls'
        )
    # Layers in fp8 follow the policy without a region too, so a warning that nothing was cast would be false.
    # Found out before the policy is applied: Ctrl-C meanwhile must leave the model as it was.
    warns_if_not_called = not policy_has_fp8(resolved_policy)
    _warn_at_exit()
    applied = Applied(model, resolved_policy)
    applied.warns_if_not_called = warns_if_not_called
    return applied


def _has_no_forward(model: torch.nn.Module) -> bool:
    if "forward" in vars(model):
        return False
    # Not getattr: the class of a TorchScript module has a descriptor there that fails without an instance.
    own = inspect.getattr_static(type(model), "forward")
    return own is inspect.getattr_static(torch.nn.Module, "forward")


def warn_of_uncalled() -> None:
    """At the end of the process, warn about models that nothing called; not after an uncaught error."""
    # Python sets ``last_value`` to an error that nothing caught.
    if getattr(sys, "last_value", None) is None:
        for applied in list(_applied.values()):
            applied.warn_if_not_called()


@functools.cache
def _warn_at_exit() -> None:
    """Register ``warn_of_uncalled``, once in a process."""
    atexit.register(warn_of_uncalled)


def is_applied(policy: Policy) -> bool:
    """Return whether some model follows the rules of ``policy`` for modules."""
    return any(applied.policy is policy or applied.policy == policy for applied in _applied.values())


class Applied:
    """A policy on a model; ``remove()`` ends it. Also a context manager that does so at its end.

    Args:
        opens: whether the model's own call opens the region; False if the caller opens it.
        strict: raise if a rule selects nothing in the model, or an operator that torch.jit casts itself.
        admits: called with the model at each of its calls; if it returns False, no region is opened.
        how_to_end: what to do before the model can have another policy; by default to call ``remove()``.

    Attributes:
        policy: the policy that was applied.
        fp8: which linear layers multiply in fp8 and which were left out, with the reason of each.
        missed: rule -> error message, for each rule that selects nothing in the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy | str,
        *,
        opens: bool = True,
        strict: bool = True,
        admits: Callable[[torch.nn.Module], bool] | None = None,
        how_to_end: str | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise PolicyError(f"expected a torch.nn.Module to apply a policy to, got {type(model).__name__}")
        if model in _applied:
            how = _applied[model].how_to_end
            raise PolicyError(f"this {type(model).__name__} has a policy already: {how}")
        self.policy = as_policy(policy)
        # The model must not live on for the sake of its handle, which outlives it in many scripts.
        self._model = weakref.ref(model)

        # Errors in the policy are raised before anything has changed.
        self.missed = missed_rules(self.policy, model)
        if strict:
            refuse_missed(self.missed)
            refuse_in_torchscript(self.policy, model)

        self._opens = opens
        self._admits = admits
        self._how_to_end = how_to_end
        self.warns_if_not_called = False
        self._begin(model)

    def _begin(self, model: torch.nn.Module) -> None:
        """Convert layers for fp8 rules, and put a ``ModuleCall`` in front of the model and its parts."""
        modules = all_paths(model)
        self._shared = Shared(self.policy, self._opens, self._admits)
        if self._how_to_end is not None:
            self._shared.how_to_end = self._how_to_end
        ruled = RuledModules(self._shared)
        self._calls = ruled.calls
        # If a module inside turns out to have another policy, undo what was done to the modules before it.
        with undo_on_error([model]):
            _remove_copied_calls(modules, self.policy)
            self.fp8 = apply_fp8(model, self.policy)
            if self._opens or self.policy.names_modules:
                for paths, module in modules:
                    # A wrapper, as DDP, and the module in it share the path "". Both get a call, since the
                    # module in it may be called directly.
                    if "" in paths and (module is model or not is_wrapper(module)):
                        rules = _rules_for_calls(self.policy, paths, module)
                        self._calls.add(_ModelCall(ruled, rules, module, model))
            ruled.follow(model)
        _applied[model] = self

    @property
    def how_to_end(self) -> str:
        return self._shared.how_to_end

    @property
    def calls(self) -> list[ModuleCall]:
        """The calls in front of the model and its parts, for a holder that is copied along with the model."""
        return list(self._calls)

    def warn_if_not_called(self) -> None:
        """Warn if no call of the model has opened a region, since then nothing was cast."""
        model = self._model()
        if model is None or self._shared.called or not self.warns_if_not_called:
            return
        self.warns_if_not_called = False
        kind = type(model).__name__
        warnings.warn(
            f"nothing in this process called the {kind} with the policy of nc.apply, which cast nothing: "
            f"only calls of the model itself open a region, and not those of its other methods; open "
            '"with nc.autocast(...)" around these',
            UserWarning,
            stacklevel=stacklevel_outside("narrowcast."),
        )

    def remove(self, *, copies: bool = True) -> None:
        """End the policy, by default on copies of the model too; calls that are running still follow it."""
        self._shared.end(copies=copies)
        _detach(self._calls)
        self._calls.clear()
        self.fp8.remove()
        model = self._model()
        if model is not None and _applied.get(model) is self:
            del _applied[model]
        self.warn_if_not_called()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In the block, calls of the model and of its copies open no region and follow no rules."""
        model = self._model()
        if model is None or self._shared.ended:
            yield
            return
        # With ``removed`` set, the calls, those on copies too, only call what is below them; they stay in
        # front of the modules. ``ended`` is set by ``remove`` alone.
        self._shared.removed = True
        del _applied[model]
        try:
            yield
        finally:
            if not self._shared.ended:
                self._shared.removed = False
                _applied[model] = self

    __reduce_ex__ = not_copied("the handle of nc.apply", "copy or save the model, which keeps its policy")

    def __deepcopy__(self, _memo: object) -> Applied:
        return self  # one handle for a model and its copies: remove() ends the policy on all of them

    def __repr__(self) -> str:
        model = self._model()
        kind = "no model" if model is None else type(model).__name__
        count = sum(rule.is_for_modules for rule in self.policy.rules)
        rules = "1 rule" if count == 1 else f"{count} rules"
        ended = ", removed" if self._shared.ended else ""
        return f"Applied({kind}, {policy_name(self.policy)}, {rules} for modules{ended})"

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error no warning is needed that nothing called the model.
        if kind is not None:
            self.warns_if_not_called = False
        self.remove()


class RuledModules:
    """The modules inside a model that the rules of one policy select, each with a ``ModuleCall`` in front."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        # Weak, since the modules hold them.
        self.calls: weakref.WeakSet[ModuleCall] = weakref.WeakSet()
        # The children of each module in the model: its ``_modules`` dict itself, and a copy from when rules
        # were last given. Comparing the two at each call of the model takes some 50 nanoseconds a module.
        self._children: list[dict[str, torch.nn.Module | None]] = []
        self._children_before: list[dict[str, torch.nn.Module | None]] = []
        self._fp8_layers: list[torch.nn.Module] = []

    def follow(self, model: torch.nn.Module) -> None:
        """Give every module in ``model`` the rules for its present place.

        Refuse a layer with an fp8 rule that is not converted, and an added module with another policy.
        """
        is_unchanged = self._children and self._children == self._children_before
        if is_unchanged and all(map(is_fp8, self._fp8_layers)):
            return
        policy = self.shared.policy
        if policy_has_fp8(policy):
            _refuse_unconverted(model, policy)

        fused = _parts_of_fused_layers(model)
        for paths, module in all_paths(model):
            self._follow_module(paths, module, unfused=module in fused)

        self._children = [part._modules for part in model.modules()]
        self._children_before = [dict(children) for children in self._children]
        self._fp8_layers = [part for part in model.modules() if is_fp8(part)]

    def _follow_module(self, paths: tuple[str, ...], module: torch.nn.Module, *, unfused: bool) -> None:
        policy = self.shared.policy
        calls = [call for call in calls_on(module) if call.shared is self.shared]
        is_compiled = self.shared.compiled
        # A module without a call of ours may be new in the model: remove calls that were copied with it.
        if not calls and not is_compiled:
            _remove_copied_calls([(paths, module)], policy)
        # nc.apply gives the model itself a _ModelCall, which has its rules. nc.compile makes none.
        if "" in paths and not is_compiled:
            return

        # A module that was moved within the model brought its call along, with the rules for its old path.
        rules = _rules_for_calls(policy, paths, module)
        rules_before = calls[0].rules if calls else ()
        if rules == rules_before:
            return
        _detach(calls)
        if rules:
            self.calls.add(ModuleCall(self.shared, rules, module, unfused=unfused))


def _refuse_unconverted(model: torch.nn.Module, policy: Policy) -> None:
    """Refuse a layer that an fp8 rule selects, could multiply in fp8, and does not."""
    for path, why_not in unconverted(model, policy).items():
        if why_not is None:
            raise OrderError(
                f"expected layers with an fp8 rule to be converted, got one at {path!r} that is not: "
                "call nc.apply(model, policy) before nc.compile, and again (after remove() on its "
                "handle) if layers are added"
            )


def _parts_of_fused_layers(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules that torch may compute in one fused kernel, which calls none of them."""
    parts = set[torch.nn.Module]()
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            parts.update(module.modules())
    return parts


class _ModelCall(ModuleCall):
    """The call of the model itself, which gives rules to modules that were added since its last call."""

    is_of_model = True
    _model: weakref.ref[torch.nn.Module] | None
    _ruled: RuledModules | None

    def __init__(
        self, ruled: RuledModules, rules: tuple[Rule, ...], module: torch.nn.Module, model: torch.nn.Module
    ) -> None:
        # For rules of the layer itself; ``RuledModules`` does the same for parts with rules.
        unfused = bool(rules) and isinstance(module, torch.nn.TransformerEncoderLayer)
        super().__init__(ruled.shared, rules, module, unfused=unfused)
        self._model = weakref.ref(model)
        self._ruled = ruled
        # Looked up once, since it reads all rules: a policy of apex's lists has 200.
        self._names_modules = ruled.shared.policy.names_modules

    def _begin(self) -> None:
        super()._begin()
        # Called by ``__init__``, which sets both afterwards, and in a copy, where they stay None: it has
        # modules of its own, for which ``follow_model`` makes new rules.
        self._model = None
        self._ruled = None

    def follow_model(self, module: torch.nn.Module) -> None:
        if not self._names_modules:
            return
        if self._ruled is None:  # in a copy
            self._ruled = RuledModules(self.shared)
        model = None if self._model is None else self._model()
        # Paths start at the model, also where what it wraps is called.
        self._ruled.follow(module if model is None else model)

    def __getstate__(self) -> dict[str, Any]:
        # A pickle cannot hold the weak reference, and a copy must not take the original's modules along.
        return {**super().__getstate__(), "_ruled": None, "_model": None}


class ModelRegion(PolicyRegion):
    """The region of a policy around the calls of a model, whose modules follow its rules inside.

    Args:
        policy: of the region.
        formats: device type -> the region's dtype there.
        say: as for ``PolicyRegion``.
        model: the model; it may have the same policy by ``nc.apply`` already.
        warns: whether a backward pass inside it warns.
        how_to_end: what to do before the model can have another policy.
        strict: raise if a rule selects nothing in the model.
        caches: as for ``PolicyRegion``.
    """

    def __init__(
        self,
        policy: Policy,
        formats: Mapping[str, torch.dtype],
        say: Callable[[str], None],
        *,
        model: torch.nn.Module,
        warns: bool,
        how_to_end: str = "delete the nc.Stepper that holds the model first",
        strict: bool = True,
        caches: bool | None = None,
    ) -> None:
        super().__init__(policy, formats, say, warns=warns, caches=caches)
        self._applied: Applied | None = None
        if applied_to(model, policy) is not None:
            return
        # A strict ``Applied``, which is made below where rules name modules, checks this itself.
        if not (policy.names_modules and strict):
            refuse_in_torchscript(policy, model)
        # Last, since it changes the model, which an error must leave as it was.
        if policy.names_modules:
            self._applied = Applied(model, policy, opens=False, strict=strict, how_to_end=how_to_end)

    def remove(self) -> None:
        """End the rules for the modules of the model."""
        if self._applied is not None:
            self._applied.remove()


def compiled_rules(policy: Policy) -> RuledModules:
    """Return the rules for modules of one ``nc.compile``; they end when the object is freed.

    They have no effect except in a region of their policy, which the compiled model opens.
    """
    _detach_freed()
    ruled = RuledModules(Shared(policy, opens=False, compiled=True))
    weakref.finalize(ruled, _detach_when_freed, ruled.calls).atexit = False
    return ruled


_freed: list[weakref.WeakSet[ModuleCall]] = []
"""For each ``nc.compile`` whose result was freed: its calls that are still in front of modules."""


def _detach_when_freed(calls: weakref.WeakSet[ModuleCall]) -> None:
    _freed.append(calls)
    # The garbage collector may run while Dynamo compiles. The calls stay then, since Dynamo guards what it
    # found in front of a module; the next ``nc.compile`` detaches them.
    if not is_compiling_a_frame():
        _detach_freed()


def _detach_freed() -> None:
    while _freed:
        _detach(_freed.pop())


def _detach(calls: Iterable[ModuleCall]) -> None:
    for call in list(calls):
        call.detach()


def _rules_for_calls(policy: Policy, paths: tuple[str, ...], module: torch.nn.Module) -> tuple[Rule, ...]:
    """Return the rules that a ModuleCall carries out, for all paths of a module: not those of fp8."""
    return tuple(rule for rule in rules_of(policy, paths, module) if rule.compute not in FP8_RECIPES)


def _remove_copied_calls(modules: Iterable[tuple[tuple[str, ...], torch.nn.Module]], policy: Policy) -> None:
    """Remove what was copied with a model; refuse if a module has another policy."""
    for paths, module in modules:
        for call in calls_on(module):
            # The policy that came with a copy gives way to the one that is asked for.
            if call.is_copy:
                call.detach()
                continue
            # Rules of nc.compile hold only in regions that the compiled model opens, and a removed policy
            # holds nowhere: neither is in the way.
            if call.shared.policy != policy and not (call.shared.compiled or call.shared.removed):
                raise PolicyError(
                    f"{type(module).__name__} {paths[0]!r} in this model has another policy already: "
                    f"{call.shared.how_to_end}"
                )


def applied_to(model: torch.nn.Module, policy: Policy) -> Applied | None:
    """Return the handle of ``policy`` on ``model``, or None; raise PolicyError if it has another policy."""
    applied = _applied.get(model)
    if applied is not None and applied.policy != policy:
        raise PolicyError(
            f"this {type(model).__name__} has another policy already: {applied.how_to_end}, or give that "
            "policy"
        )
    return applied


@contextmanager
def unapplied(model: torch.nn.Module) -> Iterator[None]:
    """In the block, a model and its parts follow no policy of ``nc.apply``."""
    with ExitStack() as stack:
        for part in model.modules():
            applied = _applied.get(part)
            if applied is not None:
                stack.enter_context(applied.paused())
        yield


def missed_rules(policy: Policy, model: torch.nn.Module) -> dict[Rule, str]:
    """Return the rules that select nothing in ``model``, each with an error message.

    A rule for modules must select one that is called, and a rule with an fp8 recipe a linear layer.
    """
    modules: list[tuple[str, torch.nn.Module]] = []
    for paths, module in all_paths(model):
        modules += [(path, module) for path in paths]
    named = [(path, class_names(type(module))) for path, module in modules]
    linears = [path for path, module in modules if isinstance(module, torch.nn.Linear)]
    # Path -> class of modules that are never called, as ``ModuleList``: a rule for one would do nothing.
    uncallable: dict[str, str] = {}
    if policy.names_modules:
        uncallable = {path: type(module).__name__ for path, module in modules if _has_no_forward(module)}

    missed = {}
    for rule in policy.rules:
        in_fp8 = rule.compute in FP8_RECIPES
        if not rule.is_for_modules and not in_fp8:
            continue
        selected = [path for path, names in named if names_module(rule, path, names)]
        if rule.is_for_modules and not selected:
            model_name = type(modules[0][1]).__name__
            missed[rule] = f"this {model_name} has no {rule.target}. {_near_modules(rule, modules)}"
        elif not in_fp8 and set(selected) <= uncallable.keys():
            container = selected[0]
            # The path of the model itself is empty: "*" names the modules in it.
            inside = f"{container}.*".lstrip(".")
            missed[rule] = (
                f"expected {rule.target} to be called, got a {uncallable[container]}, which has no forward, "
                f'so that a rule for it does nothing: name the modules in it, as "{inside}"'
            )
        elif in_fp8 and not _holds_any(selected, linears):
            known = did_you_mean(rule.module or "", linears) if linears else "The model has none."
            expected = f"expected a torch.nn.Linear for the rule {rule}"
            missed[rule] = f"{expected}, got none in {rule.target}. {known}"
    return missed


def _near_modules(rule: Rule, modules: list[tuple[str, torch.nn.Module]]) -> str:
    """Suggest paths or classes of ``modules`` for those that ``rule`` names and that do not exist."""
    if rule.module is None:
        kinds = sorted({type(module).__name__ for _, module in modules})
        return did_you_mean(str(rule.module_type).rpartition(".")[2], kinds)
    known = [path for path, _ in modules if path]
    named = [(path, class_names(type(module))) for path, module in modules]
    shorter = without_prefix(rule, named)
    if shorter is None:
        return did_you_mean(rule.module, known)
    return f"Paths start at the model itself. {did_you_mean(rule.module, known, guess=shorter)}"


def _holds_any(selected: list[str], linears: list[str]) -> bool:
    """Return whether a linear layer is one of the ``selected`` modules, or inside one."""
    for path in linears:
        for outer in selected:
            is_whole_model = not outer
            if is_whole_model or path == outer or path.startswith(f"{outer}."):
                return True
    return False


def refuse_in_torchscript(policy: Policy, model: torch.nn.Module) -> None:
    """Refuse a rule for an operator that a TorchScript module calls, if torch.jit casts it by its own table.

    torch.jit casts the inputs to the low format before the rule sees them. Rules for operators that no
    TorchScript module calls are let through: apex's O1, which follows CUDA's table on a CPU, has many.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/jit/passes/autocast.cpp
    graph_of: dict[str, str] = {}
    for path, module in modules_by_path(model):
        if isinstance(module, torch.jit.ScriptModule):
            graph_of[path] = str(getattr(module, "inlined_graph", ""))
    if policy.is_plain or not graph_of:
        return
    for device in device_types(model, (), {}):
        _, root = dtype_and_scope(policy, device)
        assert root is not None  # since the policy has rules
        scopes = scopes_by_path(model, policy, root)
        cast_to_low = [op for op, kind in root.resolved.native.items() if kind == LOWER]
        for path, op in itertools.product(graph_of, cast_to_low):
            if not _calls(graph_of[path], op):
                continue
            decision = scopes[path].decide(op)
            if decision is not None and decision.compute not in (LOWER, root.resolved.lower):
                raise PolicyError(
                    f"a rule ({decision.because}) casts {op!r} in the TorchScript module {path!r}, where "
                    "torch.jit casts by a table of its own: keep it out of the rule, or unscripted"
                )


def _calls(graph: str, op: str) -> bool:
    """Return whether a TorchScript graph calls an operator."""
    names = [base_of(op)]
    # The graph of a traced module has this name for every convolution.
    if op.startswith("conv"):
        names.append("_convolution")
    return any(f"aten::{name}(" in graph for name in names)


def refuse_missed(missed: dict[Rule, str]) -> None:
    """Raise PolicyError for the first rule that selects nothing."""
    for message in missed.values():
        raise PolicyError(message)


def refuse_missed_by_all(policy: Policy, models: Sequence[torch.nn.Module]) -> None:
    """Raise PolicyError for the first rule that selects nothing in each of ``models``."""
    missed = [missed_rules(policy, model) for model in models]
    for rule in missed[0]:
        messages = [of_model[rule] for of_model in missed if rule in of_model]
        if len(messages) == len(models):
            raise PolicyError("; ".join(messages))

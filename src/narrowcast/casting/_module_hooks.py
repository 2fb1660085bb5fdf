"""Attach hooks that open the region of a policy in a model's call, and enter the scopes of module rules.

The hooks hold the policy, so that they work in any thread: if no region of the policy is open, they open one.
PyTorch calls no hook after a ``KeyboardInterrupt``. A region that stays open is then closed when the
exception is freed, at the latest when the next region opens.

Dynamo traces the hooks. The region is then chosen once, while Dynamo traces, and its graph enters a region of
``torch.autocast``, in whose state the scope is kept (see ``_scopes``).
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from narrowcast.casting import _regions
from narrowcast.casting._kernels import Promotion, region_of
from narrowcast.casting._operators import CASTABLE, compute_dtype, depends_on_inputs
from narrowcast.casting._scopes import (
    PROMOTING,
    autocast_state_of,
    is_promoting,
    scope_on,
    scopes_here,
    thread,
)
from narrowcast.casting._torch_internals import (
    constant_while_tracing,
    is_exporting,
    keep_graphs_with_regions,
    register_first,
    skipped_by_dynamo,
    traced_only_inline,
)
from narrowcast.casting._tree import cast_where, tensors_inside
from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.machine import check_device
from narrowcast.policy import CASTS_TO, Policy, Rule, Scope, dtype_of

_EXPORTED = (
    "expected a model without a policy for torch.export, got one with hooks of nc.apply, which no program "
    "keeps: export it before nc.apply or after remove()"
)
_keys = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Hook] = weakref.WeakValueDictionary()


class _Thread(threading.local):
    """The calls of modules with hooks that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.calls: list[OpenCall] = []


_here = _Thread()


@dataclass(eq=False, slots=True)
class OpenCall:
    """One call of a module with hooks: the number of regions it opened, and the casts of its outputs."""

    module: torch.nn.Module
    caller: int
    hook: Hook
    regions: int = 0
    outputs: list[_Casts] = field(default_factory=list)
    _promotion: Promotion | None = None

    def check_recomputation(self) -> None:
        """Refuse to recompute a forward pass of a policy that was removed, without its hooks."""
        if self.hook.shared.ended and not self.hook.shared.policy.is_plain:
            raise OrderError(
                "expected the policy of a checkpointed model to be there until the backward pass, which "
                "computes the model's forward again, got one that was removed: go backward before remove(), "
                "or inside the with statement of nc.apply"
            )


class _Arguments(dict[str, Any]):
    """Keyword arguments of a call of a module, freed when it ends, by a ``KeyboardInterrupt`` too."""

    __slots__ = ()

    def __del__(self) -> None:
        _regions.close_abandoned()


class _TracedArguments(dict[str, Any]):
    """Keyword arguments of a traced call, with the regions and output casts of each hook.

    The hooks before and after a call share nothing else that may change while a checkpoint is traced.
    """

    calls: dict[int, tuple[list[Any], list[tuple[str, torch.dtype]]]]


class _Casts(NamedTuple):
    """A cast by a rule for a module, on one device type."""

    rule: Rule
    device: str
    dtype: torch.dtype


class _Region(NamedTuple):
    """A region that a hook opens."""

    device: str
    dtype: torch.dtype
    enabled: bool
    scope: Scope | None
    promotion: Promotion | None = None


_State = tuple[str, torch.dtype, bool, tuple[tuple[str, torch.dtype], ...]]
"""A region as a constant for Dynamo: its scope as the autocast formats that stand for it."""


def _caller_of_hooks() -> int:
    """Return the ``id`` of the frame of the module call that our hooks were called from.

    A reference to the frame would keep the arguments alive, whose end closes an interrupted call.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return id(frame)


@dataclass(eq=False)
class Shared:
    """State shared by the hooks of one policy on one model, and by those on copies of the model.

    Attributes:
        policy: their policy.
        opens: whether they open the policy's region.
        admits: called with the model; if it returns False, no region is opened. Lost when pickled.
        compiled: they belong to ``nc.compile``; the same modules may have others.
        removed: the policy is removed, from copies too.
        ended: the policy is removed from the model itself.
        traced_scopes: those that graphs enter. A graph holds no reference, and an equal policy that is freed
            earlier may own them.
    """

    policy: Policy
    opens: bool
    admits: Callable[[torch.nn.Module], bool] | None = None
    compiled: bool = False
    removed: bool = False
    ended: bool = False
    traced_scopes: set[Scope | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._promotions: dict[str, Promotion] = {}

    def promotion(self, device: str, dtype: torch.dtype) -> Promotion:
        """Return what promotes in the policy's regions on ``device``."""
        if device not in self._promotions:
            self._promotions[device] = Promotion(self.policy, device, dtype, warnings.warn)
        return self._promotions[device]

    def end(self, *, copies: bool) -> None:
        self.removed, self.ended = copies, True
        self._promotions.clear()

    def __deepcopy__(self, _memo: object) -> Shared:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "admits": None, "_promotions": {}, "traced_scopes": set()}


class Hook:
    """The two hooks of one module: before its forward and after it.

    Attributes:
        key: number by which traced code finds this hook.
        handles: torch's handles of the two.
        is_copy: whether it came with a copy of the module.
    """

    is_copy = False

    def __init__(
        self, shared: Shared, rules: tuple[Rule, ...], module: torch.nn.Module, *, opening: bool = False
    ) -> None:
        self.shared = shared
        self.rules = rules
        self._opening = opening
        self._casts = any(one.op is None for one in rules)
        self._model: weakref.ref[torch.nn.Module] | None = None  # of the hook of a whole model
        by_inputs = [one.compute for one in rules if one.op is None and depends_on_inputs(one.compute)]
        self._by_inputs = by_inputs[0] if by_inputs else None
        self._register()
        # First before and last after every other hook, so that those run inside, as the module's own code.
        self.handles = (
            register_first(module, self.before),
            torch.nn.Module.register_forward_hook(module, self.after, always_call=True, with_kwargs=True),
        )

    def detach(self) -> None:
        """Remove the hooks from the module; a call that is running ends with the second."""
        self._detached = any(call.hook is self for call in _here.calls)
        for handle in self.handles[: 1 if self._detached else 2]:
            handle.remove()

    _detached = False

    def _register(self) -> None:
        self.key = next(_keys)
        _hooks[self.key] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.is_copy = True
        self._register()

    @traced_only_inline
    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if is_exporting() and not (self.shared.removed or self.shared.compiled):
            raise UnsupportedError(_EXPORTED)
        if not torch.compiler.is_dynamo_compiling():
            return self._before(module, args, kwargs)
        if self.shared.admits is not None:
            return _untraced(self._before, module, args, kwargs)
        return self._traced_before(module, args, kwargs)

    @traced_only_inline
    def after(self, module: torch.nn.Module, _args: Any, kwargs: Any, output: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return self._after(module, output)
        if self.shared.admits is not None:
            return _untraced(self._after, module, output)
        return self._traced_after(module, kwargs, output)

    # ---- called by Python

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.shared.removed:
            return None
        self.follow_model(module)
        opened = _here.calls
        while opened and not _regions.is_running(opened[-1].caller):
            opened.pop()  # left by a KeyboardInterrupt, after which PyTorch calls no hook
        call = OpenCall(module, _caller_of_hooks(), self)
        try:
            if self._may_open() and (self.shared.admits is None or self.shared.admits(module)):
                for device in device_types(module, args, kwargs):
                    self._enter(call, self.region_to_open(device))
            for device in self.devices() if self.rules else ():
                region, casts, output = self.inside(device, self._dtype_by_inputs((args, kwargs), device))
                self._enter(call, region)
                if output is not None:
                    call.outputs.append(output)
                if casts is not None:
                    args, kwargs = _cast_by_rule(casts, (args, kwargs))
        except BaseException:
            self._close(call)
            raise
        opened.append(call)
        return args, _Arguments(kwargs)

    def _after(self, module: torch.nn.Module, output: Any) -> Any:
        opened = _here.calls
        if not opened or opened[-1].hook is not self or opened[-1].module is not module:
            return output  # called before the hooks were there
        call = opened.pop()
        self._close(call)
        if self._detached:
            self.handles[1].remove()
        for casts in call.outputs:
            output = _cast_by_rule(casts, output)
        return output

    def follow_model(self, module: torch.nn.Module) -> None:
        """Attach hooks to modules that were added since the last call."""

    def _enter(self, call: OpenCall, region: _Region | None) -> None:
        if region is not None:
            caches = torch.is_autocast_cache_enabled()
            device, dtype, enabled, scope, call._promotion = region
            _regions.enter(call, device, dtype, enabled, caches, scope=scope, caller=call.caller)
            call.regions += 1

    def _close(self, call: OpenCall) -> None:
        for _ in range(call.regions):
            _regions.leave(call)
        call.regions = 0

    # ---- traced by Dynamo

    def _traced_before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.shared.removed:
            return None
        given = kwargs if isinstance(kwargs, _TracedArguments) else _TracedArguments(kwargs)
        regions: list[Any] = []
        outputs: list[tuple[str, torch.dtype]] = []
        if given is not kwargs:
            given.calls = {}
        given.calls[self.key] = (regions, outputs)
        if self._opening or self.shared.opens:
            for device in _traced_device_types(module, args, kwargs):
                _enter_traced(regions, _region_to_open(self.key, device))
        for device in _devices(self.key) if self.rules else ():
            by_inputs = self._dtype_by_inputs((args, kwargs), device)
            region, dtype, output = _inside(self.key, device, by_inputs)
            _enter_traced(regions, region)
            if output is not None:
                outputs.append((device, output))
            if dtype is not None:
                wants = _wants(device, dtype)
                args, named = cast_where((args, dict(given)), dtype, wants)
                given.update(named)
        return args, given

    def _traced_after(self, module: torch.nn.Module, kwargs: Any, output: Any) -> Any:
        if not isinstance(kwargs, _TracedArguments):  # another hook replaced the arguments: run in Python
            return output if self.shared.removed else _untraced(self._after, module, output)
        regions, outputs = kwargs.calls[self.key]
        for region in reversed(regions):
            region.__exit__(None, None, None)
        for device, dtype in outputs:
            output = cast_where(output, dtype, _wants(device, dtype))
        return output

    # ---- decisions

    def _dtype_by_inputs(self, values: Any, device: str) -> torch.dtype | None:
        if self._by_inputs is None:
            return None
        return compute_dtype(self._by_inputs, torch.float32, tensors_inside(values), device)

    def devices(self) -> list[str]:
        """Return the device types on which a region of this policy is open in this thread."""
        rules = self.shared.policy.rules
        return [device for device, scope in scopes_here().items() if scope.resolved.rules == rules]

    def _may_open(self) -> bool:
        return self._opening or (self.shared.opens and not self.devices())

    def region_to_open(self, device: str) -> _Region | None:
        """Return the region of the policy on ``device``; None if it is open, or none is needed."""
        check_device(device)
        dtype, scope = region_of(self.shared.policy, device)
        promotion = None if dtype == torch.float32 else self.shared.promotion(device, dtype)
        is_open = _is_open(device, dtype, scope) and (promotion is None or is_promoting())
        if (dtype != torch.float32 or scope is not None) and not is_open:
            return _Region(device, dtype, True, scope, promotion)
        if dtype == torch.float32 and scope is None and torch.is_autocast_enabled(device):
            # The region around the call has another policy, and this one computes in fp32.
            return _Region(device, torch.get_autocast_dtype(device), False, None)
        return None

    def inside(
        self, device: str, by_inputs: torch.dtype | None
    ) -> tuple[_Region | None, _Casts | None, _Casts | None]:
        """Return the module's own region, the cast of its inputs, and that of its outputs."""
        outside = scope_on(device)
        assert outside is not None
        switched_off = outside.rule is not None and CASTS_TO[outside.rule.compute] is None
        if not torch.is_autocast_enabled(device) and not switched_off:
            return None, None, None  # by the script, inside the model
        scope = outside.inside(self.rules)
        rule = scope.rule if self._casts else None
        if rule is None:
            on = torch.is_autocast_enabled(device) or scope.rules_operators
            return _Region(device, torch.get_autocast_dtype(device), on, scope), None, None
        if rule.compute == "refuse":
            raise UnsupportedError(f"a module was called, which a rule refuses ({rule})")
        dtype = by_inputs
        if not depends_on_inputs(rule.compute):
            dtype = compute_dtype(rule.compute, dtype_of(scope.resolved.lower), (), device)
        # An "as-is" module keeps autocast on only if a rule names an operator inside it.
        on = CASTS_TO[rule.compute] is not None or scope.rules_operators
        region = _Region(device, torch.get_autocast_dtype(device) if dtype is None else dtype, on, scope)
        output = None
        if rule.output is not None:
            word = scope.resolved.lower if rule.output == "lower" else rule.output
            output = _Casts(rule, device, dtype_of(word))
        return region, None if dtype is None else _Casts(rule, device, dtype), output


# ---- decided while Dynamo traces


def _enter_traced(regions: list[Any], state: _State | None) -> None:
    if state is not None:
        region = _regions.traced_region(*state)
        region.__enter__()
        regions.append(region)


@constant_while_tracing
def _region_to_open(key: int, device: str) -> _State | None:
    hook = _hooks[key]
    model = None if hook._model is None else hook._model()
    if model is not None:
        hook.follow_model(model)
    return _state(hook.region_to_open(device)) if hook._may_open() else None


@constant_while_tracing
def _devices(key: int) -> tuple[str, ...]:
    return tuple(_hooks[key].devices())


@constant_while_tracing
def _inside(
    key: int, device: str, by_inputs: torch.dtype | None
) -> tuple[_State | None, torch.dtype | None, torch.dtype | None]:
    hook = _hooks[key]
    region, casts, output = hook.inside(device, by_inputs)
    if region is not None:
        hook.shared.traced_scopes.add(region.scope)
    dtypes = [None if one is None else one.dtype for one in (casts, output)]
    return _state(region), dtypes[0], dtypes[1]


def _state(region: _Region | None) -> _State | None:
    if region is None:
        return None
    keep_graphs_with_regions()
    device, dtype, enabled, scope, promotion = region
    state = autocast_state_of(scope, device) + ([] if promotion is None else [PROMOTING])
    return device, dtype, enabled, tuple(state)


def _traced_device_types(module: torch.nn.Module, args: Any, kwargs: Any) -> list[str]:
    """Return the device type of the first parameter, or of the inputs: tracing all would take long."""
    for weight in module.parameters():
        return [weight.device.type]
    return [one.device.type for one in tensors_inside((args, kwargs))[:1]]


@skipped_by_dynamo
def _untraced(hook: Any, *args: Any) -> Any:
    """Break the graph: a piece of the model is compiled in the region that is open around it."""
    return hook(*args)


# ---- casts


def _cast_by_rule(casts: _Casts, values: Any) -> Any:
    """Cast a module's inputs or outputs; meanwhile ``rule_that_casts`` returns the rule."""
    thread.casting_rule = casts.rule
    try:
        return cast_where(values, casts.dtype, _wants(casts.device, casts.dtype))
    finally:
        thread.casting_rule = None


def _wants(device: str, dtype: torch.dtype) -> Callable[[torch.Tensor], bool]:
    return lambda one: one.dtype in CASTABLE and one.dtype != dtype and one.device.type == device


def _is_open(device: str, dtype: torch.dtype, scope: Scope | None) -> bool:
    """Return whether the thread is in such a region already, in that scope or inside it."""
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != dtype:
        return False
    current = scope_on(device)
    if current is None or scope is None:
        return current is scope
    return current.resolved.root.identity == scope.identity


def device_types(module: torch.nn.Module | None, args: Any, kwargs: Any) -> list[str]:
    """Return the device types of the weights of ``module``, or without any of its inputs.

    Without either, the one on which tensors are made by default.
    """
    found = dict.fromkeys(one.device.type for one in _weights(module)) if module is not None else {}
    found = found or dict.fromkeys(one.device.type for one in tensors_inside((args, kwargs)))
    return [device for device in found or (torch.get_default_device().type,) if device != "meta"]


def _weights(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        for weight in (*part._parameters.values(), *part._buffers.values()):
            if weight is not None:
                yield weight


def hooks_on(module: torch.nn.Module) -> list[Hook]:
    """Return the hooks of ours on ``module`` itself."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, Hook)]

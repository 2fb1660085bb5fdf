"""Carry out a policy around the calls of modules: open its region, and enter the scopes of module rules.

A module with a rule, and the model itself, have a ``ModuleCall`` in front of their own ``_call_impl``. It
reads the autocast state, sets it, calls the module with all its hooks, and sets the state back. It holds the
policy, so that it works in any thread: if no region of the policy is open, it opens one.

Dynamo traces it. The region is then chosen once, while Dynamo traces, and its graph enters a region of
``torch.autocast``, in whose state the scope is kept (see ``_scopes``).
"""

from __future__ import annotations

import functools
import itertools
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from narrowcast.casting._devices import device_types, moves, weight_device_types
from narrowcast.casting._torch_internals import (
    CALL,
    COMPILED_CALL,
    REPLICATE,
    Replacements,
    constant_while_tracing,
    is_exporting,
    keep_graphs_with_regions,
    skipped_by_dynamo,
    skipped_itself,
    trace_backward_outside_of_regions,
    traced_only_inline,
)
from narrowcast.casting.kernels._kernels import dtype_and_scope
from narrowcast.casting.kernels._operators import LOW, compute_dtype, depends_on_inputs, widest
from narrowcast.casting.models._module_casts import Copies, RuleCast, cast_arguments, cast_outputs, wants
from narrowcast.casting.models._tree import cast_where, tensors_inside
from narrowcast.casting.regions import _regions
from narrowcast.casting.regions._policy_region import PolicyRegion
from narrowcast.casting.regions._scopes import (
    PROMOTING,
    autocast_state_of,
    change_scope,
    devices_with_scopes,
    scope_on,
    thread,
)
from narrowcast.errors import UnsupportedError
from narrowcast.machine import check_device
from narrowcast.policy import CASTS_TO, Policy, ResolvedPolicy, Rule, Scope, dtype_of

_EXPORTED = (
    "expected a model without a policy for torch.export, got one with a policy, which no program keeps: "
    "export it before it is given the policy, or after the policy has ended"
)
_keys = itertools.count()
_calls: weakref.WeakValueDictionary[int, ModuleCall] = weakref.WeakValueDictionary()


class _ModuleState(NamedTuple):
    """What holds inside a module with a rule, on one device type.

    Attributes:
        dtype: the autocast dtype.
        enabled: whether autocast is on.
        scope: the rules in force.
        input_cast: that of the inputs, or None.
        output_cast: that of the outputs, or None.
    """

    dtype: torch.dtype
    enabled: bool
    scope: Scope
    input_cast: RuleCast | None
    output_cast: RuleCast | None


TracedState = tuple[str, torch.dtype, bool, tuple[tuple[str, torch.dtype], ...]]
"""What traced code needs to enter a region, as constants: the arguments of ``traced_region``.

These are the device type, the dtype, whether autocast is on, and the scope, encoded as autocast dtypes.
"""


@dataclass(eq=False)
class Shared:
    """State shared by the calls of one policy on one model, and by those on copies of the model.

    Attributes:
        policy: what the calls carry out.
        opens: whether the calls open the policy's region.
        admits: called with the model; if it returns False, no region is opened. Lost when pickled.
        compiled: the calls belong to ``nc.compile``; the same modules may have other calls too.
        how_to_end: what to do before the model can have another policy, for messages.
        removed: calls, also those on copies, ignore the policy. ``end(copies=True)`` sets it for good, and
            ``Applied.paused`` for a time.
        ended: the policy is removed from the model itself. Every ``end`` sets it.
        called: whether a call, also of a copy, has opened a region in this process.
        traced_scopes: scopes that compiled graphs enter. Kept alive here, since a graph holds no reference to
            its scope. The scope may come from a region of another policy, equal to this one, which may be
            freed before the graph.
    """

    policy: Policy
    opens: bool
    admits: Callable[[torch.nn.Module], bool] | None = None
    compiled: bool = False
    how_to_end: str = "call remove() on the handle of its nc.apply first"
    removed: bool = False
    ended: bool = False
    called: bool = False
    traced_scopes: set[Scope | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._region_on: dict[str, PolicyRegion] = {}

    def region_on(self, device: str) -> PolicyRegion:
        """Return the policy's region on ``device``, made at the first call."""
        if device not in self._region_on:
            dtype, _ = dtype_and_scope(self.policy, device)
            self._region_on[device] = PolicyRegion(self.policy, {device: dtype}, warnings.warn)
        return self._region_on[device]

    def end(self, *, copies: bool) -> None:
        """Note that the policy is removed from the model, and with ``copies`` from its copies too.

        The caller detaches the calls on the model itself. Those on copies stay, and see ``removed``.
        """
        # ``copies=False`` after an earlier ``copies=True`` must not give copies their policy back.
        self.removed = self.removed or copies
        self.ended = True
        for region in self._region_on.values():
            region.end()
        self._region_on.clear()

    def __deepcopy__(self, _memo: object) -> Shared:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "admits": None, "_region_on": {}, "traced_scopes": set()}


class ModuleCall:
    """The call of one module by a policy, in front of ``nn.Module._call_impl``.

    Attributes:
        is_of_model: whether this is the call of the model itself, a ``_ModelCall``, rather than of a part.
        key: number by which traced code finds this object.
        rules: the rules for the module.
        is_copy: whether this object came with a copy of the module.
        below: what stood in front of the module before, and is called next; None: nothing.
    """

    is_of_model = False

    def __init__(
        self,
        shared: Shared,
        rules: tuple[Rule, ...],
        module: torch.nn.Module,
        *,
        unfused: bool = False,
    ) -> None:
        self.shared = shared
        self.rules = rules
        self.is_copy = False
        self._has_rule_for_all = False
        self._may_promote = False
        for rule in rules:
            if rule.op is None:  # for all operators in the module
                self._has_rule_for_all = True
                # "promote" finds its format at each call, from the inputs.
                self._may_promote = self._may_promote or depends_on_inputs(rule.compute)
        self._module = weakref.ref(module)
        self._begin()

        attributes = vars(module)
        # torch calls what the module has as COMPILED_CALL, if anything, and else what it has as CALL. What is
        # there now comes below this object: the result of module.compile() or an earlier ``ModuleCall`` as
        # COMPILED_CALL, or an earlier ``ModuleCall`` as CALL, or nothing. A compiled module gets this object
        # under both names, so that a reader of CALL finds it there in any case.
        self._compiled = attributes.get(COMPILED_CALL) is not None
        self.below: Callable[..., Any] | None = attributes.get(COMPILED_CALL) or attributes.get(CALL)
        attributes[CALL] = self.call
        if self._compiled:
            attributes[COMPILED_CALL] = self.call
        attributes[REPLICATE] = self.replicate
        # Keeps graphs of this module apart from those of others, see ``_Forward``. A ScriptModule has no
        # ``forward`` in its class that ``_Forward`` could call.
        if not isinstance(module, torch.jit.ScriptModule):
            attributes.setdefault("forward", _Forward(module))
        # A hook keeps nn.TransformerEncoderLayer from its fused kernel, which would bypass the rules.
        self._hook = module.register_forward_pre_hook(_no_change) if unfused else None

    def _begin(self) -> None:
        """Set what each call has of its own, also in a copy."""
        self.key = next(_keys)
        _calls[self.key] = self
        # (the scope outside, the widest dtype of the inputs where a rule asks for it) -> the state inside.
        self._decided: dict[tuple[Scope, torch.dtype | None], _ModuleState] = {}
        self._decided_in: ResolvedPolicy | None = None
        # The device types of the weights, and ``moves.count`` when they were found; -1: find them anew.
        self._devices: list[str] = []
        self._devices_at = -1
        # While this object exists, count moves of weights, and give shallow copies calls of their own. Each
        # call asks for it by itself, since one in a copy or in a loaded model may outlive the handle.
        user = object()
        MOVES_AND_COPIES.begin(user)
        self._end_watching = weakref.finalize(self, MOVES_AND_COPIES.end, user)
        self._end_watching.atexit = False

    def detach(self) -> None:
        """Remove this object from the module; a call that is running still follows the policy."""
        self._end_watching()
        if self._hook is not None:
            self._hook.remove()
        module = self._module()
        if module is None:
            return
        attributes = vars(module)
        others = [other for other in calls_on(module) if other is not self]
        # Whoever called this object now calls what is below it. That may be another ``ModuleCall``.
        for other in others:
            if other.below == self.call:
                other.below = self.below
        # If this object is the outermost one, torch called it: by COMPILED_CALL if the module is compiled.
        if attributes.get(COMPILED_CALL) == self.call:
            attributes[COMPILED_CALL] = self.below
        # The outermost one also stands at CALL, compiled or not. The next one takes its place.
        if attributes.get(CALL) == self.call:
            del attributes[CALL]  # without others, the method of the class is called again
            if others:
                attributes[CALL] = others[0].call

        # The last one to be removed leaves the module as it was.
        if not others:
            attributes.pop(REPLICATE, None)
            if _has_our_forward(module):
                del attributes["forward"]

    # For deep copies and pickles, which also copy the module. A shallow copy of a module comes with this
    # object itself, which calls the original: ``_give_twins`` replaces it.

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_module": self._module()}
        for name in ("key", "_decided", "_decided_in", "_devices", "_devices_at", "_end_watching"):
            del state[name]  # what ``_begin`` makes
        if self._compiled:  # a copy is not compiled
            state["below"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])
        self.is_copy = True
        self._begin()

    # ---- called by Python

    # Dynamo traces this method inside compiled code. Where Python calls it, ``skipped_itself`` keeps Dynamo
    # from compiling the method by itself. Dynamo may still compile the module that the method calls.
    @skipped_itself
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with its hooks, by the policy."""
        module = self._module()
        assert module is not None
        below = self.below
        if below is None:
            below = functools.partial(getattr(type(module), CALL), module)
        if self.shared.removed:
            return below(*args, **kwargs)
        # Export is refused while a model has a policy. The calls of nc.compile stay on the model that it was
        # given and do nothing outside its region, so that model may be exported.
        if is_exporting() and not self.shared.compiled:
            raise UnsupportedError(_EXPORTED)
        if torch.compiler.is_dynamo_compiling():
            return self._traced_call(module, below, args, kwargs)
        opened = _Opened(len(thread.regions))
        try:
            args, kwargs = self._enter(opened, module, args, kwargs)
            output = below(*args, **kwargs)
            if type(output) is types.GeneratorType:
                _refuse_generator(opened, module)
        finally:
            _leave(opened)
        # If the module wrote to casts of its arguments, copy that to the caller's own.
        for copy in opened.copies:
            copy.write_back()
        if opened.output_casts:
            output = cast_outputs(opened.output_casts, output)
        return output

    def follow_model(self, module: torch.nn.Module) -> None:
        """Give rules to modules added since the last call; nothing here, ``_ModelCall`` does it."""

    def replicate(self) -> torch.nn.Module:
        """Return a shallow copy for ``DataParallel``, which follows the policy by itself."""
        module = self._module()
        assert module is not None
        replica: torch.nn.Module = getattr(type(module), REPLICATE)(module)
        _give_twins(calls_on(module), replica)
        # The copied ``_Forward`` would compute with the weights of the original. A replica lives for one
        # forward pass, so it gets none of its own.
        if _has_our_forward(module):
            del vars(replica)["forward"]
        return replica

    @traced_only_inline
    def _enter(
        self, opened: _Opened, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Set the autocast state for a call, and cast its arguments."""
        if self.is_of_model:  # a part is spared the call, which would do nothing
            self.follow_model(module)
        # The model opens the regions of the policy, unless they are open. A part opens them only if it is in
        # none, as when it is called by itself or in another thread: then no scope of the policy is in force.
        # In new regions there are new scopes, so they are read again.
        scopes = self._our_scopes() if self.rules else []
        if self.shared.opens and (self.is_of_model or not scopes):
            self._open_regions(module, args, kwargs)
            scopes = self._our_scopes() if self.rules else []
        for device, outside in scopes:
            enabled = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device)
            widest_dtype = None
            if self._may_promote:
                widest_dtype = widest(tensors_inside((args, kwargs)), device)
            state = self._kept_state(outside, device, widest_dtype, enabled=enabled)
            if state is None:
                continue
            # Recorded before the state is set, so that ``_leave`` sets it back whatever raises. A plain tuple
            # costs least.
            opened.states += ((device, enabled, dtype, outside, state),)
            self._set_state(state, device, enabled, dtype)
            if state.output_cast is not None:
                opened.output_casts += (state.output_cast,)
            if state.input_cast is not None:
                args, kwargs, copies = cast_arguments(state.input_cast, args, kwargs)
                opened.copies += copies
        return args, kwargs

    def _open_regions(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Open the policy's regions that are not open yet, if ``admits`` allows it."""
        if self.shared.admits is not None and not self.shared.admits(module):
            return
        for device in self._devices_of(module, args, kwargs):
            region = self.shared.region_on(device)
            if not region.is_open():
                region.__enter__()  # left by ``_leave``, with all that was opened since

    def _devices_of(self, module: torch.nn.Module, args: Any, kwargs: Any) -> list[str]:
        """Return the device types to open regions on: those of the weights, found again after a move."""
        if self._devices_at != moves.count:
            # The first call that opens regions gets here, and so sets ``called``. Setting it at each call
            # would cost time.
            self.shared.called = True
            devices_of_weights = weight_device_types(module)
            self._devices = [device for device in devices_of_weights if device != "meta"]
            # Weights on "meta" are replaced without a move that is counted.
            self._devices_at = -1 if "meta" in devices_of_weights else moves.count
            for device in self._devices:
                check_device(device)
        if self._devices:
            return self._devices
        devices = device_types(None, args, kwargs)
        for device in devices:
            check_device(device)
        return devices

    def _kept_state(
        self, outside: Scope, device: str, widest_dtype: torch.dtype | None, *, enabled: bool
    ) -> _ModuleState | None:
        """Return ``decide_state()``, kept from earlier calls if it does not depend on the autocast state.

        It depends on it in three cases: without a rule for all operators, and with one that casts no inputs
        (as "as-is"), the dtype comes from outside; and where autocast is off, it matters why.
        """
        # The first and the last case can be told before the state is decided.
        if not self._has_rule_for_all or not enabled:
            return self.decide_state(outside, device, widest_dtype)
        if outside.resolved is not self._decided_in:
            # The region is of another, equal policy: drop what was decided for the previous one.
            self._decided_in = outside.resolved
            self._decided = {}
        state = self._decided.get((outside, widest_dtype))
        if state is None:
            state = self.decide_state(outside, device, widest_dtype)
            assert state is not None  # it is None only where autocast is off
            # The remaining case, no cast of inputs, is seen only in the state itself.
            if state.input_cast is not None:
                self._decided[outside, widest_dtype] = state
        return state

    def _set_state(self, state: _ModuleState, device: str, enabled: bool, dtype: torch.dtype) -> None:
        """Enter ``state``: by a region of its own if the low format changes, else by the settings alone."""
        if state.enabled and state.dtype in LOW and dtype in LOW and state.dtype is not dtype:
            # torch's cache of weight casts does not record the dtype; opening a region keeps casts of two
            # dtypes apart.
            cache_enabled = torch.is_autocast_cache_enabled()
            _regions.enter(self, device, state.dtype, True, cache_enabled, state.scope)
            return
        if state.enabled is not enabled:
            torch.set_autocast_enabled(device, state.enabled)
        if state.dtype is not dtype:
            torch.set_autocast_dtype(device, state.dtype)
        change_scope(state.scope, device)

    # ---- traced by Dynamo

    def _traced_call(self, module: torch.nn.Module, below: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.shared.admits is not None:
            # ``admits`` must be asked at each call, which a graph cannot do. Dynamo cannot trace the function
            # called here, so it gives up: Python calls the module untraced, and the lines below never run.
            _break_the_graph()
        devices = _traced_device_types(module, args, kwargs) if self.shared.opens else []
        return self._traced_regions(devices, below, args, kwargs)

    def _traced_regions(self, devices: list[str], below: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Open the policy's regions on ``devices``, one inside the other, and call the module in them."""
        if not devices:
            ruled_devices = _devices_with_our_scopes(self.key) if self.rules else ()
            return self._traced_rules(ruled_devices, below, args, kwargs)
        region = _prepare_region(self.key, devices[0])
        if region is None:
            return self._traced_regions(devices[1:], below, args, kwargs)
        with _regions.traced_region(*region):
            return self._traced_regions(devices[1:], below, args, kwargs)

    def _traced_rules(
        self, devices: tuple[str, ...], below: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Enter the scopes of the rules on ``devices``, one inside the other, and call the module in them.

        Recursive, since the scope of each device type is a ``with`` block around all that follow.
        """
        if not devices:
            return below(*args, **kwargs)
        device = devices[0]
        widest_dtype = None
        if self._may_promote:
            widest_dtype = widest(tensors_inside((args, kwargs)), device)
        region, input_dtype, output_dtype = _traced_state_inside(self.key, device, widest_dtype)
        if input_dtype is not None:
            args, kwargs = cast_where((args, kwargs), input_dtype, wants(device, input_dtype))
        if region is None:  # the script turned autocast off there: nothing to enter
            output = self._traced_rules(devices[1:], below, args, kwargs)
        else:
            with _regions.traced_region(*region):
                output = self._traced_rules(devices[1:], below, args, kwargs)
        if output_dtype is not None:
            output = cast_where(output, output_dtype, wants(device, output_dtype))
        return output

    # ---- decisions

    def _our_scopes(self) -> list[tuple[str, Scope]]:
        """Return the device types on which a scope of this policy, or of an equal one, is in force here."""
        rules = self.shared.policy.rules
        our_scopes = []
        for device in devices_with_scopes():
            scope = scope_on(device)
            # The identity first, since comparing all rules takes long.
            if scope is not None and (scope.resolved.rules is rules or scope.resolved.rules == rules):
                our_scopes.append((device, scope))
        return our_scopes

    def decide_state(
        self, outside: Scope, device: str, widest_dtype: torch.dtype | None
    ) -> _ModuleState | None:
        """Return what holds inside the module; None if the script turned autocast off around it.

        ``widest_dtype`` is that to which the inputs promote, for a rule with "promote".
        """
        # If autocast is off here, either the script turned it off, or the rule of a module around this one
        # did, one that casts nothing, as "as-is". Under such a rule the rules of this module still hold.
        is_on = torch.is_autocast_enabled(device)
        is_off_by_rule = outside.rule is not None and CASTS_TO[outside.rule.compute] is None
        if not is_on and not is_off_by_rule:
            return None
        scope = outside.inside(self.rules)
        dtype_outside = torch.get_autocast_dtype(device)
        rule = scope.rule if self._has_rule_for_all else None
        if rule is None:
            # Rules for single operators need autocast, also where the rule of a module around turned it off.
            return _ModuleState(dtype_outside, is_on or scope.rules_operators, scope, None, None)
        if rule.compute == "refuse":
            raise UnsupportedError(f"a module was called, which a rule refuses ({rule})")

        # The dtype to cast to: that of the inputs for "promote", else that of the rule; None: no cast.
        lower = scope.resolved.lower
        dtype = widest_dtype
        if not depends_on_inputs(rule.compute):
            dtype = compute_dtype(rule.compute, dtype_of(lower), (), device)
        # An "as-is" module keeps autocast on only if a rule names an operator inside it.
        enabled = CASTS_TO[rule.compute] is not None or scope.rules_operators

        output_cast = None
        if rule.output is not None:
            word = lower if rule.output == "lower" else rule.output
            output_cast = RuleCast(rule, device, dtype_of(word))
        # "as-is", or "promote" without inputs to promote: the autocast dtype stays as it is outside.
        if dtype is None:
            return _ModuleState(dtype_outside, enabled, scope, None, output_cast)
        return _ModuleState(dtype, enabled, scope, RuleCast(rule, device, dtype), output_cast)


class _Forward:
    """``forward`` of a module's class, as an attribute of the module.

    Dynamo guards on this attribute: other modules of the class, and this one before it had a policy, lack it,
    so they never share a graph with this one. It acts as the bound method, but refers to the module weakly.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    @skipped_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        return type(module).forward(module, *args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # For isinstance: torch.compile asks whether it is the method of one of torch's own modules.
        return types.MethodType

    def __getattr__(self, name: str) -> Any:
        module: Any = self._module()
        return getattr(type(module).forward.__get__(module), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Forward, (self._module(),)


def _has_our_forward(module: torch.nn.Module) -> bool:
    """Return whether a ``ModuleCall`` set ``forward`` as an attribute of ``module``."""
    return type(vars(module).get("forward")) is _Forward


def _no_change(*_: object) -> None:
    pass


def calls_on(module: torch.nn.Module) -> list[ModuleCall]:
    """Return the ``ModuleCall`` objects in front of ``module``, the outermost first."""
    calls = []
    call = vars(module).get(CALL)
    while call is not None:
        owner = getattr(call, "__self__", None)
        if not isinstance(owner, ModuleCall):
            break
        calls.append(owner)
        call = owner.below
    return calls


def _give_twins(calls: list[ModuleCall], copy: torch.nn.Module) -> list[ModuleCall]:
    """Put copies of ``calls`` in front of ``copy``, a shallow copy of their module.

    The copies share all that ``_begin`` made for the originals: the key, the decisions, and the finalizer. So
    ``MOVES_AND_COPIES`` may stop watching when the originals are freed. That suits replicas, which live for
    one forward pass. What ``copy.copy`` makes may outlive the originals, so ``_following_copies`` calls
    ``_begin`` for its calls, which gives each its own.

    Args:
        calls: the outermost first, as from ``calls_on``.
        copy: the copy of the module.

    Returns:
        The copies of the calls, the innermost first.
    """
    # From the innermost on, since each copy needs the one below it.
    twins = []
    below: Callable[..., Any] | None = None
    for call in reversed(calls):
        twin = object.__new__(type(call))
        vars(twin).update(vars(call))
        twin._module, twin.below = weakref.ref(copy), below
        below = twin.call
        twins.append(twin)
    vars(copy)[CALL] = below
    return twins


def _following_copies(below: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Module.__setstate__``, which ``copy.copy`` calls with the attributes of the original."""

    def set_state(module: torch.nn.Module, state: Any) -> Any:
        result = below(module, state)
        calls = calls_on(module)
        # A shallow copy has the attributes of the original, and so its calls.
        if calls and calls[0]._module() is not module:
            for twin in _give_twins(calls, module):
                twin.is_copy = True
                twin._begin()  # a key, decisions and a finalizer of its own, in place of the shared ones
            vars(module)[REPLICATE] = calls_on(module)[0].replicate
            if _has_our_forward(module):
                vars(module)["forward"] = _Forward(module)
        return result

    return set_state


class _Opened:
    """What one call of a module opened and set, for ``_leave`` to undo, and what it casts.

    Attributes:
        depth: how many regions this thread was in before the call.
        states: for each device type its name, whether autocast was on, its dtype and scope before the call,
            and the state inside.
        output_casts: the casts of what the module returns, at most one for each device type.
        copies: the casts of arguments, and the containers that hold them.
    """

    __slots__ = ("copies", "depth", "output_casts", "states")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.states: tuple[tuple[str, bool, torch.dtype, Scope, _ModuleState], ...] = ()
        self.output_casts: tuple[RuleCast, ...] = ()
        self.copies: Copies = ()


@traced_only_inline
def _refuse_generator(opened: _Opened, module: torch.nn.Module) -> None:
    """Refuse a ``forward`` whose code runs after the region or the scope of its call has ended."""
    if opened.states or len(thread.regions) > opened.depth:
        raise UnsupportedError(
            f"expected {type(module).__name__} to compute in its call, got a generator, which computes when "
            'it is iterated: open "with nc.autocast(...)" around the loop over it, in place of nc.apply and '
            "of rules for it, or let forward return a list"
        )


@traced_only_inline
def _leave(opened: _Opened) -> None:
    """Set the autocast state back, then close the regions that the call opened.

    ``_open_regions`` opens those of the policy, and ``_set_state`` those that change the low format.
    """
    # For some states ``_set_state`` opened a region, which is left below. Their autocast state is set back
    # here as well, which is harmless: leaving the region restores the same values.
    for device, enabled, dtype, outside, state in opened.states:
        if state.enabled is not enabled:
            torch.set_autocast_enabled(device, enabled)
        if state.dtype is not dtype:
            torch.set_autocast_dtype(device, dtype)
        change_scope(outside, device)
    if len(thread.regions) > opened.depth:
        _regions.leave_to(opened.depth)


# ---- decided while Dynamo traces


@constant_while_tracing
def _prepare_region(key: int, device: str) -> TracedState | None:
    """Give rules to new modules; return the region to open for a call, or None if one is open."""
    call = _calls[key]
    call.shared.called = True
    module = call._module()
    if module is not None:
        call.follow_model(module)
    if not call.is_of_model and call._our_scopes():
        return None
    check_device(device)
    region = call.shared.region_on(device)
    if region.is_open():
        return None
    (state,) = region.states
    return traced_state(device, state.dtype, state.enabled, state.scope, promotes=state.promotion is not None)


@constant_while_tracing
def _devices_with_our_scopes(key: int) -> tuple[str, ...]:
    """As ``ModuleCall._our_scopes``, but return the device types alone, which are constants."""
    return tuple(device for device, _ in _calls[key]._our_scopes())


@constant_while_tracing
def _traced_state_inside(
    key: int, device: str, widest_dtype: torch.dtype | None
) -> tuple[TracedState | None, torch.dtype | None, torch.dtype | None]:
    """Return the state inside the module, and the dtypes to cast its inputs and outputs to; None: no cast."""
    call = _calls[key]
    outside = scope_on(device)
    assert outside is not None
    state = call.decide_state(outside, device, widest_dtype)
    if state is None:
        return None, None, None
    call.shared.traced_scopes.add(state.scope)
    input_dtype = None if state.input_cast is None else state.input_cast.dtype
    output_dtype = None if state.output_cast is None else state.output_cast.dtype
    region = traced_state(device, state.dtype, state.enabled, state.scope, promotes=False)
    return region, input_dtype, output_dtype


def traced_state(
    device: str, dtype: torch.dtype, enabled: bool, scope: Scope | None, *, promotes: bool
) -> TracedState:
    """Return a region as traced code enters it, with its scope as autocast dtypes; prepare torch for it."""
    keep_graphs_with_regions()
    trace_backward_outside_of_regions()
    scope_state = (autocast_state_of(scope, device),)
    if promotes:
        return device, dtype, enabled, (*scope_state, PROMOTING)
    return device, dtype, enabled, scope_state


def _traced_device_types(module: torch.nn.Module, args: Any, kwargs: Any) -> list[str]:
    """Return a list of one device type, that of the first parameter, else of the first input; or none.

    Tracing a loop over all of them would take long.
    """
    for weight in module.parameters():
        return [weight.device.type]
    return [tensor.device.type for tensor in tensors_inside((args, kwargs))[:1]]


@skipped_by_dynamo
def _break_the_graph() -> None:
    """Do nothing. Dynamo cannot trace a call of this function, and gives up on the code around it."""


MOVES_AND_COPIES = Replacements(
    (torch.nn.Module, "_apply", moves.counted), (torch.nn.Module, "__setstate__", _following_copies)
)
"""While a ``ModuleCall`` exists, counts moves of weights, and gives shallow copies calls of their own."""

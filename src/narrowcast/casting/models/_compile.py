"""``nc.compile``: ``torch.compile`` of a model that computes by a policy.

The compiled model opens the region of its policy when it is called, as under ``nc.apply``. Dynamo and
AOTAutograd trace in that region: they meet the kernels on the autocast key, which cast as in eager code, and
the calls of modules with rules, which enter ``torch.autocast`` there. Dynamo guards the autocast state, in
which the rules in force are kept (see ``_scopes``), so that a graph is used under its own rules alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.casting._devices import device_types, weight_device_types
from narrowcast.casting._torch_internals import (
    constant_while_tracing,
    dynamo_error,
    is_exporting,
    model_of,
    stand_for,
    trace_as_called,
    traced_only_inline,
)
from narrowcast.casting.kernels._kernels import dtype_and_scope
from narrowcast.casting.models._apply import RuledModules, compiled_rules, missed_rules, refuse_missed
from narrowcast.casting.models._module_calls import TracedState, traced_state
from narrowcast.casting.models._tree import tensors_inside
from narrowcast.casting.regions._regions import open_regions, traced_region
from narrowcast.errors import NarrowcastError, PolicyError, UnsupportedError
from narrowcast.machine import check_device
from narrowcast.policy import FP8_RECIPES, Policy, Scope, with_fp32_weights

_numbers = itertools.count()
_by_key: weakref.WeakValueDictionary[str, _Compiled] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class _Compiled:
    """What one ``nc.compile`` was given.

    Attributes:
        target: the module or the function.
        policy: the policy.
        ruled: the modules with rules, if ``target`` is a module.
        key: by which traced code finds this object. A text, since Dynamo takes that for a constant and guards
            it, while it may make a symbolic variable of a number.
    """

    target: Any
    policy: Policy
    ruled: RuledModules | None = None
    key: str = field(default_factory=lambda: f"nc.compile {next(_numbers)}")

    def __post_init__(self) -> None:
        _by_key[self.key] = self
        # Scopes that graphs of an outer torch.compile enter, kept alive here since no graph refers to them.
        self.traced_scopes: set[Scope | None] = set()

    @property
    def module(self) -> torch.nn.Module | None:
        return None if self.ruled is None else self.target

    def follow_module(self) -> None:
        """Give rules to modules that were added since the last call."""
        if self.ruled is not None:
            self.ruled.follow(self.target)

    def opened(self, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """Return the policy's regions for a call with these arguments, to be opened by ``with``."""
        _refuse_export()
        self.follow_module()
        devices = device_types(self.module, args, kwargs)
        # Not nc.autocast: while another thread compiles, it would return a region for traced code.
        return open_regions(map(self.region_on, devices), torch.is_autocast_cache_enabled())

    def region_on(self, device: str) -> tuple[str, torch.dtype, bool, Scope | None]:
        """Return the device type, the dtype, whether autocast is on, and the scope of the policy's region."""
        check_device(device)
        dtype, scope = dtype_and_scope(self.policy, device)
        return device, dtype, dtype != torch.float32 or scope is not None, scope


def compile(model: Any, policy: Policy | str, **settings: Any) -> Any:
    """Compile ``model`` with ``torch.compile``, to compute by ``policy`` in training and inference.

    Each operator gets the inputs, and so gives the formats, that it does in eager code under
    ``nc.apply(model, policy)``; a compiler rounds in other places. For fp8 rules call
    ``nc.apply(model, policy)`` first, which converts the layers. Parameters, their gradients and buffers stay
    in fp32. Outputs stay in the formats in which the model computes them. Open regions of the caller, also of
    another policy, have no effect inside. Code that Dynamo does not trace is cast as eager code is.

    Args:
        model: a module; or a function, if the policy has no rules for modules. A module's ``state_dict`` is
            that of ``torch.compile``.
        policy: the name of a preset, a ``Policy``, or the path of one. It holds on the types of device that
            the model's parameters are on; without parameters, on those of its inputs. It replaces the policy
            of an earlier ``nc.compile``.
        settings: ``backend``, ``mode``, ``fullgraph``, ``dynamic`` and others that ``torch.compile`` takes.

    Returns:
        As ``torch.compile`` does: a module around ``model``, whose weights it shares, or a function. It
        computes by the policy too where other code that calls it is compiled, or if it is compiled again.

    Raises:
        PolicyError: ``model`` cannot be called; or the policy does not exist, names modules that the model
            does not have, or needs weights in a low format.
        UnsupportedError: a function was given with a rule for modules or with an fp8 rule; in a call, where a
            rule refuses what is called, or by ``torch.export``.
        OrderError: here or in a call, if a layer with an fp8 rule was not converted by ``nc.apply``.
    """
    if not callable(model):
        raise PolicyError(f"expected a module or a function to compile, got {type(model).__name__}")
    policy = with_fp32_weights(policy)
    # Without it, models of one class share a limit of recompilations, beyond which they run uncompiled.
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # since 2.12
        settings.setdefault("isolate_recompiles", True)
    model = _not_compiled(model)
    if not isinstance(model, torch.nn.Module):
        for rule in policy.rules:
            if rule.is_for_modules or rule.compute in FP8_RECIPES:
                raise UnsupportedError(
                    f"expected a module to compile with a rule for modules ({rule}), got a function: compile "
                    "the module that it calls, or leave the rule out"
                )
        return _in_region(torch.compile(model, **settings), _Compiled(model, policy))
    refuse_missed(missed_rules(policy, model))
    ruled = compiled_rules(policy)
    ruled.follow(model)
    compiled: Any = torch.compile(model, **settings)
    compiled.forward = _in_region(compiled.forward, _Compiled(model, policy, ruled))
    trace_as_called(compiled)
    # A copy or a pickle compiles its own model.
    again = functools.partial(compile, **settings)
    compiled.__dict__["__reduce_ex__"] = lambda _protocol: (again, (model, policy))
    return compiled


def _not_compiled(model: Any) -> Any:
    """Return the module that ``torch.compile`` or ``nc.compile`` was given, or ``nc.compile``'s function.

    Anything else is returned as it is, also a function that ``torch.compile`` made.
    """
    if isinstance(model, torch.nn.Module):
        return model_of(model)
    return getattr(model, "_narrowcast_target", model)


def _in_region(function: Callable[..., Any], compiled: _Compiled) -> Any:
    """Return ``function``, which ``torch.compile`` made, called in the region of a policy."""

    @functools.wraps(function)
    def in_region(*args: Any, **kwargs: Any) -> Any:
        with compiled.opened(args, kwargs):
            try:
                return function(*args, **kwargs)
            except dynamo_error() as error:
                # A rule that refuses an operator raises while Dynamo traces, which wraps that error.
                own_error = _own_error(error)
                if own_error is None:
                    raise
                raise own_error from None

    vars(in_region)["_narrowcast_target"] = compiled.target
    # An outer torch.compile traces the target instead of what the inner one made.
    stand_for(in_region, _not_compiled_in_region(compiled))
    # Compiled code may call it at a graph break: Dynamo must not compile ``in_region`` itself then.
    return traced_only_inline(in_region)


def _not_compiled_in_region(compiled: _Compiled) -> Callable[..., Any]:
    """Return a function that calls the target by the policy, for an outer ``torch.compile`` to trace."""
    key, target = compiled.key, compiled.target

    def by_policy(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_export()
            inputs = tensors_inside((args, kwargs))[:1]  # tracing all would take long
            device_of_inputs = inputs[0].device.type if inputs else None
            devices = _devices_while_tracing(key, device_of_inputs)
            return _in_traced_regions(key, devices, target, args, kwargs)
        with compiled.opened(args, kwargs):
            return target(*args, **kwargs)

    # Its name and signature, but no attributes of what torch.compile returned.
    called = target if compiled.module is None else target.forward
    return functools.update_wrapper(by_policy, called, updated=())


def _in_traced_regions(
    key: str, devices: tuple[str, ...], target: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Open the policy's regions on ``devices``, one inside the other, and call ``target`` in them."""
    if not devices:
        return target(*args, **kwargs)
    with traced_region(*_region_while_tracing(key, devices[0])):
        return _in_traced_regions(key, devices[1:], target, args, kwargs)


@constant_while_tracing
def _devices_while_tracing(key: str, of_inputs: str | None) -> tuple[str, ...]:
    compiled = _by_key[key]
    compiled.follow_module()
    devices = [] if compiled.module is None else weight_device_types(compiled.module)
    if not devices:
        devices = [of_inputs or torch.get_default_device().type]
    return tuple(device for device in devices if device != "meta")


@constant_while_tracing
def _region_while_tracing(key: str, device: str) -> TracedState:
    compiled = _by_key[key]
    device, dtype, enabled, scope = compiled.region_on(device)
    compiled.traced_scopes.add(scope)
    return traced_state(device, dtype, enabled, scope, promotes=False)


def _refuse_export() -> None:
    if is_exporting():
        raise UnsupportedError(
            "expected a model without a policy for torch.export, got one that nc.compile returned, whose "
            "policy no program keeps: export the model that it was given"
        )


def _own_error(error: BaseException) -> NarrowcastError | None:
    """Return the error of narrowcast that Dynamo met while it traced, or that the backend raised; or None."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, NarrowcastError):
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    return cause

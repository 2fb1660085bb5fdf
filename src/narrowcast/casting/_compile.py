"""``nc.compile``: ``torch.compile`` of a model that computes by a policy.

The compiled model opens the region of its policy when it is called, as under ``nc.apply``. Dynamo and
AOTAutograd trace in that region: they meet the kernels on the autocast key, which cast as in eager code, and
the calls of modules with rules, which enter ``torch.autocast`` there. Dynamo guards the autocast state, in
which the rules in force are kept (see ``_scopes``), so that a graph is used under its own rules alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from narrowcast.casting._apply import RuledModules, compiled_rules, missed_rules, refuse_missed
from narrowcast.casting._devices import device_types
from narrowcast.casting._kernels import region_of
from narrowcast.casting._regions import regions
from narrowcast.casting._torch_internals import (
    dynamo_error,
    trace_backward_outside_of_regions,
)
from narrowcast.errors import NarrowcastError, PolicyError, UnsupportedError
from narrowcast.machine import check_device
from narrowcast.policy import FP8_RECIPES, Policy, Scope, with_fp32_weights


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
            the model's parameters are on; without parameters, on those of its inputs.
        settings: ``backend``, ``mode``, ``fullgraph``, ``dynamic`` and what else ``torch.compile`` takes.

    Returns:
        As ``torch.compile`` does: a module around ``model``, whose weights it shares, or a function.

    Raises:
        PolicyError: ``model`` cannot be called; or the policy does not exist, names modules that the model
            does not have, or needs weights in a low format.
        UnsupportedError: a function was given with a rule for modules or with an fp8 rule; in a call, where a
            rule refuses what is called.
        OrderError: here or in a call, if a layer with an fp8 rule was not converted by ``nc.apply``.
    """
    if not callable(model):
        raise PolicyError(f"expected a module or a function to compile, got {type(model).__name__}")
    wanted = with_fp32_weights(policy)
    trace_backward_outside_of_regions()
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # since 2.12
        settings.setdefault("isolate_recompiles", True)
    if not isinstance(model, torch.nn.Module):
        for rule in wanted.rules:
            if rule.is_for_modules or rule.compute in FP8_RECIPES:
                raise UnsupportedError(
                    f"expected a module to compile with a rule for modules ({rule}), got a function: compile "
                    "the module that it calls, or leave the rule out"
                )
        return _in_region(torch.compile(model, **settings), wanted)
    refuse_missed(missed_rules(wanted, model))
    ruled = compiled_rules(wanted)
    ruled.follow(model)
    compiled: Any = torch.compile(model, **settings)
    compiled.forward = _in_region(compiled.forward, wanted, model, ruled)
    # A copy or a pickle compiles its own model.
    again = functools.partial(compile, **settings)
    compiled.__dict__["__reduce_ex__"] = lambda _protocol: (again, (model, wanted))
    return compiled


def _in_region(
    function: Callable[..., Any],
    policy: Policy,
    module: torch.nn.Module | None = None,
    ruled: RuledModules | None = None,
) -> Any:
    @functools.wraps(function)
    def in_region(*args: Any, **kwargs: Any) -> Any:
        if module is not None and ruled is not None:
            ruled.follow(module)
        # Not nc.autocast, which in a thread beside one that compiles would take itself for traced.
        with regions(_regions_of(policy, module, args, kwargs), torch.is_autocast_cache_enabled()):
            try:
                return function(*args, **kwargs)
            except dynamo_error() as error:
                raise _own_error(error) or error from None

    return in_region


def _regions_of(
    policy: Policy, module: torch.nn.Module | None, args: Any, kwargs: Any
) -> Iterator[tuple[str, torch.dtype, bool, Scope | None]]:
    for device in device_types(module, args, kwargs):
        check_device(device)
        dtype, scope = region_of(policy, device)
        yield device, dtype, dtype != torch.float32 or scope is not None, scope


def _own_error(error: BaseException) -> NarrowcastError | None:
    """Return the error of ours that Dynamo met while it traced, or that the backend raised."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, NarrowcastError):
        found = getattr(found, "inner_exception", None) or found.__cause__ or found.__context__
    return found

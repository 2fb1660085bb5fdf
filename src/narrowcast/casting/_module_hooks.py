"""The hooks by which a model computes by a policy: they open its region, and at each module its rules.

They hold the policy, so that it is there in whatever thread calls the module: where no region of it is
open, they open one. PyTorch calls no hook after a ``KeyboardInterrupt``; a region that it leaves open is
closed once the exception is dropped, and at the latest as the next region opens.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from narrowcast.casting import _regions
from narrowcast.casting._kernels import root_place
from narrowcast.casting._places import here
from narrowcast.casting._torch_internals import not_compiled_alone, unseen_by_the_compiler
from narrowcast.casting._tree import cast_where
from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.machine import check_device
from narrowcast.policy import Policy, Rule, Scope, dtype_of, resolve

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32)

_EXPORTED = (
    "expected a model without a policy for torch.export, got one with hooks of nc.apply, which no program "
    "keeps: export it before nc.apply or after remove(), then casting.cast_exported(program, policy)"
)


class _Thread(threading.local):
    """The calls of modules with hooks that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.calls: list[OpenCall] = []


_here = _Thread()


def calls_under_way(policy: Policy) -> list[OpenCall]:
    """Those of modules that follow ``policy`` in this thread."""
    return [call for call in _here.calls if call.shared.policy == policy and _regions.is_running(call.caller)]


class OpenCall:
    """One call of a module with hooks: how many regions it opened, and what its outputs are cast to."""

    __slots__ = ("at_its_end", "caller", "hook", "module", "output", "regions", "shared")

    def __init__(self, module: torch.nn.Module, caller: int, hook: Hook) -> None:
        self.module = module
        self.caller = caller
        self.hook = hook
        self.shared = hook._shared
        self.at_its_end: list[Any] = []  # handles to remove
        self.regions = 0
        self.output: list[tuple[str, torch.dtype, Rule]] = []

    def check_recomputation(self) -> None:
        """See ``Shared``."""
        self.shared.check_recomputation()


class _Arguments(dict[str, Any]):
    """Keyword arguments of a call of a module, which end with it, whatever ends it."""

    __slots__ = ()

    def __del__(self) -> None:
        _regions.close_abandoned()


def _caller_of_hooks() -> int:
    """The frame of the call of a module that our hooks were called from.

    Its identity, since a reference would hold the arguments, with which an interrupted call is to end.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return id(frame)


class Shared:
    """What the hooks of one policy on one model have in common. Copies of the model share it; in another
    process it is made anew.
    """

    def __init__(
        self, policy: Policy, opens: bool, admits: Callable[[torch.nn.Module], bool] | None = None
    ) -> None:
        self.policy = policy
        self.opens = opens
        self.admits = admits  # in this process only
        self.removed = False  # from copies too
        self.ended = False

    def __deepcopy__(self, _memo: object) -> Shared:
        return self

    def check_recomputation(self) -> None:
        """What was computed under this policy cannot be computed again without its hooks.

        Raises:
            OrderError: it was removed meanwhile.
        """
        if self.ended:
            raise OrderError(
                "expected the policy of a checkpointed model to be there until the backward pass, which "
                "computes the model's forward again, got one that was removed: go backward before remove(), "
                "or inside the with statement of nc.apply"
            )

    def __reduce__(self) -> Any:
        return Shared, (self.policy, self.opens)


class Hook:
    """The two hooks of one module."""

    def __init__(self, shared: Shared, rules: tuple[Rule, ...], opening: bool) -> None:
        self._shared = shared
        self._rules = rules
        self._opening = opening
        self._casts = any(one.op is None for one in rules)

    @property
    def policy(self) -> Policy:
        """What was applied, here or to the model that this one was copied from."""
        return self._shared.policy

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_exporting() and not self._shared.removed:
            raise UnsupportedError(_EXPORTED)
        if torch.compiler.is_compiling():
            return _untraced(self._before, module, args, kwargs)
        return self._before(module, args, kwargs)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return _untraced(self._after, module, args, output)
        return self._after(module, args, output)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._shared.removed:
            return None
        self._prepare(module)
        opened = _here.calls
        while opened and not _regions.is_running(opened[-1].caller):
            opened.pop()  # left by a KeyboardInterrupt, after which PyTorch calls no hook
        call = OpenCall(module, _caller_of_hooks(), self)
        try:
            opens = self._opening or (self._shared.opens and not self._devices())
            if opens and (self._shared.admits is None or self._shared.admits(module)):
                self._open_regions(call, module, args, kwargs)
            for device in self._devices() if self._rules else ():
                args, kwargs = self._go_inside(call, device, args, kwargs)
        except BaseException:
            self._close(call)
            raise
        opened.append(call)
        return args, _Arguments(kwargs)

    def _after(self, module: torch.nn.Module, _args: Any, output: Any) -> Any:
        opened = _here.calls
        if not opened or opened[-1].hook is not self or opened[-1].module is not module:
            return output  # called before the hooks were there
        call = opened.pop()
        self._close(call)
        for handle in call.at_its_end:
            handle.remove()
        for device, dtype, rule in call.output:
            output = _cast_by(rule, output, dtype, device)
        return output

    def _prepare(self, module: torch.nn.Module) -> None:
        """What is to be done before each call."""

    def _devices(self) -> list[str]:
        """The device types on which a region of this policy is open in this thread."""
        rules = self._shared.policy.rules
        return [device for device, place in here.places.items() if place.resolved.rules == rules]

    def _open_regions(self, call: OpenCall, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        policy = self._shared.policy
        for device in device_types(module, args, kwargs):
            check_device(device)
            dtype = resolve(policy, device)
            on = dtype != torch.float32 or not policy.is_plain
            place = None if policy.is_plain else root_place(policy, device, dtype)
            if on and not _is_open(device, dtype, place):
                self._enter(call, device, place, dtype, enabled=True)
            elif not on and torch.is_autocast_enabled(device):
                # A region around the call is of another policy, and this one computes in fp32.
                self._enter(call, device, None, torch.get_autocast_dtype(device), enabled=False)

    def _go_inside(self, call: OpenCall, device: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        outside = here.places[device]
        switched_off = outside.rule is not None and outside.rule.compute == "as-is"
        if not torch.is_autocast_enabled(device) and not switched_off:
            return args, kwargs  # by the script, inside the model
        place = outside.inside(self._rules)
        rule = place.rule if self._casts else None
        if rule is None:
            on = torch.is_autocast_enabled(device) or place.rules_operators
            self._enter(call, device, place, torch.get_autocast_dtype(device), on)
            return args, kwargs
        if rule.compute == "refuse":
            raise UnsupportedError(f"{type(call.module).__name__} was called, which a rule refuses ({rule})")
        dtype = _compute_dtype(rule, place, (args, kwargs), device)
        region = dtype if dtype is not None else torch.get_autocast_dtype(device)
        # Rules for operators inside come first; without any, nothing is to be cast.
        self._enter(call, device, place, region, rule.compute != "as-is" or place.rules_operators)
        if rule.output is not None:
            word = place.resolved.lower if rule.output == "lower" else rule.output
            call.output.append((device, dtype_of(word), rule))
        if dtype is not None:
            args, kwargs = _cast_by(rule, args, dtype, device), _cast_by(rule, kwargs, dtype, device)
        return args, kwargs

    def _enter(
        self, call: OpenCall, device: str, place: Scope | None, dtype: torch.dtype, enabled: bool
    ) -> None:
        caches = torch.is_autocast_cache_enabled()
        _regions.enter(call, device, dtype, enabled, caches, audible=False, place=place, caller=call.caller)
        call.regions += 1

    def _close(self, call: OpenCall) -> None:
        for _ in range(call.regions):
            _regions.leave(call)
        call.regions = 0


class HookBesideGraphs:
    """The two hooks of one module in a model that ``nc.compile`` compiles, where Python calls them.

    A subclass says what is done where Dynamo traces them. That something is compiled somewhere says nothing
    of it: another thread may do so.
    """

    def __init__(self, hook: Hook | None) -> None:
        self._hook = hook

    @not_compiled_alone
    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.traced_before(args, kwargs)
        return None if self._hook is None else self._hook._before(module, args, kwargs)

    @not_compiled_alone
    def after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.traced_after(output)
        return None if self._hook is None else self._hook._after(module, args, output)

    def traced_before(self, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def traced_after(self, output: Any) -> Any:
        raise NotImplementedError


@unseen_by_the_compiler
def _untraced(hook: Any, *args: Any) -> Any:
    """Break the graph: a compiled piece of the model is made in the region that is open around it."""
    return hook(*args)


def _compute_dtype(rule: Rule, place: Scope, values: Any, device: str) -> torch.dtype | None:
    """What a module's inputs are cast to; None: to nothing."""
    if rule.compute == "as-is":
        return None
    if rule.compute == "promote":
        return _widest(values, device)
    return dtype_of(place.resolved.lower if rule.compute == "lower" else rule.compute)


def _widest(values: Any, device: str) -> torch.dtype | None:
    found: list[torch.dtype] = []

    def note(tensor: torch.Tensor) -> bool:
        if tensor.dtype in _CASTABLE and tensor.device.type == device:
            found.append(tensor.dtype)
        return False

    cast_where(values, torch.float32, note)
    widest = found[0] if found else None
    for dtype in found[1:]:
        widest = torch.promote_types(widest, dtype)  # type: ignore[arg-type]
    return widest


def _eligible(device: str, dtype: torch.dtype) -> Any:
    def wants(tensor: torch.Tensor) -> bool:
        return tensor.dtype in _CASTABLE and tensor.dtype is not dtype and tensor.device.type == device

    return wants


def _cast_by(rule: Rule, values: Any, dtype: torch.dtype, device: str) -> Any:
    """Cast what goes into a module or comes out of it, so that who watches the casts knows the rule."""
    here.casts_by = rule
    try:
        return cast_where(values, dtype, _eligible(device, dtype))
    finally:
        here.casts_by = None


def _is_open(device: str, dtype: torch.dtype, place: Scope | None) -> bool:
    """Whether the thread is in such a region already, at that place or inside it."""
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != dtype:
        return False
    current = here.places.get(device)
    return current is place or (
        current is not None and place is not None and current.resolved is place.resolved
    )


def device_types(module: torch.nn.Module | None, args: Any, kwargs: Any) -> Iterable[str]:
    """The types of device that ``module`` computes on: its weights', or without any its inputs'.

    Without either, the one on which tensors are made by default.
    """
    found = dict.fromkeys(one.device.type for one in _weights(module)) if module is not None else {}
    if not found:

        def note(tensor: torch.Tensor) -> bool:
            found[tensor.device.type] = None
            return False

        cast_where((args, kwargs), torch.float32, note)
    if not found:
        found[torch.get_default_device().type] = None
    return [device for device in found if device != "meta"]


def _weights(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        for weight in (*part._parameters.values(), *part._buffers.values()):
            if weight is not None:
                yield weight


def hooks_on(module: torch.nn.Module) -> list[tuple[int, Hook]]:
    """Hooks of ours on ``module`` itself, with their keys."""
    found = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
    owners = [(key, getattr(hook, "__self__", None)) for key, hook in found]
    return [(key, owner) for key, owner in owners if isinstance(owner, Hook)]

"""Regions: ``nc.autocast``, those that other packages open, and functions whose backward follows them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

import torch

from narrowcast.casting._devices import check_device_type, check_dtype
from narrowcast.casting._locks import process_lock
from narrowcast.casting._torch_internals import (
    ENGINE,
    Replacements,
    is_exporting,
    nesting,
    skipped_by_dynamo,
    without_autocast,
)
from narrowcast.casting.kernels._kernels import dtype_and_scope, root_scope
from narrowcast.casting.models import _apply
from narrowcast.casting.models._tree import cast_where
from narrowcast.casting.regions import _regions, _scopes, _weight_casts
from narrowcast.casting.regions._regions import traced_region
from narrowcast.casting.regions._scopes import scope_on
from narrowcast.casting.regions._weight_casts import drop_casts
from narrowcast.errors import OrderError, PolicyError, UnsupportedError
from narrowcast.policy import FP8_RECIPES, Policy, Rule, Scope, as_policy, resolve

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_R = TypeVar("_R")


class autocast:  # noqa: N801 (torch's spelling)
    """A region in which ops run in the format that suits each; drop-in for ``torch.autocast``.

    A context manager and a decorator. One object may be entered again while it is open, by a decorated
    function that calls itself too, and by several threads at once. Regions of different formats may be nested
    in any order around shared layers, and run in several threads. A step of an optimizer or
    ``load_state_dict`` inside a region takes effect at once. ``torch.is_autocast_enabled``,
    ``torch.get_autocast_dtype`` and ``torch.is_autocast_cache_enabled`` describe the region, and after it,
    also after an exception, return what they did before. Call ``backward`` after the region: the first call
    inside one warns.

    Args:
        device_type: type of device whose ops are cast, as ``"cuda"`` or ``"cpu"``.
        dtype: format of the ops that gain by a narrow one: ``torch.float16``, ``torch.bfloat16``, or
            ``torch.float32``: then all ops of torch's list compute in fp32, fp16 and bf16 inputs cast up.
            By default ``torch.get_autocast_dtype(device_type)``.
        enabled: False turns casting off inside.
        cache_enabled: whether the cast of a weight is kept until the outermost region ends. By default
            ``torch.is_autocast_cache_enabled()``, read when this object is made. Off in any case while
            another thread keeps casts of another format, and in code that ``torch.compile`` traces.
        policy: the name of a preset, as ``"bf16"``, a ``Policy``, or the path of one; instead of ``dtype``.
            Its rules hold inside, in place of those of a region outside. Without it the rules of a region
            outside go on. Rules for modules need ``nc.apply(model, policy)`` first.

    Tensors of fp64, of other devices, and integers stay as they are; a cast to fp16 overflows to infinity
    beyond 65504, one to bf16 or fp32 does not, and NaN stays NaN. Which op does what is torch's own table
    (https://docs.pytorch.org/docs/stable/amp.html), untouched but for what a policy's rules say.

    Raises:
        ValueError: ``device_type`` is not a str.
        DeviceError: torch has no autocast for the device, or it is ``"cuda"`` and this machine has none.
        PolicyError: ``dtype`` and ``policy`` were both given, the device cannot autocast to the format, or
            the policy has rules for modules and was applied to no model.
        TypeError: ``enabled`` or ``cache_enabled`` is not a bool.
        OrderError: on leaving, if it is not the innermost region of this thread.
    """

    _warns = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """In traced code, return a region that a tracer can follow. Other subclasses do so on entering."""
        if torch.compiler.is_compiling() and cls in (autocast, ScopedRegion):
            kwargs = {name: value for name, value in kwargs.items() if name != "scope"}
            return _traced(*_checked(*args, **kwargs), kwargs.get("policy"))
        return object.__new__(cls)

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | None = None,
    ) -> None:
        self._policy: Policy | None = None
        self._policy_scope: Scope | None = None
        if policy is not None:
            check_device_type(device_type, enabled=enabled)
            _check_one_format(dtype, policy)
            self._policy = as_policy(policy)
            dtype, self._policy_scope = dtype_and_scope(self._policy, device_type)
        # The names that torch.autocast gives them, which other libraries read.
        self.device, self.fast_dtype, self._enabled, self._cache_enabled = _checked(
            device_type, dtype, enabled, cache_enabled
        )
        # The traced regions that entering this object opened, the innermost last.
        self._traced: list[Any] = []

    def __enter__(self) -> autocast:
        if torch.compiler.is_compiling():  # this object was made before torch.export ran the code
            region = self._again()
            self._traced.append(region)
            region.__enter__()
        else:
            scope = self._inner_scope()
            _regions.enter(
                self,
                self.device,
                self.fast_dtype,
                self._enabled,
                self._cache_enabled,
                scope,
                None,
                self._warns,
            )
        return self

    def _inner_scope(self) -> Scope | None:
        """Return the scope of calls inside; None: no rules are in force there."""
        policy = self._policy
        if policy is None:
            return scope_on(self.device)
        scope = self._policy_scope
        needs_apply = scope is not None and scope.resolved.names_modules and self._enabled
        if needs_apply and not _apply.is_applied(policy):
            first = next(rule for rule in policy.rules if rule.is_for_modules or rule.compute in FP8_RECIPES)
            raise PolicyError(
                f"the policy has a rule for modules ({first}), which a region alone cannot find: "
                "call nc.apply(model, policy) first, which opens the region too"
            )
        return scope

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._traced:
            self._traced.pop().__exit__(exc_type, exc, trace)
            return
        _regions.leave(self)

    def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
        if not callable(func):
            raise TypeError(
                f"expected a callable to decorate, got {type(func).__name__}; to open a region write "
                f'"with nc.autocast({self.device!r}):"'
            )

        @functools.wraps(func)
        def decorate_autocast(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # A new object where code is traced: Dynamo enters no object that it has not seen made.
            with self._again() if torch.compiler.is_compiling() else self:
                return func(*args, **kwargs)

        # The error of torch.jit.script, under torch's own name.
        unsupported = "@autocast() decorator is not supported in script mode"
        vars(decorate_autocast)["__script_unsupported"] = unsupported
        return decorate_autocast

    def _again(self) -> Any:
        """Return a new region with the arguments of this one."""
        if self._policy is not None:
            return autocast(self.device, None, self._enabled, self._cache_enabled, policy=self._policy)
        return autocast(self.device, self.fast_dtype, self._enabled, self._cache_enabled)

    def __repr__(self) -> str:
        return (
            f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self._enabled}, "
            f"cache_enabled={self._cache_enabled})"
        )


def _checked(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    policy: Policy | str | None = None,
) -> tuple[str, torch.dtype, bool, bool]:
    """Return the arguments with their defaults; raise if they are invalid."""
    check_device_type(device_type, enabled=enabled)
    if policy is not None:
        _check_one_format(dtype, policy)
        dtype = resolve(policy, device_type)
    elif dtype is None:
        dtype = torch.get_autocast_dtype(device_type)
    if enabled:
        check_dtype(device_type, dtype)
    if cache_enabled is None:
        cache_enabled = torch.is_autocast_cache_enabled()
    if not isinstance(enabled, bool):
        raise _not_a_bool("enabled", enabled)
    if not isinstance(cache_enabled, bool):
        raise _not_a_bool("cache_enabled", cache_enabled)
    return device_type, dtype, enabled, cache_enabled


def _not_a_bool(name: str, flag: object) -> TypeError:
    return TypeError(f"expected {name} to be a bool, got {flag!r} of type {type(flag).__name__}")


def _check_one_format(dtype: torch.dtype | None, policy: Policy | str) -> None:
    if dtype is not None:
        raise PolicyError(
            f"expected a dtype or a policy, got both: {dtype} and {policy!r}; leave one of them out"
        )


class ScopedRegion(autocast):
    """A region with a given scope. A backward pass inside it does not warn."""

    _warns = False

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype,
        enabled: bool,
        cache_enabled: bool | None = None,
        *,
        scope: Scope | None = None,
    ) -> None:
        super().__init__(device_type, dtype, enabled, cache_enabled)
        self._given_scope = scope

    def _inner_scope(self) -> Scope | None:
        return self._given_scope


def _traced(
    device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, policy: Policy | str | None = None
) -> Any:
    """Return a region that Dynamo and ``torch.export`` follow; refuse rules, which a graph could not keep."""
    if policy is not None and not as_policy(policy).is_plain:
        if is_exporting():
            raise UnsupportedError(
                "a region whose policy has rules was opened in code that torch.export traces, and a program "
                "keeps no rules: leave it out"
            )
        raise UnsupportedError(
            "a region whose policy has rules was opened in code that torch.compile traces: open it around "
            "the compiled function, or use nc.compile(model, policy)"
        )
    if is_exporting():
        if enabled and dtype == torch.float32:
            raise UnsupportedError(
                "expected a region in float16 or bfloat16 for torch.export, got torch.float32, which an "
                "exported program cannot keep; leave the region out and cast the half inputs of its layers "
                "with .float()"
            )
        # torch.export writes the setting into the graph, where it should say what the script did.
        return traced_region(device, dtype, enabled, cache_enabled=cache_enabled)
    return traced_region(device, dtype, enabled)


# ---- custom functions


@overload
def custom_fwd(fwd: _F, *, device_type: str, cast_inputs: torch.dtype | None = None) -> _F: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[[_F], _F]: ...
def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorator of the ``forward(ctx, ...)`` of a ``torch.autograd.Function``; drop-in for ``torch.amp``'s.

    Records on ``ctx`` the region that ``forward`` runs in, under the names that ``torch.amp`` uses, so that
    either library's ``custom_bwd`` can bring it back.

    Args:
        fwd: the function; without it, the decorator is returned.
        device_type: type of device whose region and tensors are meant.
        cast_inputs: without it ``forward`` runs in the region as it is. With it, and inside a region, the
            floating tensors of that device, fp64 aside, are cast to this format wherever they are in the
            arguments (lists, dicts, sets, named and other tuples, dataclasses: see ``cast_floating``), and
            ``forward`` runs with casting off. Outside a region it has no effect.

    Casts are not seen by autograd, which is off in a forward: gradients come back in the format of the
    inputs. Overflow and NaN are as in ``Tensor.to``. Source:
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html, "Functions with multiple inputs".

    Raises:
        ValueError: ``device_type`` is not a str.
        DeviceError: torch has no autocast for the device.
        PolicyError: ``cast_inputs`` is not a floating format.
    """
    check_device_type(device_type, enabled=False)
    if cast_inputs is not None and not (
        isinstance(cast_inputs, torch.dtype) and cast_inputs.is_floating_point
    ):
        raise PolicyError(f"expected cast_inputs to be a floating torch.dtype or None, got {cast_inputs!r}")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    def wants(tensor: torch.Tensor) -> bool:
        dtype = tensor.dtype
        is_castable = dtype.is_floating_point and dtype not in (torch.float64, cast_inputs)
        return is_castable and tensor.device.type == device_type

    @functools.wraps(fwd)
    def decorate_fwd(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        inside = torch.is_autocast_enabled(device_type)
        ctx._dtype = torch.get_autocast_dtype(device_type)
        ctx._fwd_used_autocast = inside and cast_inputs is None
        if not torch.compiler.is_compiling():
            ctx._narrowcast_scope = scope_on(device_type)
        if cast_inputs is None or not inside:
            return fwd(ctx, *args, **kwargs)
        with ScopedRegion(device_type, ctx._dtype, enabled=False):
            return fwd(ctx, *cast_where(args, cast_inputs, wants), **cast_where(kwargs, cast_inputs, wants))

    return decorate_fwd


@overload
def custom_bwd(bwd: _F, *, device_type: str) -> _F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[_F], _F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorator of the ``backward(ctx, ...)``: runs it in the forward's region; drop-in for ``torch.amp``'s.

    The forward is decorated with ``custom_fwd``, of this library or of ``torch.amp``. A region in
    ``torch.float32`` is brought back too. Works in whatever thread runs the backward.

    Args:
        bwd: the function; without it, the decorator is returned.
        device_type: type of device whose region is meant, as given to ``custom_fwd``.

    Raises:
        ValueError: ``device_type`` is not a str.
        DeviceError: torch has no autocast for the device.
        OrderError: in the backward, if the forward recorded no region.
    """
    check_device_type(device_type, enabled=False)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorate_bwd(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(ctx, "_fwd_used_autocast"):
            raise OrderError(
                f"expected the forward of {type(ctx).__name__.removesuffix('Backward')} to be decorated with "
                f"custom_fwd, got one that recorded no region; decorate it with "
                f'@nc.custom_fwd(device_type="{device_type}")'
            )
        # A forward of torch.amp's custom_fwd recorded no rules, and runs backward by PyTorch's own table.
        scope = getattr(ctx, "_narrowcast_scope", None)
        with ScopedRegion(device_type, ctx._dtype, ctx._fwd_used_autocast, scope=scope):
            return bwd(ctx, *args, **kwargs)

    return decorate_bwd


# ---- regions that outlast the code that opened them


def active_scopes() -> Mapping[str, Scope]:
    """Return device type -> the scope of this thread's calls, where autocast is enabled."""
    active = {}
    for device, scope in _scopes.scopes_here().items():
        if torch.is_autocast_enabled(device):
            active[device] = scope
    return active


class LastingRegion:
    """A region of ``policy`` on some device types, open in the calling thread until ``close()``.

    Args:
        policy: rules for operators only.
        dtypes: device type -> the region's dtype there.

    Raises:
        OrderError: another region is open in this thread, which would be closed in the wrong order.
    """

    def __init__(self, policy: Policy, dtypes: Mapping[str, torch.dtype]) -> None:
        if nesting() > 0:
            raise OrderError(
                "expected no open region of autocast where one is to begin that lasts, got one: leave its "
                "with statement first"
            )
        self._thread = threading.current_thread()
        # If a step raises, both stacks undo the steps before it.
        with ExitStack() as opened, ExitStack() as watching:
            for device, dtype in dtypes.items():
                scope = root_scope(policy, device, dtype)
                opened.enter_context(ScopedRegion(device, dtype, True, True, scope=scope))
            watching.enter_context(_backward_outside(policy))
            _weight_casts.LOADING.begin(self)
            watching.callback(_weight_casts.LOADING.end, self)
            _weight_casts.watch_optimizers()
            self._regions, self._watching = opened.pop_all(), watching.pop_all()
        self._depth = len(dtypes)

    def close(self) -> None:
        """End the region; without effect the second time.

        Raises:
            OrderError: this is another thread, or a region was opened since and is still open.
        """
        if not self._depth:
            return
        if threading.current_thread() is not self._thread:
            raise OrderError(
                f"expected the thread that opened a lasting region to close it, {self._thread.name!r}, got "
                f"{threading.current_thread().name!r}: close it there"
            )
        if nesting() != self._depth:
            raise OrderError(
                "expected no region of autocast that was opened since, got one that is still open: leave its "
                "with statement first"
            )
        self._depth = 0
        self._watching.close()
        self._regions.close()


_lock = process_lock()
_outside_rules: list[tuple[Rule, ...]] = []
"""The rules of the policies of lasting regions, whose backward passes run outside of them."""


@contextmanager
def _backward_outside(policy: Policy) -> Iterator[None]:
    """In the block, backward passes that begin in a region of ``policy`` cast nothing, in any thread."""
    user = object()
    with _lock:
        _engine.begin(user)
        _outside_rules.append(policy.rules)
    try:
        yield
    finally:
        with _lock:
            _outside_rules.remove(policy.rules)
            _engine.end(user)


def _outside(below: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the start of autograd's engine, to turn autocast off here and in the engine's threads."""

    @skipped_by_dynamo
    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(scope.resolved.rules in _outside_rules for scope in _scopes.scopes_here().values()):
            return below(*args, **kwargs)
        drop_casts()  # so that the backward pass frees each cast when it is done with it
        try:
            with without_autocast():
                return below(*args, **kwargs)
        finally:
            drop_casts()  # those of recomputed forwards

    return run


_engine = Replacements((*ENGINE, _outside))

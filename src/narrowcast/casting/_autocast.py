"""``nc.autocast``: the region that a person opens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from narrowcast.casting import _modules, _regions, _torch_internals, _traced, _travel
from narrowcast.casting._kernels import region_of, root_place
from narrowcast.casting._places import place_on
from narrowcast.errors import DeviceError, PolicyError, near_names
from narrowcast.policy import FP8_RECIPES, Policy, Scope, as_policy, resolve

_P = ParamSpec("_P")
_R = TypeVar("_R")
# The devices that torch has an autocast table for; which of them a build knows is asked when one is named.
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu")
_FORMATS = (torch.bfloat16, torch.float16, torch.float32)
_regions.ask_to_bind(install=_travel.install, remove=_travel.remove)


class autocast:  # noqa: N801 (torch's spelling)
    """A region in which ops run in the format that suits each; drop-in for ``torch.autocast``.

    A context manager and a decorator. One object may be entered again while it is open, by a decorated
    function that calls itself too, and by several threads at once. Regions of different formats may be nested
    in any order around shared layers, and run in several threads. A step of an optimizer or
    ``load_state_dict`` inside a region takes effect at once. ``torch.is_autocast_enabled``,
    ``torch.get_autocast_dtype`` and ``torch.is_autocast_cache_enabled`` answer for the region, and as before
    once it is left, by an exception too. ``backward`` belongs after the region: inside it warns, once.

    Args:
        device_type: type of device whose ops are cast, as ``"cuda"`` or ``"cpu"``.
        dtype: format of the ops that gain by a narrow one: ``torch.float16``, ``torch.bfloat16``, or
            ``torch.float32``: then all ops of torch's list compute in fp32, fp16 and bf16 inputs cast up.
            By default ``torch.get_autocast_dtype(device_type)``.
        enabled: False turns casting off inside.
        cache_enabled: whether the cast of a weight is kept until the outermost region ends; by default as it
            is where this object is made. Off in any case while another thread keeps casts of another format,
            and in code that ``torch.compile`` traces.
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

    _audible = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """In code that is traced, what its tracer can follow; nothing new otherwise."""
        if torch.compiler.is_compiling():
            kwargs = {name: value for name, value in kwargs.items() if name not in ("place", "audible")}
            return _traced.region(*_settle(*args, **kwargs), kwargs.get("policy"))
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
        self._rules: Scope | None = None
        if policy is not None:
            check_device(device_type, enabled=enabled)
            _check_one_format(dtype, policy)
            self._policy = as_policy(policy)
            dtype, self._rules = region_of(self._policy, device_type)
        # The names that torch.autocast gives them, which other libraries read.
        self.device, self.fast_dtype, self._enabled, self._cache_enabled = _settle(
            device_type, dtype, enabled, cache_enabled
        )
        self._watch: list[Any] | None = None
        self._traced: list[Any] | None = None

    def __enter__(self) -> autocast:
        if torch.compiler.is_compiling():  # made before torch.export ran the code
            self._traced = [*(self._traced or ()), self._again()]
            self._traced[-1].__enter__()
        else:
            place = self._place()
            _regions.enter(
                self,
                self.device,
                self.fast_dtype,
                self._enabled,
                self._cache_enabled,
                audible=self._audible,
                place=place,
            )
        return self

    def _place(self) -> Scope | None:
        """Where the calls inside are made from; None: no rules are in force there."""
        policy = self._policy
        if policy is None:
            return place_on(self.device)
        place = self._rules
        if place is not None and place.resolved.names_modules and self._enabled:
            if not _modules.is_applied(policy):
                by_module = next(
                    one for one in policy.rules if one.is_for_modules or one.compute in FP8_RECIPES
                )
                raise PolicyError(
                    f"the policy has a rule for modules ({by_module}), which a region alone cannot find: "
                    "call nc.apply(model, policy) first, which opens the region too"
                )
            self._watch = [*(self._watch or ()), _modules.refuse_other_models(policy)]
        return place

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._traced:
            self._traced.pop().__exit__(exc_type, exc, trace)
            return
        if self._watch:
            self._watch.pop().remove()
        _regions.leave(self)

    def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
        if not callable(func):
            raise TypeError(
                f"expected a callable to decorate, got {type(func).__name__}; to open a region write "
                f'"with nc.autocast({self.device!r}):"'
            )

        return _decorate(self, func)

    def _again(self) -> Any:
        if self._policy is not None:
            return autocast(self.device, None, self._enabled, self._cache_enabled, policy=self._policy)
        return autocast(self.device, self.fast_dtype, self._enabled, self._cache_enabled)

    def __repr__(self) -> str:
        return (
            f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self._enabled}, "
            f"cache_enabled={self._cache_enabled})"
        )


def _decorate(region: autocast, func: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(func)
    def decorate_autocast(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # A new object where code is traced: Dynamo enters no object that it has not seen made.
        with region._again() if torch.compiler.is_compiling() else region:
            return func(*args, **kwargs)

    # What torch.jit.script says when it meets one; the name is torch's.
    decorate_autocast.__script_unsupported = "@autocast() decorator is not supported in script mode"  # type: ignore[attr-defined]
    return decorate_autocast


def _settle(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    policy: Policy | str | None = None,
) -> tuple[str, torch.dtype, bool, bool]:
    """What was asked for, with every default looked up; an error where it cannot be."""
    check_device(device_type, enabled=enabled)
    if policy is not None:
        _check_one_format(dtype, policy)
        dtype = resolve(policy, device_type)
    elif dtype is None:
        dtype = torch.get_autocast_dtype(device_type)
    if enabled:
        _check_dtype(device_type, dtype)
    if cache_enabled is None:
        cache_enabled = torch.is_autocast_cache_enabled()
    if not (isinstance(enabled, bool) and isinstance(cache_enabled, bool)):
        name, flag = ("cache_enabled", cache_enabled) if isinstance(enabled, bool) else ("enabled", enabled)
        raise TypeError(f"expected {name} to be a bool, got {flag!r} of type {type(flag).__name__}")
    return device_type, dtype, enabled, cache_enabled


def _check_one_format(dtype: torch.dtype | None, policy: Policy | str) -> None:
    if dtype is not None:
        raise PolicyError(
            f"expected a dtype or a policy, got both: {dtype} and {policy!r}; leave one of them out"
        )


def check_device(device_type: Any, *, enabled: bool) -> None:
    """Refuse what is no device, a device that torch cannot autocast, and, if ``enabled``, missing CUDA."""
    if not isinstance(device_type, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
    if device_type == "cpu":
        return  # every build has it, and a region is opened at each step
    try:
        known = torch.amp.is_autocast_available(device_type)
    except RuntimeError:
        known = False
    if not known:
        names = [name for name in (*_DEVICES, _torch_internals.privateuse1_name()) if name != "privateuseone"]
        known_names = near_names("cuda" if device_type.lower() == "gpu" else device_type, names)
        raise DeviceError(
            f"expected a device type that torch can autocast, got {device_type!r}. {known_names}"
        )
    if enabled and device_type == "cuda" and _torch_internals.cuda_is_missing():
        raise DeviceError(
            'expected a CUDA device for autocast("cuda"), got a machine or a build of torch without one; '
            'write autocast("cpu"), or autocast("cuda", enabled=torch.cuda.is_available()) to go on in fp32'
        )


def _check_dtype(device_type: str, dtype: Any) -> None:
    if device_type == "cpu" and dtype in _FORMATS:
        return
    supported = _FORMATS
    if device_type == _torch_internals.privateuse1_name():
        supported = (*getattr(torch, device_type).get_amp_supported_dtype(), torch.float32)
    if dtype not in supported:
        hint = f'; write policy="{dtype}" for a preset' if isinstance(dtype, str) else ""
        raise PolicyError(
            f"expected a format that {device_type} can autocast to, got {dtype!r}{hint}. "
            f"Supported: {', '.join(map(str, dict.fromkeys(supported)))}"
        )
    if device_type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise PolicyError(
            f"expected a format that this CUDA device can compute in, got torch.bfloat16 on "
            f"{torch.cuda.get_device_name()}; use torch.float16 with a GradScaler"
        )


class PlacedRegion(autocast):
    """A region of which the place is known, for code that opens it for others.

    A backward inside it is no mistake, unless it is ``audible``.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype,
        enabled: bool,
        cache_enabled: bool | None = None,
        *,
        place: Scope | None = None,
        audible: bool = False,
    ) -> None:
        super().__init__(device_type, dtype, enabled, cache_enabled)
        self._audible = audible
        self._given = place

    def _place(self) -> Scope | None:
        return self._given


def region_in(policy: Policy, device_type: str, dtype: torch.dtype, *, audible: bool = False) -> PlacedRegion:
    """A region of ``policy`` in ``dtype`` for code that saw to its rules for modules itself.

    In fp32 it is off, unless there are rules.
    """
    place = None if policy.is_plain else root_place(policy, device_type, dtype)
    enabled = dtype != torch.float32 or place is not None
    return PlacedRegion(device_type, dtype, enabled, place=place, audible=audible)

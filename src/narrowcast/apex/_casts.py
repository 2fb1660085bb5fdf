"""What O1 casts in the calling thread now, and casts of the arguments of whole functions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.apex._patches import Target
from narrowcast.apex._rules import BANNED, FLOAT, HALF
from narrowcast.casting import PlacedRegion, cast_where, places_here
from narrowcast.errors import AmpError
from narrowcast.policy import Policy

REFUSED = "refused"
"""An in-place form of a function that computes in float32: what it writes to cannot be cast."""
_LOW = (torch.float16, torch.bfloat16)
_FLOATING = (*_LOW, torch.float32)


@dataclass(frozen=True, slots=True)
class WholeCast:
    """How one function in Python is cast.

    Attributes:
        kind: a word of ``_rules``, or ``REFUSED``.
        alone: whether nothing is cast inside of it.
        advice: what is said where it refuses.
    """

    kind: str
    alone: bool = False
    advice: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Casts:
    """What one ``initialize`` with O1 asked for."""

    policy: Policy
    half: torch.dtype
    whole: Mapping[Target, WholeCast] = field(default_factory=dict)


class _Process:
    def __init__(self) -> None:
        self.by_rules: dict[int, Casts] = {}  # by the identity of the policy's rules, which places share
        self.users: Counter[int] = Counter()


_process = _Process()


def begin(casts: Casts) -> Callable[[], None]:
    """Have threads in a region of the policy of ``casts`` find them; returns what ends that."""
    key = id(casts.policy.rules)
    _process.by_rules.setdefault(key, casts)
    _process.users[key] += 1

    def end() -> None:
        _process.users[key] -= 1
        if not _process.users[key]:
            del _process.users[key], _process.by_rules[key]

    return end


def casts_here() -> tuple[Casts, tuple[str, ...]] | None:
    """What casts in this thread, and on which types of device; None: nothing of apex does."""
    if not _process.by_rules:
        return None
    devices = []
    found = None
    for device, place in places_here().items():
        its = _process.by_rules.get(id(place.resolved.rules))
        if its is not None and (found is None or its is found):
            found = its
            devices.append(device)
    return None if found is None else (found, tuple(devices))


# ---- off for a while


class _Thread(threading.local):
    def __init__(self) -> None:
        self.off = 0


_here = _Thread()


def are_off_here() -> bool:
    """Whether this thread is inside ``disable_casts``."""
    return _here.off > 0


@contextmanager
def disable_casts() -> Iterator[None]:
    """Cast nothing inside, in this thread, in models of O1 neither; exceptions leave it as a return does."""
    _here.off += 1
    try:
        with without_casts():
            yield
    finally:
        _here.off -= 1


@contextmanager
def without_casts() -> Iterator[None]:
    """As ``disable_casts``, but models that are called inside cast by themselves."""
    with ExitStack() as off:
        for device in places_here():
            off.enter_context(PlacedRegion(device, torch.get_autocast_dtype(device), False))
        yield


# ---- whole functions


def call_cast(
    how: WholeCast,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    casts: Casts,
    devices: tuple[str, ...],
) -> Any:
    """Call ``function`` with its arguments cast as ``how`` says."""
    if how.kind in (REFUSED, BANNED):
        if _tensors((args, kwargs), devices, lambda tensor: tensor.dtype in _LOW):
            raise AmpError(how.advice)
        return function(*args, **kwargs)
    dtype = _target(how.kind, (args, kwargs), casts, devices)
    if dtype is not None:

        def wants(tensor: torch.Tensor) -> bool:
            return _is_castable(tensor, devices) and tensor.dtype is not dtype

        args, kwargs = cast_where(args, dtype, wants), cast_where(kwargs, dtype, wants)
    if not how.alone:
        return function(*args, **kwargs)
    with without_casts():
        return function(*args, **kwargs)


def _target(kind: str, values: Any, casts: Casts, devices: tuple[str, ...]) -> torch.dtype | None:
    """The type that castable tensors in ``values`` are cast to; None: they stay."""
    if kind == HALF:
        return casts.half
    if kind == FLOAT:
        return torch.float32
    widest = None
    for dtype in _tensors(values, devices, lambda _: True):
        widest = dtype if widest is None else torch.promote_types(widest, dtype)
    return widest


def _tensors(
    values: Any, devices: tuple[str, ...], which: Callable[[torch.Tensor], bool]
) -> list[torch.dtype]:
    """The types of the castable tensors in ``values`` of which ``which`` is true."""
    found: list[torch.dtype] = []

    def note(tensor: torch.Tensor) -> bool:
        if _is_castable(tensor, devices) and which(tensor):
            found.append(tensor.dtype)
        return False

    cast_where(values, torch.float32, note)
    return found


def _is_castable(tensor: torch.Tensor, devices: tuple[str, ...]) -> bool:
    return tensor.dtype in _FLOATING and tensor.device.type in devices

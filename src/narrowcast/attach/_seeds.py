"""Seeds that a script sets itself, moved: the same script with other random numbers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import random
import threading
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch

from narrowcast.attach._patches import Patches

_LARGEST = 2**32


class _Thread(threading.local):
    """Whether this thread is in a seed function: torch's calls CUDA's with the seed it was given."""

    inside = False


def shift_seeds(patches: Patches, by: int, note: Callable[[str], None]) -> None:
    """Add ``by`` to every seed that is set from now on, of Python's, NumPy's and torch's random numbers.

    Only the functions that seed for everybody are meant. A generator that the script makes for itself and
    seeds libraries are handed (``random_state=0``) stay: they often say which data is whose, and every run
    should share that.

    Args:
        patches: what puts the functions back.
        by: at least 1.
        note: told, each time, that it happened, in a line for a person.
    """
    # torch.seed, which takes the clock's, is among them for the functions that it calls.
    owners: list[tuple[Any, str]] = [(random, "seed")]
    owners += [(owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed")]
    for device in (torch.cuda, torch.mps, torch.xpu):
        owners += [(device, name) for name in ("manual_seed", "manual_seed_all") if hasattr(device, name)]
    if importlib.util.find_spec("numpy") is not None:
        owners.append((importlib.import_module("numpy.random"), "seed"))
    thread = _Thread()
    for owner, name in owners:
        patches.replace(owner, name, _shifted(getattr(owner, name), by, note, thread))


def _shifted(
    original: Callable[..., Any], by: int, note: Callable[[str], None], thread: _Thread
) -> Callable[..., Any]:
    @functools.wraps(original)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        name = next((word for word in ("seed", "a") if word in kwargs), None)
        given = kwargs[name] if name else args[0] if args else None
        moved = None if thread.inside else _moved(given, by)
        if moved is not None:
            note("a repeat moves the seeds that the script sets by its number, so that it draws others")
            args, kwargs = (args, {**kwargs, name: moved}) if name else ((moved, *args[1:]), kwargs)
        before, thread.inside = thread.inside, True
        try:
            return original(*args, **kwargs)
        finally:
            thread.inside = before

    return seeded


def _moved(given: Any, by: int) -> Any:
    """Another seed of the same kind; None: there is none, as where the seed is the clock's."""
    if isinstance(given, Integral):
        seed = int(given) + by
        return seed % _LARGEST if 0 <= int(given) < _LARGEST else seed
    if isinstance(given, float):
        return given + by
    if isinstance(given, str):
        return f"{given}+{by}"
    if isinstance(given, bytes | bytearray):
        return given + str(by).encode()
    return [*given, by] if isinstance(given, list | tuple) else None

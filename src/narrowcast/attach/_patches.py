"""Functions of torch and other libraries that are replaced while an attachment is in force."""

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

_LARGEST_SEED = 2**32


class Patches:
    """Replace attributes of modules and classes; ``restore`` puts back the originals, latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value``; a name that ``owner`` inherited is deleted again later."""
        if name in vars(owner):
            original = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, original))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Make ``owner.name(...)`` call ``replacement(original, ...)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self.replace(owner, name, wrapper)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()


# ---- seeds


class _Thread(threading.local):
    """Whether this thread is in a seed function: torch's calls CUDA's with the seed that it was given."""

    inside = False


def shift_seeds(patches: Patches, by: int, note: Callable[[str], None]) -> None:
    """Add ``by`` to every seed that is set from now on for Python's, NumPy's and torch's global generators.

    Generators that the script creates, and seeds that it passes to libraries (``random_state=0``), stay as
    they are: they often determine how data is split, which must be the same in every run.

    Args:
        patches: puts the functions back.
        by: at least 1.
        note: called with a note for the user, each time a seed was shifted.
    """
    # torch.seed, which takes a seed from the clock, is among them because it calls the others.
    owners: list[tuple[Any, str]] = [(random, "seed")]
    owners += [(owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed")]
    for device in (torch.cuda, torch.mps, torch.xpu):
        owners += [(device, name) for name in ("manual_seed", "manual_seed_all") if hasattr(device, name)]
    if importlib.util.find_spec("numpy") is not None:
        owners.append((importlib.import_module("numpy.random"), "seed"))
    thread = _Thread()

    def shifted_seed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = next((word for word in ("seed", "a") if word in kwargs), None)
        given = kwargs[name] if name else args[0] if args else None
        shifted = None if thread.inside else _other_seed(given, by)
        if shifted is not None:
            note("a repeat adds its number to the seeds that the script sets, so that it draws other numbers")
            args, kwargs = (args, {**kwargs, name: shifted}) if name else ((shifted, *args[1:]), kwargs)
        before, thread.inside = thread.inside, True
        try:
            return original(*args, **kwargs)
        finally:
            thread.inside = before

    for owner, name in owners:
        patches.wrap(owner, name, shifted_seed)


def _other_seed(given: Any, by: int) -> Any:
    """Return another seed of the same kind; None if there is none, as for a seed from the clock."""
    if isinstance(given, Integral):
        seed = int(given) + by
        return seed % _LARGEST_SEED if 0 <= int(given) < _LARGEST_SEED else seed
    if isinstance(given, float):
        return given + by
    if isinstance(given, str):
        return f"{given}+{by}"
    if isinstance(given, bytes | bytearray):
        return given + str(by).encode()
    return [*given, by] if isinstance(given, list | tuple) else None

"""Seeds of Python, NumPy and torch: set before a script starts, and shifted in a repeat of its run."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch

from narrowcast.attach._run import Nesting, Patches

_TOO_LARGE_FOR_NUMPY = 2**32


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python, NumPy (if it is installed) and torch.

    ``seed`` is from 0 to 2**32 - 1.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy.random").seed(seed)


def shift_seeds(patches: Patches, by: int, note: Callable[[str], None]) -> None:
    """Add ``by`` to every integer that seeds Python's, NumPy's or torch's global generators from now on.

    Generators that the script creates, and seeds that it passes to libraries (``random_state=0``), stay as
    they are: they often determine how data is split, which must be the same in every run. ``note`` is called
    with a note for the user, each time a seed was shifted.
    """
    # torch.seed takes a seed from the clock. It is wrapped since it calls the others, which must not shift.
    seeders: list[tuple[Any, str]] = [(random, "seed")]
    for module in (torch, torch.random):
        seeders += [(module, "manual_seed"), (module, "seed")]
    for device in (torch.cuda, torch.mps, torch.xpu):
        seeders += [(device, name) for name in ("manual_seed", "manual_seed_all") if hasattr(device, name)]
    if importlib.util.find_spec("numpy") is not None:
        seeders.append((importlib.import_module("numpy.random"), "seed"))
    nesting = Nesting()  # torch.manual_seed calls CUDA's with the seed that it was given

    def shifted_seed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The seed is the first argument, or the keyword that is not ``version``, which random.seed has too.
        names = [name for name in kwargs if name != "version"]
        seed = None
        if args:
            seed = args[0]
        elif names:
            seed = kwargs[names[0]]

        if isinstance(seed, Integral) and not nesting.depth:
            note("a repeat adds its number to the seeds that the script sets, so that it draws other numbers")
            shifted = (int(seed) + by) % _TOO_LARGE_FOR_NUMPY
            if args:
                args = (shifted, *args[1:])
            else:
                kwargs = {**kwargs, names[0]: shifted}
        with nesting:
            return original(*args, **kwargs)

    for owner, name in seeders:
        patches.wrap(owner, name, shifted_seed)

"""Functions in Python that stand in front of others for a time, as apex put its own in place of PyTorch's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

Target = tuple[Any, str]
"""A module or class, and the name of a function in it."""
Make = Callable[[Target, Callable[..., Any]], Callable[..., Any]]
_MISSING = object()


class _Patch:
    """One function in place of another, for as many users as asked for it."""

    def __init__(self, target: Target, make: Make) -> None:
        owner, name = target
        self.users = 0
        self._target = target
        self._own = vars(owner).get(name, _MISSING)  # a class may have it from a base
        below = getattr(owner, name)
        self._ours = functools.wraps(below)(make(target, below))
        setattr(owner, name, self._ours)

    def undo(self) -> None:
        owner, name = self._target
        if vars(owner).get(name) is not self._ours:
            return  # somebody replaced it since, and goes on calling ours, which hands everything on
        if self._own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, self._own)


_lock = threading.Lock()
_patches: dict[Target, _Patch] = {}


def patch(targets: Iterable[Target], make: Make) -> Callable[[], None]:
    """Put what ``make`` makes of each function in its place; returns what undoes it.

    Where several ask for one function it is replaced once, by what the first of them makes.
    """
    done: list[Target] = []

    def undo() -> None:
        with _lock:
            while done:
                target = done.pop()
                found = _patches[target]
                found.users -= 1
                if not found.users:
                    del _patches[target]
                    found.undo()

    try:
        for target in targets:
            with _lock:
                if target not in _patches:
                    _patches[target] = _Patch(target, make)
                _patches[target].users += 1
                done.append(target)
    except BaseException:
        undo()
        raise
    return undo

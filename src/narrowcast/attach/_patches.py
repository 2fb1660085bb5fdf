"""Functions of torch that are replaced for a while, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Attributes replaced on modules and classes; ``restore`` puts back what was there, latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value``; what ``owner`` only inherited is inherited again later."""
        if name in vars(owner):
            original = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, original))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()

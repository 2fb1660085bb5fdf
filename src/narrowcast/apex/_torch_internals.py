"""Names of torch that its documentation does not promise. ``tests/apex`` fails when one of them moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer class's step as it was before torch wrapped it to call step hooks."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step

"""What is watched while a region is open: writes to weights, and a backward in the wrong place.

torch keeps the cast of a weight until the outermost region ends. With the training loop inside the region, the
optimizer writes the weights and the model goes on computing with the old casts: training freezes without a word.
So a step of any optimizer, and ``Module.load_state_dict``, drop the casts. A write by hand inside a region
(``p.data``, ``p.copy_`` under ``no_grad``) is not seen; call ``torch.clear_autocast_cache()`` after it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowcast.casting import _torch_internals

BACKWARD_INSIDE = (
    "backward was called inside an nc.autocast region: what it computes is cast a second time; "
    "end the region after the loss, and call backward after it"
)

_hooked_optimizers = False
_backward_warned = False
_wrapper: Callable[..., Any] | None = None
_backward_below: Callable[..., Any] | None = None
_called_inside: Callable[[], bool] = bool  # set by the room's regions, which this file cannot import


def tell_whether_inside(called_inside: Callable[[], bool]) -> None:
    """Hand over the question whether the calling thread is inside a region."""
    global _called_inside
    _called_inside = called_inside


def forget_warnings() -> None:
    """Let the next backward inside a region warn again, as in a fresh process."""
    global _backward_warned
    _backward_warned = False


def install() -> None:
    """Called when the first region of the process opens."""
    global _hooked_optimizers, _wrapper, _backward_below
    if not _hooked_optimizers:
        register_optimizer_step_post_hook(_drop_after_step)
        _hooked_optimizers = True
    _torch_internals.replace_loaded_keys(_DroppingKeys)
    if not _backward_warned:
        _backward_below = torch.autograd.backward
        _wrapper = torch.autograd.backward = _warning_backward(_backward_below)


def remove() -> None:
    """Called when the last region of the process closes."""
    global _wrapper, _backward_below
    if _torch_internals.current_loaded_keys() is _DroppingKeys:
        _torch_internals.replace_loaded_keys(_torch_internals.LoadedKeys)
    # Whoever replaced it since keeps calling ours, which then hands everything on.
    if _wrapper is not None and torch.autograd.backward is _wrapper:
        torch.autograd.backward = _backward_below
    _wrapper = _backward_below = None


def _drop_after_step(*_: object) -> None:
    torch.clear_autocast_cache()


class _DroppingKeys(_torch_internals.LoadedKeys):  # type: ignore[misc]
    """Made by ``Module.load_state_dict`` when it has written a module's weights."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        torch.clear_autocast_cache()
        return _torch_internals.LoadedKeys(*args, **kwargs)


def _warning_backward(below: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        global _backward_warned
        if not _backward_warned and _called_inside():
            _backward_warned = True
            warnings.warn(BACKWARD_INSIDE, UserWarning, stacklevel=_frames_to_the_caller())
        return below(*args, **kwargs)

    backward.__wrapped__ = below  # type: ignore[attr-defined]
    return backward


def _frames_to_the_caller() -> int:
    """``stacklevel`` that names the user's line, whether through ``loss.backward()`` or directly."""
    level, frame = 2, sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level

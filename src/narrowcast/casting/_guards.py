"""What is watched while a region is open: writes to weights, and a backward in the wrong place.

torch keeps the cast of a weight until the outermost region ends. With the training loop inside the region,
the optimizer writes the weights and the model goes on computing with the old casts: training freezes without
a word. So a step of any optimizer, and ``Module.load_state_dict``, drop the casts. A write by hand inside a
region (``p.data``, ``p.copy_`` under ``no_grad``) is not seen; ``torch.clear_autocast_cache()`` helps there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowcast.casting import _torch_internals

_autograd: Any = torch.autograd  # the module, of which mypy would not let us replace a function
BACKWARD_INSIDE = (
    "backward was called inside an nc.autocast region, where its own operations may be cast as well; "
    "end the region after the loss and call backward after it"
)


class _Process:
    def __init__(self) -> None:
        self.optimizers_hooked = False
        self.backward_warned = False
        self.our_backward: Any = None
        self.is_inside: Callable[[], bool] = bool  # the room's regions, which this file cannot import


_process = _Process()


def tell_whether_inside(is_inside: Callable[[], bool]) -> None:
    """Hand over the question whether the calling thread is inside a region."""
    _process.is_inside = is_inside


def forget_warnings() -> None:
    """Let the next backward inside a region warn again, as in a fresh process."""
    _process.backward_warned = False


def install() -> None:
    """Called when the first region of the process opens."""
    if not _process.optimizers_hooked:
        register_optimizer_step_post_hook(_drop_after_step)
        _process.optimizers_hooked = True
    _torch_internals.replace_loaded_keys(_DroppingKeys)
    if not _process.backward_warned:
        _process.our_backward = _autograd.backward = _warning_backward(_autograd.backward)


def remove() -> None:
    """Called when the last region of the process closes."""
    if _torch_internals.current_loaded_keys() is _DroppingKeys:
        _torch_internals.replace_loaded_keys(_torch_internals.LoadedKeys)
    ours = _process.our_backward
    # Whoever replaced it since goes on calling ours, which outside a region hands everything on.
    if ours is not None and _autograd.backward is ours:
        _autograd.backward = ours.__wrapped__
    _process.our_backward = None


def _drop_after_step(*_: object) -> None:
    torch.clear_autocast_cache()


class _DroppingKeys(_torch_internals.LoadedKeys):  # type: ignore[misc]
    """Made by ``Module.load_state_dict`` when it has written a module's weights."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        torch.clear_autocast_cache()
        return _torch_internals.LoadedKeys(*args, **kwargs)


def _warning_backward(below: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not _process.backward_warned and _process.is_inside():
            _process.backward_warned = True
            warnings.warn(BACKWARD_INSIDE, UserWarning, stacklevel=_frames_to_the_caller())
        return below(*args, **kwargs)

    backward.__wrapped__ = below  # type: ignore[attr-defined]
    return backward


def _frames_to_the_caller() -> int:
    """``stacklevel`` that names the user's line, ``loss.backward()`` as well as ``torch.autograd``."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        level, frame = level + 1, frame.f_back
    return level

"""What is watched while a region is open: writes to weights, and a backward in the wrong place.

torch keeps the cast of a weight until the outermost region ends. With the training loop inside the region,
the optimizer writes the weights and the model goes on computing with the old casts: training freezes without
a word. So a step of any optimizer, ``Module.load_state_dict`` and a backward inside the region drop the
casts; the backward for what writes weights outside a step, as SAM and updates by hand, or between the calls
of a closure, as LBFGS. Other writes inside a region (an average of weights copied in, say) are not seen:
``nc.casting.drop_casts()`` after them helps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowcast.casting import _torch_internals
from narrowcast.casting._weight_casts import drop_casts

_autograd: Any = torch.autograd  # the module, of which mypy would not let us replace a function
BACKWARD_INSIDE = (
    "backward was called inside an nc.autocast region, where its own operations may be cast as well; "
    "end the region after the loss and call backward after it"
)


class _Process:
    def __init__(self) -> None:
        self.optimizers_hooked = False
        self.loading_users = 0
        self.backward_warned = False
        self.our_backward: Any = None
        self.last_backward: Any = None  # made for what it stands in front of, which rarely changes
        # Of the calling thread. Set by the file of the regions, which this one cannot import.
        self.is_open_here: Callable[[], bool] = bool
        self.is_on_here: Callable[[], bool] = bool


_process = _Process()


def ask(*, is_open_here: Callable[[], bool], is_on_here: Callable[[], bool]) -> None:
    """Hand over who knows whether the calling thread is in a region, and whether casting is on there."""
    _process.is_open_here, _process.is_on_here = is_open_here, is_on_here


def forget_warnings() -> None:
    """Let the next backward inside a region warn again, as in a fresh process."""
    _process.backward_warned = False


def install() -> None:
    """Called when the first region of the process opens."""
    watch_optimizers()
    _watch_loading(1)
    below = _autograd.backward
    if _process.last_backward is None or _process.last_backward.__wrapped__ is not below:
        _process.last_backward = _watched_backward(below)
    _process.our_backward = _autograd.backward = _process.last_backward


def remove() -> None:
    """Called when the last region of the process closes."""
    _watch_loading(-1)
    ours = _process.our_backward
    # Whoever replaced it since goes on calling ours, which outside a region hands everything on.
    if ours is not None and _autograd.backward is ours:
        _autograd.backward = ours.__wrapped__
    _process.our_backward = None


def watch_optimizers() -> None:
    """Have the casts dropped after each step of any optimizer, from now on."""
    if not _process.optimizers_hooked:
        register_optimizer_step_post_hook(_drop_after_step)
        _process.optimizers_hooked = True


@contextmanager
def loading_watched() -> Iterator[None]:
    """Inside, the casts are dropped after each ``load_state_dict``, in any thread."""
    _watch_loading(1)
    try:
        yield
    finally:
        _watch_loading(-1)


def _watch_loading(users: int) -> None:
    _process.loading_users += users
    if _process.loading_users:
        _torch_internals.replace_loaded_keys(_DroppingKeys)
    elif _torch_internals.current_loaded_keys() is _DroppingKeys:
        _torch_internals.replace_loaded_keys(_torch_internals.LoadedKeys)


def _drop_after_step(*_: object) -> None:
    drop_casts()


class _DroppingKeys(_torch_internals.LoadedKeys):  # type: ignore[misc]
    """Made by ``Module.load_state_dict`` when it has written a module's weights."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        drop_casts()
        return _torch_internals.LoadedKeys(*args, **kwargs)


def _watched_backward(below: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not _process.is_open_here():
            return below(*args, **kwargs)
        if not _process.backward_warned and _process.is_on_here():
            _process.backward_warned = True
            warnings.warn(BACKWARD_INSIDE, UserWarning, stacklevel=_frames_to_the_caller())
        try:
            return below(*args, **kwargs)
        finally:
            drop_casts()

    backward.__wrapped__ = below  # type: ignore[attr-defined]
    return backward


def _frames_to_the_caller() -> int:
    """``stacklevel`` that names the user's line, ``loss.backward()`` as well as ``torch.autograd``."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        level, frame = level + 1, frame.f_back
    return level

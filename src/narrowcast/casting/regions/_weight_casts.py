"""Weight casts: kept until the outermost region of the thread ends, and dropped when weights are written.

PyTorch keeps the casts of its own kernels by weight alone, until the outermost region ends. With the training
loop inside the region, the optimizer would write the weights, and the model would compute with the old casts.
So a step of any optimizer, ``Module.load_state_dict`` and a backward pass inside a region drop the casts. The
backward pass does so because SAM, updates by hand and LBFGS's closures write weights without a step that is
seen here. Other writes inside a region (for example an average of weights that is copied in) are
not detected: call ``nc.drop_casts()`` after them.

Kernels of ours keep casts by thread, weight, dtype and whether gradients are recorded. A cast is not used if
its weight was written since, except through ``.data``, which leaves no trace.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowcast.casting import _torch_internals
from narrowcast.casting._torch_internals import (
    LOADED_KEYS,
    Replacements,
    is_proxy_tracing,
    is_tracing,
    is_transforming,
)
from narrowcast.casting.regions._scopes import thread
from narrowcast.casting.regions._warnings import stacklevel_outside, watched_cross_entropy

BACKWARD_INSIDE = (
    "backward was called inside an nc.autocast region, where its own operations may be cast as well; "
    "end the region after the loss and call backward after it"
)
_Key = tuple[int, torch.dtype, bool]
"""Of a cast: the id of its weight, its dtype, and whether gradients are recorded."""


class _Thread(threading.local):
    """The casts that a thread keeps.

    Attributes:
        casts: ``_Key`` -> the weight, its version when it was cast, and the cast.
        generation: ``_Process.generation`` when the casts were made. Once that has changed, they are dropped.
    """

    def __init__(self) -> None:
        self.casts: dict[_Key, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        self.generation = 0


class _Process:
    """What all threads share.

    Attributes:
        generation: raised each time that casts are to be dropped in every thread.
        backward_warned: whether the warning of a backward pass inside a region was given.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.backward_warned = False


_here = _Thread()
_process = _Process()


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``weight`` in ``dtype``: the kept cast, or a new one that is kept from now on."""
    if _here.generation != _process.generation:
        _here.casts.clear()
        _here.generation = _process.generation
    key = (id(weight), dtype, weight.requires_grad and torch.is_grad_enabled())
    kept = _here.casts.get(key)
    # A weight that was freed may have had the same id.
    if kept is not None and kept[0]() is weight and kept[1] == weight._version:
        return kept[2]
    cast = weight.to(dtype)
    if type(cast) is not torch.Tensor:
        return cast  # a fake tensor, or one of another mode
    _here.casts[key] = (weakref.ref(weight), weight._version, cast)
    return cast


def is_cacheable(tensor: torch.nn.Parameter) -> bool:
    """Return whether a cast of a parameter may be kept here.

    It may inside a region with the cache on, outside of tracing and inference, and if a later write to the
    parameter would be detected.
    """
    return (
        tensor.is_leaf
        and bool(thread.regions)
        and not tensor.is_inference()
        and not torch.is_inference_mode_enabled()
        and torch.is_autocast_cache_enabled()
        and not torch.compiler.is_compiling()
        and not is_tracing()
        and not is_proxy_tracing()
        and not is_transforming()  # a cast made under torch.func ends with the transformation
    )


def drop_casts_here() -> None:
    """Forget the casts of this thread, as when its outermost region ends."""
    if _here.casts:
        _here.casts.clear()


def drop_casts() -> None:
    """Forget every cast of a weight, PyTorch's own too, in every thread; the next use casts it anew.

    Call it after writes to weights that are not detected: through ``.data``; and, inside an open region, by
    anything but an optimizer or ``load_state_dict``.
    """
    _process.generation += 1
    drop_casts_here()  # other threads drop theirs when they cast a weight next
    if torch.compiler.is_compiling():
        _torch_internals.let_dynamo_trace_autocast()
    torch.clear_autocast_cache()


# ---- what drops them


def begin_watching(region: object) -> None:
    """Watch what writes weights, and ``binary_cross_entropy``, until ``end_watching(region)``."""
    watch_optimizers()
    LOADING.begin(region)
    _BACKWARD_AND_LOSS.begin(region)


def end_watching(region: object) -> None:
    LOADING.end(region)
    _BACKWARD_AND_LOSS.end(region)


@functools.cache
def watch_optimizers() -> None:
    """Drop the casts after each step of any optimizer, from now on."""
    register_optimizer_step_post_hook(lambda *_: drop_casts())


def _dropping_casts_first(below: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LOADED_KEYS``, the constructor of what load_state_dict makes after writing each module."""

    def construct(*args: Any, **kwargs: Any) -> Any:
        drop_casts()
        return below(*args, **kwargs)

    return construct


def _watched_backward(below: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.autograd.backward``, to warn inside a region, once, and to drop the casts."""

    def backward(*args: Any, **kwargs: Any) -> Any:
        devices = [region.device for region in thread.regions if region.watches]
        if not devices:
            return below(*args, **kwargs)
        if not _process.backward_warned and any(map(torch.is_autocast_enabled, devices)):
            _process.backward_warned = True
            warnings.warn(BACKWARD_INSIDE, UserWarning, stacklevel=stacklevel_outside("torch."))
        try:
            return below(*args, **kwargs)
        finally:
            drop_casts()

    return backward


LOADING = Replacements((*LOADED_KEYS, _dropping_casts_first))
"""Drops the casts each time load_state_dict has written a module, in any thread, while there are users."""
_BACKWARD_AND_LOSS = Replacements(
    (torch.autograd, "backward", _watched_backward),
    (torch.nn.functional, "binary_cross_entropy", watched_cross_entropy),
)

"""Casts of weights that kernels of ours made, kept until the outermost region of the thread ends.

PyTorch keeps those of its own kernels by weight alone. Here each thread keeps its own, by weight, format and
whether its gradients are recorded, in regions of ours, whose end it knows of. A cast whose weight was written
since is not used, but for writes through ``.data``, which leave no trace.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from narrowcast.casting._torch_internals import is_proxy_tracing, is_tracing, is_transforming

_Key = tuple[int, torch.dtype, bool]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.casts: dict[_Key, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        self.generation = 0


_here = _Thread()
# Whether the calling thread is in a region of ours; set by the file of regions, which this one cannot import.
_is_in_region: list[Callable[[], bool]] = [bool]
# Raised by whatever writes weights, in any thread: a thread's casts are of one generation.
_generation = [0]


def ask(*, is_in_region: Callable[[], bool]) -> None:
    """Hand over who knows whether the calling thread is in a region, at whose end its casts are forgotten."""
    _is_in_region[0] = is_in_region


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` in ``dtype``: the cast of it that is there, or a new one that is kept."""
    if _here.generation != _generation[0]:
        _here.casts.clear()
        _here.generation = _generation[0]
    key = (id(weight), dtype, weight.requires_grad and torch.is_grad_enabled())
    found = _here.casts.get(key)
    if found is not None and found[0]() is weight and found[1] == weight._version:
        return found[2]
    cast = weight.to(dtype)
    if type(cast) is not torch.Tensor:
        return cast  # of a mode in which tensors are not what they seem, as fake ones
    _here.casts[key] = (weakref.ref(weight), weight._version, cast)
    return cast


def may_be_kept(tensor: torch.nn.Parameter) -> bool:
    """Whether a cast of ``tensor``, a parameter, may be used again: it can be told to be old."""
    return (
        tensor.is_leaf
        and _is_in_region[0]()
        and not tensor.is_inference()
        and not torch.is_inference_mode_enabled()
        and torch.is_autocast_cache_enabled()
        and not torch.compiler.is_compiling()
        and not is_tracing()
        and not is_proxy_tracing()
        and not is_transforming()  # what torch.func makes of it ends with the transformation
    )


def forget_here() -> None:
    """Forget the casts of this thread, as when its outermost region ends."""
    if _here.casts:
        _here.casts.clear()


def drop_casts() -> None:
    """Forget every cast of a weight, PyTorch's own too, in every thread; the next use casts it anew.

    For writes to weights that leave no trace: through ``.data``, and inside an open region those that no
    optimizer and no ``load_state_dict`` makes.
    """
    _generation[0] += 1
    forget_here()  # other threads let go of theirs at their next use
    torch.clear_autocast_cache()

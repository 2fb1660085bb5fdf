"""Telling ``torch.compile`` apart the rules that were in force when a graph was made.

Kernels of ours are traced like PyTorch's own, with the rules of that moment; but no guard of a graph knows of
rules. It does know the autocast state of every device type. So while rules are in force, autocast is on for
a device type that no tensor is on (IPU for rules on a CPU), in a format that stands for the place: another
place is another state, for which Dynamo makes another graph. Where there are more places than formats, a
second such device type is on. Caches on disk have that state in their keys, and beside it the list of what
each format stands for in this process.

Backward passes of compiled graphs are traced outside of the region, as eager code runs them.

``torch.compile`` may be imported while a region is open, so this happens in any case.
``narrowcast.compile`` needs none of it: its graphs hold their casts.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch

from narrowcast.casting._torch_internals import trace_backward_outside_of_regions
from narrowcast.errors import UnsupportedError
from narrowcast.policy import Scope

# For the first places of a device type, and for those beyond. Other device types share the last.
_BEARERS = {"cpu": ("ipu", "maia"), "cuda": ("hpu", "mtia")}
_LAST_BEARERS = ("xla", "hpu")
_FORMATS = tuple(sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str))
_lock = threading.Lock()
_marks: dict[tuple[str, str], dict[str, tuple[torch.dtype, torch.dtype | None]]] = {}


def mark(place: Scope | None, device_type: str) -> None:
    """From now on graphs that this thread makes or looks for are those of ``place``; None: of no rules."""
    bearer, bearer_beyond = _BEARERS.get(device_type, _LAST_BEARERS)
    beyond = None
    if place is not None:
        ours: Any = place.actions.get("mark")
        if ours is None:
            ours = place.actions["mark"] = _new_mark(place, (bearer, bearer_beyond))
        wanted, beyond = ours
        torch.set_autocast_dtype(bearer, wanted)
    torch.set_autocast_enabled(bearer, place is not None)
    if _beyond[0]:
        if beyond is not None:
            torch.set_autocast_dtype(bearer_beyond, beyond)
        torch.set_autocast_enabled(bearer_beyond, beyond is not None)


_beyond = [False]  # whether a second device type is used at all


def _new_mark(place: Scope, bearers: tuple[str, str]) -> tuple[torch.dtype, torch.dtype | None]:
    with _lock:
        of_bearers = _marks.setdefault(bearers, {})
        identity = repr((place.resolved.device_type, place.identity))
        if identity not in of_bearers:
            lap, at = divmod(len(of_bearers), len(_FORMATS))
            if lap > len(_FORMATS):
                raise UnsupportedError(
                    f"expected fewer than {len(of_bearers)} places of policies with rules in one process, "
                    "since torch.compile can tell no more of them apart: make each policy once"
                )
            _beyond[0] |= lap > 0
            trace_backward_outside_of_regions()
            of_bearers[identity] = (_FORMATS[at], _FORMATS[lap - 1] if lap else None)
            _tag_caches()
        return of_bearers[identity]


def _tag_caches() -> None:
    """Put what the marks stand for into the key of every compiled graph that is kept on disk."""
    settings = torch.compiler.config
    ours = hashlib.sha256(repr(sorted(_marks.items())).encode()).hexdigest()[:16]
    kept = (settings.cache_key_tag or "").partition("|narrowcast:")[0]
    settings.cache_key_tag = f"{kept}|narrowcast:{ours}"

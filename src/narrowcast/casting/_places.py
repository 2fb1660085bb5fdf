"""Which rules are in force in a thread: the place in a model that its calls are made from.

What a thread holds here is read by the kernels of ``_kernels`` and written by regions, by the hooks of
modules, and where a policy travels with a graph into another thread or to a later moment.
"""

from __future__ import annotations

import threading

import torch

from narrowcast.casting._compiler_marks import mark
from narrowcast.policy import Rule, Scope, dtype_of


class _Thread(threading.local):
    def __init__(self) -> None:
        self.places: dict[str, Scope] = {}
        self.casts_by: Rule | None = None


here = _Thread()
"""``here.places``: type of device -> the place of this thread; without an entry no rule is in force.

``here.casts_by``: the rule for a module by which what goes into it, or comes out of it, is being cast now.
"""


def rule_that_casts() -> Rule | None:
    """The rule for a module by which this thread casts its inputs or outputs now; None: it does not."""
    return here.casts_by


def move_to(place: Scope | None, device_type: str) -> None:
    """From now on this thread's calls are made from ``place``; None: from outside of every rule."""
    places = here.places
    if place is not None:
        places[device_type] = place
    elif device_type in places:
        del places[device_type]
    mark(place, device_type)


def lower_dtype(place: Scope) -> torch.dtype:
    """What "lower" means at ``place`` now: inside a module with a rule the policy's format.

    Elsewhere the region's: one of ``torch.autocast`` that was opened inside ours may have another format.
    """
    if place.rule is not None:
        return dtype_of(place.resolved.lower)
    return torch.get_autocast_dtype(place.resolved.device_type)

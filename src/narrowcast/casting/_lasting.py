"""A region that outlasts the code that opened it: it stays open in its thread until it is closed.

Backward passes are outside of it, wherever they are called: they cast nothing, as where a ``with`` statement
had closed before them. Casts of weights that it keeps are dropped after each backward pass, step of an
optimizer and ``load_state_dict``; writes through ``.data`` between two forwards need ``drop_casts()``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from narrowcast.casting import _guards, _places, _regions
from narrowcast.casting._autocast import PlacedRegion
from narrowcast.casting._kernels import root_place
from narrowcast.casting._torch_internals import (
    current_engine,
    nesting,
    replace_engine,
    unseen_by_the_compiler,
    without_autocast,
)
from narrowcast.casting._weight_casts import drop_casts
from narrowcast.errors import OrderError
from narrowcast.policy import Policy, Rule, Scope


def places_here() -> Mapping[str, Scope]:
    """Type of device -> the place of this thread's calls, where a policy with rules casts there now."""
    return {
        device: place for device, place in _places.places_here().items() if torch.is_autocast_enabled(device)
    }


def is_region_open_here() -> bool:
    """Whether any region, of ours or of ``torch.autocast``, is open in this thread."""
    return nesting() > 0


class LastingRegion:
    """A region of ``policy`` on some types of device, open in the calling thread until ``close()``.

    Args:
        policy: rules for operators only.
        dtypes: type of device -> the region's format there.
        cache_enabled: whether casts of weights are kept.

    Raises:
        OrderError: another region is open in this thread, which would close in the wrong order.
    """

    def __init__(
        self, policy: Policy, dtypes: Mapping[str, torch.dtype], *, cache_enabled: bool = True
    ) -> None:
        if is_region_open_here():
            raise OrderError(
                "expected no open region of autocast where one is to begin that lasts, got one: leave its "
                "with statement first"
            )
        self._thread = threading.current_thread()
        with ExitStack() as opened:
            for device, dtype in dtypes.items():
                place = root_place(policy, device, dtype)
                opened.enter_context(PlacedRegion(device, dtype, True, cache_enabled, place=place))
            self._frames = _regions.frames_here()
            self._regions = opened.pop_all()
        with ExitStack() as watching:
            watching.enter_context(_guards.loading_watched())
            watching.enter_context(backward_outside(policy))
            self._watching = watching.pop_all()
        _guards.watch_optimizers()
        self._depth = len(dtypes)
        self.devices = tuple(dtypes)

    def check_closable(self) -> None:
        """Refuse where ``close`` would leave the thread in a wrong state.

        Raises:
            OrderError: this is another thread, or a region was opened since and is still open.
        """
        if not self._thread.is_alive():
            return
        if threading.current_thread() is not self._thread:
            raise OrderError(
                f"expected the thread that opened a lasting region to close it, {self._thread.name!r}, got "
                f"{threading.current_thread().name!r}: close it there"
            )
        if nesting() != self._depth:
            raise OrderError(
                "expected no region of autocast that was opened since, got one that is still open: leave its "
                "with statement first"
            )

    def close(self) -> None:
        """End it; without effect the second time.

        Raises:
            OrderError: as ``check_closable``; it goes on then.
        """
        if not self._depth:
            return
        self.check_closable()
        self._depth = 0
        self._watching.close()
        if self._thread.is_alive():
            self._regions.close()
        else:
            self._regions.pop_all()
            _regions.give_up(self._frames)


# ---- backward passes


class _Process:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rules: list[tuple[Rule, ...]] = []  # of the policies whose regions are open
        self.ours: Any = None


_process = _Process()


@contextmanager
def backward_outside(policy: Policy) -> Iterator[None]:
    """While this is open, backward passes begun in a region of ``policy`` cast nothing, in any thread."""
    with _process.lock:
        _process.rules.append(policy.rules)
        if _process.ours is None:
            _process.ours = _outside(current_engine())
            replace_engine(_process.ours)
    try:
        yield
    finally:
        with _process.lock:
            _process.rules.remove(policy.rules)
            if not _process.rules:
                # Whoever replaced it since goes on calling ours, which hands everything on.
                if current_engine() is _process.ours:
                    replace_engine(_process.ours.__wrapped__)
                _process.ours = None


def _outside(below: Callable[..., Any]) -> Callable[..., Any]:
    """The start of autograd's engine with autocast off for the thread, which the engine's threads follow."""

    @unseen_by_the_compiler
    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(place.resolved.rules in _process.rules for place in _places.places_here().values()):
            return below(*args, **kwargs)
        drop_casts()  # so that the pass frees each as it goes
        try:
            with without_autocast():
                return below(*args, **kwargs)
        finally:
            drop_casts()  # of what was computed again meanwhile

    run.__wrapped__ = below  # type: ignore[attr-defined]
    return run

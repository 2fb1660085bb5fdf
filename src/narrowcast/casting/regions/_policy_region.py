"""The region of a policy, which ``nc.apply``, ``nc.Stepper``, ``nc.attached`` and others open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from narrowcast.casting._devices import check_device_type, check_dtype
from narrowcast.casting.kernels._kernels import Promotion, root_scope
from narrowcast.casting.regions import _regions, _weight_casts
from narrowcast.casting.regions._scopes import is_promoting, scope_on, thread
from narrowcast.errors import OrderError
from narrowcast.policy import Policy, Scope

_R = TypeVar("_R")


class RegionState(NamedTuple):
    """What holds on one device type inside a region.

    Attributes:
        device: the device type.
        dtype: the autocast dtype.
        enabled: whether autocast is on; off in fp32 without rules.
        scope: the rules in force, or None.
        promotion: what promotes where formats meet, or None.
    """

    device: str
    dtype: torch.dtype
    enabled: bool
    scope: Scope | None
    promotion: Promotion | None


class PolicyRegion:
    """The region of a policy on some device types, which its caller opens by ``with``.

    Made once and opened at each step: the formats, the rules and the promotions are decided here. Several
    threads may have it open, and it may be opened again inside itself. In fp32 without rules it is disabled.

    Args:
        policy: of the region. The caller carries out its rules for modules.
        formats: device type -> the region's dtype there.
        say: called with a sentence, once for each operator that runs in fp32 because PyTorch has no kernel
            for it in the low format. Without ``say`` operators do not promote where formats meet.
        warns: whether a backward pass inside it warns. If so, a backward pass inside it and loading weights
            also drop the casts of weights.
        caches: whether the cast of a weight is kept until the outermost region ends; by default as it is
            around the region.

    Attributes:
        states: what holds inside, on each device type.
    """

    def __init__(
        self,
        policy: Policy,
        formats: Mapping[str, torch.dtype],
        say: Callable[[str], None] | None = None,
        *,
        warns: bool = False,
        caches: bool | None = None,
    ) -> None:
        _weight_casts.watch_optimizers()
        self._policy = policy
        self._caches = caches
        self._warns = warns
        self._ended = False
        self.states: list[RegionState] = []
        for device, dtype in formats.items():
            scope = None if policy.is_plain else root_scope(policy, device, dtype)
            enabled = dtype != torch.float32 or scope is not None
            check_device_type(device, enabled=enabled)
            if enabled:
                check_dtype(device, dtype)

            promotion = None
            if say is not None and dtype != torch.float32:
                promotion = Promotion(policy, device, dtype, say)
            self.states.append(RegionState(device, dtype, enabled, scope, promotion))

    def is_open(self) -> bool:
        """Return whether this thread is in such a region already, of an equal policy too."""
        return all(_holds_here(state) for state in self.states)

    def __enter__(self) -> None:
        depth = len(thread.regions)
        cache_enabled = torch.is_autocast_cache_enabled() if self._caches is None else self._caches
        try:
            for device, dtype, enabled, scope, promotion in self.states:
                _regions.enter(self, device, dtype, enabled, cache_enabled, scope, promotion, self._warns)
        except BaseException:
            # Entering raises if no dtype is left to stand for the rules (see ``_scopes``), perhaps only on
            # the second device type.
            _regions.leave_to(depth)
            raise

    def __exit__(self, *_: object) -> None:
        # One region for each device type. After an error the remaining ones are left too.
        for count_closed, _ in enumerate(self.states, 1):
            try:
                _regions.leave(self)
            except OrderError:
                for _ in self.states[count_closed:]:
                    _regions.leave(self)
                raise

    def around(self, call: Callable[[], _R]) -> _R:
        """Return ``call()``, called inside the region."""
        depth = len(thread.regions)
        try:
            self.__enter__()
            return call()
        finally:
            _regions.leave_to(depth)

    def end(self) -> None:
        """Have ``check_recomputation`` raise from now on, since the rules for modules were removed."""
        self._ended = True

    def check_recomputation(self) -> None:
        """Refuse to recompute a forward pass of a policy that was removed."""
        if self._ended and not self._policy.is_plain:
            raise OrderError(
                "expected the policy of a checkpointed model to be there until the backward pass, which "
                "computes the model's forward again, got one that was removed: go backward before remove(), "
                "or inside the with statement of nc.apply"
            )


def _holds_here(state: RegionState) -> bool:
    """Return whether ``state``, or the scope of a module inside it, is in force in this thread."""
    # The cheapest checks come first.
    if torch.is_autocast_enabled(state.device) is not state.enabled:
        return False
    if not state.enabled:
        return True
    if torch.get_autocast_dtype(state.device) != state.dtype:
        return False
    if state.promotion is not None and not is_promoting():
        return False
    current = scope_on(state.device)
    if current is None or state.scope is None:
        return current is state.scope
    # An equal policy has scopes of its own, which compute the same.
    return current.resolved.root.identity == state.scope.identity

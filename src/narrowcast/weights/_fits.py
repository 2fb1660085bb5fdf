"""Whether a saved state of held weights can be loaded, asked before anything is written."""

from __future__ import annotations

from typing import Any

from narrowcast.weights import _checkpoint
from narrowcast.weights._held import HeldWeights


def check_state(held: HeldWeights, state: dict[str, Any]) -> None:
    """Return where ``held.load_state_dict(state)`` would go well; nothing is written.

    Raises:
        SettingError: as ``HeldWeights.load_state_dict``.
    """
    held._adopt({})
    _checkpoint.check(held._keeper, held._pairs, state)

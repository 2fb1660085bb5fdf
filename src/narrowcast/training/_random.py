"""Random numbers drawn again, so that a step that is computed again sees the same masks."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class RandomState:
    """Where the random numbers are, to draw the same ones again."""

    def __init__(self, device_types: Iterable[str]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if "cuda" in device_types else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)

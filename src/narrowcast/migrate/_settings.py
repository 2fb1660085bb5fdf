"""What a person may ask of a migration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Target = Literal["torch", "narrowcast"]
"""What to migrate to, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to migrate to.

    Attributes:
        target: ``"torch"`` for ``torch.amp``, ``"narrowcast"`` for ``nc.autocast`` and ``nc.GradScaler``.
    """

    target: Target = "torch"

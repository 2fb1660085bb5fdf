"""What is asked of a script, whatever it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.verify._child import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """Which script, and how it is run.

    Attributes:
        target: the script, or with ``is_module`` the module, and its arguments.
        is_module: whether ``target`` begins with the name of a module, as for ``python -m``.
        policy: the name or the file of what it runs in, where that is mixed precision.
        seed: each run starts with it; of repeats the next with the next number.
        folder: where all of it goes.
    """

    target: tuple[str, ...]
    is_module: bool = False
    policy: str = "auto"
    seed: int = 0
    folder: Path

    def whole_run(self, purpose: str, folder: Path, policy: str, **more: Any) -> RunSettings:
        """A run of it that is not cut short, without a loss scale of its own.

        Args:
            purpose: what it is watched for.
            folder: of this run.
            policy: what this run is in.
            more: other fields of ``RunSettings``.
        """
        return RunSettings(
            purpose=purpose,
            policy=policy,
            loss_scale=None,
            seed=self.seed,
            seed_shift=0,
            steps=0,
            is_module=self.is_module,
            folder=str(folder),
            **more,
        )

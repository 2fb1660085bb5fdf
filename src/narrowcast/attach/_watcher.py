"""What may look over a script's shoulder while it runs, and hold its updates back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Attached(Protocol):
    """What a watcher may ask the attachment, and ask of it."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that the script has made and still has."""
        ...

    def parameter_names(self) -> Mapping[int, str]:
        """``id`` of each parameter of the modules that were called -> its name."""
        ...

    def continue_in_fp32(self) -> None:
        """Open no region from now on, and scale no loss."""
        ...

    def continue_at_scale(self, scale: float) -> None:
        """Go on with another loss scale, by the same rule; one that never moves stays."""
        ...

    @property
    def loss_scale(self) -> float | None:
        """That of the next backward; None where losses are not scaled."""
        ...

    def stop(self) -> None:
        """End the script here, as after ``stop_after`` steps."""
        ...


class Watcher:
    """Told what an attached script does, as it does it; this one looks on and changes nothing.

    Each method is called in the script's own thread, between its own lines.
    """

    def attached(self, attachment: Attached) -> None:
        """The script is about to start."""

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost call of a module that holds parameters begins."""

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        """It ended, with ``output`` as the script gets it."""

    def holds_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step that ``optimizer`` begins is to be left out, parameters and state untouched."""
        return False

    def held_back(self, optimizer: torch.optim.Optimizer) -> None:
        """A step was left out; its closure, if any, was evaluated once, and ``p.grad`` is what it had."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """A step ended, taken, skipped or held back."""

"""What the latest ``amp.initialize`` left in the process: apex's ``_amp_state``."""

from __future__ import annotations

import os
import sys
from typing import Any

from narrowcast.apex._levels import Properties


class AmpState:
    """The one object that scripts reach into as ``amp._amp_state``.

    Attributes:
        opt_properties: what the latest ``initialize`` asked for; None before it.
        loss_scalers: those of the latest ``initialize``, by ``loss_id``.
        handle: what turns casts off and on; None before ``initialize``.
        verbosity: 0: amp says nothing.
        allow_incoming_model_not_fp32: set to True, ``initialize`` takes models in half.
    """

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None
        self.loss_scalers: list[Any] = []
        self.handle: Any = None
        self.verbosity = 1
        self.allow_incoming_model_not_fp32 = False

    @property
    def opt_level(self) -> str | None:
        """That of the latest ``initialize``; None before it."""
        return None if self.opt_properties is None else self.opt_properties.opt_level

    def reset(self) -> None:
        """As before any ``initialize``; what a person set stays."""
        self.opt_properties, self.loss_scalers, self.handle = None, [], None


amp_state = AmpState()


def say(message: str) -> None:
    """Tell the person, on standard error and on the first rank only, unless ``verbosity`` is 0."""
    if amp_state.verbosity > 0 and int(os.environ.get("RANK", "0")) == 0:
        sys.stderr.write(f"{message}\n")


def maybe_print(msg: str, rank0: bool = False) -> None:
    """apex's name of ``say``, which scripts call too; it is always the first rank that says it."""
    say(msg)

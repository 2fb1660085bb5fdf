"""The settings of the latest ``amp.initialize``, for the whole process: ``amp._amp_state`` in scripts."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed

from narrowcast.apex.amp._levels import Properties


class AmpState:
    """The object that scripts read and write as ``amp._amp_state``.

    Attributes:
        opt_properties: the settings of the latest ``initialize``; None before it.
        loss_scalers: the loss scalers of the latest ``initialize``, by ``loss_id``.
        handle: the casts of the latest ``initialize`` with O1; None before it.
        verbosity: 0 turns the messages off.
        allow_incoming_model_not_fp32: True lets ``initialize`` take models in half.
    """

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None
        self.loss_scalers: list[Any] = []
        self.handle: Any = None
        self.verbosity = 1
        self.allow_incoming_model_not_fp32 = False


process_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Write a message to standard error, on rank 0 only, unless ``verbosity`` is 0.

    ``rank0`` has no effect: other ranks never write.
    """
    if process_state.verbosity > 0 and _rank() == 0:
        sys.stderr.write(f"{msg}\n")


def _rank() -> int:
    """Return the rank of this process; 0 if there is one process only."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    # torchrun sets the variable before the script initializes anything. An empty one counts as none.
    return int(os.environ.get("RANK") or "0")

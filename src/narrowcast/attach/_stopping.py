"""Ending a script early, after as many optimizer steps as were asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

_TRIES = 3


class StopScript(SystemExit):
    """Ends a script as ``sys.exit(0)`` would: what it has open is closed, what it registered is called."""

    def __init__(self) -> None:
        super().__init__(0)


class Stopping:
    """Ends the script once it is due; one that catches everything and goes on is ended the hard way.

    Args:
        after: optimizer steps, skipped ones included, or outermost calls of modules in a script that has
            made no optimizer; 0: never.
        close: puts everything in order before the process is ended without asking the script.
    """

    def __init__(self, after: int, close: Callable[[], None]) -> None:
        self._after = after
        self._close = close
        self._tries = 0
        self.reached = False

    def is_due(self, count: int) -> bool:
        return 0 < self._after <= count

    def stop(self) -> None:
        """End the script here.

        Raises:
            StopScript: always, but for the time when it was in vain so often that the process ends.
        """
        self.reached = True
        self._tries += 1
        if self._tries <= _TRIES:
            raise StopScript()
        self._close()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(0)

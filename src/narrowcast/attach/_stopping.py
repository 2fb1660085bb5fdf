"""Ending a script early, after as many optimizer steps as were asked for."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_TRIES = 3
_PATIENCE_S = 30.0


class _Thread(threading.local):
    """How often this thread was asked to end: one that trains beside others is asked as often as they."""

    tries = 0


class Stopping:
    """Ends the script once it is due, and the hard way where it does not end.

    That is one that catches everything and goes on, or one that still waits half a minute later, as for a
    thread that was ended.

    Args:
        after: optimizer steps, skipped ones included; backwards in a script whose steps cannot be seen, or
            outermost calls of modules in one that does not train; 0: never.
        close: puts everything in order before the process is ended without asking the script.
    """

    def __init__(self, after: int, close: Callable[[], None]) -> None:
        self._after = after
        self._close = close
        self._process = os.getpid()
        self._thread = _Thread()
        self._deadline: threading.Timer | None = None
        self._ending = threading.Lock()
        self.reached = False

    def is_due(self, count: int) -> bool:
        return 0 < self._after <= count

    def stop(self) -> None:
        """End the script here: what it has open is closed, what it registered is called.

        Raises:
            SystemExit: always, but for the time when it was in vain so often that the process ends. None of
                a class of its own, which threads would show as an error.
        """
        if not self.reached:
            self.reached = True
            self._deadline = threading.Timer(_PATIENCE_S, self._end_process)
            self._deadline.daemon = True  # Python does not wait for it
            self._deadline.start()
        self._thread.tries += 1
        if self._thread.tries > _TRIES:
            self._end_process()
        raise SystemExit(0)

    def call_off(self) -> None:
        """The script has ended and the process goes on: it is not to be ended any more."""
        if self._deadline is not None:
            self._deadline.cancel()

    def _end_process(self) -> None:
        self._ending.acquire()  # for good: whoever comes second waits for the end
        try:
            self._close()
        finally:
            if os.getpid() == self._process:  # a forked child would count its siblings among them
                for child in multiprocessing.active_children():
                    child.kill()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(0)

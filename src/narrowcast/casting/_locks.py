"""Locks for state that all threads share."""

from __future__ import annotations

import os
import threading


def process_lock() -> threading.Lock:
    """Return a lock that is free in a child made by ``os.fork``, whoever holds it in the parent.

    What it guards may be half changed in the child: the other thread's block does not go on there.
    """
    lock = threading.Lock()
    if hasattr(os, "register_at_fork"):
        # Another thread may hold the lock during the fork, and does not exist in the child.
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock

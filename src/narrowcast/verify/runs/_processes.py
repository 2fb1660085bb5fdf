"""Processes of runs. On Linux they are forked from one that has imported torch, which takes 3 s each time.

``_server`` is that process. It gets the settings file of each run through a socket, one line of JSON each,
and answers with the number of the process, and later with that and the exit code.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_FRESH, _SERVER = "narrowcast.verify.runs._child", "narrowcast.verify.runs._server"
_LINE_BYTES = 4096
# After so long without a line from the server, see whether the process still exists.
_CHECK_AFTER_S = 1.0

# OpenMP threads spin for about 50 us and then sleep. If they never slept, a step would take sixty times as
# long as soon as something else needs a core. If they slept at once, a step of many small operators would
# take 2.5 times as long. With one hash seed, sets of strings have the same order in all runs: scripts make
# vocabularies of them.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000", "PYTHONHASHSEED": "0"}
# The parent shows the last line of the output while the run goes on.
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


class RunProcess(Protocol):
    """What ``subprocess.Popen`` and ``_ForkedProcess`` offer of the process of a run."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the process has not ended after ``timeout`` seconds.
        """


class Processes:
    """Starts the processes of runs, each in a session of its own; ``close`` ends the server."""

    def __init__(self) -> None:
        self._server: _Server | None = None

    def start(self, settings_file: Path) -> RunProcess:
        """Start the run of a settings file, with its output in files beside that one."""
        if sys.platform != "linux":
            return _start_fresh(["-m", _FRESH, str(settings_file)], settings_file.parent)
        if self._server is not None and self._server.has_ended():
            self.close()
        if self._server is None:
            self._server = _Server(settings_file.parent)
        return self._server.fork(settings_file)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def environment() -> dict[str, str]:
    """Return the environment of every run."""
    return {**_ENVIRONMENT, **os.environ, **_UNBUFFERED}


def _start_fresh(words: list[str], folder: Path, inherited: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a Python process, with its output in files of ``folder``."""
    with (folder / "stdout.txt").open("wb") as stdout, (folder / "stderr.txt").open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment(),
            pass_fds=inherited,
            start_new_session=True,
        )


class _Server:
    """The process that forks runs, seen from outside.

    Attributes:
        codes: exit code of each process that has ended, by its number.
    """

    def __init__(self, folder: Path) -> None:
        """Start it; its own output, which is empty unless it fails, goes to files of ``folder``."""
        self.codes: dict[int, int] = {}
        self._socket, theirs = socket.socketpair()
        self._running: set[int] = set()
        self._unread = b""
        with theirs:
            words = ["-m", _SERVER, str(theirs.fileno())]
            self._process = _start_fresh(words, folder, inherited=(theirs.fileno(),))

    def fork(self, settings_file: Path) -> RunProcess:
        """Fork the process of a run.

        If the server has ended, as when torch fails to load, return its process, whose exit code and output
        are then those of the run.
        """
        with suppress(OSError):
            self._socket.sendall(json.dumps(str(settings_file)).encode() + b"\n")
        started = self._next_started()
        if started is None:
            return self._process
        return _ForkedProcess(self, started)

    def _next_started(self) -> int | None:
        """Wait for the number of the process that was asked for; None: the server has ended.

        The first line about a process that was not running is about the new one: usually of its start, or of
        its end if it could not become a run, as on a full disk.
        """
        running = set(self._running)
        while True:
            line = self.read_line()
            if line is None:
                return None
            pid = line[0]
            if pid not in running:
                return pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def read_line(self, timeout_s: float | None = None) -> list[int] | None:
        """Return the number of a process that started, or that and the exit code of one that ended.

        Returns:
            None if the server has ended.

        Raises:
            TimeoutError: nothing came for ``timeout_s``.
        """
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._socket], [], [], timeout_s)
            if not ready:
                raise TimeoutError
            received = b""
            with suppress(ConnectionError):
                received = self._socket.recv(_LINE_BYTES)
            if not received:
                return None
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        numbers = [int(word) for word in line.split()]
        pid, *code = numbers
        if code:
            self._running.discard(pid)
            self.codes[pid] = code[0]
        else:
            self._running.add(pid)
            self.codes.pop(pid, None)  # of an earlier process with this number
        return numbers

    def close(self) -> None:
        """End the server, and runs that have not ended."""
        self._socket.close()
        self._process.kill()  # to end by itself takes a second, and nothing is left to write
        self._process.wait()


class _ForkedProcess:
    """What ``subprocess.Popen`` offers of a process that the server forked."""

    def __init__(self, server: _Server, pid: int) -> None:
        self.pid = pid
        self._server = server

    def wait(self, timeout: float | None = None) -> int:
        deadline = math.inf
        if timeout is not None:
            deadline = time.monotonic() + timeout
        was_gone = False
        while self.pid not in self._server.codes:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                line = self._server.read_line(min(left_s, _CHECK_AFTER_S))
            except TimeoutError:
                if left_s <= _CHECK_AFTER_S:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
                # The line with the exit code may come just after the process is gone. If it has not come at
                # the next check, an interrupt lost it.
                if was_gone:
                    return -signal.SIGKILL
                was_gone = self._is_gone()
                continue
            if line is None:  # the server was killed, and with it what it forked
                self._server.codes[self.pid] = -signal.SIGKILL
        return self._server.codes[self.pid]

    def _is_gone(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

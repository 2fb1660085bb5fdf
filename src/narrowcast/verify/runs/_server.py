"""The process that forks the processes of runs: ``python -m narrowcast.verify.runs._server DESCRIPTOR``.

A forked process becomes the run: it has a session and output of its own, and ends as any Python program does.
Nothing is computed in the server, so that no run inherits threads, a device or random numbers.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from narrowcast.verify.runs._child import end_with_parent, main

# Else the garbage collections at the end of a run take half a second, for objects of torch. The compiler is
# imported only after this, since Triton's bindings complain at exit about objects that were not collected.
gc.freeze()
# torch imports its compiler when the first optimizer is made, which takes a second.
import torch._dynamo  # noqa: E402, F401


def _serve(connection: socket.socket) -> str | None:
    """Return the settings file in each process that is forked for a run; None: there are no more runs."""
    # Each run takes two forks. The first makes its parent, which waits for the run and tells its exit code
    # while the server reads the next request; the second makes the run. The system reaps the parents.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with connection, connection.makefile("r") as requests:
        for line in requests:
            if _fork() != 0:  # in the server
                continue
            end_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                pid = _fork()
            except OSError as error:  # no process is left, or no memory
                sys.stderr.write(f"{error}\n")
                connection.sendall(f"{os.getpid()} 1\n".encode())
                os._exit(1)
            if pid != 0:  # in the run's parent, which never returns from this
                _tell_end(connection, pid)
            settings_file: str = json.loads(line)
            _become_run(Path(settings_file).parent)
            # From this line on it may be stopped or killed, since its session is its own.
            connection.sendall(f"{os.getpid()}\n".encode())
            return settings_file
    return None


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads: those of OpenBLAS, which expects to be forked and makes new ones.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _tell_end(connection: socket.socket, pid: int) -> NoReturn:
    """Wait for the end of a run and tell its exit code. Then this process, the run's parent, ends."""
    status = os.waitpid(pid, 0)[1]
    with suppress(OSError):  # nobody listens any more
        connection.sendall(f"{pid} {os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become_run(folder: Path) -> None:
    """Give a forked process what a fresh one has: a session, and output of its own."""
    end_with_parent()
    os.setsid()
    for name, descriptor in (("stdout.txt", 1), ("stderr.txt", 2)):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, descriptor)
        os.close(file)


def _run_or_serve(descriptor: int) -> int:
    end_with_parent()
    settings_file = _serve(socket.socket(fileno=descriptor))
    return 0 if settings_file is None else main([settings_file])


if __name__ == "__main__":
    sys.exit(_run_or_serve(int(sys.argv[1])))

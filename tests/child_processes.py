"""Processes that tests start: one that takes too long is ended with all it started, and says where it was."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO

import psutil
import pytest

# Seconds; less than pytest's faulthandler_timeout, which ends the whole run.
LIMIT_S = 400.0
_LAST_WORDS_S = 10.0


def finished(
    command: Sequence[object], given: str | bytes | None = None, limit_s: float = LIMIT_S, **settings: object
) -> subprocess.CompletedProcess[str]:
    """What a command ends with; ``given`` is its standard input, and ``settings`` are those of ``Popen``."""
    return end(start(command, **settings), given, limit_s)


def output_of(command: Sequence[object], **settings: object) -> str:
    """What a command prints that ends with exit code 0."""
    done = finished(command, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(command: Sequence[object], **settings: object) -> subprocess.Popen[str]:
    """Begin a command in a session of its own, with pipes for what it reads and writes, as text."""
    environment = {"PYTHONFAULTHANDLER": "1", **(settings.pop("env", None) or os.environ)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [*map(str, command)], env=environment, start_new_session=True, **(pipes | settings)
    )


def end(
    process: subprocess.Popen[str], given: str | bytes | None = None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Wait for the end of what ``start`` began; past the limit the test fails, with all threads' stacks."""
    try:
        out, err = process.communicate(given, timeout=limit_s)
    except subprocess.TimeoutExpired:
        out, err = map(_text, _killed(process))
        command = " ".join(process.args)[:500]
        pytest.fail(f"{command}\nwas ended after {limit_s:g} s; it wrote:\n{out[-2000:]}\n{err[-8000:]}")
    except BaseException:
        _killed(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _killed(process: subprocess.Popen[str]) -> tuple[str | bytes | None, str | bytes | None]:
    """What was written, last by Python's fault handler, which tells the stacks of the threads as it aborts.

    The ranks of a launcher lead sessions of their own: to end the launcher's leaves them, and the pipes that
    they hold stay open.
    """
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    for number in (signal.SIGABRT, signal.SIGKILL):
        process.send_signal(number)
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # whoever lost its parent
        psutil.wait_procs(started, timeout=_LAST_WORDS_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)
    try:
        return process.communicate(timeout=_LAST_WORDS_S)
    except subprocess.TimeoutExpired as held:
        # Somebody who cannot be found holds the pipes.
        for pipe in (process.stdin, process.stdout, process.stderr):
            _close(pipe)
        return held.stdout, held.stderr


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.close()


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""

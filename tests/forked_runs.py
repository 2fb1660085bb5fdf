"""Run functions in processes that are forked from one that has imported torch, which takes 2 s each time.

The server is this file run as a program. It reads one request a line (JSON) from its standard input, forks,
and answers with the process id and, when that process has ended, with its id and exit code. The forked
process leaves the loop, calls the function and ends as a Python program does (traceback, threads, exit
handlers), except that only the script's own module is deleted: to delete all modules takes another second.
"""

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest


class ForkedProcess:
    """What ``subprocess.Popen`` offers of a process that the server forked."""

    def __init__(self, server, words):
        self.args = words
        self.returncode = None
        self._server = server
        self.pid = server.next_started()

    def wait(self, timeout=None):
        while self.pid not in self._server.codes:
            if not select.select([self._server.stdout], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._server.read_line()
        self.returncode = self._server.codes[self.pid]
        return self.returncode


class ForkServer:
    """Starts processes. ``codes``: process id -> exit code, of those that have ended."""

    def __init__(self):
        tests = Path(__file__).parent
        command = [sys.executable, "-W", "error::RuntimeWarning", str(tests / "forked_runs.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # Not buffered: on a busy machine both lines of a run may arrive at once, and ``select`` would wait
        # for ever for the second one, which the buffer holds already.
        self._server = subprocess.Popen(command, bufsize=0, **pipes)
        self.stdout, self.codes = self._server.stdout, {}

    def start(self, function, words, *, stdout, stderr, cwd=None, env=None):
        """Call ``"module:function"`` with ``words``; ``stdout`` and ``stderr`` are files."""
        request = {
            "function": function,
            "words": [*map(str, words)],
            "stdout": str(stdout),
            "stderr": str(stderr),
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
        }
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        return ForkedProcess(self, request["words"])

    def next_started(self):
        while (words := self.read_line())[1:]:
            pass
        self.codes.pop(words[0], None)
        return words[0]

    def read_line(self):
        """The id of a process that has started, or the id and the exit code of one that has ended."""
        words = [int(word) for word in self.stdout.readline().split()]
        self.codes.update([words] if words[1:] else [])
        return words

    def run(self, function, words, *, folder, limit_s=100.0, **where):
        """Wait for the end; the output goes to files in ``folder``."""
        out, err = folder / "stdout.txt", folder / "stderr.txt"
        process = self.start(function, words, stdout=out, stderr=err, **where)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            process.wait()
            pytest.fail(f"{words} took more than {limit_s:g} s: {out.read_text()}{err.read_text()}"[-8000:])
        return subprocess.CompletedProcess(words, process.returncode, out.read_text(), err.read_text())

    def close(self):
        self._server.stdin.close()
        self._server.stdout.close()
        # Not reaped: the time of all its processes would be counted as that of the last test.
        os.waitid(os.P_PID, self._server.pid, os.WEXITED | os.WNOWAIT)
        self._server.returncode = 0


def _serve():
    """Return the request in the process that was forked for it; None at the end of the server."""
    for line in sys.stdin:
        if os.fork() == 0:  # the parent of the run, so that another one can begin before it ends
            pid = os.fork()
            if pid == 0:
                return json.loads(line)
            os.write(1, f"{pid}\n".encode())
            os.write(1, f"{pid} {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
            os._exit(0)
    return None


def _become(request):
    os.setsid()
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.modules["narrowcast.attach._recorder"]._STARTED_IN = os.getcwd()


def _exit_code(function, words):
    try:
        return function(words) or 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
    except BaseException:  # as Python does at its end
        sys.excepthook(*sys.exc_info())
    return 1


def _end(code, sys=sys, threading=threading, atexit=atexit, leave=os._exit):
    threading._shutdown()
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()  # which closes its files
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    leave(code)


if __name__ == "__main__":
    for name in ("numpy", "narrowcast.attach", "narrowcast.verify", "torch._dynamo", "torch.utils.data"):
        importlib.import_module(name)  # the compiler too: torch imports it when an optimizer is made
    sys.path.append(str(Path(__file__).parent / "attach"))
    request = _serve()
    if request is not None:
        _become(request)
        module, _, function = request["function"].partition(":")
        _end(_exit_code(getattr(importlib.import_module(module), function), request["words"]))

"""The processes of runs are forked from one that has imported torch, and are as fresh ones."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from narrowcast.verify.runs import _processes
from narrowcast.verify.runs._processes import Processes
from narrowcast.verify.runs._runs import Purpose, RunSettings

# ``conftest.py`` replaces it in each test that is not ``long``; this file tests the real one.
_START = Processes.start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="linux: runs are forked there alone")


@pytest.fixture(scope="module")
def processes():
    made = Processes()
    yield made
    made.close()


@pytest.fixture
def started(processes, tmp_path):
    """Start the run of a script; return its process and its folder."""

    def start(text, name="run"):
        script = tmp_path / f"{name}.py"
        script.write_text(textwrap.dedent(text), encoding="utf-8")
        folder = tmp_path / name
        folder.mkdir()
        settings = RunSettings(target=(str(script),), policy="fp32", folder=folder, purpose=Purpose.TIMED)
        return _START(processes, settings.write()), folder

    return start


def test_a_forked_run_has_what_a_fresh_process_has(started):
    """Its own session, output, threads and arguments; and no device or random numbers were used before."""
    process, folder = started(
        """\
        import json, os, sys, threading, torch
        import __main__
        facts = {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "argv": sys.argv,
            "main": __main__.__file__,
            "threads": threading.active_count(),
            "device": torch.cuda.is_initialized(),
            "hash": os.environ["PYTHONHASHSEED"],
            "input": sys.stdin.read(),
        }
        print(json.dumps(facts))
        print("done", file=sys.stderr)
        """
    )
    assert process.wait(60) == 0
    facts = json.loads((folder / "stdout.txt").read_text())
    script = str(folder.with_suffix(".py"))
    assert facts == {
        "pid": process.pid,
        "session": process.pid,
        "argv": [script],
        "main": script,
        "threads": 1,
        "device": False,
        "hash": os.environ.get("PYTHONHASHSEED", "0"),
        "input": "",
    }
    assert (folder / "stderr.txt").read_text() == "done\n"


def test_a_run_ends_as_a_python_program_does(started):
    """With its exit handlers, what was not flushed, and its traceback and exit code."""
    process, folder = started(
        """\
        import atexit
        file = open(__file__ + ".txt", "w")
        file.write("kept")
        atexit.register(print, "at exit")
        raise KeyError("wrong")
        """
    )
    assert process.wait(60) == 1
    assert (folder / "stdout.txt").read_text() == "at exit\n"
    assert (folder / "stderr.txt").read_text().endswith("KeyError: 'wrong'\n")
    assert folder.with_suffix(".py.txt").read_text() == "kept"


def test_two_runs_end_in_either_order(started):
    waits, _ = started("import time\ntime.sleep(60)", "waits")
    ends, _ = started("raise SystemExit(3)", "ends")
    assert ends.wait(60) == 3
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0.05)
    os.killpg(waits.pid, signal.SIGTERM)
    assert waits.wait(60) == -signal.SIGTERM
    assert waits.wait(0) == -signal.SIGTERM, "again"


@pytest.mark.long
def test_when_the_server_is_killed_its_runs_end(tmp_path):
    """As when the user's terminal closes: nothing is left behind."""
    script = tmp_path / "waits.py"
    script.write_text("import time\ntime.sleep(60)")
    settings = RunSettings(target=(str(script),), policy="fp32", folder=tmp_path, purpose=Purpose.TIMED)
    processes = Processes()
    run = processes.start(settings.write())
    os.kill(processes._server._process.pid, signal.SIGKILL)
    began = time.monotonic()
    assert run.wait(30) == -signal.SIGKILL
    while os.path.isdir(f"/proc/{run.pid}") and time.monotonic() - began < 30:
        time.sleep(0.01)
    assert not os.path.isdir(f"/proc/{run.pid}")
    processes.close()


@pytest.mark.long
def test_a_server_that_cannot_start_is_a_run_that_failed(tmp_path, monkeypatch):
    """Here torch cannot be loaded. The error of the server stands where that of the run would."""
    broken = tmp_path / "path" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libtorch.so: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    settings = RunSettings(target=("train.py",), policy="fp32", folder=tmp_path, purpose=Purpose.TIMED)
    processes = Processes()
    assert processes.start(settings.write()).wait(60) == 1
    assert "libtorch.so: no such file" in (tmp_path / "stderr.txt").read_text()
    processes.close()


def test_other_systems_start_each_run_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(_processes.sys, "platform", "darwin")
    monkeypatch.setattr(_processes.sys, "executable", "/bin/echo")
    run = _START(Processes(), tmp_path / "narrowcast-run.json")
    assert run.wait(30) == 0
    words = (tmp_path / "stdout.txt").read_text().split()
    assert words == ["-m", "narrowcast.verify.runs._child", str(tmp_path / "narrowcast-run.json")]


def test_a_run_that_cannot_begin_has_failed(processes, started, tmp_path):
    """Its folder is missing, so that it cannot open its output, as on a full disk."""
    # The server starts in the folder of its first run, which has to be there.
    first, _ = started("raise SystemExit(3)")
    assert first.wait(60) == 3
    for _ in range(2):  # after such a run the server goes on
        run = _START(processes, tmp_path / "missing" / "narrowcast-run.json")
        assert run.wait(30) == 1


def test_a_line_that_an_interrupt_lost_is_not_waited_for(started):
    """The line told the exit code. Without it a process that is gone counts as killed."""
    process, _ = started("import time\ntime.sleep(60)")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    del process._server.codes[process.pid]
    assert process.wait(30) == -signal.SIGKILL


@pytest.mark.long
def test_a_server_that_was_killed_is_followed_by_another(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text("raise SystemExit(3)")
    settings = RunSettings(target=(str(script),), policy="fp32", folder=tmp_path, purpose=Purpose.TIMED)
    processes = Processes()
    assert processes.start(settings.write()).wait(60) == 3
    processes._server._process.kill()
    processes._server._process.wait()
    assert processes.start(settings.write()).wait(60) == 3
    processes.close()

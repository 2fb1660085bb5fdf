"""A test whose process hangs fails, says where that was, and leaves nothing that runs on."""

import os
import signal
import sys

import psutil
import pytest

import child_processes
from child_processes import end, start

RANK = """
import os, time

print(os.getpid(), flush=True)

def waits_here():
    time.sleep(600)

waits_here()
"""
# Like torchrun: what it starts leads a session of its own and holds the pipes of the launcher. In place of
# AND_THEN stands what the launcher does next.
LAUNCHER = f"""
import subprocess, sys

one = subprocess.Popen([sys.executable, "-c", {RANK!r}], start_new_session=True)
AND_THEN
"""


def begun(and_then):
    """Start the launcher; return its process, and the process number of what it started."""
    process = start([sys.executable, "-c", LAUNCHER.replace("AND_THEN", and_then)])
    return process, int(process.stdout.readline())


def test_a_process_that_hangs_is_ended_with_its_children():
    process, rank = begun("one.wait()")
    with pytest.raises(pytest.fail.Exception, match=r"was ended after 0.1 s(.|\n)*waits_here"):
        end(process, limit_s=0.1)
    assert process.returncode == -signal.SIGABRT
    assert not psutil.pid_exists(rank)


def test_a_child_that_cannot_be_found_delays_no_test(monkeypatch):
    """Its launcher ends at once. So it is nobody's child any more, and it still holds the pipes."""
    monkeypatch.setattr(child_processes, "_LAST_WORDS_S", 0.1)
    process, orphan = begun("")
    try:
        with pytest.raises(pytest.fail.Exception, match=r"was ended after 0.1 s"):
            end(process, limit_s=0.1)
        assert process.stdout.closed
    finally:
        os.kill(orphan, signal.SIGKILL)

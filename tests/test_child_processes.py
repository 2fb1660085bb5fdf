"""A test whose process hangs fails, says where that was, and leaves nothing that runs on."""

import os
import signal
import sys

import psutil
import pytest

import child_processes
from child_processes import end, start

# A launcher, as torchrun is: what it starts leads a session of its own and holds the same pipes.
RANK = """
import os, time

print(os.getpid(), flush=True)

def waits_here():
    time.sleep(600)

waits_here()
"""
LAUNCHER = f"""
import subprocess, sys

one = subprocess.Popen([sys.executable, "-c", {RANK!r}], start_new_session=True)
AND_THEN
"""


def begun(and_then):
    process = start([sys.executable, "-c", LAUNCHER.replace("AND_THEN", and_then)])
    return process, int(process.stdout.readline())


def test_a_process_that_hangs_is_ended_with_its_children():
    process, rank = begun("one.wait()")
    with pytest.raises(pytest.fail.Exception, match=r"was ended after 0.1 s(.|\n)*waits_here"):
        end(process, limit_s=0.1)
    assert process.returncode == -signal.SIGABRT
    assert not psutil.pid_exists(rank)


def test_one_that_nobody_can_find_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(child_processes, "_LAST_WORDS_S", 0.1)
    process, orphan = begun("")
    try:
        with pytest.raises(pytest.fail.Exception, match=r"was ended after 0.1 s"):
            end(process, limit_s=0.1)
        assert process.stdout.closed
    finally:
        os.kill(orphan, signal.SIGKILL)

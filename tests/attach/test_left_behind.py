"""What a run leaves that ends or begins in an unusual way."""

import sys
import textwrap

import pytest

from child_processes import output_of
from narrowcast.observe.capture import read_capture

TRAINS = """
    import os, signal, time, torch
    network = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for step in range(6):
        loss = network(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """


def test_a_script_that_calls_os_exit_keeps_every_step(runs):
    ended = runs.run(TRAINS + "os._exit(0)\n")
    assert ended.capture.end is None
    assert (len(ended.capture.of("step")), len(ended.capture.of("loss"))) == (6, 6)


def test_a_killed_run_keeps_all_but_the_last_second(runs):
    one_more = "time.sleep(1.2); network(torch.ones(1, 8)).sum().backward(); optimizer.step()\n"
    ended = runs.run(f"{TRAINS}{one_more}    os.kill(os.getpid(), signal.SIGKILL)\n")
    assert ended.code == -9
    assert len(ended.capture.of("step")) >= 6


@pytest.mark.long
def test_peak_memory_is_that_of_the_run_and_not_of_its_parent(tmp_path):
    starter, script = tmp_path / "starter.py", tmp_path / "script.py"
    starter.write_text(
        "import subprocess, sys\n"
        "ballast = b'x' * 2**31\n"
        "del ballast\n"
        "sys.exit(subprocess.run(sys.argv[1:]).returncode)\n"
    )
    script.write_text(textwrap.dedent(TRAINS))
    words = ["-m", "narrowcast", "run", "--run-dir", str(tmp_path / "run"), str(script)]
    output_of([sys.executable, str(starter), sys.executable, *words])
    end = read_capture(tmp_path / "run" / "capture.jsonl").end
    # torch alone takes 200 to 400 MiB; the starter took more than 2 GiB.
    assert 2**26 < end["peak_resident_bytes"] < 2**30

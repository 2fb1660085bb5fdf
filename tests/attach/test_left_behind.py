"""What a run leaves that ends in an odd way, or began in an odd place."""

import sys
import textwrap

from child_processes import output_of
from narrowcast.observe.capture import read_capture

TRAINS = """
    import os, torch
    network = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for step in range(6):
        loss = network(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def run_of(folder, text, *before):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    words = [sys.executable, "-m", "narrowcast", "run", "--run-dir", str(folder / "run"), str(script)]
    output_of([*before, *words])
    return read_capture(folder / "run" / "capture.jsonl")


def test_a_script_that_leaves_by_the_back_door_keeps_every_step(tmp_path):
    capture = run_of(tmp_path, TRAINS + "    os._exit(0)\n")
    assert capture.end is None
    assert (len(capture.of("step")), len(capture.of("loss"))) == (6, 6)


def test_peak_memory_is_that_of_the_run_and_not_of_what_started_it(tmp_path):
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import subprocess, sys\n"
        "ballast = b'x' * 2**31\n"
        "del ballast\n"
        "sys.exit(subprocess.run(sys.argv[1:]).returncode)\n"
    )
    capture = run_of(tmp_path, TRAINS, sys.executable, str(starter))
    # torch alone takes 200 to 400 MiB; the starter took more than 2 GiB.
    assert 2**26 < capture.end["peak_resident_bytes"] < 2**30

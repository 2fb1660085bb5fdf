"""Processes that a script starts itself train in mixed precision too, and say so."""

import json
import sys
from pathlib import Path

import pytest

from child_processes import finished
from narrowcast.observe.capture import read_capture

SCRIPT = Path(__file__).parent / "scripts" / "spawned.py"


@pytest.mark.parametrize(("start", "processes"), [("torch", 2), ("spawn", 1), ("forkserver", 1), ("fork", 1)])
def test_a_process_of_the_script_trains_in_mixed_precision(start, processes, tmp_path):
    command = [sys.executable, "-m", "narrowcast", "run", "--policy", "bf16", "--run-dir", str(tmp_path)]
    done = finished([*command, str(SCRIPT), start])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"process {n}: torch.bfloat16" for n in range(processes)]
    assert done.stderr.count("narrowcast: ") == 1
    if start == "fork":
        return
    assert "the script started processes of its own: they run in mixed precision too" in " ".join(
        done.stderr.split()
    )
    for number in range(processes):
        capture = read_capture(tmp_path / f"capture-process{number}.jsonl")
        assert capture.end["steps"] == 3
        assert capture.of("device")[0]["format"] == "bf16"


def test_a_comparison_is_of_the_process_that_trained(tmp_path):
    command = [sys.executable, "-m", "narrowcast", "compare", "--policy", "bf16", "--json"]
    done = finished([*command, "--run-dir", str(tmp_path), str(SCRIPT), "torch"])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["fp32"]["steps"] == result["mixed"]["steps"] == 3
    assert (result["fp32"]["format"], result["mixed"]["format"]) == ("fp32", "bf16")

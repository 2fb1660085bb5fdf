"""Processes that a script starts train in mixed precision too."""

import json
import sys
from pathlib import Path

import pytest

from child_processes import finished
from narrowcast.observe.capture import read_capture

SCRIPT = Path(__file__).parent / "scripts" / "spawned.py"


@pytest.mark.parametrize(
    ("start", "processes"),
    [
        ("spawn", 1),
        ("fork", 1),
        pytest.param("torch", 2, marks=pytest.mark.long),
        pytest.param("forkserver", 1, marks=pytest.mark.long),
    ],
)
def test_a_started_process_trains_in_mixed_precision(start, processes, tmp_path, fork_server):
    words = ["run", "--policy", "bf16", "--run-dir", tmp_path / "run", SCRIPT, start]
    done = fork_server.run("narrowcast.cli.main:main", words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"process {n}: torch.bfloat16" for n in range(processes)]
    if start == "fork":
        return
    assert "the script started processes of its own" in " ".join(done.stderr.split())
    for number in range(processes):
        capture = read_capture(tmp_path / "run" / f"capture-process{number}.jsonl")
        assert capture.end["steps"] == 3
        assert capture.of("device")[0]["format"] == "bf16"


@pytest.mark.long
def test_a_comparison_is_of_the_process_that_trained(tmp_path):
    command = [sys.executable, "-m", "narrowcast", "compare", "--policy", "bf16", "--json"]
    done = finished([*command, "--run-dir", str(tmp_path), str(SCRIPT), "torch"])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["fp32"]["steps"] == result["mixed"]["steps"] == 3
    assert (result["fp32"]["format"], result["mixed"]["format"]) == ("fp32", "bf16")

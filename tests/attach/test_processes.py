"""Runs that end in an unusual way, and processes that a script starts."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from child_processes import output_of
from narrowcast.capture import read_capture

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
    starter = "import subprocess, sys; len(b'x' * 2**31); sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TRAINS))
    words = ["-m", "narrowcast", "run", "--run-dir", tmp_path / "run", script]
    output_of([sys.executable, "-c", starter, sys.executable, *words])
    end = read_capture(tmp_path / "run" / "capture.jsonl").end
    # torch alone takes 200 to 400 MiB; the starter took more than 2 GiB.
    assert 2**26 < end["peak_resident_bytes"] < 2**30


# ---- processes that a script starts train in mixed precision too

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
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "capture.jsonl").touch()
    done = fork_server.run("narrowcast.cli.main:main", words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"process {n}: torch.bfloat16" for n in range(processes)]
    shown = " ".join(done.stderr.split())
    assert "note: the capture of the earlier run in" in shown
    assert "narrowcast: nothing ran in mixed precision in this process" in shown
    assert (
        f"note: processes of the script, {processes} of them, took {3 * processes} optimizer steps" in shown
    )
    if start == "fork":
        return
    assert "the script started processes of its own" in shown
    for number in range(processes):
        capture = read_capture(tmp_path / "run" / f"capture-process{number}.jsonl")
        assert capture.end["steps"] == 3
        assert capture.of("device")[0]["format"] == "bf16"


OWN_RANKS = """
    import os, subprocess, sys, torch
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    script = ["-m", __spec__.name] if __spec__ else [os.path.abspath(sys.argv[0])]
    words = [sys.executable, *script, *sys.argv[1:]]
    if rank == 0:
        subprocess.run(words, env={**os.environ, "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, check=True)
    network = torch.nn.Linear(8, 1)
    network.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    seen = []
    network(torch.randn(4, 8)).sum().backward()
    sys.stdout.write(f"rank {rank} {sys.argv[1:]}: {seen[0]}\\n")
    sys.stdout.flush()
    """


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (["train.py"], ["--policy", "bf16"]),
        pytest.param(["-m", "train"], ["--policy", "my.toml", "--seed", "1"], marks=pytest.mark.long),
    ],
    ids=["file", "module"],
)
def test_a_rank_that_the_script_starts_is_attached_too(script, options, tmp_path, fork_server):
    (tmp_path / "train.py").write_text(textwrap.dedent(OWN_RANKS))
    (tmp_path / "my.toml").write_text('version = 1\ncompute = "bf16"\n')
    words = ["run", *options, "--run-dir", "run", *script, "--epochs", "2"]
    done = fork_server.run("narrowcast.cli.main:main", words, folder=tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"rank {n} ['--epochs', '2']: torch.bfloat16" for n in (1, 0)]
    assert done.stderr.count("narrowcast: bf16 on cpu") == 1, "rank 0 speaks for all"
    capture = read_capture(tmp_path / "run" / "capture-rank1.jsonl")
    assert (capture.start["rank"], capture.end["backwards"]) == (1, 1)


def test_a_rank_that_a_measured_script_starts_is_refused(runs):
    ended = runs.run(OWN_RANKS)  # as compare, doctor and explain run it: without a command for ranks
    assert ended.code == 1
    assert "got one that starts rank 1 itself, which would train in FP32: write torchrun" in ended.stderr
    assert "--nproc-per-node 2 -m narrowcast in place of narrowcast" in ended.stderr


def test_another_process_of_the_script_is_noted(runs):
    alone = OWN_RANKS.replace('"LOCAL_RANK": "1"', '"LOCAL_RANK": "0", "AGAIN": "1"')
    ended = runs.run(alone.replace("if rank == 0:", 'if "AGAIN" not in os.environ:'))
    assert ended.code == 0, ended.stderr
    assert "rank 0 []: torch.float32" in ended.lines
    (note,) = [note["text"] for note in ended.capture.of("note") if "itself as another" in note["text"]]
    assert "which was left in FP32" in note


LAUNCHES = """
    import pathlib, subprocess, sys
    other = pathlib.Path(__file__).with_name("other.py")
    other.write_text("")
    subprocess.run([sys.executable, *sys.argv[1:], str(other)], check=True)
    """


@pytest.mark.parametrize("words", [[], ["-m", "narrowcast", "run"]])
def test_a_script_that_only_starts_another_is_told_how_to_start_narrowcast_there(words, runs):
    ended = runs.run(LAUNCHES, *words)
    assert ended.code == 0, ended.stderr
    notes = [note["text"] for note in ended.capture.of("note")]
    (note,) = [note for note in notes if "no module with parameters was called" in note]
    assert ("-m narrowcast run SCRIPT" in note) == (not words)


@pytest.mark.long
def test_a_comparison_is_of_the_process_that_trained(tmp_path):
    # One process, not two as torch.multiprocessing starts: each of the six runs starts them anew.
    words = ["compare", "--policy", "bf16", "--json", "--run-dir", tmp_path, SCRIPT, "spawn"]
    result = json.loads(output_of([sys.executable, "-m", "narrowcast", *words]))
    assert result["fp32"]["steps"] == result["mixed"]["steps"] == 3
    assert (result["fp32"]["format"], result["mixed"]["format"]) == ("fp32", "bf16")

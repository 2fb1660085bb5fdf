"""Training under ``narrowcast run``: threads, exit handlers, processes that a script starts, a killed run."""

import io
import sys

import pytest

from narrowcast.capture import CaptureWriter, start_event
from narrowcast.cli.run import _ending

# Says in which format its first layer computes, and takes as many steps as it is asked to.
NETWORK = """\
    import atexit, sys, threading, time
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Says(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.formats = set()

        def forward(self, x):
            y = self.inner(x)
            self.formats.add(str(y.dtype))
            return y

    def train(steps):
        network = nn.Sequential(Says(), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            network(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
        return sorted(network[0].formats)
    """


@pytest.fixture(scope="session")
def with_threads(shared_workshop):
    shared_workshop.write(
        "threads.py",
        NETWORK,
        """\
    def thread():
        while main.is_alive():
            time.sleep(0.01)
        print("thread", train(5), flush=True)

    @atexit.register
    def last():
        import inspect
        print("at exit", train(2), inspect.getsourcefile(nn.Module.__call__) == nn.modules.module.__file__)

    main = threading.current_thread()
    threading.Thread(target=thread).start()
    print("main", train(3), flush=True)
    sys.exit(7)
    """,
    )
    return shared_workshop.narrowcast("run", "--policy", "bf16", "threads.py")


@pytest.mark.cpu_kind
def test_threads_train_in_the_run_and_exit_handlers_do_not(with_threads):
    ours = with_threads
    assert (ours.code, ours.stderr) == (7, "")
    assert ours.stdout.splitlines() == [
        "main ['torch.bfloat16']",
        "thread ['torch.bfloat16']",
        "at exit ['torch.float32'] True",
    ]
    end = ours.capture.end
    assert (end["steps"], end["skipped_steps"], end["exit_code"]) == (8, 0, 7)
    assert "  8 optimizer steps, 0 skipped, loss scale off, " in ours.block


def test_the_summary_is_printed_once_where_stdout_is_stderr(tmp_path, monkeypatch):
    writer = CaptureWriter(tmp_path / "capture.jsonl")
    writer.write(start_event(["train.py"], "bf16"))
    both = io.StringIO()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    _ending(writer)()
    writer.close()
    assert both.getvalue().count("narrowcast: ") == 1


@pytest.mark.long
def test_a_run_folder_that_is_named_twice_does_not_mix_two_runs(workshop):
    workshop.write("trains.py", NETWORK, "train(int(sys.argv[1]))\n")
    folder = workshop.folder / "kept"
    words = ("run", "--run-dir", "kept", "--policy")
    first = workshop.narrowcast(*words, "fp16", "--loss-scale", "1024", "trains.py", "20")
    assert first.capture.end["steps"] == 20
    (folder / "capture-rank1.jsonl").write_text((folder / "capture.jsonl").read_text())
    (folder / "picture.png").write_text("of the script")
    second = workshop.narrowcast(*words, "bf16", "--seed", "5", "trains.py", "1")
    assert second.captures == first.captures
    assert second.capture.start["seed"] == 5
    assert (second.capture.end["steps"], len(second.capture.of("step"))) == (1, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["capture.jsonl", "picture.png"]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_writes_a_capture_and_rank_0_prints(workshop, rank):
    precise = "import os, torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; "
    workshop.write("shows.py", precise + "print(os.environ['NARROWCAST_RUN_DIR'])")
    (workshop.folder / "kept").mkdir()
    (workshop.folder / f"kept/capture-rank{1 - rank}.jsonl").write_text("of another process")
    (workshop.folder / "kept/capture-rank2.jsonl").write_text("of an earlier run, with more processes")
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    ours = workshop.narrowcast("run", "--run-dir", "kept", "shows.py", environment=environment)
    assert (ours.code, ours.stderr) == (0, "")
    assert ours.stdout == f"{workshop.folder / 'kept'}\n"
    assert len(ours.captures) == (rank == 0)
    left = {path.name for path in (workshop.folder / "kept").iterdir()}
    if rank == 0:
        assert left == {"capture.jsonl", "capture-rank1.jsonl"}
    else:
        assert {"capture-rank0.jsonl", "capture-rank1.jsonl"} <= left
        alone = workshop.narrowcast("run", "shows.py", environment=environment)
        assert (workshop.folder / alone.stdout.strip() / "capture.jsonl").is_file()  # in a folder of its own

"""Training under ``narrowcast run``: threads, exit handlers, processes that a script starts, a killed run."""

import signal
import sys
import time

import pytest

from narrowcast.machine import is_native
from narrowcast.observe.capture import read_capture

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


@pytest.mark.long
def test_forked_children_leave_the_capture_to_their_parent(workshop):
    workshop.write(
        "forks.py",
        NETWORK,
        """\
    import multiprocessing, os

    def work(queue):
        queue.put(train(4))

    if __name__ == "__main__":
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        print("child", queue.get())
        child.join()
        print("ended with", child.exitcode, flush=True)
        child = os.fork()
        if child == 0:
            print("second child", train(2), flush=True)
            sys.exit(0)  # runs what was registered for the exit, as the parent will
        os.waitpid(child, 0)
        print("parent", train(1))
    """,
    )
    ours = workshop.narrowcast("run", "--policy", "bf16", "forks.py")
    assert (ours.code, ours.stderr) == (0, "")
    assert ours.stdout.splitlines() == [
        "child ['torch.bfloat16']",
        "ended with 0",
        "second child ['torch.bfloat16']",
        "parent ['torch.bfloat16']",
    ]
    kinds = [event["event"] for event in ours.capture.events]
    assert kinds == ["start", "device", "forward", "loss", "step", "end"]
    assert ours.capture.end["steps"] == 1


@pytest.mark.long
def test_spawned_children_import_the_script_again(workshop):
    workshop.write(
        "spawns.py",
        NETWORK,
        """\
    import multiprocessing
    import beside

    class Kept:
        def __init__(self, formats):
            self.formats = formats

    def work(queue):
        queue.put(Kept([__name__, beside.NAME, sys.argv[1:], train(1)]))

    def work_of_rank(rank, words):
        print("rank", rank, words, train(1), flush=True)

    if __name__ == "__main__":
        for method in "spawn", "forkserver":
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            child = context.Process(target=work, args=(queue,))
            child.start()
            print(method, queue.get().formats)
            child.join()
            print("ended with", child.exitcode, flush=True)
        torch.multiprocessing.spawn(work_of_rank, args=("words",), nprocs=1)
        print("parent", train(1))
    """,
    )
    workshop.write("beside.py", "NAME = __name__")
    ours = workshop.narrowcast("run", "--policy", "bf16", "spawns.py", "--an", "option")
    assert (ours.code, ours.stderr) == (0, "")
    assert ours.stdout.splitlines() == [
        "spawn ['__mp_main__', 'beside', ['--an', 'option'], ['torch.bfloat16']]",
        "ended with 0",
        "forkserver ['__mp_main__', 'beside', ['--an', 'option'], ['torch.bfloat16']]",
        "ended with 0",
        "rank 0 words ['torch.bfloat16']",
        "parent ['torch.bfloat16']",
    ]
    assert ours.capture.end["steps"] == 1


@pytest.mark.long
def test_a_killed_run_leaves_a_capture_that_can_be_read(workshop):
    workshop.write("trains.py", NETWORK, "train(10**9)\n")
    process = workshop.start(
        sys.executable,
        "-m",
        "narrowcast",
        "run",
        "--policy",
        "fp16",
        "--loss-scale",
        "1024",
        "--run-dir",
        "kept",
        "trains.py",
    )
    path = workshop.folder / "kept/capture.jsonl"
    deadline = time.monotonic() + 100
    while not (path.exists() and path.read_text().count('"step"') > 10):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    ended = workshop.end(process)
    assert ended.code == -signal.SIGKILL
    # What it could not say at the end it had said at the beginning.
    assert ended.stderr.startswith("narrowcast: note: fp16 on this CPU has no instructions") or is_native(
        "fp16", "cpu"
    )
    assert ended.stderr.count("\n") <= 1
    capture = read_capture(path)
    assert capture.end is None
    assert capture.start["argv"] == ["trains.py"]
    totals = capture.totals()
    assert totals["steps"] > 10
    assert totals["final_scale"] == 1024
    assert all(0 <= loss["value"] < 100 for loss in capture.of("loss"))
    assert len(capture.of("step")) <= len(capture.of("loss")) <= len(capture.of("step")) + 1
    assert totals["wall_s"] > 0


@pytest.mark.long
def test_a_run_folder_that_is_named_twice_does_not_mix_two_runs(workshop):
    workshop.write("trains.py", NETWORK, "train(int(sys.argv[1]))\n")
    folder = workshop.folder / "kept"
    first = workshop.narrowcast(
        "run", "--policy", "fp16", "--loss-scale", "1024", "--run-dir", "kept", "trains.py", "20"
    )
    assert first.capture.end["steps"] == 20
    (folder / "capture-rank1.jsonl").write_text((folder / "capture.jsonl").read_text())
    (folder / "picture.png").write_text("of the script")
    second = workshop.narrowcast(
        "run", "--policy", "bf16", "--seed", "5", "--run-dir", "kept", "trains.py", "1"
    )
    assert second.captures == first.captures
    assert second.capture.start["seed"] == 5
    assert (second.capture.end["steps"], len(second.capture.of("step"))) == (1, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["capture.jsonl", "picture.png"]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_each_rank_writes_a_capture_and_rank_0_prints(workshop, rank):
    workshop.write("shows.py", "import os; print(os.environ['NARROWCAST_RUN_DIR'])")
    (workshop.folder / "kept").mkdir()
    (workshop.folder / f"kept/capture-rank{1 - rank}.jsonl").write_text("of another process")
    (workshop.folder / "kept/capture-rank2.jsonl").write_text("of an earlier run, with more processes")
    ours = workshop.narrowcast(
        "run",
        "--run-dir",
        "kept",
        "shows.py",
        environment={"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
    )
    assert (ours.code, ours.stderr) == (0, "")
    assert ours.stdout == f"{workshop.folder / 'kept'}\n"
    assert len(ours.captures) == (rank == 0)
    left = {path.name for path in (workshop.folder / "kept").iterdir()}
    if rank == 0:
        assert left == {"capture.jsonl", "capture-rank1.jsonl"}
    else:
        assert {"capture-rank0.jsonl", "capture-rank1.jsonl"} <= left

"""``narrowcast run --tensorboard``: its files, read back by TensorBoard's own reader."""

import json
import math
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from narrowcast.cli import main
from narrowcast.cli.run import _command_of_ranks

STEPS, BAD = 8, 3
# The third step is skipped. Two optimizers, of which the second has a closure.
SCRIPT = """\
    import json, multiprocessing, os, signal, sys, time
    import torch
    from torch import nn

    def train(steps, pause_s=0.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        other = nn.Linear(4, 1)
        adam = torch.optim.AdamW(model.parameters(), 1e-2)
        sgd = torch.optim.SGD(other.parameters(), 1e-2)
        told = {"first": [], "second": [], "norms": [], "other_norms": []}

        def norm(module):
            return float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))

        def closure():
            sgd.zero_grad()
            loss = other(torch.ones(2, 4)).square().mean()
            loss.backward()  # closure
            told["second"].append(loss.item())
            told["other_norms"].append(norm(other))
            return loss

        for number in range(1, steps + 1):
            x = torch.randn(2, 4)
            if number == 3:
                x = x * 1e30
            adam.zero_grad()
            loss = model(x).square().mean()
            loss.backward()  # first
            told["first"].append(loss.item())
            told["norms"].append(norm(model))
            adam.step()
            sgd.step(closure)
            time.sleep(pause_s)
        told["weights"] = [p.tolist() for p in model.parameters()]
        return told
    """
MAIN = """\
    if __name__ == "__main__":
        print(json.dumps(train(int(sys.argv[1]))))
    """
# Not with a random loss scale: that of SCRIPT's third input overflows the cast to fp16 at any.
OPTIONS = ("--policy", "fp16", "--loss-scale", "16")


def line_of(marker):
    return next(n for n, line in enumerate(SCRIPT.splitlines(), start=1) if line.endswith(marker))


FIRST, CLOSURE = f"loss/train.py:{line_of('# first')}", f"loss/train.py:{line_of('# closure')}"


def read(folder):
    """Scalars and texts of event files, as TensorBoard reads them: tag -> steps and values."""
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {}
    for tag in tags["tensors"]:
        shown = [(one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors(tag)]
        texts[tag.removesuffix("/text_summary")] = shown
    return scalars, texts


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A run with the option and one without, at the same time."""
    from workshops import Workshop

    workshop = Workshop(tmp_path_factory.mktemp("board"))
    workshop.write("train.py", SCRIPT, MAIN)
    words = ("-m", "narrowcast", "run", *OPTIONS)
    shown = workshop.start(sys.executable, *words, "--tensorboard", "board", "train.py", str(STEPS))
    plain = workshop.start(sys.executable, *words, "train.py", str(STEPS))
    return workshop.folder / "board", workshop.end(shown), workshop.end(plain)


@pytest.mark.long
def test_tensorboard_reads_what_the_script_saw(both):
    board, ours, _ = both
    told = json.loads(ours.stdout)
    scalars, texts = read(board)
    # Backward passes take turns, and so do steps.
    odd, even = range(1, 2 * STEPS, 2), range(2, 2 * STEPS + 1, 2)
    assert set(scalars) == {
        FIRST,
        CLOSURE,
        "narrowcast/loss_scale",
        "narrowcast/skipped_steps",
        "narrowcast/grad_norm",
        "narrowcast/optimizer1/grad_norm",
    }
    for tag, numbers, key in (
        (FIRST, odd, "first"),
        (CLOSURE, even, "second"),
        ("narrowcast/grad_norm", odd, "norms"),
        ("narrowcast/optimizer1/grad_norm", even, "other_norms"),
    ):
        assert [step for step, _ in scalars[tag]] == list(numbers), tag
        assert [value for _, value in scalars[tag]] == pytest.approx(told[key], rel=1e-6, nan_ok=True), tag
    assert not math.isfinite(scalars["narrowcast/grad_norm"][BAD - 1][1])
    skipped_at = 2 * BAD - 1
    every = range(1, 2 * STEPS + 1)
    assert scalars["narrowcast/skipped_steps"] == [(step, float(step >= skipped_at)) for step in every]
    assert scalars["narrowcast/loss_scale"] == [(step, 16.0) for step in every]

    ((step, story),) = texts["narrowcast/skips"]
    assert step == skipped_at
    assert f"step {skipped_at} was skipped at a loss scale of 16. narrowcast repeated it:" in story
    assert "verdict  precision" in story
    assert any("NaN or infinite itself" in note for _, note in texts["narrowcast/notes"])


@pytest.mark.long
def test_the_option_changes_no_bit_and_costs_nothing_without(both):
    _, ours, plain = both
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert all("grad_norm" in step for step in ours.capture.of("step"))
    assert not any("grad_norm" in step for step in plain.capture.of("step"))


@pytest.mark.long
def test_a_killed_run_keeps_what_was_written(workshop):
    kill = "if __name__ == '__main__':\n    train(4, 0.3)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    workshop.write("train.py", SCRIPT, kill)
    ours = workshop.narrowcast("run", *OPTIONS, "--tensorboard", "board", "train.py")
    assert ours.code < 0
    scalars, texts = read(workshop.folder / "board")
    # All but the events of the last tenth of a second before the last pause.
    assert scalars["narrowcast/skipped_steps"][:6] == [(step, float(step >= 5)) for step in range(1, 7)]
    assert len(scalars[FIRST]) >= 3
    assert "narrowcast/skips" in texts


@pytest.mark.long
def test_other_ranks_and_processes_have_folders_of_their_own(workshop):
    spawn = """\
    if __name__ == "__main__":
        multiprocessing.set_start_method("spawn")
        process = multiprocessing.Process(target=train, args=(2,))
        process.start()
        process.join()
        train(1)
    """
    workshop.write("train.py", SCRIPT, spawn)
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    words = ("run", *OPTIONS, "--tensorboard", "board", "train.py")
    assert workshop.narrowcast(*words, environment=environment).code == 0
    board = workshop.folder / "board"
    assert [path.name for path in board.iterdir()] == ["rank1"]
    of_rank, _ = read(board / "rank1")
    assert [step for step, _ in of_rank["narrowcast/skipped_steps"]] == [1, 2]
    of_process, _ = read(board / "rank1" / "process0")
    assert [step for step, _ in of_process["narrowcast/skipped_steps"]] == [1, 2, 3, 4]


def test_ranks_that_a_script_starts_get_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = _command_of_ranks("bf16", None, tmp_path, None, Path("board"), no_replay=False)
    assert f"--tensorboard={tmp_path / 'board'}" in words


def test_a_missing_package_or_a_wrong_folder_is_refused_at_once(here, capsys, monkeypatch):
    here.write("train.py", "print('it ran')")
    here.write("file", "")
    assert main(["run", "--tensorboard", "file/board", "train.py"]) == 2
    said = capsys.readouterr()
    assert "file/board: Not a directory; choose another with --tensorboard" in said.err
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["run", "--tensorboard", "board", "train.py"]) == 2
    said_of_package = capsys.readouterr()
    assert said_of_package.err.count("\n") == 1
    assert said_of_package.err.endswith(": pip install tensorboard\n")
    assert (said.out, said_of_package.out) == ("", "")
    assert sorted(path.name for path in here.folder.iterdir()) == ["file", "train.py"]

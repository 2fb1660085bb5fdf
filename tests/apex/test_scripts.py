"""Scripts for apex print the same numbers as they are, and migrated to torch and to narrowcast."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from child_processes import finished
from narrowcast.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ("speech_training.py", "language_apex.py")
TARGETS = ("torch", "narrowcast")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
OURS = ["-m", "narrowcast.apex"]


@dataclass(frozen=True)
class Printed:
    """What a script printed: by iteration the loss and the norm of the gradients, and a sum of parameters."""

    losses: list[float]
    norms: list[float]
    parameters: float


def printed(text):
    lines = [line.split() for line in text.splitlines()]
    steps = [line for line in lines if line[0] in ("step", "iteration")]
    (last,) = (line for line in lines if line[0] == "parameters")
    return Printed(
        losses=[float.fromhex(line[3]) for line in steps],
        norms=[float.fromhex(line[5]) for line in steps],
        parameters=float.fromhex(last[1]),
    )


@pytest.fixture(scope="session")
def migrated(tmp_path_factory):
    """By target, a folder with the scripts rewritten."""
    folders = {}
    for target in TARGETS:
        folders[target] = tmp_path_factory.mktemp(target)
        for name in NAMES:
            lines = (SCRIPTS / name).read_text().splitlines(keepends=True)
            # A script with edits of apex's lists keeps apex's calls, and migrate says to remove the edits.
            kept = [line for line in lines if not line.startswith("amp.lists.")]
            (folders[target] / name).write_text("".join(kept))
        assert main(["migrate", "--write", "--to", target, str(folders[target])]) == 0
    return folders


@pytest.fixture(scope="session")
def runs(migrated, tmp_path_factory, fork_server):
    """What each run printed, by its script, the way it was run, and its options."""
    jobs = {}
    for options in (("--amp",), ()):
        jobs["speech_training", "apex", options] = options
    for level in ("O0", "O1", "O2", "O3"):
        jobs["language_apex", "apex", level] = ("--fp16", "--opt_level", level)
    jobs["language_apex", "apex", "fp32"] = ()
    for target in TARGETS:
        jobs["speech_training", target, ("--amp",)] = ("--amp",)
        jobs["speech_training", target, ()] = ()
    jobs["language_apex", "narrowcast", "O2"] = ("--fp16", "--opt_level", "O2")
    found = {}
    for (script, way, which), options in jobs.items():
        path = (SCRIPTS if way == "apex" else migrated[way]) / f"{script}.py"
        # A script that does not import apex runs as under plain Python.
        done = fork_server.run(
            "narrowcast.apex.__main__:main", [path, *options], folder=tmp_path_factory.mktemp("run")
        )
        assert done.returncode == 0, done.stderr
        found[script, way, which] = printed(done.stdout)
    return found


def assert_same_numbers(one, other):
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert one.parameters == other.parameters


def assert_close(one, other, roundoffs):
    # In units of half's roundoff, 2**-11.
    for ours, theirs in zip(one.losses, other.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=roundoffs * 2.0**-11)


# Between input and loss about a dozen operators round a number to half, each by at most one roundoff; Adam's
# steps, whose size does not follow the gradient's, keep the weights as close.
ROUNDINGS = 12


def test_they_train(runs):
    for (script, way, options), found in runs.items():
        assert found.losses[-1] < found.losses[0], (script, way, options)
        assert all(0 < norm < 1e4 for norm in found.norms), (script, way, options)


def test_the_speech_script_migrated_trains_as_it_did(runs):
    apex, torchs, ours = (runs["speech_training", way, ("--amp",)] for way in ("apex", *TARGETS))
    # torch.autocast on a CPU leaves softmax in half, as the edited lists do.
    assert_same_numbers(torchs, ours)
    # apex runs the whole recurrent cell in half, autocast only its products.
    assert_close(apex, torchs, ROUNDINGS)
    assert apex.losses != torchs.losses


def test_a_rewritten_script_is_the_same_without_mixed_precision(runs):
    apex, torchs, ours = (runs["speech_training", way, ()] for way in ("apex", *TARGETS))
    assert_same_numbers(apex, torchs)
    assert_same_numbers(apex, ours)


def test_a_script_that_keeps_its_calls_computes_the_same(runs):
    assert_same_numbers(runs["language_apex", "apex", "O2"], runs["language_apex", "narrowcast", "O2"])


def test_the_levels_of_the_language_script_train_alike(runs):
    levels = {level: runs["language_apex", "apex", level] for level in ("O0", "O1", "O2", "O3", "fp32")}
    assert_same_numbers(levels["O0"], levels["fp32"])
    assert_close(levels["O1"], levels["fp32"], ROUNDINGS)
    assert_close(levels["O2"], levels["fp32"], ROUNDINGS)
    assert len({tuple(levels[level].losses) for level in ("O0", "O1", "O2", "O3")}) == 4


@pytest.mark.long
def test_two_ranks_under_torchrun_train_one_model(tmp_path):
    # Each rank's output in files of its own: they write at the same time.
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--log-dir", str(tmp_path), "--redirects", "3",
        *OURS, str(SCRIPTS / "speech_training.py"), "--amp", "--distributed", "--iterations", "4",
    ]  # fmt: skip
    done = finished(command, env=ENVIRONMENT)
    said = [file.read_text() for file in sorted(tmp_path.rglob("stderr.log"))]
    assert done.returncode == 0, (done.stderr, said)
    # Both have the same text here, and print the mean of their losses and their common gradients.
    ranks = [printed(file.read_text()) for file in sorted(tmp_path.rglob("stdout.log"))]
    assert len(ranks) == 2
    assert_same_numbers(*ranks)
    assert len(ranks[0].losses) == 4
    assert ["is provided by narrowcast" in text for text in said] == [True, False]

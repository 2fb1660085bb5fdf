"""Synthetic speech in four ways of mixed precision: learns, resumes to the bit, and reads nothing back."""

import json
import re

import pytest
import torch
from example_runs import EXAMPLES, assert_same, doctor, load, refused, run, succeeded

import narrowcast as nc
from narrowcast.apex import amp
from narrowcast.attach import call_site
from narrowcast.observe.profiling import HostReads, read_rows

MAIN = "speech_style/main.py"
SMALL = ("--width", "16", "--bins", "8", "--utterances", "40", "--batch-size", "8", "--device", "cpu")
# Neither an epoch, of 5 updates, nor the stretch of a line in the log ends with the half.
HALF, WHOLE = ("--log-every", "4", "--steps", "7"), ("--log-every", "4", "--steps", "14")
WAYS = [
    ("--amp", "none"),
    ("--amp", "torch", "--format", "bf16"),
    ("--amp", "torch", "--format", "fp16"),
    ("--amp", "narrowcast", "--format", "bf16"),
    ("--amp", "narrowcast", "--format", "fp16"),
    ("--amp", "narrowcast", "--format", "bf16", "--master-weights"),
    ("--amp", "narrowcast", "--format", "fp16", "--master-weights"),
    ("--amp", "apex", "--format", "bf16"),
    ("--amp", "apex", "--format", "fp16"),
    ("--amp", "apex", "--format", "bf16", "--master-weights"),
    ("--amp", "apex", "--format", "fp16", "--master-weights"),
]
in_each_way = pytest.mark.parametrize("way", WAYS, ids=" ".join)


@pytest.fixture(scope="module")
def speech():
    return load(MAIN)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_of_apex_stays():
    yield
    amp.shutdown()


def log_of(folder):
    return (folder / "speech_style.jsonl").read_text().splitlines()


def train(speech, folder, *options):
    training = speech.Training(speech.parse_arguments([*SMALL, *options]), folder)
    training.run()
    training.log.close()
    return training


def everything(training):
    """Weights, masters, moments, scheduler and scaler."""
    saved = {name: owner.state_dict() for name, owner in training.updates.saved().items()}
    return saved | {"model": training.model.state_dict()}


@in_each_way
def test_a_run_that_is_resumed_in_the_middle_goes_on_to_the_bit(speech, way, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    uninterrupted = train(speech, whole, *way, *WHOLE)
    train(speech, parts, *way, *HALF)
    torch.manual_seed(99)  # the random numbers of the checkpoint go on, not these
    resumed = train(speech, parts, *way, *WHOLE, "--resume")
    assert log_of(parts) == log_of(whole)
    assert [json.loads(line)["step"] for line in log_of(whole)[1:]] == [4, 8, 12]
    assert_same(everything(resumed), everything(uninterrupted))


def states(speech, folder, ranks, *way):
    """What the checkpoint of a folder holds, loaded."""
    model, updates = speech.make(speech.parse_arguments([*SMALL, *way]))
    kept = nc.training.load_checkpoint(folder / "speech_style.checkpoint", model, **updates.saved())
    assert kept.ranks == ranks
    saved = {name: owner.state_dict() for name, owner in updates.saved().items()}
    return model.state_dict(), saved, kept.position


def run_there(folder, processes, *options):
    there = {"NARROWCAST_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    return succeeded(run(MAIN, *SMALL, *options, folder=folder.parent, processes=processes, **there))


@pytest.mark.long
def test_a_new_process_goes_on_to_the_bit(speech, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    train(speech, whole, *WAYS[4], *WHOLE)
    train(speech, parts, *WAYS[4], *HALF)
    lines = run_there(parts, 1, *WAYS[4], *WHOLE, "--resume")
    assert "amp narrowcast, steps 8 to 14, 1 ranks, " in lines[0]
    assert log_of(parts) == log_of(whole)
    assert_same(states(speech, parts, 1, *WAYS[4]), states(speech, whole, 1, *WAYS[4]))


@pytest.mark.long
def test_two_ranks_go_on_to_the_bit_with_random_numbers_of_their_own(speech, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = run_there(whole, 2, *WAYS[5], *WHOLE)
    run_there(parts, 2, *WAYS[5], *HALF)
    lines = run_there(parts, 2, *WAYS[5], *WHOLE, "--resume")
    assert "steps 8 to 14, 2 ranks, " in lines[0]
    assert lines[-2:] == said[-2:]
    assert log_of(parts) == log_of(whole)
    assert_same(states(speech, parts, 2, *WAYS[5]), states(speech, whole, 2, *WAYS[5]))


@pytest.mark.long
def test_it_learns_to_read_along_and_draws_it(tmp_path):
    options = ("--steps", "120", "--width", "32", "--batch-size", "16", "--device", "cpu")
    lines = succeeded(run(MAIN, *options, folder=tmp_path, OMP_NUM_THREADS="1"))
    last = re.fullmatch(r"attention on the right token ([01]\.\d{4})", lines[-1])
    assert last, lines[-1]
    assert float(last[1]) > 0.8
    losses = [json.loads(line)["loss"] for line in log_of(tmp_path)[1:]]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 5
    assert {path.name for path in tmp_path.iterdir()} == {
        f"speech_style.{end}" for end in ("checkpoint", "jsonl", "png")
    }
    assert (tmp_path / "speech_style.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.long
def test_doctor_sees_no_line_that_reads_back_in_every_step(tmp_path):
    found = doctor(MAIN, *SMALL, "--steps", "60", "--amp", "none", folder=tmp_path)
    assert found["problem"] is None
    reads = found["mixed"]["reads"]
    assert reads["steps"] == 10
    assert reads["sites"], "the line of the log is read"
    for site in reads["sites"]:
        assert site["count"] <= 1, site


@pytest.mark.parametrize("way", [WAYS[2], WAYS[4], WAYS[6]], ids=" ".join)
def test_no_line_reads_back_in_every_step_in_mixed_precision_either(speech, way, tmp_path):
    with HostReads(call_site) as reads:
        train(speech, tmp_path, *way, "--log-every", "10", "--steps", "20")
    rows = read_rows(reads.take())
    assert rows
    for site in rows:
        assert site["count"] <= 2, site


def test_overflows_are_skipped_and_the_log_says_so(speech, tmp_path, monkeypatch):
    """At a scale of 65536 a loss a thousand times as large overflows fp16, until the scale is low enough."""
    loss_of = speech.loss_of
    monkeypatch.setattr(speech, "loss_of", lambda *given: 1000 * loss_of(*given))
    training = train(speech, tmp_path, *WAYS[4], "--log-every", "1", "--steps", "12")
    lines = [json.loads(line) for line in log_of(tmp_path)[1:]]
    assert lines[0]["updates_taken"] == 0
    assert lines[0]["grad_norm_before_clip"] in ("inf", "nan")
    taken, scale = lines[-1]["updates_taken"], lines[-1]["loss_scale"]
    assert 0 < taken < 12
    assert scale == 65536 / 2 ** (12 - taken)
    assert training.updates.scheduler.last_epoch == taken


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--amp", "tensorflow"), "argument --amp: invalid choice: 'tensorflow' (choose from "),
        (("--steps", "0"), "argument --steps: expected a whole number from 1 up, not 0"),
        (("--clip", "-1"), "argument --clip: expected a number above 0, not -1"),
        (("--learning-rate", "nan"), "argument --learning-rate: expected a number above 0, not nan"),
        (("--width", "7"), "argument --width: expected an even number, not 7"),
        (
            ("--batch-size", "41", "--utterances", "40"),
            "argument --batch-size: expected at most the 40 utterances",
        ),
        (
            ("--amp", "torch", "--master-weights"),
            "argument --master-weights: expected --amp apex or narrowcast, which have them",
        ),
        (("--device", "gpu"), "argument --device: expected cpu or cuda, not gpu"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(options, message):
    assert refused(MAIN, "--device", "cpu", *options).startswith(message)


def test_what_cannot_be_resumed_is_one_line(speech, tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWCAST_RUN_DIR", str(tmp_path))
    path = tmp_path / "speech_style.checkpoint"

    def said(*options):
        with pytest.raises(SystemExit) as ending:
            speech.main(speech.parse_arguments([*SMALL, *options, "--resume"]))
        return ending.value.code

    assert said() == f"cannot read the checkpoint {path}: No such file or directory"
    train(speech, tmp_path, *HALF)
    assert said(*HALF) == f"{path} is of step 7: expected --steps above that"
    assert said(*WHOLE, "--seed", "3") == f"{path} was made with seed = 0, not 3: expected the same"
    assert said(*WHOLE, "--amp", "torch").startswith(f"{path} does not fit: ")


def test_docstring_says_how_to_run_it_and_what_to_look_at():
    docstring = (EXAMPLES / MAIN).read_text().split('"""')[1]
    assert f"    python examples/{MAIN}\n" in docstring
    assert "What to look at:" in docstring

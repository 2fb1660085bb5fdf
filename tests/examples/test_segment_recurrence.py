"""Segments of text with a memory: the loop learns, resumes to the bit, and reads nothing back."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from example_runs import EXAMPLES, assert_same, doctor, load, refused, run, succeeded

import narrowcast as nc
from narrowcast.attach import call_site
from narrowcast.observe.profiling import HostReads, read_rows

MAIN = "segment_recurrence/main.py"
SMALL = (
    "--characters", "2000", "--width", "16", "--length", "8", "--memory", "12", "--batch-size", "16",
    "--validate-every", "6", "--device", "cpu",
)  # fmt: skip
# Neither a pass over the text, of 13 segments, nor the stretch of a line in the log ends with the half.
HALF, WHOLE = ("--log-every", "4", "--steps", "9"), ("--log-every", "4", "--steps", "18")
WAYS = [
    ("--amp", "none"),
    ("--amp", "torch", "--format", "bf16"),
    ("--amp", "torch", "--format", "fp16"),
    ("--amp", "narrowcast", "--format", "bf16"),
    ("--amp", "narrowcast", "--format", "fp16"),
]
in_each_way = pytest.mark.parametrize("way", WAYS, ids=" ".join)


@pytest.fixture(scope="module")
def recurrence():
    return load(MAIN)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def log_of(folder):
    return (folder / "segment_recurrence.jsonl").read_text().splitlines()


def train(recurrence, folder, *options):
    training = recurrence.Training(recurrence.parse_arguments([*SMALL, *options]), folder)
    training.run()
    training.log.close()
    return training


def everything(training):
    """Weights, masters, moments, scheduler and scaler."""
    saved = {name: owner.state_dict() for name, owner in training.updates.saved().items()}
    return saved | {"model": training.model.state_dict()}


@in_each_way
def test_a_run_that_is_resumed_in_the_middle_goes_on_to_the_bit(recurrence, way, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    uninterrupted = train(recurrence, whole, *way, *WHOLE)
    train(recurrence, parts, *way, *HALF)
    torch.manual_seed(99)  # the random numbers of the checkpoint go on, not these
    resumed = train(recurrence, parts, *way, *WHOLE, "--resume")
    assert log_of(parts) == log_of(whole)
    assert [json.loads(line)["step"] for line in log_of(whole)[1:]] == [4, 6, 8, 12, 12, 16, 18]
    assert (uninterrupted.passes, uninterrupted.segment, uninterrupted.characters) == (1, 5, 18 * 16 * 8)
    assert_same(everything(resumed), everything(uninterrupted))


def states(recurrence, folder, ranks, *way):
    """What the checkpoint of a folder holds, loaded."""
    vocabulary = recurrence.vocabulary_of(recurrence.source(1800))
    model, updates = recurrence.make(recurrence.parse_arguments([*SMALL, *way]), len(vocabulary))
    kept = nc.training.load_checkpoint(folder / "segment_recurrence.checkpoint", model, **updates.saved())
    assert kept.ranks == ranks
    assert kept.position["vocabulary"] == vocabulary
    assert [list(memory.shape) for memory in kept.position["memories"]] == [[2, 8 // ranks, 12, 16]] * 2
    saved = {name: owner.state_dict() for name, owner in updates.saved().items()}
    return model.state_dict(), saved, kept.position


def run_there(folder, processes, *options):
    there = {"NARROWCAST_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    return succeeded(run(MAIN, *SMALL, *options, folder=folder.parent, processes=processes, **there))


@pytest.mark.long
def test_a_new_process_goes_on_to_the_bit(recurrence, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    train(recurrence, whole, *WAYS[4], *WHOLE)
    train(recurrence, parts, *WAYS[4], *HALF)
    lines = run_there(parts, 1, *WAYS[4], *WHOLE, "--resume")
    assert "amp narrowcast, steps 10 to 18, 2 chunks, 1 ranks, " in lines[0]
    assert log_of(parts) == log_of(whole)
    assert_same(states(recurrence, parts, 1, *WAYS[4]), states(recurrence, whole, 1, *WAYS[4]))


@pytest.mark.long
def test_two_ranks_go_on_to_the_bit_with_random_numbers_of_their_own(recurrence, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = run_there(whole, 2, *WAYS[3], *WHOLE)
    run_there(parts, 2, *WAYS[3], *HALF)
    lines = run_there(parts, 2, *WAYS[3], *WHOLE, "--resume")
    assert "steps 10 to 18, 2 chunks, 2 ranks, " in lines[0]
    assert lines[-2:] == said[-2:]
    assert log_of(parts) == log_of(whole)
    assert_same(states(recurrence, parts, 2, *WAYS[3]), states(recurrence, whole, 2, *WAYS[3]))


def bits(line, what):
    found = re.fullmatch(rf"{what} memory (\d\.\d{{4}}) bits a character", line)
    assert found, line
    return float(found[1])


@pytest.mark.long
def test_it_learns_and_its_memory_helps(tmp_path):
    options = ("--characters", "40000", "--steps", "200", "--length", "16", "--memory", "48")
    lines = succeeded(run(MAIN, *options, "--device", "cpu", folder=tmp_path, OMP_NUM_THREADS="1"))
    # By their frequencies characters need 4.25 bits; seeds 0 to 2 come to 2.03, and 2.18 to
    # 2.20 without memory.
    assert bits(lines[-1], "with") < 2.5
    assert bits(lines[-1], "with") < bits(lines[-2], "without")
    validations = [json.loads(line) for line in log_of(tmp_path) if "best" in line]
    assert [line["step"] for line in validations] == [100, 200]
    assert validations[-1]["best"]["bits_a_character"] == pytest.approx(bits(lines[-1], "with"), abs=0.51e-4)
    assert {path.name for path in tmp_path.iterdir()} == {
        "segment_recurrence.checkpoint", "segment_recurrence.jsonl"
    }  # fmt: skip


def test_a_segment_with_its_memory_is_read_as_the_end_of_a_longer_one(recurrence):
    model, _ = recurrence.make(recurrence.parse_arguments(SMALL), 50)
    model.double().eval()
    characters = torch.randint(50, (4, 16))
    nothing = model.no_memory(4, torch.device("cpu")).double()
    with torch.no_grad():
        whole, remembered = model(characters, nothing)
        _, memory = model(characters[:, :8], nothing)
        second, kept = model(characters[:, 8:], memory)
    assert memory.shape == (2, 4, 8, 16)
    # Sums of at most 64 products, one after the other in two layers, in fp64.
    torch.testing.assert_close(second, whole[:, 8:], rtol=0, atol=1e-12)
    torch.testing.assert_close(kept, remembered, rtol=0, atol=1e-12)
    assert not torch.allclose(model(characters[:, 8:], nothing)[0], second, atol=1e-3)


@pytest.mark.long
def test_doctor_sees_no_line_that_reads_back_in_every_step(tmp_path):
    found = doctor(MAIN, *SMALL, "--log-every", "5", "--steps", "60", "--amp", "none", folder=tmp_path)
    assert found["problem"] is None
    reads = found["mixed"]["reads"]
    assert reads["steps"] == 10
    assert reads["sites"], "the line of the log is read"
    for site in reads["sites"]:
        assert site["count"] <= 2, site


@pytest.mark.parametrize("way", [WAYS[2], WAYS[4]], ids=" ".join)
def test_no_line_reads_back_in_every_step_in_mixed_precision_either(recurrence, way, tmp_path):
    with HostReads(call_site) as reads:
        train(
            recurrence, tmp_path, *way, *SMALL, "--log-every", "10", "--validate-every", "20", "--steps", "20"
        )
    rows = read_rows(reads.take())
    assert rows
    for site in rows:
        assert site["count"] <= 2, site


def test_overflows_are_skipped_and_the_log_says_so(recurrence, tmp_path, monkeypatch):
    """At a scale of 65536 a loss a thousand times as large overflows fp16, until the scale is low enough."""
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *given: 1000 * cross_entropy(*given))
    training = train(recurrence, tmp_path, *WAYS[4], "--log-every", "1", "--steps", "12")
    lines = [json.loads(line) for line in log_of(tmp_path) if "updates_taken" in line]
    assert lines[0]["updates_taken"] == 0
    assert lines[0]["grad_norm_before_clip"] in ("inf", "nan")
    taken, scale = lines[-1]["updates_taken"], lines[-1]["loss_scale"]
    assert 0 < taken < 12
    assert scale == 65536 / 2 ** (12 - taken)
    assert training.updates.scheduler.last_epoch == taken


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--amp", "apex"), "argument --amp: invalid choice: 'apex' (choose from "),
        (("--steps", "0"), "argument --steps: expected a whole number from 1 up, not 0"),
        (("--width", "6"), "argument --width: expected a multiple of 4, not 6"),
        (("--batch-size", "15"), "argument --batch-size: expected a multiple of the 2 chunks of all ranks"),
        (
            ("--characters", "2000"),
            "argument --characters: expected at least 2640 for these segments and columns",
        ),
        (("--memories", "disk"), "argument --memories: invalid choice: 'disk' (choose from "),
        (("--device", "gpu"), "argument --device: expected cpu or cuda, not gpu"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(options, message):
    assert refused(MAIN, "--device", "cpu", *options).startswith(message)


def test_what_cannot_be_resumed_is_one_line(recurrence, tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWCAST_RUN_DIR", str(tmp_path))
    path = tmp_path / "segment_recurrence.checkpoint"

    def said(*options):
        with pytest.raises(SystemExit) as ending:
            recurrence.main(recurrence.parse_arguments([*SMALL, *options, "--resume"]))
        return ending.value.code

    assert said() == f"cannot read the checkpoint {path}: No such file or directory"
    train(recurrence, tmp_path, *HALF)
    assert said(*HALF) == f"{path} is of step 9: expected --steps above that"
    assert said(*WHOLE, "--seed", "3") == f"{path} was made with seed = 0, not 3: expected the same"
    assert said(*WHOLE, "--amp", "torch").startswith(f"{path} does not fit: ")


def test_docstring_says_how_to_run_it_and_what_to_look_at():
    docstring = (EXAMPLES / MAIN).read_text().split('"""')[1]
    assert f"    python examples/{MAIN}\n" in docstring
    assert "What to look at:" in docstring

"""Checkpoints of several processes on gloo, in DDP and ``fully_shard``, loaded by as many and by others."""

import shutil

import pytest
import torch
from checkpoint_launches import facts_of

from narrowcast.errors import CheckpointError
from narrowcast.training import load_checkpoint, save_checkpoint

CASES = ["ddp fp16", "ddp masters", "fsdp bf16", "fsdp O2", "fsdp kahan", "fsdp stochastic"]
FEW = ["ddp fp16", "fsdp O2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def by_case(facts):
    return {one["case"]: one for one in facts}


@pytest.fixture(scope="module")
def saved(folder):
    return by_case(facts_of("checkpoint_ranks.py", "save", folder, processes=2))


@pytest.fixture(scope="module")
def resumed(folder, saved):
    """By the number of processes."""
    return {
        count: by_case(facts_of("checkpoint_ranks.py", "resume", folder, processes=count))
        for count in (None, 2, 4)
    }


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    """A few cases, saved and resumed."""
    folder = tmp_path_factory.mktemp("few")
    phases = ("save", "resume")
    return [by_case(facts_of("checkpoint_ranks.py", one, folder, *FEW, processes=2)) for one in phases]


@pytest.mark.parametrize("case", FEW)
def test_two_ranks_continue_to_the_bit(few, case):
    check_bits(*few, case)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_as_many_ranks_continue_to_the_bit(saved, resumed, case):
    check_bits(saved, resumed[2], case)


def check_bits(saved, resumed, case):
    found = resumed[case]
    assert found["ends"] == saved[case]["ends"], "weights, statistics, random numbers and rates of each rank"
    assert found["notes"] == []
    assert found["exact"][0]
    assert found["positions"] == [[0, [0, 1, 2]], [1, [1, 2, 3]]]


@pytest.mark.long
@pytest.mark.parametrize("count", [None, 4])
@pytest.mark.parametrize("case", CASES)
def test_another_number_of_ranks_loads_the_same_states(resumed, case, count):
    found = resumed[count][case]
    assert found["exact"] == [True] * (count or 1)
    here = "4 ranks" if count else "1 rank"
    of_random = (
        "random states: ranks from 2 on have none in it, and keep their own"
        if count
        else "random states: those of ranks from 1 on are not used"
    )
    expected = [f"the checkpoint is of 2 ranks, loaded by {here}", of_random]
    expected.append("each rank takes its own position, and new ranks that of rank 0")
    if case.startswith("ddp"):
        what = "model/1.running_mean, model/1.running_var"
        expected.append(f"ranks had different values of {what}: every rank takes those of rank 0")
    if case == "fsdp stochastic":
        what = "objects//held/0/state/generators/cpu"
        expected.append(f"ranks had different values of {what}: every rank takes those of rank 0")
    assert found["notes"] == expected
    positions = [[0, [0, 1, 2]], [1, [1, 2, 3]], [0, [0, 1, 2]], [0, [0, 1, 2]]]
    assert found["positions"] == positions[: count or 1]


@pytest.mark.long
def test_new_ranks_do_not_draw_what_others_draw(resumed):
    draws = [end[2] for end in resumed[4]["fsdp bf16"]["ends"]]
    assert len(set(map(tuple, draws))) == 4


@pytest.mark.long
def test_several_ranks_load_what_one_process_saved(resumed):
    found = resumed[4]["alone fsdp bf16"]
    assert found["exact"] == [True] * 4
    assert found["positions"] == [[7, [0.0]]] * 4
    assert found["notes"] == [
        "the checkpoint is of 1 rank, loaded by 4 ranks",
        "random states: ranks from 1 on have none in it, and keep their own",
    ]


def test_what_one_rank_cannot_do_stops_all_and_changes_nothing(few):
    found = few[0]["refused"]
    (other_save, load), (own_save, other_load) = found["told"]
    assert own_save.startswith("a checkpoint holds dicts, lists")
    assert "position is a object" in own_save
    assert other_save == f"rank 1 failed: CheckpointError: {own_save}"
    assert "it holds no scheduler 'beside the Stepper 0'" in load
    assert other_load == f"rank 0 failed: CheckpointError: {load}"
    assert found["unchanged"]
    assert found["folders"] == 2, "the marker and the data"


# ---- a folder, in one process


@pytest.fixture
def one(tmp_path):
    """A folder that one process has saved into."""
    path = tmp_path / "folder.ckpt"
    path.mkdir()
    model = torch.nn.Linear(3, 2)
    save_checkpoint(path, model, position="here")
    return path, model


def test_one_process_saves_into_a_folder_that_is_there(one):
    path, model = one
    other = torch.nn.Linear(3, 2)
    assert load_checkpoint(path, other).position == "here"
    assert torch.equal(other.weight, model.weight)
    assert (path / "checkpoint.narrowcast").is_file()


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="is a folder with other files in it"):
        save_checkpoint(tmp_path, torch.nn.Linear(1, 1))
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


def test_an_altered_or_missing_byte_of_a_folder_is_found(one):
    path, model = one
    before = model.weight.detach().clone()
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        whole = file.read_bytes()
        for place in {0, 99, len(whole) // 2, len(whole) - 1}:
            altered = bytearray(whole)
            altered[place] ^= 0x01
            file.write_bytes(altered)
            with pytest.raises(CheckpointError):
                load_checkpoint(path, model)
            file.write_bytes(whole[:place])
            with pytest.raises(CheckpointError):
                load_checkpoint(path, model)
        file.unlink()
        with pytest.raises(CheckpointError):
            load_checkpoint(path, model)
        file.write_bytes(whole)
    assert load_checkpoint(path, model).position == "here"
    assert torch.equal(model.weight, before)


def test_a_folder_without_a_complete_checkpoint(one):
    path, model = one
    (path / "checkpoint.narrowcast").unlink()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_checkpoint(path, model)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        load_checkpoint(path, model)

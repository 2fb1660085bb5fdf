"""Checkpoints of several processes on gloo, in DDP and ``fully_shard``, loaded by as many and by others."""

import shutil

import pytest
import torch
from checkpoint_launches import facts_of

from narrowcast.errors import CheckpointError
from narrowcast.training import load_checkpoint, save_checkpoint
from narrowcast.training.checkpoint._ranks import _digest

CASES = ["ddp fp16", "ddp masters", "fsdp bf16", "fsdp O2", "fsdp kahan", "fsdp stochastic"]


def ranks_by_case(*arguments, processes):
    """The facts of each rank."""
    lines = facts_of("checkpoint_ranks.py", *arguments, processes=processes)
    return {line["case"]: line["ranks"] for line in lines}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def saved(folder):
    return ranks_by_case("save", folder, processes=2)


@pytest.fixture(scope="module")
def resumed(folder, saved):
    """By the number of processes."""
    return {count: ranks_by_case("resume", folder, processes=count) for count in (None, 2, 4)}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_as_many_ranks_continue_to_the_bit(saved, resumed, case):
    for rank, (before, after) in enumerate(zip(saved[case], resumed[2][case], strict=True)):
        assert after["end"] == before["end"], "weights, statistics, random numbers and rates"
        assert after["notes"] == []
        assert after["exact"] or rank > 0, "which has statistics of its own"
        assert after["position"] == [rank, [rank, rank + 1, rank + 2]]


@pytest.mark.long
@pytest.mark.parametrize("count", [None, 4])
@pytest.mark.parametrize("case", CASES)
def test_another_number_of_ranks_loads_the_same_states(resumed, case, count):
    ranks = resumed[count][case]
    assert len(ranks) == (count or 1)
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
    positions = [[0, [0, 1, 2]], [1, [1, 2, 3]], [0, [0, 1, 2]], [0, [0, 1, 2]]]
    for facts, position in zip(ranks, positions, strict=False):
        assert facts["exact"]
        assert facts["notes"] == expected
        assert facts["position"] == position


@pytest.mark.long
def test_new_ranks_do_not_draw_what_others_draw(resumed):
    draws = [facts["end"][2] for facts in resumed[4]["fsdp bf16"]]
    assert len(set(map(tuple, draws))) == 4


@pytest.mark.long
def test_several_ranks_load_what_one_process_saved(resumed):
    for facts in resumed[4]["alone"]:
        assert facts["exact"]
        assert facts["position"] == [7, [0.0]]
        assert facts["notes"] == [
            "the checkpoint is of 1 rank, loaded by 4 ranks",
            "random states: ranks from 1 on have none in it, and keep their own",
        ]


def altered(tensor, place, change):
    """A copy with one byte changed, or two words exchanged."""
    copy = tensor.clone()
    flat = copy.view(torch.uint8)
    if change == "exchanged":
        flat[place : place + 8], flat[-8:] = flat[-8:].clone(), flat[place : place + 8].clone()
    else:
        flat[place] ^= change
    return copy


@pytest.mark.parametrize("length", [24, 2**17 + 3], ids=["short", "of several pieces"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_digest_tells_tensors_of_ranks_apart(dtype, length):
    tensor = torch.arange(length * 8, dtype=torch.int64).to(torch.uint8).view(dtype)
    variants = [altered(tensor, place, bit) for place in (0, 5, length) for bit in (0x01, 0x80)]
    variants += [altered(altered(tensor, 7, 0x80), 15, 0x80)]  # two signs, in the highest bits of words
    variants += [altered(tensor, 0, "exchanged"), tensor[: length // 2].clone(), tensor.reshape(2, -1)]
    variants += [tensor.reshape(2, -1).t(), torch.zeros_like(tensor), torch.ones_like(tensor)]
    variants += [tensor.view(torch.int8) if dtype == torch.uint8 else tensor.view(torch.uint8)]
    assert len({_digest(one) for one in [tensor, *variants]}) == 1 + len(variants)
    assert _digest(tensor.clone()) == _digest(tensor)


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


def test_what_a_killed_first_save_left_of_the_marker_is_no_other_file(tmp_path):
    (tmp_path / f".checkpoint.narrowcast.{'0123456789abcdef' * 2}.part").write_bytes(b"{")
    save_checkpoint(tmp_path, torch.nn.Linear(1, 1), position="here")
    assert load_checkpoint(tmp_path, torch.nn.Linear(1, 1)).position == "here"
    assert not list(tmp_path.glob("*.part"))


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

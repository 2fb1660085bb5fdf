"""One checkpoint in one file: everything comes back to the bit; damaged files are refused."""

import collections
import hashlib
import math
import os
import random

import hypothesis.strategies as st
import numpy
import pytest
import torch
from checkpoint_launches import Bomb, same
from hypothesis import example, given, settings
from torch import nn

import narrowcast as nc
from narrowcast.errors import CheckpointError
from narrowcast.training import load_checkpoint, save_checkpoint

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64, torch.complex128,
]  # fmt: skip


def round_trip(path, position):
    save_checkpoint(path, nn.Linear(1, 1), position=position)
    found = load_checkpoint(path, nn.Linear(1, 1))
    assert found.notes == ()
    return found.position


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=9,
)


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.long)])
def test_any_position_comes_back(tmp_path, count):
    @settings(max_examples=count, deadline=None)
    @example(position=[b"", (), {}, {(): []}])
    @given(position=nested)
    def check(position):
        assert same(round_trip(tmp_path / "one.ckpt", position), position)

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_order_come_back(tmp_path, dtype):
    bits = torch.arange(2 * 3 * 4 * 16, dtype=torch.int64).to(torch.uint8)
    if dtype == torch.bool:
        bits = bits & 1
    values = bits.view(dtype).flatten()[:24].reshape(2, 3, 4)
    position = {
        "whole": values,
        "permuted": values.permute(2, 0, 1),
        "of one": values.reshape(-1)[0],
        "empty": values[:0],
        "part": values[:, 1:2],
    }
    found = round_trip(tmp_path / "one.ckpt", position)
    assert all(same(found[name], position[name]) for name in ("whole", "permuted", "of one", "empty"))
    assert torch.equal(found["part"].view(torch.uint8), position["part"].contiguous().view(torch.uint8))


def test_numbers_of_numpy_and_other_values_that_states_hold(tmp_path):
    position = {
        "numpy": [numpy.float64(0.1), numpy.float32(0.1), numpy.int64(-3), numpy.bool_(True)],
        "counter": collections.Counter({3: 2}),
        "ordered": collections.OrderedDict(b=1, a=2),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "size": torch.Size([2, 3]),
    }
    found = round_trip(tmp_path / "one.ckpt", position)
    assert found.pop("numpy") == [0.1, float(numpy.float32(0.1)), -3, True]
    position.pop("numpy")
    assert found.pop("size") == tuple(position.pop("size"))
    assert same(found, position)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (print, "position/a/1 is a builtin_function_or_method: save what it is made from"),
        (numpy.zeros(2), r"position/a/1 is a numpy.ndarray: .*torch.from_numpy\(array\)"),
        (collections.defaultdict(int), r"is a collections.defaultdict"),
        (torch.zeros(2).to_sparse(), "is a tensor on cpu with layout sparse_coo: make it dense"),
        (torch.zeros(2, device="meta"), "is a tensor on meta"),
    ],
)
def test_values_that_cannot_be_saved_are_named(tmp_path, value, message):
    path = tmp_path / "one.ckpt"
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(path, nn.Linear(1, 1), position={"a": [0, value]})
    assert list(tmp_path.iterdir()) == []


def test_tied_weights_and_views_are_saved_once(tmp_path):
    path = tmp_path / "one.ckpt"
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    model[1].weight = model[0].weight
    save_checkpoint(path, model, position=torch.zeros(2**20)[:3])
    assert path.stat().st_size < 2 * 4 * 128 * 128
    other = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    load_checkpoint(path, other)
    assert torch.equal(other[1].weight, model[0].weight)


def test_torch_load_reads_a_checkpoint(tmp_path):
    model = nn.Linear(3, 2)
    save_checkpoint(tmp_path / "one.ckpt", model)
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert torch.equal(found["model"]["weight"], model.weight)


# ---- a file that is not as it was written


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "one.ckpt"
    model = nn.Linear(3, 2)
    save_checkpoint(path, model, torch.optim.SGD(model.parameters(), 0.1), position=7)
    return path, path.read_bytes()


def refused(path, model):
    """The error of loading, after which nothing has changed."""
    before, drawn = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, model)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(torch.get_rng_state(), drawn)
    return str(error.value)


@pytest.mark.parametrize("step", [151, pytest.param(13, marks=pytest.mark.long)])
def test_any_altered_byte_is_found(saved, step):
    path, whole = saved
    model = nn.Linear(3, 2)
    for place in sorted({*range(0, len(whole), step), *range(len(whole) - 105, len(whole), 8)}):
        altered = bytearray(whole)
        altered[place] ^= 0x20  # the case of a letter
        path.write_bytes(altered)
        refused(path, model)


def test_a_truncated_or_longer_file_is_found(saved):
    path, whole = saved
    model = nn.Linear(3, 2)
    last_line = len(whole) - whole.rindex(b"\n", 0, -1)
    for length in {0, 1, 4, 200, len(whole) // 2, len(whole) - last_line, len(whole) - 1}:
        path.write_bytes(whole[:length])
        assert "is truncated, was altered" in refused(path, model)
    path.write_bytes(whole + b"\0")
    refused(path, model)
    path.write_bytes(whole)
    assert load_checkpoint(path, model).position == 7


def test_a_newer_version_says_so(saved):
    path, whole = saved
    path.write_bytes(whole.replace(b"checkpoint 1 sha256", b"checkpoint 2 sha256"))
    assert refused(path, nn.Linear(3, 2)) == (
        f"{path} is a checkpoint of version 2, and this narrowcast reads up to 1: install a newer narrowcast"
    )


def test_a_file_of_another_program_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("step 7: loss 0.3")
    assert "is not of save_checkpoint" in refused(path, nn.Linear(3, 2))
    torch.save({"model": nn.Linear(3, 2).state_dict()}, path)
    assert "is read with torch.load" in refused(path, nn.Linear(3, 2))
    assert "No such file or directory" in refused(tmp_path / "missing.ckpt", nn.Linear(3, 2))


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    path, ran = tmp_path / "one.ckpt", tmp_path / "ran"
    torch.save({"format": "narrowcast checkpoint", "model": Bomb(ran)}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with path.open("ab") as file:
        file.write(f"\nnarrowcast checkpoint 1 sha256 {digest}\n".encode())
    assert "not a file of torch.save without code" in refused(path, nn.Linear(3, 2))
    assert not ran.exists()
    torch.load(path, weights_only=False)["model"].close()
    assert ran.exists(), "it would have"


# ---- writing


@pytest.mark.parametrize("place", ["missing/one.ckpt", "file/one.ckpt", "x" * 300])
def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*The previous one is unchanged"):
        save_checkpoint(tmp_path / place, nn.Linear(1, 1))


def test_order_of_flush_rename_and_folder_sync(tmp_path, monkeypatch):
    calls = []
    sync, rename = os.fsync, os.replace

    def kind(descriptor):
        return "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"

    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(f"sync {kind(fd)}"), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("rename"), rename(*names)))
    save_checkpoint(tmp_path / "one.ckpt", nn.Linear(1, 1))
    assert calls == ["sync file", "rename", "sync folder"]


# ---- random states


def test_every_random_state_is_as_it_was(tmp_path):
    path = tmp_path / "one.ckpt"
    random.gauss(0, 1)
    numpy.random.standard_normal()  # both keep the second of a pair
    save_checkpoint(path, nn.Linear(1, 1))

    def draws():
        return (
            torch.rand(3).tolist(), torch.randn(1).item(), random.random(), random.gauss(0, 1),
            numpy.random.rand(), numpy.random.standard_normal(),
        )  # fmt: skip

    expected = draws()
    model = nn.Linear(1, 1)
    assert load_checkpoint(path, model).notes == ()
    assert draws() == expected
    assert math.isfinite(expected[0][0])


def test_the_version_of_what_wrote_it_is_kept(tmp_path):
    save_checkpoint(tmp_path / "one.ckpt", nn.Linear(1, 1), policy="bf16")
    found = load_checkpoint(tmp_path / "one.ckpt", nn.Linear(1, 1))
    assert found.versions["narrowcast"] == nc.__version__
    assert found.versions["torch"] == torch.__version__
    assert (found.ranks, found.position, found.policy) == (1, None, nc.Policy.preset("bf16"))

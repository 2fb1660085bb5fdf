"""What other loops saved with torch.save: converted where it is plain what is meant, and said; never run."""

import argparse
import pickle

import numpy
import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import CheckpointError
from narrowcast.scaling import Dynamic
from narrowcast.training import load_checkpoint


def trained(seed=0, steps=2):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_at(seed):
    return torch.Generator().manual_seed(seed).get_state()


def drawn_after(seed):
    return torch.rand(3, generator=torch.Generator().manual_seed(seed))


APEX = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 17}}
CONVERTED = "was written by torch.save, not by save_checkpoint: it was converted"
NO_PYTHON = "the checkpoint holds no random state of Python's random: it is as it was"
NO_NUMPY = "the checkpoint holds no random state of NumPy: it is as it was"


def test_a_loop_with_random_states_of_all_ranks(tmp_path):
    model, optimizer = trained()
    path = tmp_path / "epoch_3.pt"
    torch.save(
        {
            "epoch": 3,
            "cuda_rng_state_all": torch.stack([state_at(7), state_at(8)]),
            "random_rng_states_all": torch.stack([state_at(5), state_at(6)]),
            "config": {"width": 4},
            "state_dict": {f"module.{name}": value for name, value in model.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "amp": APEX,
        },
        path,
    )
    other, fresh = trained(1, steps=0)
    scaler = nc.GradScaler("cpu")
    found = load_checkpoint(path, other, fresh, scaler=scaler)
    assert torch.equal(torch.rand(3), drawn_after(5))
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert str(fresh.state_dict()) == str(optimizer.state_dict())
    assert scaler.loss_scale() == Dynamic(
        scale=1024.0, good_steps=17, rule="apex", min_scale=scaler.loss_scale().min_scale, max_scale=2.0**24
    )
    assert found.position == {"epoch": 3, "config": {"width": 4}}
    assert (found.policy, found.versions, found.ranks) == (None, {}, 1)
    expected = [
        f"{path} {CONVERTED}",
        'its model was wrapped in DDP: "module." was taken from the names',
        "its loss scale is from the state that apex saves: ",
        "it holds the random state of 2 ranks, and here is 1: each rank takes its own",
        "it holds the CUDA random state of 2 ranks, and here is 1: each rank takes its own",
    ]
    if not torch.cuda.is_available():
        expected.append("the random state of cuda:0 was not set: this process has no such device")
        assert len(found.notes) == 8
    for note in (*expected, NO_PYTHON, NO_NUMPY):
        assert any(one.startswith(note) for one in found.notes), (note, found.notes)


def test_a_loop_with_one_random_state_and_none_of_cuda(tmp_path):
    model, optimizer = trained()
    path = tmp_path / "old.pt"
    states = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    torch.save({**states, "random_rng_state": state_at(5)}, path)
    found = load_checkpoint(path, *trained(1))
    assert torch.equal(torch.rand(3), drawn_after(5))
    assert found.notes == (f"{path} {CONVERTED}", NO_PYTHON, NO_NUMPY)


def test_a_loop_with_a_scheduler_and_torchs_scaler(tmp_path):
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    path = tmp_path / "last.pt"
    rest = {"epoch": 2, "batch": 5, "last_iter": 9, "train_step": 40, "best_val_loss": 0.25}
    states = {
        "model_config": {"layers": 2},
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "scheduler_state": scheduler.state_dict(),
        "vocab": None,
        "amp_state": scaler.state_dict(),
        **rest,
    }
    torch.save(states, path)
    other, fresh = trained(1, steps=0)
    ours, moved = nc.GradScaler("cpu"), torch.optim.lr_scheduler.StepLR(fresh, 3, 0.1)
    found = load_checkpoint(path, other, fresh, scheduler=moved, scaler=ours)
    assert found.position == {"model_config": {"layers": 2}, "vocab": None, **rest}
    assert found.notes == (
        f"{path} {CONVERTED}",
        "it holds no random states: they are as they were",
    )
    assert (ours.get_scale(), moved.gamma) == (256.0, 0.5)

    # The same file with the parsed arguments of a command line in it.
    torch.save({**states, "args": argparse.Namespace(lr=0.1)}, path)
    with pytest.raises(CheckpointError, match=r"would run argparse.Namespace when it is read"):
        load_checkpoint(path, other, fresh, scheduler=moved, scaler=ours)
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = load_checkpoint(path, other, fresh, scheduler=moved, scaler=ours)
    assert found.position["args"] == argparse.Namespace(lr=0.1)


def test_a_plain_loop_goes_on_under_o2_with_masters_of_its_fp32_weights(tmp_path):
    model, optimizer = trained()
    path = tmp_path / "fp32.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": APEX}, path)
    other, fresh = trained(1, steps=0)
    stepper = nc.Stepper(other, fresh, nc.Policy(compute="fp16", master_weights=True))
    found = load_checkpoint(path, other, stepper=stepper)
    held = nc.weights.held_by(fresh)
    for (low, master), saved in zip(held.parameters, model.parameters(), strict=True):
        assert torch.equal(master, saved)
        assert torch.equal(low, saved.half())
    assert stepper.scaler.get_scale() == 1024.0
    assert "the fp32 masters were made from the fp32 weights in the checkpoint" in found.notes
    assert "weight is fp16 here, and was saved in fp32: converted, rounded to nearest" in found.notes


def test_a_bare_state_dict_is_a_model(tmp_path):
    model, _ = trained()
    path = tmp_path / "weights.pt"
    torch.save(model.state_dict(), path)
    other, _ = trained(1)
    notes = load_checkpoint(path, other).notes
    assert notes[1] == "it holds a model's state dict, and nothing else of the run"
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"net": {}}, "expected the model's state under .*, got the keys net: load it by hand"),
        ([1], "expected a dict with the states of a run, got list"),
        ({"model": {}, "state_dict": {}}, "holds state_dict and model, and which of them is meant cannot"),
        (
            {"model": {}, "amp": {**APEX, "loss_scaler1": APEX["loss_scaler0"]}},
            "holds 2 loss scales of apex, and which loss each is for cannot be told",
        ),
        ({"model": {}, "scaler": {"size": 3}}, "the state of its loss scaler cannot be read"),
        ({"model": {}, "rng_state": [3]}, "expected each random state in it to be a tensor of bytes"),
        ({"model": {}, "rng_state": torch.zeros(3, dtype=torch.uint8)}, "a random state in it cannot be set"),
        ({"model": {}, "optimizer": {"lr": 1}}, "expected the state of optimizer '0', got dict"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, states, message):
    path = tmp_path / "other.pt"
    torch.save(states, path)
    model, optimizer = trained()
    scaler = nc.GradScaler("cpu")
    before = str((model.state_dict(), optimizer.state_dict(), scaler.state_dict(), torch.get_rng_state()))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, model, optimizer, scaler=scaler, strict=False)
    assert before == str(
        (model.state_dict(), optimizer.state_dict(), scaler.state_dict(), torch.get_rng_state())
    )


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_code_in_a_checkpoint_is_not_run(tmp_path, kind):
    path, ran = tmp_path / "one.ckpt", tmp_path / "ran"
    model, _ = trained()
    bomb = {"state_dict": model.state_dict(), "config": Bomb(ran)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(ran)))
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(CheckpointError, match=r"when it is read, and was not read"):
        load_checkpoint(path, model)
    assert not ran.exists()
    if kind != "pickle":
        torch.load(path, weights_only=False)["config"].close()
        assert ran.exists(), "it would have"


def test_a_file_of_torch_that_was_cut_off_or_altered_is_refused(tmp_path):
    path = tmp_path / "one.pt"
    model, _ = trained()
    torch.save({"state_dict": model.state_dict(), "config": "x" * 500}, path)
    whole = path.read_bytes()
    expected = model.state_dict()["weight"].numpy().tobytes()
    place = whole.index(expected)
    for damaged in (
        whole[:-100],
        whole[:200],
        whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
    ):
        path.write_bytes(damaged)
        before = model.weight.detach().clone()
        with pytest.raises(CheckpointError, match="is truncated or was altered"):
            load_checkpoint(path, model)
        assert torch.equal(model.weight, before)
    assert numpy.frombuffer(expected, numpy.float32).size == 8

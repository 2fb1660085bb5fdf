"""Checkpoints that other loops wrote with torch.save: converted with notes, or refused; code is never run."""

import argparse
import pickle

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import CheckpointError
from narrowcast.scaling import Dynamic
from narrowcast.training import load_checkpoint

APEX = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 17}}
CONVERTED = "was written by torch.save, not by save_checkpoint: it was converted"
RANDOM = "the random states stay as they are: those of another loop are not read"


def trained(seed=0, steps=2):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "old.pt"


def test_a_loop_of_apex_in_ddp(path):
    model, optimizer = trained()
    states = {
        "epoch": 3,
        "state_dict": {f"module.{name}": value for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "amp": APEX,
    }
    torch.save(states, path)
    other, fresh = trained(1, steps=0)
    scaler = nc.GradScaler("cpu")
    found = load_checkpoint(path, other, fresh, scaler=scaler)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert str(fresh.state_dict()) == str(optimizer.state_dict())
    scale = scaler.loss_scale()
    assert isinstance(scale, Dynamic)
    assert (scale.scale, scale.good_steps, scale.rule) == (1024.0, 17, "apex")
    assert (found.position, found.policy, found.versions, found.ranks) == ({"epoch": 3}, None, {}, 1)
    assert found.notes[:2] == (
        f"{path} {CONVERTED}",
        'its model was wrapped in DDP: "module." was removed from the names',
    )
    assert found.notes[2].startswith("its loss scale comes from the state of apex: ")
    assert found.notes[3:] == (RANDOM,)


def test_a_loop_with_a_scheduler_and_torchs_scaler(path):
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    rest = {"epoch": 2, "best_val_loss": 0.25, "vocab": None}
    states = {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        **rest,
    }
    torch.save(states, path)
    other, fresh = trained(1, steps=0)
    ours, moved = nc.GradScaler("cpu"), torch.optim.lr_scheduler.StepLR(fresh, 3, 0.1)
    found = load_checkpoint(path, other, fresh, scheduler=moved, scaler=ours)
    assert found.position == rest
    assert found.notes == (f"{path} {CONVERTED}", RANDOM)
    assert (ours.get_scale(), moved.gamma) == (256.0, 0.5)

    torch.save({**states, "args": argparse.Namespace(lr=0.1)}, path)
    with pytest.raises(CheckpointError, match=r"would run argparse.Namespace when it is read"):
        load_checkpoint(path, other, fresh, scheduler=moved, scaler=ours)
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = load_checkpoint(path, other, fresh, scheduler=moved, scaler=ours)
    assert found.position["args"] == argparse.Namespace(lr=0.1)


def test_o2_makes_masters_from_fp32_weights(path):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": APEX}, path)
    other, fresh = trained(1, steps=0)
    stepper = nc.Stepper(other, fresh, nc.Policy(compute="fp16", master_weights=True))
    found = load_checkpoint(path, other, stepper=stepper)
    for (low, master), saved in zip(nc.weights.held_by(fresh).parameters, model.parameters(), strict=True):
        assert torch.equal(master, saved)
        assert torch.equal(low, saved.half())
    assert stepper.scaler.get_scale() == 1024.0
    assert "the fp32 masters were made from the fp32 weights in the checkpoint" in found.notes
    assert "weight is float16 here, and was saved in float32: rounded to nearest" in found.notes


def test_a_bare_state_dict_is_a_model(path):
    model, _ = trained()
    torch.save(model.state_dict(), path)
    other, _ = trained(1)
    load_checkpoint(path, other)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"net": {}}, "expected the model's state under .*, got the keys net: load it by hand"),
        ([1], "expected a dict with the states of a run, got list"),
        ({"model": {}, "state_dict": {}}, "holds both state_dict and model"),
        ({"model": {}, "amp": {**APEX, "loss_scaler1": APEX["loss_scaler0"]}}, "holds 2 loss scales of apex"),
        ({"model": {}, "amp": {"loss_scaler0": {"size": 3}}}, "the state of its loss scaler cannot be read"),
        ({"model": {}, "optimizer": {"lr": 1}}, "expected the state of Adam, got dict"),
    ],
)
def test_ambiguous_files_are_refused(path, states, message):
    torch.save(states, path)
    model, optimizer = trained()
    scaler = nc.GradScaler("cpu")
    live = [model, optimizer, scaler]
    before = str([one.state_dict() for one in live])
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, model, optimizer, scaler=scaler, strict=False)
    assert before == str([one.state_dict() for one in live])


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_code_in_a_checkpoint_is_not_run(tmp_path, path, kind):
    ran = tmp_path / "ran"
    model, _ = trained()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(ran)))
    else:
        bomb = {"state_dict": model.state_dict(), "config": Bomb(ran)}
        torch.save(bomb, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(CheckpointError):
        load_checkpoint(path, model)
    assert not ran.exists()
    if kind != "pickle":
        torch.load(path, weights_only=False)["config"].close()
        assert ran.exists(), "it would have"


def test_a_truncated_file_of_torch_is_refused(path):
    model, _ = trained()
    torch.save({"state_dict": model.state_dict(), "config": "x" * 500}, path)
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:200]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is truncated, was altered"):
            load_checkpoint(path, model)

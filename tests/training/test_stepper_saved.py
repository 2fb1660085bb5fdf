"""The state of a Stepper continues to the bit, and does not load into another format's scale."""

import io

import pytest
import torch
from checkpoint_launches import same
from stepper_runs import made, micro_batch
from torch import nn
from torch.distributed import checkpoint

import narrowcast as nc
from narrowcast.scaling import Dynamic

O2 = nc.Policy(compute="fp16", master_weights=True)


def make(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    scaler = Dynamic(scale=2.0**9, growth_interval=3)
    settings = {"accumulate": 2, "max_norm": 1.0, "scheduler": scheduler, "scaler": scaler}
    return model, nc.Stepper(model, optimizer, policy, **settings)


def train(model, stepper, steps, *, seed, overflow_at=()):
    generator = torch.Generator().manual_seed(seed)
    for number in range(steps * 2):
        x = torch.randn(4, 8, generator=generator) * (torch.inf if number in overflow_at else 1.0)
        micro_batch(model, stepper, x)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("policy", ["bf16", "fp16", O2], ids=["bf16", "fp16", "O2"])
def test_resuming_is_bit_exact(policy):
    model, stepper = make(policy)
    train(model, stepper, 4, seed=1, overflow_at=(2,))
    saved = through_a_file({"model": model.state_dict(), "stepper": stepper.state_dict()})
    train(model, stepper, 4, seed=2, overflow_at=(5,))

    again, resumed = make(policy)
    train(again, resumed, 1, seed=9)  # whatever it did before
    assert not micro_batch(again, resumed).complete, "loading discards it"
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["stepper"])
    assert resumed.steps == 4
    train(again, resumed, 4, seed=2, overflow_at=(5,))
    assert same(again.state_dict(), model.state_dict())
    assert same(resumed.state_dict(), stepper.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_goes_through_torchs_distributed_checkpoint(tmp_path):
    (model, stepper), (again, resumed) = make("fp16"), make("fp16")
    train(model, stepper, 2, seed=1)
    train(again, resumed, 1, seed=9)
    checkpoint.save({"stepper": stepper.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    loaded = {"stepper": resumed.state_dict()}
    checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    resumed.load_state_dict(loaded["stepper"])
    assert same(resumed.state_dict(), stepper.state_dict())


@pytest.mark.parametrize(("saved", "into"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_a_state_of_another_format_leaves_the_scale_alone(saved, into):
    """A state without a loss scale must not turn scaling off."""
    (_, _, one), (_, _, other) = made(saved), made(into)
    with pytest.warns(UserWarning, match="the saved state is of a run with (a|no) loss scale"):
        other.load_state_dict(one.state_dict())
    assert other.scaler.get_scale() == (2.0**16 if into == "fp16" else 1.0)

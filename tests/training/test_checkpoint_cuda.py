"""Checkpoints of models on a GPU: its random states, and states on both kinds of devices."""

import pytest
import torch
from stepper_runs import micro_batch
from torch import nn

import narrowcast as nc
from narrowcast.training import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.gpu


def made(seed, device, policy, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.25), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return model, nc.Stepper(model, optimizer, policy, max_norm=1.0, scheduler=scheduler)


def train(model, stepper, steps):
    for _ in range(steps):
        micro_batch(model, stepper, torch.randn(16, 8, device=model[0].weight.device))


O2 = nc.Policy(compute="fp16", master_weights=True)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("policy", ["bf16", "fp16", O2], ids=["bf16", "fp16", "O2"])
def test_a_run_on_the_gpu_goes_on_to_the_bit(tmp_path, policy, options):
    path = tmp_path / "one.ckpt"
    model, stepper = made(0, "cuda", policy, **options)
    train(model, stepper, 3)
    save_checkpoint(path, model, stepper=stepper)
    train(model, stepper, 3)
    drawn = torch.rand(2, device="cuda")
    other, fresh = made(1, "cuda", policy, **options)
    train(other, fresh, 1)
    assert load_checkpoint(path, other, stepper=fresh).notes == ()
    train(other, fresh, 3)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert torch.equal(torch.rand(2, device="cuda"), drawn)


def test_from_the_gpu_to_the_cpu(tmp_path):
    path = tmp_path / "one.ckpt"
    model, stepper = made(0, "cuda", "bf16")
    train(model, stepper, 3)
    save_checkpoint(path, model, stepper=stepper)
    other, fresh = made(1, "cpu", "bf16")
    assert load_checkpoint(path, other, stepper=fresh).notes == ()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    train(other, fresh, 1)


def test_a_learning_rate_on_the_gpu_stays_there(tmp_path):
    path = tmp_path / "one.ckpt"
    model = nn.Linear(4, 2).cuda()

    def capturable(rate):
        return torch.optim.AdamW(model.parameters(), torch.tensor(rate, device="cuda"), capturable=True)

    save_checkpoint(path, model, capturable(0.25))
    optimizer = capturable(0.5)
    load_checkpoint(path, model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    assert (rate.device.type, rate.item()) == ("cuda", 0.25)

"""Stepper on a GPU: no step waits for the device, and what it does there is what it does on a CPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.scaling import Dynamic

pytestmark = pytest.mark.gpu


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).to(device)


def made(policy: str, device: str = "cuda", **settings):
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    return model, optimizer, nc.Stepper(model, optimizer, policy, **settings)


def one_step(model, stepper, x, y):
    with stepper.autocast():
        loss = F.cross_entropy(model(x), y)
    return stepper.step(loss)


@pytest.fixture
def no_waiting():
    def begin():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("policy", ["fp16", "bf16", "O2"])
def test_no_step_waits_for_the_device(policy, max_norm, accumulate, no_waiting):
    model, optimizer, stepper = made(policy, accumulate=accumulate, max_norm=max_norm)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    stepper.scaler.on_step(lambda _: scheduler.step())
    x, y = torch.randn(16, 32, device="cuda"), torch.randint(0, 4, (16,), device="cuda")
    bad = x * math.inf
    for batch in (x, bad, x, x):
        one_step(model, stepper, batch, y)
    no_waiting()
    results = [one_step(model, stepper, batch, y) for batch in (x, x, bad, bad, x, x, x, x)]
    torch.cuda.set_sync_debug_mode("default")
    steps = [result for result in results if result.complete]
    assert [result.skipped for result in steps] == (
        [False, False, True, True, False, False, False, False]
        if accumulate == 1
        else [False, True, False, False]
    )
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_the_scheduler_is_at_most_one_step_late():
    model = network("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    stepper = nc.Stepper(model, optimizer, "fp16", scheduler=scheduler, scaler=Dynamic(scale=8.0))
    x, y = torch.randn(16, 32, device="cuda"), torch.randint(0, 4, (16,), device="cuda")
    moved = []
    for batch in (x, x * math.inf, x, x):
        one_step(model, stepper, batch, y)
        moved.append(scheduler.last_epoch)
    taken = [1, 1, 2, 3]
    assert all(late <= now and late >= now - 1 for late, now in zip(moved, taken, strict=True))


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_fused_step_is_torchs(max_norm):
    torch.manual_seed(0)
    data = [(torch.randn(16, 32, device="cuda"), torch.randint(0, 4, (16,), device="cuda")) for _ in range(6)]
    model, _, stepper = made("fp16", max_norm=max_norm, scaler=Dynamic(scale=2.0**10))
    theirs = network("cuda")
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for x, y in data:
        one_step(model, stepper, x, y)
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(theirs(x), y)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
        # 1e-6 of a gradient is 1e-6 of a step of 1e-3, and a weight of 0.2 is rounded at 1.5e-8 each time.
        torch.testing.assert_close(a, b, rtol=0, atol=0 if max_norm is None else 1e-7)

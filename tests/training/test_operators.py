"""How many operators a step of Stepper dispatches, against the same loop by torch; not how long they take."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from counted_operators import operators_of
from narrowcast.scaling import Dynamic

MORE = 5
MORE_FOR_STATISTICS = 3


def linear_layers(count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(8, 8), nn.Tanh())])


def batch_norms(count):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8))])


def large_layers(count):
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(count)])


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def by_torch(model, scaled, max_norm):
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    x = torch.randn(4, model[0].in_features)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_stepper(model, scaled, max_norm):
    scaler = Dynamic(scale=2.0**10) if scaled else None
    stepper = nc.Stepper(model, optimizer_of(model), "bf16", max_norm=max_norm, scaler=scaler)
    x = torch.randn(4, model[0].in_features)

    def step():
        with stepper.autocast():
            loss = model(x).float().square().mean()
        assert not stepper.step(loss).skipped

    return step


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e3])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("network", [linear_layers, large_layers, batch_norms])
def test_a_step_dispatches_little_more_than_torchs(network, scaled, max_norm):
    more = []
    for count in (2, 12):
        theirs = operators_of(by_torch(network(count), scaled, max_norm))
        ours = operators_of(by_stepper(network(count), scaled, max_norm))
        more.append(ours.total() - theirs.total())
        dtypes = 2 if network is batch_norms else 0
        assert more[-1] <= MORE + MORE_FOR_STATISTICS * dtypes, ours - theirs
    assert more[0] == more[1]

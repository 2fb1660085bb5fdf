"""A step by ``Stepper`` against the same step written out by hand, by torch and in double precision."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from stepper_runs import stepped
from torch import nn

import narrowcast as nc
from narrowcast.scaling import Dynamic

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS = {
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=True),
    "AdamW for-loop": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batches(count: int, rows: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator))
        for _ in range(count)
    ]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    numbers = [v for entry in state for v in entry.values() if isinstance(v, torch.Tensor)]
    return [value.clone() for value in [*model.state_dict().values(), *numbers]]


def by_stepper(policy, make_optimizer, data, scaler=None, **settings):
    model = network()
    optimizer = make_optimizer(model.parameters())
    stepper = nc.Stepper(model, optimizer, policy, scaler=scaler, **settings)
    for x, y in data:
        stepped(stepper, lambda x, y: F.cross_entropy(model(x), y), x, y)
    stepper.flush()
    return everything(model, optimizer)


def by_hand(policy, make_optimizer, data, scaler, *, accumulate=1, max_norm=None):
    """torch's own region, and ``scaler``, which is torch's or ours."""
    model = network()
    optimizer = make_optimizer(model.parameters())
    for number, (x, y) in enumerate(data, start=1):
        with torch.autocast("cpu", FORMATS[policy]):
            loss = F.cross_entropy(model(x), y)
        (scaler.scale(loss) / accumulate).backward()
        if number % accumulate:
            continue
        if max_norm is not None and isinstance(scaler, nc.GradScaler):
            scaler.clip_grad_norm_(optimizer, max_norm)
        elif max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return everything(model, optimizer)


CASES = [
    *itertools.product(OPTIMIZERS, [2.0**10, 1000.0], [1]),
    *[("AdamW fused", 2.0**10, n) for n in (2, 3)],
]


@pytest.mark.parametrize(("kind", "scale", "accumulate"), CASES)
@pytest.mark.parametrize("policy", FORMATS)
def test_it_is_the_loop_by_hand_to_the_bit(policy, kind, scale, accumulate):
    """With torch's scaler, and with ours in its place; a scale that is no power of two rounds as torch's."""
    make, window = OPTIMIZERS[kind], {"accumulate": accumulate}
    data = batches(6)
    stepped = by_stepper(policy, make, data, scaler=Dynamic(scale=scale), **window)
    torchs = by_hand(policy, make, data, torch.amp.GradScaler("cpu", init_scale=scale), **window)
    ours = by_hand(policy, make, data, nc.GradScaler("cpu", init_scale=scale), **window)
    for a, b, c in zip(stepped, torchs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(a, c, rtol=0, atol=0)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("kind", ["SGD", "SGD fused"])
@pytest.mark.parametrize("policy", FORMATS)
def test_clipping_in_one_pass_is_torchs_to_1e_6(policy, kind, accumulate):
    """SGD, whose update is proportional to the gradient: AdamW's first steps would hide its size.

    One pass multiplies a gradient once by 1 / (scale * norm / max_norm) where torch multiplies it by 1/scale
    and by max_norm/norm: three roundings of 6e-8 apart, in sums of 12 steps.
    """
    data = batches(12)
    settings = {"accumulate": accumulate, "max_norm": 0.05}
    stepped = by_stepper(policy, OPTIMIZERS[kind], data, scaler=Dynamic(scale=2.0**10), **settings)
    torchs, ours = (
        by_hand(policy, OPTIMIZERS[kind], data, make("cpu", init_scale=2.0**10), **settings)
        for make in (torch.amp.GradScaler, nc.GradScaler)
    )
    for a, b, c in zip(stepped, torchs, ours, strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=0)
        # Activations are rounded to 8 or 11 bits, so a weight off by 1e-7 may turn one of those roundings;
        # the largest weight is about 1.
        assert (a - b).abs().max() <= 1e-6 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("accumulate", [1, 2, 4, 5])
def test_a_window_in_fp32_is_the_mean_of_its_batches(accumulate):
    """Against double precision and one large batch; 5 does not divide 12, so two batches are flushed."""
    data = batches(12)
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    wide = nn.Linear(8, 4).double()
    wide.load_state_dict(model.state_dict())
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.5), "fp32", accumulate=accumulate)
    steps = 0
    for x, y in data:
        steps += stepped(stepper, lambda x, y: F.cross_entropy(model(x), y), x, y).complete
    steps += stepper.flush().complete
    assert steps == stepper.steps == -(-12 // accumulate)
    optimizer = torch.optim.SGD(wide.parameters(), 0.5)
    for start in range(0, 12, accumulate):
        window = data[start : start + accumulate]
        x, y = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
        optimizer.zero_grad()
        F.cross_entropy(wide(x.double()), y).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), wide.parameters(), strict=True):
        # 12 steps, each of sums of at most 80 terms of about 1: some 100 roundings of 6e-8.
        torch.testing.assert_close(a.double(), b, rtol=0, atol=6e-6)

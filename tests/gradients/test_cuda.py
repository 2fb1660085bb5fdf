"""On a GPU: nothing waits for the device, and what becomes of a step is told at most one step late."""

import contextlib
import math

import pytest
import torch
from pairs import iterate

import narrowcast as nc
from narrowcast.errors import ScaleCollapseError

pytestmark = pytest.mark.gpu


def training(kind=torch.optim.AdamW):
    model = torch.nn.Linear(16, 16, device="cuda")
    optimizer = kind(model.named_parameters(), lr=0.1, fused=True)
    return model, optimizer, torch.randn(8, 16, device="cuda")


@pytest.mark.parametrize("clip", [None, "unscale_", "norm", "infinity norm", "value"])
@pytest.mark.parametrize("loss_scale", [None, nc.scaling.Dynamic(rule="megatron", hysteresis=2)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_step_waits_for_nothing(kind, loss_scale, clip, no_waiting):
    model, optimizer, x = training(kind)
    scaler = nc.GradScaler("cuda", loss_scale=loss_scale)
    inside = contextlib.ExitStack()
    for step in range(4):
        if step == 1:
            inside.enter_context(no_waiting())  # the first step makes state and places the scale
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if clip == "unscale_":
            scaler.unscale_(optimizer)
        elif clip == "value":
            scaler.clip_grad_value_(optimizer, 0.1)
        elif clip:
            scaler.clip_grad_norm_(optimizer, 1.0, math.inf if clip == "infinity norm" else 2.0)
        result = scaler.step(optimizer)
        scaler.update()
    inside.close()
    assert not result.skipped
    assert scaler.get_scale() >= 1.0


def test_an_overflow_on_the_device_skips_names_and_backs_off(no_waiting):
    model, optimizer, x = training()
    scaler = nc.GradScaler("cuda")
    iterate(scaler, optimizer, lambda: model(x).square().mean())
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    model.bias.grad[3] = math.nan
    with no_waiting():
        scaler.clip_grad_norm_(optimizer, 1.0)
        result = scaler.step(optimizer)
        scaler.update()
    assert result.skipped
    assert result.nonfinite == ("bias",)
    assert math.isnan(result.grad_norm)
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**15


def test_listeners_hear_at_most_one_step_late(no_waiting):
    model, optimizer, x = training()
    scaler, heard = nc.GradScaler("cuda"), []
    scaler.on_step(lambda result: heard.append("step"))
    scaler.on_skip(lambda result: heard.append("skip"))
    for number, factor in enumerate((1.0, math.inf, 1.0, 1.0)):
        iterate(scaler, optimizer, lambda f=factor: model(x).square().mean() * f)
        assert len(heard) >= number
    assert heard[:3] == ["step", "skip", "step"]


def test_patience_on_the_device_is_at_most_one_step_late():
    model, optimizer, x = training()
    scaler, steps = nc.GradScaler("cuda", patience=3), 0
    with pytest.raises(ScaleCollapseError, match="3 steps of AdamW in a row were skipped, since step 1"):  # noqa: PT012
        for _ in range(4):
            iterate(scaler, optimizer, lambda: model(x).square().mean() * math.inf)
            steps += 1
    assert steps <= 3


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_torchs_to_the_bit(fused, kind):
    weights = []
    for make in (torch.amp.GradScaler, nc.GradScaler):
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 16, device="cuda")
        optimizer = kind(model.parameters(), lr=0.1, fused=fused)
        scaler, x = make("cuda", growth_interval=2), torch.randn(8, 16, device="cuda")
        for factor in (1.0, math.inf, 1.0, 1.0, 1.0):
            iterate(scaler, optimizer, lambda m=model, x=x, f=factor: m(x).square().mean() * f)
        weights.append((model.weight.detach(), scaler.get_scale()))
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


def test_squares_that_overflow_skip_a_clipped_step(no_waiting):
    """On a CPU they are looked at again; here that would wait, and a lower scale mends it."""
    weight = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0, fused=True), nc.GradScaler("cuda", 2.0)
    scaler.scale((weight * 6.6e19).sum()).backward()
    with no_waiting():
        scaler.clip_grad_norm_(optimizer, 1.0)
        result = scaler.step(optimizer)
        scaler.update()
    assert result.skipped
    assert weight.tolist() == [0.0] * 4
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("clips", [False, True])
def test_parameters_on_two_devices_skip_together(clips):
    if torch.cuda.device_count() < 2:
        pytest.skip("gpu: this machine has one CUDA device")
    one, two = (torch.nn.Parameter(torch.ones(3, device=f"cuda:{index}")) for index in (0, 1))
    optimizer, scaler = torch.optim.SGD([one, two], lr=1.0, fused=True), nc.GradScaler("cuda", 8.0)
    for factor in (math.inf, 0.5):
        optimizer.zero_grad()
        scaler.scale(one.sum() + (two * factor).sum().to(one.device)).backward()
        if clips:
            scaler.clip_grad_norm_(optimizer, 1e6)
        assert scaler.step(optimizer).skipped == math.isinf(factor)
        scaler.update()
    assert one.tolist() == pytest.approx([0.0] * 3)
    assert two.tolist() == pytest.approx([0.5] * 3)
    assert scaler.get_scale() == 4.0

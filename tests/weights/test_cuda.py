"""The same on a CUDA device: equality with float32, memory as the allocator counts it, and no wait for it."""

import contextlib

import pytest
import torch

from narrowcast.weights import UpdateMeter, hold, lower
from narrowcast.weights._lower import round_stochastically, rounded_with

pytestmark = pytest.mark.gpu


def on_device(dtype, *shapes):
    return [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_held_is_float32_from_what_is_kept(dtype, updates, way, kind):
    lows = on_device(dtype, (33, 65), (7,))
    full = [torch.nn.Parameter(p.detach().float()) for p in lows]
    optimizer, expected = kind(lows, lr=0.01, **way), kind(full, lr=0.01, **way)
    drawn = torch.Generator("cuda").manual_seed(2)
    handle = hold(
        optimizer,
        updates,
        generator=torch.Generator("cuda").manual_seed(2) if updates == "stochastic" else None,
    )
    for _ in range(3):
        for low, wide in zip(lows, full, strict=True):
            low.grad = torch.randn_like(low)
            wide.grad = low.grad.float()
        optimizer.step()
        expected.step()
        values = handle.full_values()
        for low, wide in zip(lows, full, strict=True):
            if updates == "stochastic":
                wide.data.copy_(round_stochastically(wide.detach(), dtype, drawn))
            assert torch.equal(low, wide.to(dtype))
            bound = wide.abs() * 2.0**-16 if updates == "kahan" else torch.zeros_like(wide)
            assert ((values[low] - wide).abs() <= bound).all()
            wide.data.copy_(values[low])


def test_rounding_is_that_of_the_cpu(dtype):
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    values = ((codes << 16) + torch.randint(0, 2**16, codes.shape, dtype=torch.int32)).view(torch.float32)
    bits = 16 if dtype == torch.bfloat16 else 31
    noise = torch.randint(0, 2**bits, values.shape).to(torch.int32)
    here, there = rounded_with(values, dtype, noise), rounded_with(values.cuda(), dtype, noise.cuda()).cpu()
    numbers = ~here.isnan()
    assert torch.equal(here[numbers].view(torch.int16), there[numbers].view(torch.int16))
    assert there[~numbers].isnan().all()


@pytest.mark.parametrize(("updates", "per_element"), [("masters", 4), ("kahan", 2), ("stochastic", 0)])
def test_bytes_kept_between_steps(updates, per_element):
    (low,) = on_device(torch.bfloat16, (1024, 1024))
    optimizer = torch.optim.SGD([low], lr=0.1)
    before = torch.cuda.memory_allocated()
    hold(optimizer, updates)
    for _ in range(2):
        # Blocks of the allocator have at least 512 bytes: the NaN and the generator take one each.
        assert 0 <= torch.cuda.memory_allocated() - before - per_element * 2**20 <= 2048
        low.grad = torch.randn_like(low)
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_waits_for_nothing(updates, no_waiting):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32)).cuda()
    originals = lower(model, torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    handle = hold(optimizer, updates, originals=None if updates == "stochastic" else originals)
    meter = UpdateMeter(optimizer)
    inputs = torch.randn(8, 32, device="cuda", dtype=torch.float16)
    for step in range(4):
        with no_waiting() if step else contextlib.nullcontext():
            model(inputs).float().square().sum().backward()
            handle.take_gradients()
            optimizer.found_inf = torch.full((), float(step % 2), device="cuda")
            optimizer.grad_scale = torch.full((), 2.0, device="cuda")
            optimizer.step()
            optimizer.zero_grad()
    assert meter.read()[0].intended_elements > 0


def test_bare_optimizers_are_measured_without_a_trace():
    (low,) = on_device(torch.bfloat16, (1000,))
    twin = torch.nn.Parameter(low.detach().clone())
    plain, measured = (torch.optim.AdamW([p], lr=1e-4, capturable=True) for p in (low, twin))
    with UpdateMeter(measured) as meter:
        for _ in range(3):
            low.grad = torch.randn_like(low)
            twin.grad = low.grad.clone()
            state = torch.cuda.get_rng_state()
            plain.step()
            measured.step()
            assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(low, twin)
    assert meter.read()[0].swallowed_share > 0.5

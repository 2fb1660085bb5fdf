"""Stepper on a GPU: no step waits for the device, and what it does there is what it does on a CPU."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from stepper_runs import stepped
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.gpu


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).to(device)


def made(policy: str, device: str = "cuda", **settings):
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    return model, optimizer, nc.Stepper(model, optimizer, policy, **settings)


def one_step(model, stepper, x, y):
    return stepped(stepper, lambda: F.cross_entropy(model(x), y))


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
    with no_waiting():
        results = [one_step(model, stepper, batch, y) for batch in (x, x, bad, bad, x, x, x, x)]
    steps = [result for result in results if result.complete]
    assert [result.skipped for result in steps] == (
        [False, False, True, True, False, False, False, False]
        if accumulate == 1
        else [False, True, False, False]
    )
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 0.25])
@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_steps_are_those_of_a_loop_by_hand(policy, max_norm, accumulate):
    """To the bit without clipping; a clipped step to 1e-6, after which roundings in the region differ."""
    model, _, stepper = made(policy, accumulate=accumulate, max_norm=max_norm)
    by_hand = network("cuda")
    optimizer = torch.optim.AdamW(by_hand.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=policy == "fp16")
    x, y = torch.randn(16, 32, device="cuda"), torch.randint(0, 4, (16,), device="cuda")
    for step in range(6 if max_norm is None else 1):
        batch = x * math.inf if step == 2 and policy == "fp16" else x + step
        for _ in range(accumulate):
            result = one_step(model, stepper, batch, y)
            with torch.autocast("cuda", stepper.formats["cuda"]):
                loss = F.cross_entropy(by_hand(batch), y)
            scaler.scale(loss / accumulate).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), max_norm)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert result.skipped == bool(batch.isinf().any())
    tolerance = 0.0 if max_norm is None else 1e-6
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fused", [True, False])
def test_a_writer_gets_all_steps_and_waits_for_none(fused, no_waiting):
    """Without fused the step itself waits for its flag; then only what was written is compared."""
    written = {}

    class Writer:
        def add_scalar(self, tag, value, step):
            written.setdefault(tag, []).append((step, value))

        def add_text(self, tag, text, step):
            pass

    model = network("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    stepper = nc.Stepper(model, optimizer, "bf16", max_norm=1.0, writer=Writer())
    x, y = torch.randn(16, 32, device="cuda"), torch.randint(0, 4, (16,), device="cuda")
    one_step(model, stepper, x, y)
    with no_waiting() if fused else contextlib.nullcontext():
        results = [one_step(model, stepper, batch, y) for batch in (x, x * math.inf, x)]
    stepper.flush()
    assert written["narrowcast/skipped_steps"] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    norms = [value for _, value in written["narrowcast/grad_norm"]]
    assert norms[1::2] == [results[0].grad_norm, results[2].grad_norm]
    assert not math.isfinite(norms[2])

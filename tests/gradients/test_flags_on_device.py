"""What a step does where only the device knows whether a gradient is finite, as on a GPU: played on a CPU."""

import gc
import math
import weakref

import pytest
import torch

import narrowcast as nc
from counted_operators import operators_of
from narrowcast.gradients import _check, nonfinite_flags


@pytest.fixture
def flags_stay_on_device(monkeypatch):
    """The host acts as if it could not read a flag without waiting; reads by the test are allowed."""
    monkeypatch.setattr(_check, "known_on_host", lambda found_inf: None)
    monkeypatch.setattr(_check, "_clip_on_host", _check._clip_on_device)


def training(loss_scale=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1, fused=True)
    return (
        model,
        optimizer,
        nc.GradScaler("cpu", 8.0 if loss_scale is None else 2.0**16, loss_scale=loss_scale),
    )


SCALES = [None, nc.scaling.Off()]


def iterate(model, optimizer, scaler, factor=1.0, clip=None):
    optimizer.zero_grad()
    loss = model.weight.square().sum() + (model.bias * factor).sum()
    scaler.scale(loss).backward()
    if clip == "unscale_":
        scaler.unscale_(optimizer)
    elif clip is not None:
        scaler.clip_grad_norm_(optimizer, clip)
    result = scaler.step(optimizer)
    scaler.update()
    return result


@pytest.mark.usefixtures("flags_stay_on_device")
@pytest.mark.parametrize("loss_scale", SCALES)
@pytest.mark.parametrize("clip", [None, "unscale_", 1.0, 1e-3, 0.0])
def test_a_step_skips_and_names_as_where_the_host_knows(clip, loss_scale):
    model, optimizer, scaler = training(loss_scale)
    for factor in (1.0, math.inf, 1.0, math.nan, 1.0):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        result = iterate(model, optimizer, scaler, factor, clip)
        same = all(map(torch.equal, before, model.parameters()))
        assert result.skipped == same == (not math.isfinite(factor))
        assert result.nonfinite == (("bias",) if same else ())
        assert optimizer.state[model.weight]["step"] in (1, 2, 3)


@pytest.mark.usefixtures("flags_stay_on_device")
@pytest.mark.parametrize("clip", [None, "unscale_", 1e-3, 1e3])
@pytest.mark.parametrize("loss_scale", SCALES)
def test_parameters_are_those_of_a_host_that_knows(clip, loss_scale, monkeypatch):
    ends = []
    for on_device in (True, False):
        if not on_device:
            monkeypatch.undo()
        model, optimizer, scaler = training(loss_scale)
        for _ in range(3):
            iterate(model, optimizer, scaler, clip=clip)
        ends.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.usefixtures("flags_stay_on_device")
def test_names_are_kept_after_the_gradients_are_gone():
    model, optimizer, scaler = training()
    result = iterate(model, optimizer, scaler, math.nan)
    optimizer.zero_grad()
    assert result.nonfinite == ("bias",)


@pytest.mark.usefixtures("flags_stay_on_device")
def test_names_are_all_once_the_gradients_were_overwritten():
    model, optimizer, scaler = training()
    result = iterate(model, optimizer, scaler, math.nan)
    optimizer.zero_grad(set_to_none=False)
    assert result.nonfinite == ("weight", "bias")


@pytest.mark.usefixtures("flags_stay_on_device")
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_gradients_are_let_go_when_the_flag_was_read(factor):
    model, optimizer, scaler = training()
    results = [iterate(model, optimizer, scaler, factor)]
    held = weakref.ref(model.bias.grad)
    optimizer.zero_grad()
    assert held() is not None
    iterate(model, optimizer, scaler)
    gc.collect()
    assert held() is None
    assert results[0].nonfinite == (() if factor == 1.0 else ("bias",))


@pytest.mark.usefixtures("flags_stay_on_device")
@pytest.mark.parametrize("loss_scale", SCALES)
@pytest.mark.parametrize("clip", [None, "unscale_"])
def test_large_gradients_are_not_held_and_not_written(clip, loss_scale, monkeypatch):
    monkeypatch.setattr(_check, "_IN_PLACE_BYTES", 8)
    model, optimizer, scaler = training(loss_scale)
    result = iterate(model, optimizer, scaler, math.nan, clip)
    held = weakref.ref(model.bias.grad)
    optimizer.zero_grad()
    assert held() is None
    assert result.nonfinite == ("bias",)


@pytest.mark.usefixtures("flags_stay_on_device")
@pytest.mark.parametrize("max_norm", [math.nan, -1.0])
def test_a_limit_in_a_tensor_that_cannot_clip_skips(max_norm):
    model, optimizer, scaler = training()
    assert iterate(model, optimizer, scaler, clip=torch.tensor(max_norm)).skipped
    assert not iterate(model, optimizer, scaler, clip=torch.tensor(0.0)).skipped


@pytest.mark.usefixtures("flags_stay_on_device")
@pytest.mark.parametrize("loss_scale", SCALES)
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_operators_do_not_grow_with_the_parameters(clip, loss_scale):
    totals = []
    for count in (2, 30):
        parameters = [torch.nn.Parameter(torch.ones(600)) for _ in range(count)]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        scaler = nc.GradScaler("cpu", loss_scale=loss_scale)
        gradients = [torch.ones(600) for _ in parameters]

        def step(optimizer=optimizer, scaler=scaler, parameters=parameters, gradients=gradients):
            scaler.scale(torch.ones(()))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            if clip is not None:
                scaler.clip_grad_norm_(optimizer, clip)
            scaler.step(optimizer)
            scaler.update()

        totals.append(operators_of(step).total())
    assert totals[0] == totals[1] <= 30


@pytest.fixture
def copies(monkeypatch):
    """The device and ``non_blocking`` of every copy between devices, also of those to the same device."""
    made, to = [], torch.Tensor.to

    def recorded(tensor, *args, **kwargs):
        if args and isinstance(args[0], torch.device):
            made.append((args[0].type, kwargs.get("non_blocking", False)))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    return made


@pytest.mark.parametrize("clip", [None, "unscale_", "norm"])
def test_a_copy_to_the_cpu_is_waited_for(clip, copies):
    """The CPU has no queue: without waiting it would read the flag of a GPU before that has written it."""
    weights = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = nc.GradScaler("cpu", 8.0)
    scaler.scale(sum(weight.float().sum() for weight in weights)).backward()
    for optimizer in optimizers:
        if clip == "unscale_":
            scaler.unscale_(optimizer)
        elif clip == "norm":
            scaler.clip_grad_norm_(optimizer, 1e-3)
    scaler.step_together(optimizers)
    scaler.update()
    nonfinite_flags([weight.grad for weight in weights]).any(torch.device("cpu"))
    assert set(copies) == {("cpu", False)}

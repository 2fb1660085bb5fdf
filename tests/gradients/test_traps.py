"""Traps of ``torch.amp.GradScaler``: that torch still has each, and that ours has none.

Where torch mends one, its half of the test fails, and the row in docs/deviations.md can go.
"""

import math
import warnings
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from pairs import iterate
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import narrowcast as nc
from narrowcast.errors import DeviceError, ScaleError
from narrowcast.gradients._check import Scaling

TORCH = torch.amp.GradScaler


def one_weight(scaler, **settings):
    weight = torch.nn.Parameter(torch.ones(1))
    return weight, torch.optim.SGD([weight], **{"lr": 0.1, **settings}), scaler


@pytest.mark.parametrize("make", [TORCH, nc.GradScaler])
def test_1_a_closure_by_position_steps_on_true_gradients(make):
    weight, optimizer, scaler = one_weight(make("cpu", 1024.0))

    def closure():
        optimizer.zero_grad()
        loss = scaler.scale(weight.square().sum())
        loss.backward()
        return loss

    if make is TORCH:
        closure()
    scaler.step(optimizer, closure)
    # The gradient is 2, so the weight should be 0.8; torch's step takes 1024 times as much.
    assert weight.item() == pytest.approx(-203.8 if make is TORCH else 0.8)


@pytest.mark.parametrize("make", [TORCH, nc.GradScaler])
def test_2_a_skipped_step_says_so_and_calls_no_hooks(make):
    weight, optimizer, scaler = one_weight(make("cpu"), fused=True, momentum=0.9)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    skipped = iterate(scaler, optimizer, lambda: weight.sum() * math.inf)
    stepped = iterate(scaler, optimizer, lambda: torch.zeros(1) @ weight)
    if make is TORCH:
        assert skipped is stepped is None
        assert calls == ["pre", "post"] * 2
    else:
        assert (skipped.skipped, stepped.skipped) == (True, False)
        assert calls == ["pre", "post"]


def test_3_the_scale_has_a_floor():
    weight, optimizer, scaler = one_weight(TORCH("cpu"))
    for _ in range(166):
        iterate(scaler, optimizer, lambda: weight.sum() * math.inf)
    assert scaler.get_scale() == 0.0
    iterate(scaler, optimizer, weight.sum)
    assert math.isnan(weight.item())  # 0 * (1 / 0), and no infinity was found

    weight, optimizer, scaler = one_weight(nc.GradScaler("cpu", patience=None))
    for _ in range(200):
        iterate(scaler, optimizer, lambda: weight.sum() * math.inf)
    assert scaler.get_scale() == 2.0**-126
    assert iterate(scaler, optimizer, weight.sum).skipped is False
    assert weight.item() == pytest.approx(0.9)


def test_4_settings_that_cannot_work_are_refused():
    TORCH("cpu", init_scale=-1.0)
    TORCH("cpu", backoff_factor=-3.0)
    TORCH("cpu", growth_interval=0)
    Pair = namedtuple("Pair", "a b")
    scaler = TORCH("cpu", 8.0)
    with pytest.raises(TypeError):
        scaler.scale(Pair(torch.ones(()), torch.ones(())))
    scaler.scale(torch.ones(()))
    with pytest.raises(AttributeError):
        scaler.update(2)
    with pytest.raises(AssertionError):
        TORCH("cpu", growth_factor=1.0)  # so no scale can be held fixed

    with pytest.raises(ScaleError):  # and others in test_settings.py
        nc.GradScaler("cpu", growth_interval=0)
    scaler = nc.GradScaler("cpu", 8.0)
    scaled = scaler.scale(Pair(torch.ones(()), [torch.ones(())]))
    assert isinstance(scaled, Pair)
    assert scaled == Pair(torch.tensor(8.0), [torch.tensor(8.0)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu: it is about a machine without CUDA")
def test_7_cuda_without_cuda_is_an_error():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        disabled = TORCH("cuda")
    assert not disabled.is_enabled()
    with pytest.raises(RuntimeError, match="state dict is empty"):
        TORCH("cpu").load_state_dict(disabled.state_dict())

    with pytest.raises(DeviceError, match="device 'cuda' was asked for"):
        nc.GradScaler("cuda")
    with pytest.warns(UserWarning, match="the saved state is empty"):
        nc.GradScaler("cpu").load_state_dict(disabled.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_8_a_narrow_loss_of_one_dimension_is_scaled_in_fp32(dtype):
    loss = torch.ones(1, dtype=dtype, requires_grad=True)
    theirs, ours = TORCH("cpu").scale(loss), nc.GradScaler("cpu").scale(loss)
    assert theirs.dtype == dtype
    assert theirs.item() == (math.inf if dtype == torch.float16 else 65536.0)
    assert ours.dtype == torch.float32
    assert ours.item() == 65536.0
    ours.sum().backward()
    assert loss.grad.dtype == dtype


@pytest.fixture
def compiled():
    from torch._dynamo import reset
    from torch._dynamo.testing import CompileCounter

    reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo has many of its own, about itself
        yield CompileCounter()
    reset()


@pytest.mark.parametrize("make", [TORCH, nc.GradScaler])
def test_9_a_loss_is_scaled_inside_a_compiled_graph(make, compiled):
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), make("cpu", 8.0, growth_interval=1)
    forward = torch.compile(lambda: scaler.scale(model(x).square().mean()), backend=compiled, fullgraph=True)
    if make is TORCH:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"GradScaler\.scale"):
            forward()
        return
    for step in range(6):
        optimizer.zero_grad()
        loss = forward()
        assert torch.equal(loss, model(x).square().mean() * 8.0 * 2**step)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
    # The first call puts the scale on its device; the second graph is good for every scale after it.
    assert compiled.frame_count == 2


@pytest.mark.usefixtures("one_process")
def test_10_the_scale_stops_below_infinity():
    weight, optimizer, scaler = one_weight(ShardedGradScaler("cpu", init_scale=2.0**120, growth_interval=1))
    for _ in range(8):
        iterate(scaler, optimizer, lambda: weight.sum() * 1e-40)
    assert scaler.get_scale() == math.inf

    weight, optimizer, scaler = one_weight(nc.GradScaler("cpu", init_scale=2.0**120, growth_interval=1))
    for _ in range(20):
        assert not iterate(scaler, optimizer, lambda: weight.sum() * 1e-40).skipped
    assert scaler.get_scale() == 2.0**127
    assert weight.item() == 1.0


@pytest.mark.usefixtures("one_process")
def test_10_fully_sharded_parameters_stop_there_too():
    model = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = nc.GradScaler("cpu", init_scale=2.0**125, growth_interval=1)
    for _ in range(5):
        assert not iterate(scaler, optimizer, lambda: model(torch.ones(1, 2)).sum() * 1e-40).skipped
    assert scaler.get_scale() == 2.0**127
    before = model.weight.full_tensor().clone()
    assert iterate(scaler, optimizer, lambda: model(torch.ones(1, 2)).sum() * math.inf).skipped
    assert torch.equal(model.weight.full_tensor(), before)


@pytest.mark.parametrize("scale", [2.0**-149, 1e-39, 2.0**-126, 3.0, 65536.0])
def test_the_inverse_of_a_scale_is_torchs_whatever_the_default_device(scale):
    factor = torch.tensor(scale)
    with torch.device("meta"):
        inverse = Scaling(factor, below_one=scale < 1).inverse()
    assert torch.equal(inverse, factor.double().reciprocal().float())

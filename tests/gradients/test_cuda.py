"""On a GPU: nothing waits for the device, and what becomes of a step is told at most one step late."""

import contextlib
import functools
import math

import pytest
import torch
from pairs import CLIPPED, iterate

import narrowcast as nc
from narrowcast.errors import ScaleCollapseError
from narrowcast.gradients import unscale_by

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


SGD, AdamW = functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW
WAYS = {
    "SGD for-loop": functools.partial(SGD, foreach=False),
    "SGD foreach": functools.partial(SGD, foreach=True),
    "SGD fused": functools.partial(SGD, fused=True),
    "AdamW for-loop": functools.partial(AdamW, foreach=False),
    "AdamW foreach": functools.partial(AdamW, foreach=True),
    "AdamW fused": functools.partial(AdamW, fused=True, amsgrad=True),
    "AdamW capturable": functools.partial(AdamW, capturable=True),
    "AdamW fused capturable": functools.partial(AdamW, fused=True, capturable=True),
}


@pytest.mark.parametrize("policy", [None, "fp16"])
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_torchs_to_the_bit(way, policy, counted_waits):
    ends, waits = [], []
    for make, region in ((torch.amp.GradScaler, torch.autocast), (nc.GradScaler, nc.autocast)):
        model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).cuda()
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-0.5, 0.75 + index, parameter.numel()).view_as(parameter))
        optimizer = WAYS[way](model.parameters(), lr=0.01)
        scaler, x = make("cuda", 2.0**10, growth_interval=2), torch.linspace(-1, 1, 128).view(8, 16).cuda()
        factors = torch.tensor([1.0, math.inf, 1.0, 0.5, 1.0, 1.0], device="cuda").unbind()
        for factor in factors:
            with region("cuda", torch.float16, enabled=policy is not None):
                loss = model(x).float().square().mean() * factor
            with counted_waits() as found:
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        ends.append([*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())])
        waits.append(found.count)  # of the last step
    assert all(map(torch.equal, *ends))
    assert ends[0][-1] == 2.0**11
    # Steps that are not fused are skipped by the host, which reads one flag: torch's scaler does too.
    assert waits == ([0, 0] if "fused" in way else [1, 1])


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_is_torchs_on_many_tensors(fused):
    shapes = [(1 + index % 7, 1 + index * 13 % 61) for index in range(200)]
    ends = []
    for make in (torch.amp.GradScaler, nc.GradScaler):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape).cuda()) for shape in shapes]
        optimizer, scaler = torch.optim.SGD(parameters, lr=1.0, fused=fused), make("cuda", 2.0**7)
        scaler.scale(sum(p.square().sum() for p in parameters)).backward()
        if make is nc.GradScaler:
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        ends.append([norm.detach(), *(p.detach() for p in parameters)])
    for theirs, ours in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=CLIPPED, atol=CLIPPED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_gradients_are_unscaled_as_on_a_cpu(dtype, no_waiting):
    """For bf16 CUDA has no kernel that unscales and checks."""
    ends = []
    for device in ("cpu", "cuda"):
        weights = [torch.nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in (5, 0, 3)]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        flags = []
        for bad in (1.0, math.inf, math.nan):
            for weight in weights:
                weight.grad = torch.linspace(-3, 2, weight.numel()).to(dtype).to(device)
            weights[2].grad[1] *= bad
            with no_waiting():
                flags.append(unscale_by(optimizer, 3.0))
            ends.append([weight.grad.cpu() for weight in weights])
        assert [bool(flag) for flag in flags] == [False, True, True]
    here, there = ends[:3], ends[3:]
    for mine, other in zip(here, there, strict=True):
        assert all(
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(mine, other, strict=True)
        )


@pytest.mark.parametrize("scaled", [False, True])
def test_a_whole_step_in_a_cuda_graph_is_torchs(scaled):
    """With fp16 the graph scales, checks, skips and moves the scale by itself, as often as it is replayed."""
    ends = []
    for make, region in ((torch.amp.GradScaler, torch.autocast), (nc.GradScaler, nc.autocast)):
        model = torch.nn.Linear(16, 16, device="cuda")
        with torch.no_grad():
            model.weight.copy_(torch.eye(16))
            model.bias.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=scaled, capturable=True)
        scaler = make("cuda", 2.0**7, growth_interval=10**6, enabled=scaled)
        x = torch.linspace(-1, 1, 128, device="cuda").view(8, 16).clone()

        def step(model=model, optimizer=optimizer, scaler=scaler, region=region, x=x):
            optimizer.zero_grad()
            with region("cuda", torch.float16 if scaled else torch.bfloat16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        if scaled:
            before = model.weight.detach().clone()
            assert scaler.get_scale() == 2.0**7
            x[0, 0] = math.inf
            graph.replay()
            x[0, 0] = -1.0
            assert torch.equal(model.weight, before)
            assert scaler.get_scale() == 2.0**6
        graph.replay()
        ends.append((model.weight.detach(), model.bias.detach()))
    assert all(map(torch.equal, *ends))


def test_squares_that_overflow_skip_a_clipped_step(no_waiting):
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


@pytest.mark.parametrize("clip", [None, "norm"])
def test_a_flag_of_the_gpu_is_waited_for_where_the_scale_is_on_the_cpu(clip):
    """Without waiting, the CPU would read the flag before the GPU, busy for a moment, has written it."""
    weights = [torch.nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "cuda")]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = nc.GradScaler("cpu", 8.0)
    scaler.scale(weights[0].sum() + weights[1].cpu().sum()).backward()
    torch.cuda._sleep(200_000_000)
    weights[1].grad[0] = math.nan
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert scaler.step(optimizer).skipped
    assert weights[1].tolist() == [1.0, 1.0]

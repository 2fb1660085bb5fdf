"""One step, stage by stage: against numbers worked out by hand, and without moving the step by a bit."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import SettingError, UnsupportedError
from narrowcast.observe import _torch_internals as internals

SCALERS = [torch.amp.GradScaler, nc.GradScaler]
X = 0.25  # the gradient of the weight; that of the bias is 1


def one_by_one(device="cpu"):
    model = nn.Linear(1, 1, device=device)
    with torch.no_grad():
        model.weight.fill_(-0.5)
        model.bias.fill_(2.0)
    return model, torch.full((1, 1), X, device=device)


def numbers(trace):
    """(weight, bias), (their gradients or None) of each stage."""
    return {
        stage.name: (
            tuple(value.item() for value in stage.weights.values()),
            tuple(None if g is None else g.item() for g in stage.gradients.values()),
        )
        for stage in trace.stages
    }


def stages_of(scale, *, unscaled=True):
    """Worked out by hand for one step of ``one_by_one``."""
    before, after = (-0.5, 2.0), (-0.5 - X, 1.0)
    return {
        "forward": (before, (None, None)),
        "backward": (before, (scale * X, scale)),
        **({"unscale": (before, (X, 1.0))} if unscaled else {}),
        "step": (after, (X, 1.0)),
        "zeroed": (after, (None, None)),
    }


def scaled(model, x, optimizer, scaler, *, factor=1.0, unscale=False):
    with nc.observe.trace_step(model, optimizer, scaler=scaler) as trace:
        scaler.scale(factor * model(x)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return trace


def test_a_plain_step_has_the_numbers_worked_out_by_hand():
    model, x = one_by_one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with nc.observe.trace_step(model, optimizer) as trace:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert numbers(trace) == stages_of(1.0, unscaled=False)
    assert (trace.skipped, trace.scale) == (False, None)
    assert (trace.inputs["input"].item(), trace.outputs["output"].item()) == (X, 2.0 - 0.5 * X)
    assert trace["backward"].gradients["weight"].item() == X


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler", SCALERS)
def test_a_scaled_step_is_unscaled_before_it_is_taken(scaler, unscale, fused):
    model, x = one_by_one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1, fused=fused)
    trace = scaled(model, x, optimizer, scaler("cpu", init_scale=4096.0), unscale=unscale)
    assert numbers(trace) == stages_of(4096.0)
    assert (trace.skipped, trace.scale) == (False, 4096.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("factor", [math.inf, math.nan])
@pytest.mark.parametrize("scaler", SCALERS)
def test_a_skipped_step_leaves_the_weights(scaler, factor, fused):
    model, x = one_by_one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1, fused=fused)
    trace = scaled(model, x, optimizer, scaler("cpu", init_scale=4096.0), factor=factor)
    assert (trace.skipped, trace.scale) == (True, 4096.0)
    weights = {stage: values for stage, (values, _) in numbers(trace).items()}
    assert set(weights) >= {"forward", "backward", "step", "zeroed"}
    assert set(weights.values()) == {(-0.5, 2.0)}
    assert trace["backward"].gradients["weight"].isfinite().sum() == 0
    assert "taken" not in str(trace)
    assert str(trace).count("\nstep skipped") == 1


@pytest.mark.parametrize("scaler", SCALERS)
def test_of_two_steps_the_last_one_is_told(scaler):
    model, x = one_by_one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    made = scaler("cpu", init_scale=4096.0)
    with nc.observe.trace_step(model, optimizer, scaler=made) as trace:
        for factor in (torch.inf, 1.0):
            made.scale(factor * model(x)).backward()
            made.unscale_(optimizer=optimizer)
            made.step(optimizer=optimizer)
            made.update()
            optimizer.zero_grad()
    assert trace.skipped is False
    assert trace["step"].weights["weight"].item() == -0.5 - X


def test_a_stepper_brings_its_optimizers_and_scalers():
    model, x = one_by_one()
    stepper = nc.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=1), "fp16", scaler=nc.scaling.Static(scale=1024.0)
    )
    with nc.observe.trace_step(stepper) as trace:
        with stepper.autocast():
            loss = model(x).float().sum()
        stepper.step(loss)
    assert trace.outputs["output"].dtype == torch.float16
    assert numbers(trace) == stages_of(1024.0)
    assert (trace.skipped, trace.scale) == (False, 1024.0)


@pytest.mark.cpu_kind
def test_masters_have_rows_of_their_own():
    model, x = one_by_one()
    policy = replace(nc.Policy.preset("O2"), compute="bf16")  # auto is fp32 on some CPUs
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), lr=2.0**-12), policy)
    with nc.observe.trace_step(stepper) as trace:
        with stepper.autocast():
            loss = model(x).float().sum()
        stepper.step(loss)
    assert list(trace["step"].weights) == ["weight", "bias", "weight (master)", "bias (master)"]
    # 2.0 - 2**-12 is in fp32 what it is, and in bf16 (8 bits) or fp16 (11 bits) it is 2.0.
    assert trace["step"].weights["bias"].item() == 2.0
    assert trace["step"].weights["bias (master)"].item() == 2.0 - 2.0**-12
    assert trace["unscale"].gradients["bias (master)"].item() == 1.0


def test_clipping_after_unscaling_is_a_stage():
    model, x = one_by_one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with nc.observe.trace_step(model, optimizer, scaler=scaler) as trace:
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert [stage.name for stage in trace.stages] == ["forward", "backward", "unscale", "before step", "step"]
    assert numbers(trace)["unscale"][1] == (X, 1.0)
    assert numbers(trace)["before step"][1] == numbers(trace)["step"][1] == (X, 0.5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_clips_unscales_too(fused):
    model, x = one_by_one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1, fused=fused)
    scaler = nc.GradScaler("cpu", init_scale=8.0)
    with nc.observe.trace_step(model, optimizer, scaler=scaler) as trace:
        scaler.scale(model(x)).backward()
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert numbers(trace)["backward"][1] == (8 * X, 8.0)
    # Clipped by 0.5 / (norm + 1e-6), as torch does, in fp32: a relative error of 2e-6 and a few roundings.
    norm = math.hypot(X, 1.0)
    assert numbers(trace)["unscale"][1] == pytest.approx((0.5 * X / norm, 0.5 / norm), rel=1e-5)


def test_a_scaler_that_was_not_given_unscales_before_the_step():
    model, x = one_by_one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with nc.observe.trace_step(model, optimizer) as trace:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert numbers(trace)["backward"][1] == (8 * X, 8.0)
    assert numbers(trace)["before step"][1] == (X, 1.0)
    with nc.observe.trace_step(model, optimizer) as trace:
        optimizer.zero_grad()
        scaler.scale(math.inf * model(x)).backward()
        scaler.step(optimizer)
    assert trace.skipped is None
    assert "no optimizer step" in str(trace)


def test_several_optimizers_step_together():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1) for layer in model]
    scaler = nc.GradScaler("cpu", init_scale=16.0)
    with nc.observe.trace_step(model, optimizers, scaler=scaler) as trace:
        scaler.scale(model(torch.ones(1, 1))).backward()
        scaler.step_together(optimizers)
        scaler.update()
    for name, gradient in trace["backward"].gradients.items():
        assert torch.equal(trace["unscale"].gradients[name], gradient / 16)
        moved = trace["forward"].weights[name] - trace["unscale"].gradients[name]
        assert torch.equal(trace["step"].weights[name], moved)
        assert torch.equal(trace["unscale"].weights[name], trace["forward"].weights[name])


def test_gradients_are_recorded_after_their_reduction():
    """As DistributedDataParallel, which waits for the other ranks there."""
    model, x = one_by_one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)

    def reduce(parameter):
        internals.at_the_end_of_backward(lambda: parameter.grad.mul_(0.5))

    with nc.observe.trace_step(model, optimizer) as trace:
        handles = [p.register_post_accumulate_grad_hook(reduce) for p in model.parameters()]
        model(x).backward()
        optimizer.step()
    assert numbers(trace)["backward"][1] == (X / 2, 0.5)
    assert "before step" not in numbers(trace)
    for handle in handles:
        handle.remove()


def test_of_several_backward_passes_the_sum_is_kept():
    model, x = one_by_one()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with nc.observe.trace_step(model, optimizer) as trace:
        for _ in range(3):
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert numbers(trace)["backward"][1] == (3 * X, 3.0)
    assert numbers(trace)["zeroed"][1] == (0.0, 0.0)


def test_a_step_with_a_closure_is_recorded():
    model, x = one_by_one()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with nc.observe.trace_step(model, optimizer) as trace:
        optimizer.step(closure)
    assert [stage.name for stage in trace.stages] == ["forward", "backward", "step"]
    assert numbers(trace)["step"][0] != numbers(trace)["forward"][0]


@pytest.mark.parametrize("scaler", [None, *SCALERS])
def test_the_step_is_the_same_to_the_bit(scaler):
    def train(*, traced):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        ours = None if scaler is None else scaler("cpu", init_scale=2.0**10)
        trace = nc.observe.trace_step(model, optimizer, scaler=ours)
        for _ in range(3):
            x = torch.randn(4, 8)
            with trace if traced else torch.enable_grad():
                loss = model(x).square().mean()
                (loss if ours is None else ours.scale(loss)).backward()
                if ours is None:
                    optimizer.step()
                else:
                    ours.step(optimizer)
                    ours.update()
                optimizer.zero_grad()
        return [*model.parameters(), *(s["exp_avg_sq"] for s in optimizer.state.values())]

    assert all(torch.equal(a, b) for a, b in zip(train(traced=True), train(traced=False), strict=True))


def test_the_table_is_80_columns_wide():
    model = nn.ModuleDict({"a_block_with_quite_a_long_name": nn.Linear(64, 32)})
    layer = model["a_block_with_quite_a_long_name"]
    model.forward = layer.forward
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, :4] = torch.tensor([3.0, -4.0, 1e-7, math.inf])
        layer.bias.fill_(1e-7)
    with nc.observe.trace_step(model, torch.optim.SGD(model.parameters())) as trace:
        pass
    text = str(trace)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[1:] == [
        "stage         tensor             weight                  gradient",
        "------------  -----------------  ----------------------  -----------------------",
        "forward       a_block_with_quite_a_long_name.weight",
        "                                 1 not finite            none",
        "              a_block_with_quite_a_long_name.bias",
        "                                 norm 5.6569e-07         none",
    ]


def test_sparse_gradients_are_shown_dense():
    model = nn.Embedding(4, 1, sparse=True)
    with nc.observe.trace_step(model, torch.optim.SGD(model.parameters(), lr=1)) as trace:
        model(torch.tensor([2, 2])).sum().backward()
    assert trace["backward"].gradients["weight"].flatten().tolist() == [0.0, 0.0, 2.0, 0.0]


def test_nothing_is_left_behind_by_an_exception():
    model, x = one_by_one()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1), torch.amp.GradScaler("cpu")
    before = dict(vars(scaler))
    trace = nc.observe.trace_step(model, optimizer, scaler=scaler)

    def fail():
        with trace:
            scaler.scale(model(x)).backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [stage.name for stage in trace.stages] == ["forward", "backward"]
    assert set(vars(scaler)) == set(before)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not model.weight._post_accumulate_grad_hooks
    scaler.step(optimizer)
    assert [stage.name for stage in trace.stages] == ["forward", "backward"]


def test_what_cannot_be_traced_is_refused():
    model, _ = one_by_one()
    optimizer = torch.optim.SGD(model.parameters())
    stepper = nc.Stepper(model, optimizer, "fp32")
    for given, scaler, message in (
        ((3, optimizer), None, "expected a torch.nn.Module or an nc.Stepper, got int"),
        ((model,), None, "expected a torch.optim.Optimizer, or several, got NoneType"),
        ((model, optimizer), "dynamic", "expected a torch.amp.GradScaler or None, got str"),
        ((stepper, optimizer), None, "a Stepper brings its optimizers"),
    ):
        with pytest.raises(SettingError, match=re.escape(message)):
            nc.observe.trace_step(*given, scaler=scaler)
    for without_values in (nn.LazyLinear(1), nn.Linear(1, 1, device="meta")):
        trace = nc.observe.trace_step(without_values, optimizer)
        with pytest.raises(UnsupportedError, match="parameter weight has no values here"):
            trace.__enter__()
    with nc.observe.trace_step(model, optimizer) as trace:
        pass
    with pytest.raises(SettingError, match=r"stage 'backwards' is not in this trace\. Known: forward\."):
        trace["backwards"]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler", SCALERS)
def test_scaled_and_skipped_steps_are_recorded_on_a_gpu(scaler, fused):
    model, x = one_by_one("cuda")
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    trace = scaled(model, x, optimizer, scaler("cuda", init_scale=4096.0))
    assert numbers(trace)["backward"][1] == (4096 * X, 4096.0)
    assert numbers(trace)["unscale"][1] == (X, 1.0)
    assert scaled(model, x, optimizer, scaler("cuda", init_scale=4096.0), factor=math.inf).skipped

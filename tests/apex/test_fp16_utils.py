"""``apex.fp16_utils``: the optimizer against fp32 training, its scaler, closures, states, and the helpers."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from narrowcast.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from narrowcast.errors import CheckpointError, OrderError, ScaleCollapseError, ScaleError, SettingError
from narrowcast.scaling import Dynamic

LOW = [torch.float16, torch.bfloat16]
in_each_format = pytest.mark.parametrize("dtype", LOW)
# Of gradients in a low format, as a share of them: half a unit of their last place.
ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class TwoParameters(nn.Module):
    """One in a low format and one in float32; a loss is linear in both, so that gradients are the inputs."""

    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.low = nn.Parameter(torch.ones(4, dtype=dtype))
        self.wide = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.low.float() * x).sum() + (self.wide * x).sum()


def made(dtype=torch.float16, *, momentum=0.9, **settings):
    model = TwoParameters(dtype)
    settings.setdefault("verbose", False)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.125, momentum=momentum), **settings)
    return model, optimizer


def inputs(step):
    """Multiples of 2**-6 below 1: exact in every format, times powers of two too."""
    return torch.randint(1, 64, (4,), generator=torch.Generator().manual_seed(step)) / 64


def in_fp32(steps, momentum=0.9):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.125, momentum=momentum)
    for step in steps:
        parameter.grad = inputs(step)
        optimizer.step()
    return parameter.detach()


@in_each_format
@pytest.mark.parametrize("settings", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_it_trains_as_in_fp32_with_the_steps_that_overflow_left_out(dtype, settings):
    model, optimizer = made(dtype, **settings)
    taken = []
    for step in range(40):
        optimizer.zero_grad()
        optimizer.backward(model(inputs(step)))
        optimizer.step()
        taken += [] if optimizer.overflow else [step]
    # Gradients are at most 63/64, so that 2**16, 16 halvings from 2**32, is the first scale in half's range.
    assert len(taken) == (24 if dtype == torch.float16 and "dynamic_loss_scale" in settings else 40)
    expected = in_fp32(taken)
    (master,), (wide,) = optimizer.fp32_from_fp16_groups[0], optimizer.fp32_from_fp32_groups[0]
    assert torch.equal(wide, expected)
    assert torch.equal(master, expected)
    assert optimizer.fp16_groups[0][0] is model.low
    assert torch.equal(model.low, expected.to(dtype))


def test_the_scale_starts_at_2_to_the_32_and_grows_after_a_thousand():
    scaler = DynamicLossScaler()
    assert scaler.loss_scale == 2.0**32
    for _ in range(999):
        scaler.update_scale(False)
    assert scaler.loss_scale == 2.0**32
    scaler.update_scale(False)
    assert scaler.loss_scale == 2.0**33
    scaler.update_scale(True)
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (2.0**32, 1001, 1000)


def test_the_scaler_moves_as_apexs_own_formula():
    """The loop of apex's ``update_scale``, written out."""
    scaler = DynamicLossScaler(init_scale=16.0, scale_factor=4.0, scale_window=3)
    scale, last = 16.0, -1
    overflows = torch.rand(200, generator=torch.Generator().manual_seed(3)) < 0.3
    for number, overflow in enumerate(overflows.tolist()):
        if overflow:
            scale, last = max(scale / 4.0, 1.0), number
        elif (number - last) % 3 == 0:
            scale *= 4.0
        scaler.update_scale(overflow)
        assert scaler.loss_scale == scale
        if number % 7 == 0:
            scaler = pickle.loads(pickle.dumps(scaler))
    assert scaler.value == Dynamic(
        rule="apex", scale=scale, growth_factor=4.0, backoff_factor=0.25, growth_interval=3, min_scale=1.0,
        good_steps=(199 - last) % 3,
    )  # fmt: skip


def test_a_scaler_sees_overflow_scales_and_goes_backward():
    parameter = nn.Parameter(torch.ones(2))
    for scaler in (LossScaler(8.0), DynamicLossScaler(init_scale=8.0)):
        parameter.grad = None
        assert not scaler.has_overflow([parameter])
        scaler.backward(parameter.sum(), retain_graph=True)
        assert parameter.grad.tolist() == [8.0, 8.0]
        assert scaler.scale_gradient(nn.Identity(), (torch.ones(1),), None)[0].item() == 8.0
        for bad in (torch.inf, -torch.inf, torch.nan):
            parameter.grad[1] = bad
            assert scaler.has_overflow([parameter])


@pytest.mark.parametrize("settings", [{"static_loss_scale": 4.0}, {"dynamic_loss_scale": True}])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_reaches_no_weight(settings, bad, capsys):
    model, optimizer = made(**settings, verbose=True)
    optimizer.loss_scale = 4.0
    before = copy.deepcopy(model.state_dict())
    optimizer.backward(model(torch.tensor([1.0, bad, 1.0, 1.0])))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    scale = 2 if "dynamic_loss_scale" in settings else 4
    assert capsys.readouterr().err == (
        f"FP16_Optimizer: gradients overflowed at loss scale 4: step left out, scale now {scale}\n"
    )
    model.zero_grad(set_to_none=False)
    optimizer.backward(model(inputs(0)))
    optimizer.step()
    assert torch.equal(optimizer.fp32_from_fp16_groups[0][0], in_fp32([0]))


def gradients_of(optimizer):
    return torch.stack([gradient for group in optimizer.inspect_master_grad_data() for gradient in group])


@pytest.mark.parametrize("delayed", [True, False])
def test_gradients_of_several_losses_add_up_unscaled(delayed):
    model, optimizer = made(static_loss_scale=64.0)
    for step in (1, 2):
        optimizer.backward(model(inputs(step)), update_master_grads=not delayed)
    if delayed:
        with pytest.raises(OrderError, match=r"gradients are still scaled, by backward\("):
            optimizer.step()
        optimizer.update_master_grads()
    expected = (inputs(1) + inputs(2)).expand(2, 4)
    assert torch.equal(gradients_of(optimizer), expected)
    optimizer.update_master_grads()
    assert torch.equal(gradients_of(optimizer), expected)
    # One more, after they were unscaled.
    optimizer.backward(model(inputs(3)))
    assert torch.equal(gradients_of(optimizer), expected + inputs(3))


@pytest.mark.parametrize(
    "zero",
    [
        lambda model, _: model.zero_grad(),
        lambda model, _: model.zero_grad(set_to_none=False),
        lambda _, optimizer: optimizer.zero_grad(),
        lambda _, optimizer: optimizer.zero_grad(set_grads_to_None=True),
    ],
)
def test_gradients_that_were_zeroed_do_not_come_back(zero):
    model, optimizer = made(static_loss_scale=64.0, momentum=0.0)
    optimizer.backward(model(inputs(1)))
    zero(model, optimizer)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    optimizer.backward(model(inputs(2)))
    assert torch.equal(gradients_of(optimizer), inputs(2).expand(2, 4))


def test_clipping_sees_true_gradients():
    model, optimizer = made(static_loss_scale=1024.0)
    optimizer.backward(model(torch.tensor([0.5, 0.5, 0.5, 0.5])))
    norm = optimizer.clip_master_grads(0.5)
    assert norm.item() == pytest.approx(2**0.5, rel=4 * 2.0**-24)
    # torch adds 1e-6 to the norm.
    assert gradients_of(optimizer).norm().item() == pytest.approx(0.5, rel=2e-6)


def test_an_error_in_backward_leaves_what_was_there():
    model, optimizer = made(static_loss_scale=64.0)
    optimizer.backward(model(inputs(1)))
    loss = model(inputs(2))
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.backward(loss)
    assert torch.equal(gradients_of(optimizer), inputs(1).expand(2, 4))
    optimizer.backward(model(inputs(2)))
    assert torch.equal(gradients_of(optimizer), (inputs(1) + inputs(2)).expand(2, 4))


@in_each_format
def test_a_closure_is_evaluated_at_lower_scales_until_it_is_finite(dtype):
    model, optimizer = made(dtype, dynamic_loss_scale=True, momentum=0.0)
    optimizer.loss_scale = 2.0**18
    evaluations = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4))
        optimizer.backward(loss)
        evaluations.append(optimizer.loss_scale)
        return loss

    assert optimizer.step(closure).item() == 8.0
    overflowing = [2.0**18, 2.0**17, 2.0**16] if dtype == torch.float16 else []
    assert evaluations == [*overflowing, 2.0**15 if overflowing else 2.0**18]
    assert model.low.tolist() == model.wide.tolist() == [0.875] * 4


def test_lbfgs_takes_closures_of_masters():
    target = torch.tensor([1.0, -2.0, 3.0, 0.5])
    model = TwoParameters()
    optimizer = FP16_Optimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe"),
        static_loss_scale=8.0,
        verbose=False,
    )

    def closure():
        optimizer.zero_grad()
        loss = (model.low.float() - target).square().sum() + (model.wide - target).square().sum()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    # The quadratic's gradient is rounded to half: the minimum is right to that.
    torch.testing.assert_close(model.wide.detach(), target, rtol=2.0**-8, atol=2.0**-8)
    torch.testing.assert_close(model.low.detach().float(), target, rtol=2.0**-8, atol=2.0**-8)


def test_a_closure_that_is_never_finite_raises():
    model, optimizer = made(dynamic_loss_scale=True)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.tensor([torch.nan] * 4))
        optimizer.backward(loss)
        return loss

    with pytest.raises(ScaleCollapseError, match="not finite at the lowest loss scale, 1: look for"):
        optimizer.step(closure)


@in_each_format
def test_a_saved_state_goes_on_to_the_bit(dtype):
    whole, optimizer = made(
        dtype, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64.0, "scale_window": 4}
    )
    train(whole, optimizer, range(7))
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(whole, optimizer, range(7, 11))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, resumed = made(dtype, dynamic_loss_scale=True)
    model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.loss_scale == 128.0
    train(model, resumed, range(7, 11))
    assert resumed.loss_scale == optimizer.loss_scale == 256.0
    for one, other in zip(
        resumed.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(one, other)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(model(inputs(step) / 3))
        optimizer.step()


def test_a_state_of_apex_has_its_scaler_as_an_object():
    _, optimizer = made(dynamic_loss_scale=True)
    state = optimizer.state_dict()
    # apex pickled the attributes of its class, by the name that python -m narrowcast.apex answers for.
    scaler = object.__new__(DynamicLossScaler)
    scaler.__setstate__(
        {"cur_scale": 32.0, "cur_iter": 9, "last_overflow_iter": 4, "scale_factor": 2.0, "scale_window": 1000}
    )
    optimizer.load_state_dict(state | {"loss_scaler": scaler})
    assert optimizer.loss_scaler.value.good_steps == 4
    assert optimizer.loss_scale == 32.0
    _, fixed = made(static_loss_scale=2.0)
    fixed.load_state_dict(
        optimizer.state_dict() | {"loss_scaler": LossScaler(8), "dynamic_loss_scale": False}
    )
    assert fixed.loss_scale == 8.0


def test_what_does_not_belong_is_refused_and_nothing_changed():
    _, optimizer = made()
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    with pytest.raises(CheckpointError, match="the saved state of an FP16_Optimizer has no 'overflow'"):
        optimizer.load_state_dict({k: v for k, v in state.items() if k != "overflow"})
    with pytest.raises(CheckpointError, match=r"expected masters of shapes \[\(4,\)\], got \[\(3,\)\]: make"):
        optimizer.load_state_dict(state | {"fp32_from_fp16": [[torch.ones(3)]]})
    assert str(optimizer.state_dict()) == str(before)
    with pytest.raises(CheckpointError, match=r"saved by its state_dict\(\), not pickled or copied"):
        copy.copy(optimizer)


def test_settings_out_of_range_are_refused():
    optimizer = torch.optim.SGD(TwoParameters().parameters(), lr=0.1)
    with pytest.raises(ScaleError, match="expected a positive, finite loss scale"):
        FP16_Optimizer(optimizer, static_loss_scale=0.0)
    with pytest.raises(ScaleError, match="growth_factor must be above 1"):
        FP16_Optimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args={"scale_factor": 0})
    with pytest.raises(TypeError, match="init"):
        FP16_Optimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init": 2})
    assert FP16_Optimizer(optimizer).fp16_groups[0]


def test_an_optimizer_of_float32_parameters_is_taken_too():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = FP16_Optimizer(torch.optim.SGD([parameter], lr=1.0), static_loss_scale=8.0)
    optimizer.backward((parameter * 2).sum())
    assert parameter.grad.tolist() == [2.0, 2.0]
    optimizer.step()
    assert parameter.tolist() == [-1.0, -1.0]
    assert optimizer.fp16_groups == [[]]


# ---- helpers


def network():
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.LSTM(12, 2))


def test_network_to_half_keeps_every_bit_of_batch_norms():
    model = network()
    with torch.no_grad():
        model[1].weight.fill_(1 + 2.0**-20)
    half = network_to_half(model)
    assert isinstance(half[0], tofp16)
    assert half[1] is model
    assert half(torch.randn(2, 2, 2, 2))[0].dtype == torch.float16
    assert model[1].weight[0] == 1 + 2.0**-20
    assert {p.dtype for p in model[1].parameters()} == {torch.float32}
    assert {p.dtype for p in (*model[0].parameters(), *model[3].parameters())} == {torch.float16}


@in_each_format
def test_convert_network_leaves_affine_batch_norms(dtype):
    model = nn.Sequential(network(), nn.BatchNorm1d(2, affine=False))
    model[0][0].weight.grad = torch.ones_like(model[0][0].weight)
    assert convert_network(model, dtype) is model
    assert model[0][0].weight.dtype == model[0][0].weight.grad.dtype == dtype
    assert model[0][1].running_mean.dtype == torch.float32
    assert model[1].running_mean.dtype == dtype
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_convert_module_leaves_children():
    model = nn.Sequential(nn.Linear(1, 1))
    model.register_buffer("own", torch.ones(1))
    convert_module(model, torch.bfloat16)
    assert model.own.dtype == torch.bfloat16
    assert model[0].weight.dtype == torch.float32
    assert BN_convert_float(nn.BatchNorm1d(2).half()).weight.dtype == torch.float32


def test_fp16_model_casts_its_inputs():
    model = FP16Model(nn.Bilinear(2, 2, 1))
    assert model(torch.ones(1, 2), torch.ones(1, 2)).dtype == torch.float16


@pytest.mark.parametrize("flat", [False, True])
def test_masters_kept_by_hand(flat):
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert len(params) == 3
    assert [m.shape for m in masters] == ([(8,)] if flat else [p.shape for p in params])
    assert all(m.dtype == torch.float32 and m.requires_grad and m.is_leaf for m in masters)
    for number, parameter in enumerate(params):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    for _ in range(2):
        model_grads_to_master_grads(params, masters, flat_master=flat)
    assert torch.cat([m.grad.flatten() for m in masters]).tolist() == [1.0] * 4 + [2.0] * 2 + [3.0] * 2
    with torch.no_grad():
        for master in masters:
            master.copy_(1 + 2.0**-20)
    master_params_to_model_params(params, masters, flat_master=flat)
    assert {p.dtype for p in params} == {torch.float16, torch.float32}
    assert params[0].flatten().tolist() == [1.0] * 4
    assert params[2].flatten().tolist() == [1 + 2.0**-20] * 2


def test_masters_of_parameters_without_gradients():
    params, masters = prep_param_lists(nn.Linear(2, 1))
    masters[0].grad = torch.ones_like(masters[0])
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None
    params, flat = prep_param_lists(nn.Linear(2, 1), flat_master=True)
    with pytest.raises(
        SettingError, match=r"a gradient of each parameter, and 2 have none, the first of shape"
    ):
        model_grads_to_master_grads(params, flat, flat_master=True)
    with pytest.raises(
        SettingError, match="expected a copy for each of 2 parameters, got 1: give both lists"
    ):
        master_params_to_model_params(params, flat)
    with pytest.raises(SettingError, match="has 3 elements, got one of 2"):
        master_params_to_model_params(params, masters, flat_master=True)


def test_small_helpers():
    assert to_python_float(torch.tensor(2.5)) == to_python_float([2.5]) == 2.5
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([3.0])
    assert clip_grad_norm([parameter], 1.0).item() == 3.0

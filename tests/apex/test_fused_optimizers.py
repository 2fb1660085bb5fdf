"""apex's fused optimizers on torch's: apex's formulas in float64, states of apex, and what is refused."""

import copy
import pickle

import pytest
import torch

from narrowcast.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from narrowcast.errors import SettingError, UnsupportedError
from narrowcast.weights import hold

STEPS = 20
SHAPES = [(3, 5), (7,), ()]
# Each step rounds some ten operations, of relative error 2**-53 each, and errors of steps add up.
TOLERANCE = STEPS * 100 * 2.0**-53


def parameters(dtype=torch.float64):
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def gradients(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in SHAPES]


def run(optimizer, params, steps=range(STEPS)):
    for step in steps:
        for parameter, gradient in zip(params, gradients(step, params[0].dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()


def adam(values, *, lr, betas, eps, decay, decoupled):
    """multi_tensor_adam.cu, one element at a time."""
    first, second = ([torch.zeros_like(v) for v in values] for _ in range(2))
    for step in range(STEPS):
        corrections = [1 - beta ** (step + 1) for beta in betas]
        for i, gradient in enumerate(gradients(step)):
            g = gradient if decoupled else gradient + decay * values[i]
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g * g
            update = (first[i] / corrections[0]) / ((second[i] / corrections[1]).sqrt() + eps)
            values[i] = values[i] - lr * (update + (decay * values[i] if decoupled else 0))
    return values


def sgd(values, *, lr, momentum, dampening, decay, nesterov):
    """multi_tensor_sgd_kernel.cu with wd_after_momentum = False."""
    velocity = [None] * len(values)
    for step in range(STEPS):
        for i, gradient in enumerate(gradients(step)):
            g = gradient + decay * values[i]
            if momentum:
                first_run = velocity[i] is None
                velocity[i] = g if first_run else momentum * velocity[i] + (1 - dampening) * g
                g = g + momentum * velocity[i] if nesterov else velocity[i]
            values[i] = values[i] - lr * g
    return values


def assert_close(params, expected):
    for parameter, value in zip(params, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_follows_apexs_formula(decoupled, decay):
    params = parameters()
    expected = adam(
        [p.detach().clone() for p in params],
        lr=0.05, betas=(0.8, 0.95), eps=1e-3, decay=decay, decoupled=decoupled,
    )  # fmt: skip
    optimizer = FusedAdam(
        params, lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=decay, adam_w_mode=decoupled
    )
    run(optimizer, params)
    assert_close(params, expected)


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)]
)
def test_sgd_follows_apexs_formula(momentum, dampening, nesterov):
    params = parameters()
    settings = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    expected = sgd([p.detach().clone() for p in params], lr=0.05, decay=0.1, **settings)
    run(FusedSGD(params, lr=0.05, weight_decay=0.1, **settings), params)
    assert_close(params, expected)


@pytest.mark.parametrize(
    ("kind", "settings", "states", "names", "more"),
    [
        (FusedAdam, {}, ("exp_avg", "exp_avg_sq"), ("betas", "eps"), {"bias_correction": True, "step": 5}),
        (FusedSGD, {"momentum": 0.9}, ("momentum_buffer",), ("momentum", "dampening", "nesterov"), {}),
    ],
)
def test_a_state_that_apex_saved_goes_on(kind, settings, states, names, more):
    """apex keeps the steps in the group, and none of torch's own settings."""
    params = parameters()
    whole = kind(params, lr=0.05, weight_decay=0.1, **settings)
    run(whole, params, range(5))
    saved = whole.state_dict()
    group = {k: saved["param_groups"][0][k] for k in ("lr", "weight_decay", "params", *names)}
    apexs = {
        "state": {i: {k: s[k].clone() for k in states} for i, s in saved["state"].items()},
        "param_groups": [group | more],
    }
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = kind(resumed, lr=1.0)
    optimizer.load_state_dict(apexs)
    assert optimizer.param_groups[0]["fused"]
    assert optimizer.param_groups[0]["lr"] == 0.05
    run(whole, params, range(5, 9))
    run(optimizer, resumed, range(5, 9))
    assert all(map(torch.equal, params, resumed))


def test_zero_grad_does_what_apexs_did_by_default():
    params = parameters()
    for kind, to_none in ((FusedAdam, True), (FusedSGD, False)):
        optimizer = kind(params, lr=0.1)
        for made in (optimizer, copy.deepcopy(optimizer)):
            mine = made.param_groups[0]["params"]
            for parameter in mine:
                parameter.grad = torch.ones_like(parameter)
            made.zero_grad()
            assert all(p.grad is None if to_none else not p.grad.any() for p in mine)
            made.zero_grad(set_to_none=True)
            assert all(p.grad is None for p in mine)


def test_groups_of_fused_sgd_may_bring_their_own_rates():
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = FusedSGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 0.25}])
    (a.sum() + b.sum()).backward()
    optimizer.step()
    assert (a[0].item(), b[0].item()) == (0.5, 0.75)
    for made in (lambda: FusedSGD([a]), lambda: FusedSGD([{"params": [a]}])):
        with pytest.raises(SettingError, match="FusedSGD needs an lr"):
            made()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_low_parameters_are_refused_until_masters_are_held(kind, dtype):
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype))]
    optimizer = kind(params, lr=0.5)
    name = str(dtype).removeprefix("torch.")
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        one.param_groups[0]["params"][0].grad = torch.ones(3, dtype=dtype)
        with pytest.raises(UnsupportedError, match=f"{kind.__name__} has a parameter in {name}"):
            one.step()
    hold(optimizer)
    optimizer.step()
    assert (params[0] < 1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: FusedAdam(p, amsgrad=True), r"no amsgrad.* use torch\.optim\.AdamW\("),
        (lambda p: FusedAdam(p, bias_correction=False), "leaves out the division of the moments by 1 - beta"),
        (lambda p: FusedAdam([{"params": p, "bias_correction": False}]), "leaves out the division"),
        (lambda p: FusedAdam(p, master_weights=True), r"narrowcast\.weights\.hold\(optimizer\) for"),
        (lambda p: FusedSGD(p, lr=0.1, wd_after_momentum=True), "adds the weight decay to the update"),
        (FusedAdagrad, r"torch\.optim\.Adagrad"),
        (lambda p: FusedLAMB(p, use_nvlamb=True), r"FusedLAMB is not .*: LAMB .* timm\.optim\.Lamb has"),
        (FusedMixedPrecisionLamb, "FusedMixedPrecisionLamb is not mapped"),
        (FusedNovoGrad, "FusedNovoGrad is not mapped on an optimizer of torch: NovoGrad divides"),
    ],
)
def test_what_torch_computes_otherwise_is_refused(make, message):
    with pytest.raises(UnsupportedError, match=message):
        make(parameters())

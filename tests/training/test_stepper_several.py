"""Several optimizers, several losses, gradient penalties, closures: each against the loop by hand."""

import copy
import math
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from stepper_runs import made, stepped
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.scaling import Dynamic, Static

WIDE = {"rtol": 0.0, "atol": 2e-6}  # a few hundred fp32 roundings of numbers up to 1


def close(mine, wanted, **tolerance):
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), **tolerance)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.d = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def optimizers(self):
        return {name: torch.optim.SGD(getattr(self, name).parameters(), 0.3) for name in "dg"}

    def loss_d(self, noise, real):
        fake = self.g(noise).detach()
        return F.softplus(self.d(fake)).mean() + F.softplus(-self.d(real)).mean()

    def loss_g(self, noise):
        return F.softplus(-self.d(self.g(noise))).mean()


def noises(count):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 3, generator=generator), torch.randn(16, 2, generator=generator))
        for _ in range(count)
    ]


def gan_by_hand(data, accumulate):
    gan = Gan().double()
    optimizers = gan.optimizers()
    grads = {"d": [0.0] * 4, "g": [0.0] * 4}
    for number, (noise, real) in enumerate(data, start=1):
        for name, optimizer in optimizers.items():
            parameters = list(getattr(gan, name).parameters())
            loss = gan.loss_d(noise.double(), real.double()) if name == "d" else gan.loss_g(noise.double())
            found = torch.autograd.grad(loss, parameters)
            grads[name] = [a + b / accumulate for a, b in zip(grads[name], found, strict=True)]
            if number % accumulate == 0:
                for parameter, gradient in zip(parameters, grads[name], strict=True):
                    parameter.grad = gradient
                optimizer.step()
                grads[name] = [0.0] * 4
    return gan


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_gan_whose_losses_reach_each_others_networks(scaled, accumulate):
    """The generator's loss goes through the discriminator, and leaves no gradient there."""
    data = noises(6)
    gan = Gan()
    scaler = Dynamic(scale=2.0**9) if scaled else None
    stepper = nc.Stepper(gan, gan.optimizers(), "fp32", accumulate=accumulate, scaler=scaler)
    for noise, real in data:
        stepped(stepper, gan.loss_d, noise, real, name="d")
        stepped(stepper, gan.loss_g, noise, name="g")
    wanted = gan_by_hand(data, accumulate)
    close(gan.parameters(), wanted.parameters(), **WIDE)


def test_an_overflow_leaves_the_other_optimizer_alone():
    gan = Gan()
    optimizers = gan.optimizers()
    schedulers = {name: torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for name, o in optimizers.items()}
    stepper = nc.Stepper(gan, optimizers, "fp16", scaler=Dynamic(scale=2.0**9), scheduler=schedulers)
    (noise, real), *_ = noises(1)
    assert stepped(stepper, lambda: gan.loss_d(noise, real) * math.inf, name="d").skipped
    assert not stepped(stepper, gan.loss_g, noise, name="g").skipped
    assert {name: s.get_scale() for name, s in stepper.scalers.items()} == {"d": 2.0**8, "g": 2.0**9}
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers.values()] == [0.3, 0.15]


@pytest.mark.parametrize("meanwhile", ["a step", "an error"])
def test_a_skip_restores_statistics_from_before_its_first_micro_batch(meanwhile):
    """Although another named optimizer ends its accumulation in between."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizers = {name: torch.optim.SGD(model[index].parameters(), 0.1) for index, name in enumerate("ab")}
    stepper = nc.Stepper(model, optimizers, "fp32", accumulate=2)
    x = torch.tensor([[1.0, 2.0], [-3.0, 4.0]])
    before = model[1].running_mean.clone()
    assert not stepped(stepper, lambda: model(x * math.inf).sum(), name="a").complete
    assert model[1].running_mean.isnan().all()
    if meanwhile == "a step":
        assert not stepped(stepper, lambda: model(x).square().sum(), name="b").complete
        assert not stepped(stepper, lambda: model(x).square().sum(), name="b").skipped
    else:
        with pytest.raises(KeyError), stepper.autocast("b"):
            raise KeyError
    assert stepped(stepper, lambda: model(x).square().sum(), name="a").skipped
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize("reentrant", [True, False])
def test_named_optimizers_and_checkpoints(reentrant):
    """torch would raise, or leave the parameters inside without gradients where nothing before has any."""
    model = nn.Linear(4, 1)
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.1) for name in "ab"}
    stepper, x = nc.Stepper(model, optimizers, "fp32"), torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        before, loss = (
            model.weight.detach().clone(),
            checkpoint(model, x, use_reentrant=reentrant).sum(),
        )
        if not reentrant:
            stepper.step(loss, name="a")
            assert not torch.equal(model.weight, before)
            continue
        with pytest.raises(UnsupportedError, match="use_reentrant=False"):
            stepper.step(loss, name="a")


def test_optimizers_in_a_list_step_and_clip_as_one():
    def trained(stepper_of):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().float()
        parts = [
            torch.optim.SGD(model[0].parameters(), 0.5),
            torch.optim.SGD(model[2].parameters(), 0.25, momentum=0.5),
        ]
        return model, parts, stepper_of(model, parts)

    def with_schedulers(model, optimizers):
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 100) for optimizer in optimizers]
        return nc.Stepper(model, optimizers, "fp32", max_norm=0.1, scheduler=schedulers), schedulers

    model, _, (stepper, schedulers) = trained(with_schedulers)
    wide, wide_parts, _ = trained(lambda m, o: m.double())
    x = torch.randn(16, 4)
    for _ in range(3):
        result = stepped(stepper, lambda: model(x).square().mean())
        for part in wide_parts:
            part.zero_grad()
        wide(x.double()).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(wide.parameters(), 0.1)
        assert math.isclose(result.grad_norm, float(norm), rel_tol=1e-5)
        for part in wide_parts:
            part.step()
    close(model.parameters(), wide.parameters(), **WIDE)

    before = copy.deepcopy(model.state_dict())
    model[0].weight.register_hook(lambda gradient: gradient * math.nan)
    result = stepped(stepper, lambda: model(x).square().mean())
    assert result.skipped
    assert result.nonfinite == ("0.weight",)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [scheduler.last_epoch for scheduler in schedulers] == [3, 3], "once a step, and not with a skip"


def test_a_joint_step_that_raised_does_not_move_the_schedulers_of_the_next_too_early():
    """Else they would move between the steps of the two optimizers, and the second would use the new rate."""
    parts = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    model = nn.Sequential(*parts)
    optimizers = [torch.optim.SGD(part.parameters(), 0.25) for part in parts]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    stepper = nc.Stepper(model, optimizers, "fp32", scheduler=schedulers)
    fail = optimizers[1].register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stepped(stepper, lambda: sum(part.weight.sum() for part in parts))
    fail.remove()
    stepper.zero_grad()

    before = [part.weight.item() for part in parts]
    stepped(stepper, lambda: sum(part.weight.sum() for part in parts))
    # The gradient is 1.
    assert [part.weight.item() for part in parts] == pytest.approx([weight - 0.25 for weight in before])
    assert [scheduler.last_epoch for scheduler in schedulers] == [1, 1]


@pytest.mark.parametrize(("factor", "skipped"), [(1e18, False), (1e25, True)])
def test_a_joint_norm_that_overflows_skips_as_the_norm_of_one_optimizer_does(factor, skipped):
    """1e25 squared is above fp32's range: clipping by an infinite norm would step on zeros."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizers = [torch.optim.SGD(part.parameters(), 1.0) for part in model]
    x = torch.ones(2, 4)
    for stepping in (optimizers, torch.optim.SGD(model.parameters(), 1.0)):
        stepper = nc.Stepper(model, stepping, "fp32", max_norm=1.0)
        result = stepper.step((model[0](x) * factor).sum() + (model[1](x) * factor).sum())
        assert result.skipped == skipped
        assert math.isinf(result.grad_norm) == skipped


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 3e4])
def test_a_gradient_penalty_is_that_of_double_precision(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    wide = copy.deepcopy(model).double()
    _, _, stepper = made("fp32", model, lr=0.02, scaler=Dynamic(scale=scale))
    optimizer = torch.optim.SGD(wide.parameters(), 0.02)
    x = torch.randn(16, 4)

    def penalty(gradients):
        return sum((gradient.square().sum() for gradient in gradients), torch.zeros(()))

    for _ in range(3):
        with stepper.autocast():
            loss = model(x).square().mean()
        gradients = stepper.grad(loss, list(model.parameters()))
        assert not stepper.step(loss + penalty(gradients)).skipped
        optimizer.zero_grad()
        loss = wide(x.double()).square().mean()
        gradients = torch.autograd.grad(loss, list(wide.parameters()), create_graph=True)
        (loss + penalty(gradients)).backward()
        optimizer.step()
    close(model.parameters(), wide.parameters(), **WIDE)


def test_a_gradient_penalty_in_fp16_does_not_underflow():
    """Gradients of 1e-9 are 0 in fp16; scaled by 2**15 they are not."""
    model = nn.Linear(16, 1, bias=False)
    x = torch.full((1, 16), 2e-5, requires_grad=True)
    losses = {}
    for scale in (1.0, 2.0**15):
        _, _, stepper = made("fp16", model, scaler=Static(scale=scale))
        with stepper.autocast():
            loss = (model(x).float() * 1e-4).sum()
        (gradient,) = stepper.grad(loss, [model.weight], create_graph=False)
        losses[scale] = gradient.abs().max().item()
        assert gradient.dtype == torch.float32
    assert losses[1.0] == 0.0
    assert math.isclose(losses[2.0**15], 2e-9, rel_tol=2.0**-9)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_lbfgs_by_a_function(policy):
    torch.manual_seed(0)
    x, w = torch.randn(64, 3), torch.randn(3, 1)
    y = x @ w
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    stepper = nc.Stepper(model, optimizer, policy)
    first = F.mse_loss(model(x), y).item()

    def function():
        return F.mse_loss(model(x).float(), y)

    while (result := stepper.step(function)).skipped:
        pass
    for _ in range(3):
        stepper.step(function)
    # The solution is exact in fp32; rounded activations leave an error of (2 roundings)**2 of the target.
    floor = {"fp32": 1e-10, "bf16": (2 * 2.0**-8) ** 2, "fp16": (2 * 2.0**-11) ** 2}[policy]
    assert F.mse_loss(model(x), y).item() < first * max(floor, 1e-10) * 10
    assert math.isclose(result.returned.item(), first, rel_tol=0.05)


def test_a_retry_at_a_lower_scale_draws_the_same_numbers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    _, _, stepper = made("fp16", model, scaler=Dynamic(scale=2.0**24))
    x = torch.randn(4, 8)
    losses = []

    def function():
        loss = model(x).float().square().mean() * random.uniform(1.0, 2.0) * numpy.random.uniform(1.0, 2.0)
        losses.append(loss.item())
        return loss

    result = stepper.step(function)
    assert not result.skipped
    assert len(losses) > 3
    assert len(set(losses)) == 1, "the same masks, and the same numbers of Python and NumPy"
    assert result.scale == 2.0 ** (25 - len(losses))
    assert stepper.steps == 1
    assert not stepper.step(function).skipped
    assert losses[-1] != losses[0], "a new step draws anew"


@pytest.mark.parametrize(("accumulate", "value"), [(1, math.nan), (2, 1.0)])
def test_a_function_is_not_called_again_in_vain(accumulate, value):
    """No scale mends a loss that is not finite; other micro-batches of a step cannot be computed again."""
    scaler = Dynamic(scale=2.0**24)
    model, _, stepper = made("fp16", nn.Linear(2, 1), accumulate=accumulate, scaler=scaler)
    calls = []

    def function():
        calls.append(1)
        return model(torch.full((1, 2), value)).float().mean()

    results = [stepper.step(function) for _ in range(accumulate)]
    assert [result.complete for result in results] == [False, True][-accumulate:]
    assert results[-1].skipped
    assert len(calls) == accumulate
    assert stepper.scaler.get_scale() == 2.0**23


def test_max_value_clamps():
    model = nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    _, _, stepper = made("fp16", model, lr=1.0, max_value=0.25, scaler=Static(scale=8.0))
    stepped(stepper, lambda: model(torch.tensor([[1.0, -1.0, 0.125, 0.0]])).float().sum())
    close([before - model.weight], [torch.tensor([[0.25, -0.25, 0.125, 0.0]])], rtol=0, atol=2.0**-23)

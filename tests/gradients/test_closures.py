"""Steps with a closure: gradients unscaled and checked at every evaluation."""

import copy
import math

import pytest
import torch
from pairs import OPTIMIZERS

import narrowcast as nc
from narrowcast.errors import OrderError, UnsupportedError


def problem():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return model, torch.randn(16, 3), torch.randn(16, 1)


def lbfgs(parameters, search="strong_wolfe"):
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, history_size=4, line_search_fn=search)


def train(make_optimizer, scaler=None, steps=4, by_keyword=False, inside=lambda optimizer: None):
    """Losses of each step, and the weights at the end."""
    model, x, y = problem()
    optimizer, losses, evaluations = make_optimizer(model.parameters()), [], []

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        inside(optimizer)
        evaluations.append(loss.item())
        return loss

    for _ in range(steps):
        if scaler is None:
            loss = optimizer.step(closure)
        else:
            result = (
                scaler.step(optimizer, closure=closure) if by_keyword else scaler.step(optimizer, closure)
            )
            assert not result.skipped
            assert result.nonfinite == ()
            loss = result.returned
            scaler.update()
        losses.append(loss.item())
    return losses, evaluations, [p.detach().clone() for p in model.parameters()]


def assert_equal(ours, plain):
    assert ours[:2] == plain[:2]
    assert all(torch.equal(a, b) for a, b in zip(ours[2], plain[2], strict=True))


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_trains_as_without_a_scaler(search, by_keyword):
    """To the bit: a power of two in and out again changes no normal number."""
    plain = train(lambda ps: lbfgs(ps, search))
    assert len(plain[1]) > 10
    assert plain[0][-1] < plain[0][0] / 2
    scaler = nc.GradScaler("cpu", growth_interval=2)
    assert_equal(train(lambda ps: lbfgs(ps, search), scaler, by_keyword=by_keyword), plain)
    assert scaler.get_scale() == 2.0**18  # four good steps, however many evaluations each had


@pytest.mark.parametrize("name", ["SGD with momentum", "SGD fused", "AdamW fused", "AdamW foreach"])
def test_closures_train_as_without_a_scaler(name):
    assert_equal(train(OPTIMIZERS[name], nc.GradScaler("cpu")), train(OPTIMIZERS[name]))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("by", ["unscale_", "clip_grad_norm_", "clip_grad_value_"])
def test_a_closure_may_unscale_and_clip(by, fused):
    scaler = nc.GradScaler("cpu")

    def clip(optimizer, scaled):
        parameters = optimizer.param_groups[0]["params"]
        if scaled and by == "unscale_":
            scaler.unscale_(optimizer)
        elif scaled:
            getattr(scaler, by)(optimizer, 0.1)
            return
        clip = "clip_grad_norm_" if by == "unscale_" else by
        getattr(torch.nn.utils, clip)(parameters, 0.1)

    make = (lambda ps: torch.optim.SGD(ps, lr=0.5, fused=True)) if fused else lbfgs
    ours = train(make, scaler, inside=lambda optimizer: clip(optimizer, scaled=True))
    plain = train(make, inside=lambda optimizer: clip(optimizer, scaled=False))
    # Each clipped gradient is torch's to 1e-6; twenty evaluations add that up.
    assert ours[0] == pytest.approx(plain[0], rel=1e-4)


@pytest.mark.parametrize(
    "make", [lbfgs, lambda ps: lbfgs(ps, None), lambda ps: torch.optim.Adam(ps, fused=True)]
)
@pytest.mark.parametrize("good", [0, 1, 3])
def test_an_evaluation_that_is_not_finite_undoes_the_step(make, good):
    model, x, y = problem()
    optimizer, scaler, evaluations = make(list(model.named_parameters())), nc.GradScaler("cpu"), []
    bad = math.inf

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        if bad is not None and len(evaluations) >= good:
            loss = loss + (model[2].bias * bad).sum()
            optimizer.param_groups[0]["lr"] = 123.0
        scaler.scale(loss).backward()
        evaluations.append(loss.item())
        return loss

    enough = good == 0 or isinstance(optimizer, torch.optim.LBFGS)
    bad = None
    scaler.step(optimizer, closure)  # so that there is state to come back to
    scaler.update()
    evaluations.clear()
    bad = math.inf
    weights = copy.deepcopy(model.state_dict())
    state, settings = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.param_groups[0]["lr"])
    result = scaler.step(optimizer, closure)
    if not enough:  # one evaluation a step: it was a good one
        assert not result.skipped
        return
    assert result.skipped
    assert result.nonfinite == ("2.bias",)
    assert math.isinf(result.returned.item())
    assert len(evaluations) == good + 1
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(state)
    assert optimizer.param_groups[0]["lr"] == settings
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    bad = None
    assert not scaler.step(optimizer, closure).skipped


def test_misuse_of_a_closure_is_said():
    model, x, y = problem()
    optimizer, scaler = lbfgs(model.parameters()), nc.GradScaler("cpu")
    with pytest.raises(OrderError, match=r"^Attempted step but no loss was scaled yet"):
        scaler.step(optimizer, lambda: torch.nn.functional.mse_loss(model(x), y))

    def closure():
        optimizer.zero_grad()
        return scaler.scale(torch.nn.functional.mse_loss(model(x), y))

    with pytest.raises(OrderError, match=r"^No inf checks were recorded for this optimizer"):
        scaler.step(optimizer, closure)

    class Lazy(torch.optim.SGD):
        def step(self, closure=None):
            return None

    with pytest.raises(OrderError, match=r"^Lazy\.step never called its closure$"):
        scaler.step(Lazy(model.parameters()), closure)

    def whole():
        closure().backward()
        return 0.0

    scaler.step(optimizer, whole)
    with pytest.raises(OrderError, match="already been called"):
        scaler.step(optimizer, whole)
    scaler.update()

    def updates():
        closure().backward()
        scaler.unscale_(optimizer)
        scaler.update()

    with pytest.raises(OrderError, match=r"^update\(\) was called inside the closure of a step"):
        scaler.step(optimizer, updates)


def test_a_disabled_scaler_passes_a_closure_on():
    assert_equal(train(lbfgs, nc.GradScaler("cpu", enabled=False)), train(lbfgs))


def test_a_closure_over_held_weights_is_refused():
    layer = torch.nn.Linear(2, 1).bfloat16()
    optimizer = torch.optim.LBFGS(layer.parameters())
    nc.weights.hold(optimizer, "kahan")
    with pytest.raises(UnsupportedError, match="a closure of a LBFGS whose weights are held in a low format"):
        nc.GradScaler("cpu").step(optimizer, lambda: layer(torch.ones(1, 2)).sum())


def test_optimizers_that_need_a_closure_do_not_step_together():
    layer = torch.nn.Linear(2, 1)
    scaler = nc.GradScaler("cpu")
    scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(OrderError, match="LBFGS needs a closure: step it by itself"):
        scaler.step_together([torch.optim.LBFGS(layer.parameters())])

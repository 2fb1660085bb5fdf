"""``StepResult``: what a step did, and what the next steps and the listeners make of it."""

import inspect
import math
import warnings

import pytest
import torch
from pairs import iterate

import narrowcast as nc
from narrowcast.errors import OrderError, ScaleCollapseError


def model_and(optimizer=torch.optim.SGD, **settings):
    model = torch.nn.Linear(3, 2)
    return model, optimizer(model.parameters(), **{"lr": 0.1, **settings})


def loss_of(model, factor=1.0):
    return sum((p * factor).sum() for p in model.parameters())


def backward(scaler, model, bad=(), factor=1.0):
    model.zero_grad()
    scaler.scale(loss_of(model, factor)).backward()
    for parameter, value in bad:
        parameter.grad.view(-1)[-1] = value


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_a_step_that_was_taken(scale, fused):
    scaler, (model, optimizer) = nc.GradScaler("cpu", scale), model_and(fused=fused)
    backward(scaler, model)
    result = scaler.step(optimizer)
    assert (result.skipped, result.scale, result.grad_norm, result.nonfinite, result.returned) == (
        False, scale, None, (), None
    )  # fmt: skip
    assert repr(result) == f"StepResult(skipped=False, scale={scale})"
    scaler.update(4.0)
    assert result.scale == scale  # that of the step, not of now
    backward(scaler, model, factor=3.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    result = scaler.step(optimizer)
    assert result.grad_norm == float(norm) == pytest.approx(3 * math.sqrt(8))
    assert repr(result) == "StepResult(skipped=False, scale=4.0, grad_norm=8.48528)"


@pytest.mark.parametrize(
    "way", ["step", "unscale_", "torch clips", "ours clips", "ours clips after unscale_", "ours clips twice"]
)
@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_a_skipped_step_names_what_was_not_finite(scale, settings, value, way):
    """Whatever clipping by a norm of NaN made of the other gradients meanwhile."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*model.named_parameters()], lr=0.1, **settings)
    scaler = nc.GradScaler("cpu", scale)
    backward(scaler, model, [(model.bias, value)])
    if "unscale" in way or way == "torch clips":
        scaler.unscale_(optimizer)
    if way == "torch clips":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif "ours" in way:
        scaler.clip_grad_norm_(optimizer, 1.0)
        if "twice" in way:
            scaler.clip_grad_norm_(optimizer, 0.5)
    before = [p.detach().clone() for p in model.parameters()]
    result = scaler.step(optimizer)
    assert result.skipped
    assert result.nonfinite == ("bias",)
    assert result.returned is None
    assert "skipped=True" in repr(result)
    assert "nonfinite=('bias',)" in repr(result)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


def test_a_step_that_raises_can_be_tried_again():
    """Its gradients are divided once."""

    class Stumbles(torch.optim.SGD):
        stumbled = False

        def step(self, closure=None):
            if not Stumbles.stumbled:
                Stumbles.stumbled = True
                raise KeyError("once")
            return super().step(closure)

    model = torch.nn.Linear(3, 2)
    optimizer, scaler = Stumbles(model.parameters(), lr=1.0), nc.GradScaler("cpu")
    before = model.bias.detach().clone()
    backward(scaler, model)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert not scaler.step(optimizer).skipped
    assert torch.equal(model.bias, before - 1.0)


def test_a_fused_step_that_raises_leaves_no_attributes():
    for make, left in ((torch.amp.GradScaler, True), (nc.GradScaler, False)):
        scaler, (model, optimizer) = make("cpu", 10.0), model_and(fused=True)
        optimizer.register_step_pre_hook(lambda *_: {}["nothing"])
        backward(scaler, model)
        with pytest.raises(KeyError):
            scaler.step(optimizer)
        assert hasattr(optimizer, "grad_scale") == hasattr(optimizer, "found_inf") == left


def test_optimizers_without_gradients_do_not_block_others():
    scaler, (model, optimizer), (_, empty) = nc.GradScaler("cpu"), model_and(lr=1.0), model_and()
    before = model.bias.detach().clone()
    backward(scaler, model)
    with pytest.raises(OrderError, match="none of its parameters had a gradient"):
        scaler.step_together([optimizer, empty])
    scaler.step(optimizer)
    assert torch.equal(model.bias, before - 1.0)


def test_the_return_value_of_the_optimizer_is_handed_on():
    class Counts(torch.optim.SGD):
        def step(self, closure=None, *, word="nothing"):
            super().step(closure)
            return word

    scaler, (model, optimizer) = nc.GradScaler("cpu"), model_and(Counts)
    backward(scaler, model)
    assert scaler.step(optimizer, word="yes").returned == "yes"


# ---- listeners


@pytest.mark.parametrize("fused", [False, True])
def test_listeners_hear_of_each_step_once(fused):
    scaler, (model, optimizer) = nc.GradScaler("cpu"), model_and(fused=fused)
    heard = []
    taken = scaler.on_step(lambda result: heard.append(("step", result.skipped)))
    scaler.on_skip(lambda result: heard.append(("skip", result.nonfinite[0][:7])))
    for factor in (1.0, math.inf, 1.0):
        iterate(scaler, optimizer, lambda f=factor: loss_of(model, f))
    assert heard == [("step", False), ("skip", "group 0"), ("step", False)]
    taken.remove()
    backward(scaler, model)
    scaler.step(optimizer)
    assert len(heard) == 3
    with pytest.raises(TypeError, match=r"^expected a function of a StepResult, got int$"):
        scaler.on_step(3)


def test_a_scheduler_after_a_skipped_first_step_does_not_warn():
    for make, warns in ((torch.amp.GradScaler, True), (nc.GradScaler, False)):
        scaler, (model, optimizer) = make("cpu"), model_and()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        backward(scaler, model, factor=math.inf)
        scaler.step(optimizer)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            scheduler.step()
        assert any("before `optimizer.step()`" in str(warning.message) for warning in seen) == warns


# ---- several optimizers


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_step_together_or_not_at_all(fused):
    scaler = nc.GradScaler("cpu", growth_interval=1)
    pairs = [model_and(fused=fused), model_and(torch.optim.AdamW)]
    before = [p.detach().clone() for model, _ in pairs for p in model.parameters()]
    for model, _ in pairs:
        backward(scaler, model)
    pairs[1][0].weight.grad[0, 0] = math.nan
    results = scaler.step_together(optimizer for _, optimizer in pairs)
    assert [result.skipped for result in results] == [True, True]
    assert [result.nonfinite for result in results] == [(), ("group 0, parameter 0, shape (2, 3)",)]
    after = [p for model, _ in pairs for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    for model, _ in pairs:
        backward(scaler, model)
    assert [result.skipped for result in scaler.step_together(o for _, o in pairs)] == [False, False]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    scaler.update()
    assert scaler.get_scale() == 2.0**16
    assert scaler.step_together([]) == ()


# ---- patience


@pytest.mark.parametrize("fused", [False, True])
def test_patience_ends_with_an_error(fused):
    assert inspect.signature(nc.GradScaler).parameters["patience"].default == 25
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters(), fused=fused)
    scaler = nc.GradScaler("cpu", patience=3)
    iterate(scaler, optimizer, lambda: loss_of(model))
    for step in range(3):
        backward(scaler, model, [(model.bias, math.nan)])
        if step < 2:
            assert scaler.step(optimizer).skipped
            scaler.update()
    with pytest.raises(ScaleCollapseError) as error:
        scaler.step(optimizer)
    for words in ("3 steps of AdamW in a row were skipped, since step 2", "bias", "16384", "patience=None"):
        assert words in str(error.value)
    scaler.update()  # who caught it may go on, and has as many tries again
    for _ in range(2):
        backward(scaler, model, [(model.bias, math.nan)])
        scaler.step(optimizer)
        scaler.update()
    backward(scaler, model)
    assert not scaler.step(optimizer).skipped


def test_patience_is_of_one_optimizer_and_a_good_step_renews_it():
    scaler, (model, one), (_, two) = nc.GradScaler("cpu", patience=2), model_and(), model_and()
    other = model_and()[0]
    two.param_groups[0]["params"] = list(other.parameters())
    for factor in (math.inf, 1.0, math.inf, 1.0):
        backward(scaler, model, factor=factor)
        backward(scaler, other, factor=math.inf if factor == 1.0 else 1.0)
        scaler.step(one)
        scaler.step(two)
        scaler.update()
    iterate(scaler, one, lambda: loss_of(model, math.inf))
    backward(scaler, model, factor=math.inf)
    with pytest.raises(ScaleCollapseError, match="since step 9"):
        scaler.step(one)


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_an_optimizer_that_takes_the_scaler(factor):
    """torch's old contract: its step takes ``grad_scaler`` and unscales by itself."""

    class UnscalesItself(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler):
            grad_scaler.unscale_(self)
            found = sum(grad_scaler._found_inf_per_device(self).values())
            return None if found else super().step(closure)

    model = torch.nn.Linear(3, 2)
    optimizer, scaler, heard = UnscalesItself(model.parameters(), lr=1.0), nc.GradScaler("cpu"), []
    scaler.on_step(heard.append)
    scaler.on_skip(heard.append)
    before = model.bias.detach().clone()
    backward(scaler, model, factor=factor)
    with pytest.warns(FutureWarning, match="an optimizer whose step takes grad_scaler") as seen:
        result = scaler.step(optimizer)
    assert seen[0].filename == __file__
    assert heard == [result]
    assert result.skipped == math.isinf(factor)
    assert len(result.nonfinite) == (2 if result.skipped else 0)
    assert torch.equal(model.bias, before if result.skipped else before - 1.0)
    scaler.update()
    assert scaler.get_scale() == (2.0**15 if result.skipped else 2.0**16)

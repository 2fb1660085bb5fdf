"""Loops that misuse a scaler are refused or warned of with the line to write; right ones hear nothing.

Each right loop trains under torch's scaler too, to the same bits.
"""

import math
import warnings

import pytest
import torch
from pairs import iterate
from torch.optim.optimizer import _global_optimizer_pre_hooks

import narrowcast as nc
from narrowcast.errors import OrderError
from narrowcast.gradients import _torch_internals as internals

SCALERS = [torch.amp.GradScaler, nc.GradScaler]
X = torch.tensor([[1.0, -2.0], [0.5, 3.0]])


def models_and_optimizers(count=2, kind=torch.optim.SGD, **settings):
    torch.manual_seed(0)
    models = [torch.nn.Linear(2, 1) for _ in range(count)]
    return models, [kind(model.parameters(), **{"lr": 0.1, **settings}) for model in models]


def weights(*models):
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


# ---- update between two optimizers


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "second", ["unscale_", "clip_grad_norm_", "clip_grad_value_", "step", "step_together"]
)
@pytest.mark.parametrize("unscaled", [False, True])
def test_an_update_between_two_steps_is_refused(second, unscaled, fused):
    (a, b), (one, two) = models_and_optimizers(fused=fused)
    scaler = nc.GradScaler("cpu", growth_interval=1)
    before = weights(b)
    scaler.scale(a(X).sum() + b(X).sum()).backward()
    if unscaled:
        scaler.unscale_(one)
        scaler.unscale_(two)
    scaler.step(one)
    scaler.update()
    given = {"clip_grad_norm_": (two, 1.0), "clip_grad_value_": (two, 1.0), "step_together": ([two],)}
    with pytest.raises(
        OrderError, match=r"call scaler\.update\(\) once, after scaler\.step of every optimizer"
    ):
        getattr(scaler, second)(*given.get(second, (two,)))
    assert torch.equal(weights(b), before)

    # The next iteration is right.
    two.zero_grad()
    assert not iterate(scaler, two, lambda: b(X).sum()).skipped
    torch.testing.assert_close(weights(b), before - 0.1 * torch.tensor([1.5, 1.0, 2.0]))


def accumulate(scaler, models, optimizers):
    for _ in range(3):
        for scale in (0.5, 0.25):
            scaler.scale(models[0](X).sum() * scale).backward()
        scaler.unscale_(optimizers[0])
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()


def several_losses(scaler, models, optimizers):
    for _ in range(3):
        first = models[0](X).square().mean() + models[1](X).mean()
        second = models[0](X).mean() - models[1](X).square().mean()
        scaler.scale(first).backward(retain_graph=True)
        scaler.scale(second).backward()
        scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()


def gan(scaler, models, optimizers):
    """One scaler, updated after each optimizer; the second loss reaches the first model too."""
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(models[0](X).square().mean() * model(X).mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


def gan_of_one_update(scaler, models, optimizers):
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(models[0](X).square().mean() * model(X).mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()


def a_scaler_each(scaler, models, optimizers):
    """The first loss reaches the second model too."""
    other = type(scaler)("cpu", init_scale=4.0)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(models[0](X).square().mean() * models[1](X).mean()).backward()
        optimizers[1].zero_grad()
        other.scale(models[1](X).mean()).backward()
        other.step(optimizers[1])
        scaler.step(optimizers[0])
        scaler.update()
        other.update()


def penalty(scaler, models, optimizers):
    for _ in range(3):
        optimizers[0].zero_grad()
        loss = models[0](X).square().mean()
        parameters = [*models[0].parameters()]
        scaled = torch.autograd.grad(scaler.scale(loss), parameters, create_graph=True)
        norm = sum((gradient / scaler.get_scale()).square().sum() for gradient in scaled)
        scaler.scale(loss + norm).backward()
        scaler.step(optimizers[0])
        scaler.update()


def left_out(scaler, models, optimizers):
    """The step is left out where the norm is large; the update is not."""
    for factor in (1.0, 100.0, 1.0):
        optimizers[0].zero_grad()
        scaler.scale(models[0](X).sum() * factor).backward()
        scaler.unscale_(optimizers[0])
        if torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0) < 50:
            scaler.step(optimizers[0])
        scaler.update()


def unscaled_one_after_the_other(scaler, models, optimizers):
    """An optimizer is unscaled before the loss of the next is scaled."""
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(X).square().mean()).backward()
            scaler.unscale_(optimizer)
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
        scaler.update()


def by_hand(scaler, models, optimizers):
    """Unscaled by hand, by a scale that is never updated, beside a model in fp32."""
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        models[1](X).square().mean().backward()
        scaler.scale(models[0](X).square().mean()).backward()
        optimizers[1].step()
        inverse = 1.0 / scaler.get_scale()
        for parameter in models[0].parameters():
            parameter.grad.mul_(inverse)
        optimizers[0].step()


def unscaled_and_stepped_by_hand(scaler, models, optimizers):
    for _ in range(3):
        optimizers[0].zero_grad()
        scaler.scale(models[0](X).square().mean()).backward()
        scaler.unscale_(optimizers[0])
        optimizers[0].step()
        scaler.update()


def scheduled_by_epoch(scaler, models, optimizers):
    """The last step of each epoch is skipped."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of")  # torch's own
        for _ in range(3):
            for factor in (1.0, 1.0, math.inf):
                iterate(scaler, optimizers[0], lambda factor=factor: models[0](X).mean() * factor)
            scheduler.step()


def scheduled_by_number(scaler, models, optimizers):
    """The script writes the learning rate of each iteration."""
    for number, factor in enumerate((math.inf, 1.0, 1.0, 1.0)):
        optimizers[0].param_groups[0]["lr"] = 0.1 / (number + 1)
        iterate(scaler, optimizers[0], lambda factor=factor: models[0](X).mean() * factor)


RIGHT = [
    accumulate,
    several_losses,
    gan,
    gan_of_one_update,
    a_scaler_each,
    penalty,
    left_out,
    unscaled_one_after_the_other,
    by_hand,
    unscaled_and_stepped_by_hand,
    scheduled_by_epoch,
    scheduled_by_number,
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", RIGHT)
def test_right_loops_train_as_under_torch(loop, fused):
    trained = []
    for make in SCALERS:
        models, optimizers = models_and_optimizers(kind=torch.optim.Adam, fused=fused)
        scaler = make("cpu", init_scale=8.0, growth_interval=2)
        loop(scaler, models, optimizers)
        trained.append((weights(*models), scaler.get_scale()))
    assert torch.equal(trained[0][0], trained[1][0])
    assert trained[0][1] == trained[1][1]


def test_replays_of_a_captured_loss_may_step_without_another_scale(monkeypatch):
    """As torch's notes on CUDA graphs do: the graph holds ``scale``, and ``step`` stands outside."""
    (model,), (optimizer,) = models_and_optimizers(1)
    scaler = nc.GradScaler("cpu", init_scale=8.0)
    monkeypatch.setattr(internals, "is_capturing", lambda: True)
    scaler.scale(model(X).sum()).backward()
    monkeypatch.undo()
    before = weights(model)
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
        for parameter in model.parameters():
            parameter.grad.mul_(8.0)  # what a replay would write
    torch.testing.assert_close(weights(model), before - 0.2 * torch.tensor([1.5, 1.0, 2.0]))


# ---- backward without a scale, or after unscale_


def test_backward_without_a_scale_is_refused():
    (model,), (optimizer,) = models_and_optimizers(1)
    scaler = nc.GradScaler("cpu")
    iterate(scaler, optimizer, lambda: model(X).sum())
    model(X).sum().backward()
    with pytest.raises(OrderError, match=r"no loss was scaled since the last update\(\)"):
        scaler.step(optimizer)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("new_parameter", [False, True])
def test_a_backward_pass_after_unscaling_is_refused(new_parameter, fused):
    (model,), (optimizer,) = models_and_optimizers(1, fused=fused)
    scaler = nc.GradScaler("cpu")
    first = model.weight.sum() if new_parameter else model(X).sum()
    later = model.bias.sum() if new_parameter else model(X).sum()
    scaler.scale(first).backward()
    scaler.unscale_(optimizer)
    scaler.scale(later).backward()
    before = weights(model)
    with pytest.raises(OrderError, match=r"after the last scaler\.scale\(loss\)\.backward\(\) of the step"):
        scaler.step(optimizer)
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_later_loss_of_another_model_hides_no_backward_pass(fused):
    (a, b), (one, _) = models_and_optimizers(fused=fused)
    scaler = nc.GradScaler("cpu")
    scaler.scale(a(X).sum()).backward()
    scaler.unscale_(one)
    scaler.scale(a(X).sum()).backward()
    scaler.scale(b(X).sum()).backward()
    before = weights(a)
    with pytest.raises(OrderError, match=r"after the last scaler\.scale\(loss\)\.backward\(\) of the step"):
        scaler.step(one)
    assert torch.equal(weights(a), before)


def test_later_losses_of_another_model_are_right():
    (a, b), (one, two) = models_and_optimizers()
    scaler = nc.GradScaler("cpu")
    before = weights(a)
    scaler.scale(a(X).sum()).backward()
    scaler.unscale_(one)
    for _ in range(2):
        scaler.scale(b(X).sum()).backward()
    torch.nn.utils.clip_grad_norm_(a.parameters(), 1e-3)
    assert not scaler.step(one).skipped
    assert not scaler.step(two).skipped
    assert not torch.equal(weights(a), before)


# ---- a batch without gradients


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "way", ["step", "unscale_", "clip_grad_norm_", "together", "closure", "unscale_ alone"]
)
def test_training_goes_on_after_a_batch_without_gradients(way, fused):
    (model, other), (optimizer, _) = models_and_optimizers(fused=fused, momentum=0.9)
    (plain, _), (expected, _) = models_and_optimizers(momentum=0.9)
    scaler = nc.GradScaler("cpu", growth_interval=2)

    def backward(reached):
        optimizer.zero_grad()
        loss = scaler.scale(reached(X).mean())
        loss.backward()
        return loss

    def step(reached):
        if way.startswith("unscale_"):
            scaler.unscale_(optimizer)
        if way == "clip_grad_norm_":
            scaler.clip_grad_norm_(optimizer, math.inf)
        if way == "unscale_ alone" and reached is other:
            return
        if way == "closure":
            scaler.step(optimizer, lambda: backward(reached))
        elif way == "together":
            scaler.step_together([optimizer])
        else:
            assert not scaler.step(optimizer).skipped

    for reached, scale in ((model, 2.0**16), (other, 2.0**16), (model, 2.0**17)):  # two good steps
        backward(reached)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(reached)
        assert len(seen) == (reached is other and way != "unscale_ alone")
        for warning in seen:
            assert "no parameter of this SGD had a gradient in this step" in str(warning.message)
            assert warning.filename == __file__
        scaler.update()
        assert scaler.get_scale() == scale
        if reached is model:
            expected.zero_grad()
            plain(X).mean().backward()
            expected.step()
    torch.testing.assert_close(weights(model), weights(plain))


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_never_had_gradients_is_an_error(fused):
    """As it is where it has the parameters of another model; who catches it may go on."""
    (model, other), (optimizer, _) = models_and_optimizers(fused=fused)
    scaler = nc.GradScaler("cpu")

    def wrong():
        scaler.scale(other(X).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(2):
        with pytest.raises(OrderError, match=r"^No inf checks were recorded"):
            wrong()
    assert not iterate(scaler, optimizer, lambda: model(X).mean()).skipped


# ---- steps by hand


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_by_hand_on_scaled_gradients_is_told_once(stepped, fused):
    (model,), (optimizer,) = models_and_optimizers(1, fused=fused)
    scaler = nc.GradScaler("cpu")
    expected = "leave optimizer.step() out" if stepped else "write scaler.step(optimizer)"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(X).mean()).backward()
            if stepped:
                scaler.step(optimizer)
            optimizer.step()
            if stepped:
                scaler.update()
    (warning,) = seen
    assert expected in str(warning.message)
    assert warning.filename == __file__


def test_a_step_by_hand_beside_another_scaler_is_told_and_taken():
    """torch iterates over the hooks of both, and raises if one goes meanwhile."""
    models, optimizers = models_and_optimizers(2)
    scalers = [nc.GradScaler("cpu") for _ in models]
    for scaler, model in zip(scalers, models, strict=True):
        scaler.scale(model(X).mean()).backward()
    for optimizer in optimizers:
        with pytest.warns(UserWarning, match="was called by hand"):
            optimizer.step()


def test_the_hook_for_steps_by_hand_is_gone_after_the_first_iteration():
    hooks = _global_optimizer_pre_hooks
    (model,), (optimizer,) = models_and_optimizers(1)
    before, scaler = len(hooks), nc.GradScaler("cpu")
    scaler.scale(model(X).mean()).backward()
    assert len(hooks) == before + 1
    scaler.step(optimizer)
    scaler.update()
    assert len(hooks) == before
    other = nc.GradScaler("cpu")
    other.scale(model(X).mean())
    del other
    assert len(hooks) == before


# ---- schedulers after a skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("way", ["always", "held back", "a listener"])
def test_a_scheduler_that_runs_ahead_is_told_once(way, fused, together):
    (model,), (optimizer,) = models_and_optimizers(1, fused=fused)
    scaler = nc.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if way == "a listener":
        scaler.on_step(lambda _: scheduler.step())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for factor in (1.0, math.inf, 1.0, 1.0, math.inf, 1.0, 1.0, 1.0):
            loss = model(X).mean() * factor
            if together:
                scaler.scale(loss).backward()
                (result,) = scaler.step_together([optimizer])
                scaler.update()
                optimizer.zero_grad()
            else:
                result = iterate(scaler, optimizer, lambda loss=loss: loss)
            if way == "always" or (way == "held back" and not result.skipped):
                scheduler.step()
    if way == "always":
        (warning,) = seen
        assert "if not result.skipped: scheduler.step()" in str(warning.message)
    else:
        assert not seen
        assert scheduler.last_epoch == 6  # of eight steps two were skipped
    assert internals.has_scheduler(optimizer)
    assert not internals.has_scheduler(torch.optim.SGD(model.parameters(), 0.1))

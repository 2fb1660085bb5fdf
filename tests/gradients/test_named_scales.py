"""A scale for each loss: gradients are true from ``backward`` on, whatever the losses share."""

import copy
import math
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import ScaleError, UnsupportedError


def shared(dtype=torch.float32):
    drawn = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=drawn).to(dtype).requires_grad_() for shape in ((3, 4), (4,), (3,))]


def losses(trunk, head, other):
    return (torch.tanh(trunk) * head).square().sum(), (torch.sin(trunk).T * other).sum().exp()


def scaler_with(**scales):
    """Scales by name, put where they are by ``update``."""
    scaler = nc.GradScaler("cpu")
    for name, scale in scales.items():
        scaler.scale(torch.ones(1, requires_grad=True).sum(), name=name)
        scaler.update(scale, name=name)
    return scaler


@pytest.mark.parametrize("together", [False, True])
def test_two_losses_with_two_scales_give_the_gradients_of_both(together):
    """The oracle is autograd in fp64."""
    wide, narrow = shared(torch.float64), shared()
    sum(losses(*wide)).backward()
    scaler = scaler_with(a=2.0**20, b=2.0**-3)
    a, b = losses(*narrow)
    a, b = scaler.scale(a, name="a"), scaler.scale(b, name="b")
    assert a.item() / b.item() == pytest.approx(2.0**23 * (losses(*wide)[0] / losses(*wide)[1]).item())
    if together:
        with pytest.raises(ScaleError, match=r"^expected one named loss in a backward pass, got '[ab]' and"):
            (a + b).backward()
        return
    a.backward(retain_graph=True)
    b.backward()
    for parameter, oracle in zip(narrow, wide, strict=True):
        torch.testing.assert_close(parameter.grad.double(), oracle.grad, rtol=1e-5, atol=1e-6)
    optimizer = torch.optim.SGD(narrow, lr=1.0)
    expected = [p.detach() - p.grad for p in narrow]
    result = scaler.step(optimizer)
    assert result.scale == {"a": 2.0**20, "b": 2.0**-3}
    assert all(torch.equal(p, value) for p, value in zip(narrow, expected, strict=True))


def test_several_passes_and_autograd_grad_are_unscaled():
    parameters = shared()
    plain = torch.autograd.grad(losses(*parameters)[0], parameters[:2])
    scaler = scaler_with(a=2.0**10)
    scaled = scaler.scale(losses(*parameters)[0], name="a")
    ours = torch.autograd.grad(scaled, parameters[:2], retain_graph=True)
    scaled.backward(retain_graph=True)
    scaled.backward()
    for value, expected, parameter in zip(ours, plain, parameters, strict=False):
        assert torch.equal(value, expected)
        assert torch.equal(parameter.grad, 2 * expected)
    losses(*parameters)[0].backward()  # an unscaled loss beside it
    assert torch.equal(parameters[0].grad, 3 * plain[0])


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_one_loss_lowers_only_its_own_scale(fused):
    """As in a GAN: two optimizers, and the generator's loss runs through the discriminator."""
    generator, discriminator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    g = torch.optim.Adam(generator.parameters(), fused=fused)
    d = torch.optim.Adam(discriminator.parameters(), fused=fused)
    scaler, noise = nc.GradScaler("cpu", 1024.0, growth_interval=2), torch.randn(4, 2)
    for factor in (1.0, math.inf, 1.0, 1.0):
        d.zero_grad()
        loss = discriminator(generator(noise).detach()).square().mean() * factor
        scaler.scale(loss, name="d").backward()
        assert scaler.step(d).skipped == math.isinf(factor)
        g.zero_grad()
        scaler.scale(-discriminator(generator(noise)).mean(), name="g").backward()
        result = scaler.step(g)
        assert not result.skipped
        assert list(result.scale) == ["g"]
        scaler.update()
    assert scaler.get_scale("d") == 1024.0  # halved, and doubled after two good steps
    assert scaler.get_scale("g") == 4096.0  # though the generator's loss left gradients in the discriminator


def test_an_overflow_lowers_every_scale_that_reached_it():
    one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([one, two], lr=0.1)
    scaler = scaler_with(a=16.0, b=16.0, c=16.0)
    scaler.scale((one * math.inf).sum(), name="a").backward()
    scaler.scale((one + two).sum(), name="b").backward()
    result = scaler.step(optimizer)
    assert result.nonfinite == ("group 0, parameter 0, shape (2,)",)
    scaler.update()
    assert [scaler.get_scale(name) for name in "abc"] == [8.0, 8.0, 16.0]
    assert [scaler.loss_scale(name).good_steps for name in "abc"] == [0, 0, 0]  # of c there was no step


def test_clipping_needs_no_other_call():
    parameters, plain = shared(), shared()
    scaler = scaler_with(a=2.0**10, b=4.0)
    ours, theirs = torch.optim.SGD(parameters, fused=True), torch.optim.SGD(plain)
    for loss, name in zip(losses(*parameters), "ab", strict=True):
        scaler.scale(loss, name=name).backward(retain_graph=True)
    sum(losses(*plain)).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.1)
    torch.testing.assert_close(scaler.clip_grad_norm_(ours, 0.1), expected, rtol=1e-6, atol=0.0)
    scaler.step(ours)
    theirs.step()
    for a, b in zip(parameters, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_checkpoints_are_right_or_refused():
    weight = torch.nn.Parameter(torch.ones(3))
    scaler, x = scaler_with(a=64.0), torch.ones(3, requires_grad=True)

    def layer(value):
        return (value * weight).exp()

    scaler.scale(checkpoint(layer, x, use_reentrant=False).sum(), name="a").backward()
    assert torch.equal(weight.grad, layer(x).detach())
    with pytest.raises(UnsupportedError, match=r"checkpoint\(\.\.\., use_reentrant=False\)"):
        scaler.scale(checkpoint(layer, x, use_reentrant=True).sum(), name="a")


def test_every_loss_of_a_scaler_has_a_name_or_none_has():
    loss = torch.ones(1, requires_grad=True).sum()
    both = r"^expected a name for every loss of this scaler or for none, got both: gradients of a named loss"
    scaler = nc.GradScaler("cpu")
    scaler.scale(loss)
    with pytest.raises(ScaleError, match=both):
        scaler.scale(loss, name="a")
    scaler = nc.GradScaler("cpu")
    scaler.scale(loss, name="disc")
    with pytest.raises(ScaleError, match=both):
        scaler.scale(loss)
    with pytest.raises(ScaleError, match=r"^expected the name of a loss scale: \['disc'\]$"):
        scaler.get_scale()
    with pytest.raises(ScaleError, match=r"^expected the name of a loss scale: \['disc'\]$"):
        scaler.update(2.0)
    with pytest.raises(ScaleError, match=r"^no loss was scaled by the name 'disk'\. Did you mean \"disc\"\?"):
        scaler.get_scale("disk")
    with pytest.raises(TypeError, match=r"^expected the name of a loss scale, got 3$"):
        scaler.scale(loss, name=3)
    with pytest.raises(ScaleError, match=r"^expected a loss with a graph for the scale 'disc', got a tensor"):
        scaler.scale(torch.ones(()), name="disc")


def test_narrow_named_losses_are_scaled_in_fp32():
    weight = torch.nn.Parameter(torch.ones(1))
    scaler = nc.GradScaler("cpu", 1024.0)
    scaled = scaler.scale({"one": [weight.half() + 99.0]}, name="a")["one"][0]
    assert scaled.dtype == torch.float32
    assert scaled.item() == 102400.0
    scaled.backward()
    assert weight.grad.item() == 1.0


@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy"])
def test_named_scales_are_saved_and_go_on(way):
    scaler, weight = scaler_with(a=64.0, b=8.0), torch.nn.Parameter(torch.ones(2))
    if way == "state_dict":
        again = nc.GradScaler("cpu")
        again.load_state_dict(scaler.state_dict())
    else:
        again = pickle.loads(pickle.dumps(scaler)) if way == "pickle" else copy.deepcopy(scaler)
    assert (again.get_scale("a"), again.get_scale("b")) == (64.0, 8.0)
    scaler.scale(weight.sum(), name="a").backward()  # hooks of both on one parameter
    again.scale(weight.sum(), name="b").backward()
    assert weight.grad.tolist() == [2.0, 2.0]
    with pytest.raises(ScaleError, match=r"^expected a loss scale for each of \['a', 'b'\], got one without"):
        again.load_state_dict(nc.GradScaler("cpu").state_dict())
    used = nc.GradScaler("cpu")
    used.scale(torch.ones(()))
    with pytest.raises(ScaleError, match=r"^expected one loss scale without a name, got \['a', 'b'\]$"):
        used.load_state_dict(scaler.state_dict())


def test_closures_see_true_gradients_of_a_named_loss():
    model, x, y = torch.nn.Linear(3, 1), torch.randn(8, 3), torch.randn(8, 1)
    plain = copy.deepcopy(model)
    scaler, ours = nc.GradScaler("cpu"), torch.optim.LBFGS(model.parameters())
    theirs = torch.optim.LBFGS(plain.parameters())

    def closure(network, optimizer, scale):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(network(x), y)
        scale(loss).backward()
        return loss

    result = scaler.step(ours, lambda: closure(model, ours, lambda loss: scaler.scale(loss, name="a")))
    theirs.step(lambda: closure(plain, theirs, lambda loss: loss))
    assert result.scale == {"a": 2.0**16}
    assert torch.equal(model.weight, plain.weight)

"""Weights written while a region is open take effect at once; a backward pass inside it warns."""

import sys
import warnings
from functools import partial

import pytest
import torch
from casting_cases import in_threads
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

OPTIMIZER_FILE = sys.modules["torch.optim.optimizer"]  # torch.optim deletes the name
OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 2}),
]


def losses(autocast, optimizer_class, settings):
    """Three steps, all inside one region."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), torch.randn(16, 8)
    optimizer = optimizer_class(model.parameters(), **settings)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        seen.append(loss.item())
        return loss

    with autocast("cpu", torch.bfloat16):
        for _ in range(3):
            if optimizer_class is torch.optim.LBFGS:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    return seen


@pytest.fixture
def warned_already():
    """These loops call backward inside the region, which is the point."""
    with nc.autocast("cpu"), pytest.warns(UserWarning, match="backward was called inside"):
        torch.ones(1, requires_grad=True).backward()


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS)
def test_training_inside_a_region_freezes_under_torch_and_not_under_ours(
    optimizer, settings, warned_already, without_our_hook
):
    frozen = losses(torch.autocast, optimizer, settings)
    assert len(set(frozen)) == 1, "torch drops stale casts now: is our optimizer hook still needed?"
    without_our_hook.undo()
    moving = losses(nc.autocast, optimizer, settings)
    uncached = losses(partial(torch.autocast, cache_enabled=False), optimizer, settings)
    assert moving == uncached
    assert moving[-1] < moving[0]


@pytest.fixture
def without_our_hook(monkeypatch):
    """The hook is for the whole process, torch's own regions too: take it out to see torch as it is."""
    with monkeypatch.context() as patch:
        patch.setattr(OPTIMIZER_FILE, "_global_optimizer_post_hooks", {})
        yield patch


def test_weights_written_by_hand_after_a_backward_take_effect(warned_already):
    layer, x = nn.Linear(8, 1), torch.randn(16, 8)
    seen = []
    with nc.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            loss = layer(x).square().mean()
            with nc.autocast("cpu", enabled=False):
                loss.backward()
            with torch.no_grad():
                for p in layer.parameters():
                    p.sub_(0.1 * p.grad)
                    p.grad = None
            seen.append(loss.item())
    assert sorted(seen, reverse=True) == seen
    assert len(set(seen)) == 3


def loads(autocast, **how):
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    other = nn.Linear(4, 4)
    with autocast("cpu", torch.bfloat16):
        layer(x)
        result = nn.Sequential(layer).load_state_dict(nn.Sequential(other).state_dict(), **how)
        inside = layer(x)
        assert type(result) is nn.modules.module._IncompatibleKeys
    with autocast("cpu", torch.bfloat16):
        return torch.equal(inside, other(x)), result


@pytest.mark.usefixtures("torch_alone")
def test_loaded_weights_take_effect_inside_a_region():
    assert loads(torch.autocast)[0] is False, "torch drops stale casts on loading now"
    right, result = loads(nc.autocast)
    assert right
    assert repr(result) == "<All keys matched successfully>"
    assert loads(nc.autocast, assign=True)[0]


def test_weights_that_loaded_before_an_error_take_effect_too():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    other = nn.Linear(4, 4)
    with nc.autocast("cpu", torch.bfloat16):
        layer(x)
        with pytest.raises(RuntimeError, match="Missing key"):
            layer.load_state_dict({"weight": other.weight})
        with torch.no_grad():
            layer.bias.copy_(other.bias)
        torch.clear_autocast_cache()
        assert torch.equal(layer(x), other(x))


# ---- a backward inside warns, once a process, and names the line that called it

LINE = (
    "backward was called inside an nc.autocast region, where its own operations may be cast as well; "
    "end the region after the loss and call backward after it"
)


def loss():
    return nn.Linear(4, 1)(torch.randn(2, 4)).float().sum()


@pytest.mark.parametrize(
    "call", [lambda t: t.backward(), lambda t: torch.autograd.backward(t, retain_graph=True)]
)
def test_it_warns_once_and_names_the_line(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with nc.autocast("cpu"):
            call(loss())
            call(loss())
        with nc.autocast("cpu"):
            call(loss())
    assert [(str(w.message), w.category, w.filename) for w in seen] == [(LINE, UserWarning, __file__)]


def test_it_does_not_warn_after_the_region_or_where_casting_is_off():
    with nc.autocast("cpu"):
        value = loss()
        with nc.autocast("cpu", enabled=False):
            loss().backward()
    value.backward()
    with nc.autocast("cpu", enabled=False):
        loss().backward()


def test_it_does_not_warn_in_a_thread_without_a_region():
    with nc.autocast("cpu"):
        in_threads(lambda: loss().backward())


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_does_not_warn(reentrant):
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with nc.autocast("cpu"):
        y = checkpoint(layer, x, use_reentrant=reentrant)
    y.float().sum().backward()
    assert x.grad is not None


def test_torchs_function_is_back_after_the_outermost_region():
    before = torch.autograd.backward
    with nc.autocast("cpu"):
        assert torch.autograd.backward is not before
        with nc.autocast("cpu"):
            pass
        assert torch.autograd.backward is not before
    assert torch.autograd.backward is before

"""A region that stays open in its thread, backward passes outside of it."""

import pytest
import torch
from casting_cases import in_threads, rules

import narrowcast as nc
from narrowcast.casting import Applied, LastingRegion, active_scopes
from narrowcast.casting import _torch_internals as internals
from narrowcast.casting.regions import _autocast, _weight_casts
from narrowcast.errors import OrderError

POLICY = rules(nc.rule.op("exp", compute="fp32"))


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.fixture
def region():
    opened = LastingRegion(POLICY, {"cpu": torch.bfloat16})
    yield opened
    opened.close()


def test_what_starts_the_engine_is_looked_up_at_each_call(monkeypatch):
    seen = []
    below = getattr(*internals.ENGINE)
    monkeypatch.setattr(*internals.ENGINE, lambda *a, **named: seen.append(1) or below(*a, **named))
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    torch.autograd.grad((x * x).sum(), x)
    torch.autograd.backward((x * x).sum())
    assert seen == [1, 1, 1]


def test_it_is_open_until_it_is_closed(region):
    assert product() == torch.bfloat16
    assert torch.exp(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    assert list(active_scopes()) == ["cpu"]
    with nc.autocast("cpu", enabled=False):
        assert not active_scopes()
        assert product() == torch.float32
    region.close()
    assert product() == torch.float32
    assert not active_scopes()
    region.close()


def test_backward_passes_of_other_regions_are_as_they_were(region):
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    def look():
        Look.apply(torch.ones(1, requires_grad=True)).backward()

    look()
    other = rules(nc.rule.op("exp", compute="bf16"))

    def in_another_thread():
        with nc.autocast("cpu", policy=other), pytest.warns(UserWarning, match="backward was called inside"):
            look()

    in_threads(in_another_thread)
    assert seen == [False, True]


def test_weights_that_are_loaded_take_effect(region):
    layer = torch.nn.Linear(2, 2, bias=False)
    before = layer(torch.ones(1, 2))
    layer.load_state_dict({"weight": torch.full((2, 2), 3.0)})
    assert layer(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]
    assert not torch.equal(before, layer(torch.ones(1, 2)))
    with nc.autocast("cpu", torch.bfloat16):
        layer(torch.ones(1, 2))
    layer.load_state_dict({"weight": torch.full((2, 2), 1.0)})  # the region that watches has ended meanwhile
    assert layer(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


def test_it_neither_begins_nor_ends_inside_of_another(region):
    with pytest.raises(OrderError, match=r"^expected no open region of autocast where one is to begin"):
        LastingRegion(POLICY, {"cpu": torch.bfloat16})
    with torch.autocast("cpu", torch.float16), pytest.raises(OrderError, match="one that is still open"):
        region.close()
    assert product() == torch.bfloat16


def test_nothing_is_left_of_one_that_cannot_open():
    with pytest.raises(nc.NarrowcastError):
        LastingRegion(POLICY, {"cpu": torch.bfloat16, "no such device": torch.bfloat16})
    assert product() == torch.float32
    assert not _autocast._outside_rules
    assert not _weight_casts.LOADING.users


def test_a_model_is_asked_whether_it_opens_its_region():
    model, admitted = torch.nn.Linear(2, 2), [True]
    with Applied(model, POLICY, admits=lambda called: admitted[0] and called is model):
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16
        admitted[0] = False
        assert model(torch.ones(1, 2)).dtype == torch.float32

"""Casts of weights that rules make: kept within a region, and never older than the weight."""

import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, CountCasts, in_threads, rules
from torch import nn

import narrowcast as nc
from child_processes import finished
from narrowcast.casting import PolicyRegion, drop_casts
from narrowcast.casting.regions import _weight_casts

rule = nc.rule
X = torch.linspace(-1, 1, 8).reshape(2, 4)
POLICY = rules(rule.op("linear", compute="fp16"), rule.op("matmul", compute="fp32"))


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=False)


@pytest.fixture(autouse=True)
def _nothing_is_kept_afterwards():
    yield
    assert not _weight_casts._here.casts


def by_hand(layer, x=X):
    return F.linear(x.half(), layer.weight.detach().half())


def test_one_cast_serves_a_region(layer):
    with nc.autocast("cpu", policy=POLICY), CountCasts((4, 4), FP16) as casts:
        for _ in range(3):
            layer(X)
            with nc.autocast("cpu", policy=POLICY):
                layer(X)
    assert casts.count == 1


def test_the_end_of_another_policy_changes_nothing_before_the_region_ends(layer):
    """A policy ends when garbage is collected: PyTorch's kernel, back in place, would cast anew."""
    other = nc.Policy.preset("fp32").with_rules(rule.op("linear", compute="fp32"))
    with nc.autocast("cpu", policy=other):
        layer(X)
    with nc.autocast("cpu", torch.float16), CountCasts((4, 4), FP16) as casts:
        layer(X)
        del other
        gc.collect()
        layer(X)
    assert casts.count == 1


def test_only_parameters_are_kept_and_only_where_the_cache_is_on(layer):
    for weight, settings in ((layer.weight, {"cache_enabled": False}), (layer.weight.detach(), {})):
        with nc.autocast("cpu", policy=POLICY, **settings), CountCasts((4, 4), FP16) as casts:
            F.linear(X, weight)
            F.linear(X, weight)
        assert casts.count == 2


def test_formats_do_not_meet(layer):
    other = rules(rule.op("linear", compute="bf16"), compute="fp16")
    with nc.autocast("cpu", policy=POLICY):
        first = layer(X)
        with nc.autocast("cpu", policy=other):
            second = layer(X)
        third = layer(X)
    assert [out.dtype for out in (first, second, third)] == [FP16, BF16, FP16]
    assert torch.equal(second, F.linear(X.bfloat16(), layer.weight.bfloat16()))


# ---- gradients


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_first_use_without_gradients_costs_no_later_one(layer, without):
    with nc.autocast("cpu", policy=POLICY):
        with without():
            assert not layer(X).requires_grad
        out = layer(X)
        with without():
            again = layer(X)
    assert not again.requires_grad
    (found,) = torch.autograd.grad(out.float().square().sum(), layer.weight)
    by_hand = F.linear(X.half(), layer.weight.half())
    assert torch.equal(found, torch.autograd.grad(by_hand.float().square().sum(), layer.weight)[0])


def test_a_weight_that_is_thawed_inside_a_region(layer):
    layer.weight.requires_grad_(False)
    with nc.autocast("cpu", policy=POLICY):
        assert not layer(X).requires_grad
        layer.weight.requires_grad_(True)
        out = layer(X)
        layer.weight.requires_grad_(False)
        assert not layer(X).requires_grad
        layer.weight.requires_grad_(True)
    out.float().sum().backward()
    assert layer.weight.grad is not None


def test_one_cast_gathers_the_gradients_of_all_uses(layer):
    def gradient(region):
        layer.weight.grad = None
        with region:
            loss = sum(layer(X * scale).float().square().sum() for scale in (1, 2, 3))
        loss.backward()
        return layer.weight.grad

    kept = gradient(nc.autocast("cpu", policy=POLICY))
    each = gradient(nc.autocast("cpu", policy=POLICY, cache_enabled=False))
    # Sums of three products in fp16 instead of fp32.
    assert torch.allclose(kept, each, rtol=3 * 2.0**-10, atol=3 * 2.0**-10)


# ---- writes


def step(optimizer, **settings):
    def write(weight, other):
        with torch.enable_grad():
            weight.grad = other.clone()
            optimizer([weight], lr=1.0, **settings).step()

    return write


def foreach(weight, other):
    torch._foreach_mul_([weight], 2.0)
    torch._foreach_add_([weight], [other])


WRITES = {
    "average": lambda weight, other: weight.lerp_(other, 0.5),
    "copy_": lambda weight, other: weight.copy_(other),
    "a part": lambda weight, _: weight[0].fill_(7),
    "foreach": foreach,
    "through detach": lambda weight, other: weight.detach().copy_(other),
    "through a view": lambda weight, _: weight.view(-1)[3:5].fill_(9),
    "by init": lambda weight, _: nn.init.constant_(weight, 0.25),
    "SGD": step(torch.optim.SGD),
    "fused Adam": step(torch.optim.Adam, fused=True),
    "in another thread": lambda weight, _: in_threads(lambda: weight.detach().fill_(0.5)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_takes_effect_at_once(layer, write):
    with nc.autocast("cpu", policy=POLICY):
        before = layer(X)
        with torch.no_grad():
            WRITES[write](layer.weight, torch.ones(4, 4))
        after = layer(X)
    assert torch.equal(after, by_hand(layer))
    assert not torch.equal(after, before)


def test_writes_through_data_need_drop_casts(layer):
    """They leave no trace: the one exception, of rules and of PyTorch's own casts alike."""
    plain = nc.Policy(compute="fp16")
    for policy in (POLICY, plain):
        with nc.autocast("cpu", policy=policy):
            before = layer(X)
            layer.weight.data.add_(1)
            assert torch.equal(layer(X), before)
            drop_casts()
            assert torch.equal(layer(X), by_hand(layer))
            assert not torch.equal(layer(X), before)


@pytest.mark.usefixtures("torch_alone")
def test_a_plain_region_does_not_see_other_writes(layer):
    """PyTorch's cache asks no weight whether it was written; optimizers, states and backward are watched."""
    with nc.autocast("cpu", FP16):
        before = layer(X)
        with torch.no_grad():
            layer.weight.add_(1)
        assert torch.equal(layer(X), before)
        drop_casts()
        assert torch.equal(layer(X), by_hand(layer))


def test_a_plain_region_sees_them_where_the_operator_has_a_kernel(layer):
    policy = rules(rule.module("elsewhere", op="linear", compute="fp32"))  # in force nowhere
    PolicyRegion(policy, {"cpu": BF16})
    with nc.autocast("cpu", FP16):
        layer(X)
        with torch.no_grad():
            layer.weight.add_(1)
        assert torch.equal(layer(X), by_hand(layer))


@pytest.mark.long
def test_no_thread_waits_for_a_cache_with_pythons_lock():
    script = Path(__file__).parent / "scripts" / "threads_that_clear.py"
    done = finished([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr


# ---- other weights


def test_a_weight_that_dies_and_another_in_its_place():
    with nc.autocast("cpu", policy=POLICY):
        for _ in range(50):
            layer = nn.Linear(4, 4, bias=False)
            assert torch.equal(layer(X), by_hand(layer))
            del layer
            gc.collect(0)


def test_shared_weights_have_one_cast(layer):
    twin = nn.Linear(4, 4, bias=False)
    twin.weight = layer.weight
    with nc.autocast("cpu", policy=POLICY), CountCasts((4, 4), FP16) as casts:
        layer(X)
        twin(X)
    assert casts.count == 1

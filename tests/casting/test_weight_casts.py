"""Casts of weights that rules make: kept within a region, and never older than the weight."""

import copy
import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from child_processes import finished
from narrowcast.casting import _weight_casts, drop_casts, region_in

rule = nc.rule
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.linspace(-1, 1, 8).reshape(2, 4)
POLICY = nc.Policy(compute="bf16").with_rules(
    rule.op("linear", compute="fp16"), rule.op("matmul", compute="fp32")
)


class Casts(TorchDispatchMode):
    """Counts the casts to fp16 of tensors of a shape."""

    only_looks_on = True

    def __init__(self, shape):
        super().__init__()
        self.shape = torch.Size(shape)
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        cast = op is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == FP16
        self.count += cast and args[0].shape == self.shape
        return op(*args, **(kwargs or {}))


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
    with nc.autocast("cpu", policy=POLICY), Casts((4, 4)) as casts:
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
    with nc.autocast("cpu", torch.float16), Casts((4, 4)) as casts:
        layer(X)
        del other
        gc.collect()
        layer(X)
    assert casts.count == 1


def test_without_the_cache_each_use_casts(layer):
    with nc.autocast("cpu", policy=POLICY, cache_enabled=False), Casts((4, 4)) as casts:
        layer(X)
        layer(X)
    assert casts.count == 2


def test_only_parameters_are_kept(layer):
    plain = layer.weight.detach()
    with nc.autocast("cpu", policy=POLICY), Casts((4, 4)) as casts:
        F.linear(X, plain)
        F.linear(X, plain)
    assert casts.count == 2


def test_formats_do_not_meet(layer):
    other = nc.Policy(compute="fp16").with_rules(rule.op("linear", compute="bf16"))
    with nc.autocast("cpu", policy=POLICY):
        first = layer(X)
        with nc.autocast("cpu", policy=other):
            second = layer(X)
        third = layer(X)
    assert [out.dtype for out in (first, second, third)] == [FP16, BF16, FP16]
    assert torch.equal(second, F.linear(X.bfloat16(), layer.weight.bfloat16()))


# ---- gradients


@pytest.mark.parametrize("first", ["no_grad", "inference_mode", "set_grad_enabled"])
def test_a_first_use_without_gradients_costs_no_later_one(layer, first):
    without = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    }[first]
    with nc.autocast("cpu", policy=POLICY):
        with without():
            assert not layer(X).requires_grad
        out = layer(X)
        with without():
            again = layer(X)
    assert not again.requires_grad
    out.float().square().sum().backward()
    expected = copy.deepcopy(layer)
    expected.weight.grad = None
    F.linear(X.half(), expected.weight.half()).float().square().sum().backward()
    assert torch.equal(layer.weight.grad, expected.weight.grad)


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


def writes():
    """Everything that changes a weight, named."""

    def average(weight, other):
        with torch.no_grad():
            weight.lerp_(other, 0.5)

    def copy_(weight, other):
        with torch.no_grad():
            weight.copy_(other)

    def multiply(weight, _other):
        with torch.no_grad():
            weight *= 3

    def a_part(weight, _other):
        with torch.no_grad():
            weight[0] = 7

    def foreach(weight, other):
        with torch.no_grad():
            torch._foreach_mul_([weight], 2.0)
            torch._foreach_add_([weight], [other])

    def through_detach(weight, other):
        weight.detach().copy_(other)

    def through_a_view(weight, _other):
        with torch.no_grad():
            weight.view(-1)[3:5].fill_(9)

    def by_init(weight, _other):
        nn.init.constant_(weight, 0.25)

    def sgd(weight, other):
        weight.grad = other.clone()
        torch.optim.SGD([weight], lr=1.0).step()

    def fused_adam(weight, other):
        weight.grad = other.clone()
        torch.optim.Adam([weight], lr=1.0, fused=True).step()

    return [
        average,
        copy_,
        multiply,
        a_part,
        foreach,
        through_detach,
        through_a_view,
        by_init,
        sgd,
        fused_adam,
    ]


@pytest.mark.parametrize("write", writes(), ids=lambda write: write.__name__)
def test_a_write_takes_effect_at_once(layer, write):
    with nc.autocast("cpu", policy=POLICY):
        before = layer(X)
        write(layer.weight, torch.ones(4, 4))
        after = layer(X)
    assert torch.equal(after, by_hand(layer))
    assert not torch.equal(after, before)


def test_a_loaded_state_takes_effect_at_once(layer):
    other = nn.Linear(4, 4, bias=False)
    with nc.autocast("cpu", policy=POLICY):
        layer(X)
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(X), by_hand(other))
        layer.load_state_dict(nn.Linear(4, 4, bias=False).state_dict(), assign=True)
        assert torch.equal(layer(X), by_hand(layer))


def test_a_write_in_another_thread(layer):
    with nc.autocast("cpu", policy=POLICY):
        layer(X)

        def write():
            with torch.no_grad():
                layer.weight.fill_(0.5)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        assert torch.equal(layer(X), by_hand(layer))


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


def test_a_plain_region_does_not_see_other_writes():
    """PyTorch's cache asks no weight whether it was written; optimizers, states and backward are watched.

    In a process of its own, where no kernel of ours stands in front of it.
    """
    script = """
import torch, narrowcast as nc
layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
with nc.autocast("cpu", torch.float16):
    before = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    assert torch.equal(layer(x), before)
    nc.drop_casts()
    assert not torch.equal(layer(x), before)
"""
    done = finished([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def kernel_for_nobody():
    """A kernel of ours on ``linear``, whose rule is in force nowhere."""
    policy = nc.Policy(compute="bf16").with_rules(nc.rule.module("elsewhere", op="linear", compute="fp32"))
    region_in(policy, "cpu", BF16)
    yield
    del policy


@pytest.mark.usefixtures("kernel_for_nobody")
def test_a_plain_region_sees_them_where_the_operator_has_a_kernel(layer):
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
    with nc.autocast("cpu", policy=POLICY), Casts((4, 4)) as casts:
        layer(X)
        twin(X)
    assert casts.count == 1

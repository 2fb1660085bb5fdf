"""O1: where its casts are in force: models in any thread, loose calls in one, never in backward passes."""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from o1 import halves, initialize
from torch.autograd import grad as imported_grad
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from ended_apex import end_apex
from narrowcast.apex import amp
from narrowcast.errors import PolicyError


def product(size=4):
    return torch.ones(size, size) @ torch.ones(size, size)


def small_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
    )


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@halves
def test_models_in_every_thread_and_loose_calls_in_this_one(half):
    model = initialize(small_model(), half)
    x = torch.randn(2, 4)
    assert model(x).dtype == half
    assert product().dtype == half
    assert F.cross_entropy(model(x), torch.tensor([0, 1])).dtype == torch.float32
    assert in_a_thread(lambda: model(x)).dtype == half
    assert in_a_thread(product).dtype == torch.float32
    end_apex()
    assert model(x).dtype == torch.float32
    assert product().dtype == torch.float32


def test_the_latest_has_the_loose_calls_and_each_model_its_own():
    first = initialize(small_model(), torch.float16)
    amp.lists.functional_overrides.FP32_FUNCS.remove("gelu")
    try:
        second = initialize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), torch.bfloat16)
        third = amp.initialize(small_model(), opt_level="O2", verbosity=0)
    finally:
        amp.lists.functional_overrides.FP32_FUNCS.append("gelu")
    x = torch.randn(2, 4)
    assert product().dtype == torch.bfloat16
    assert first(x).dtype == torch.float16
    assert first[1](first[0](x)).dtype == torch.bfloat16  # parts of a model are called as loose calls are
    assert second(x).dtype == torch.bfloat16  # gelu is on no list of this one
    assert third(x).dtype == torch.float32
    assert third[0].weight.dtype == torch.float16


def test_a_model_that_is_initialized_again_follows_the_latest():
    model = small_model()
    initialize(model)
    initialize(model, torch.bfloat16)
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16


def test_deactivated_casts_end_in_models_and_outside():
    model = initialize(small_model())
    amp._amp_state.handle._deactivate()
    assert not amp._amp_state.handle.is_active()
    assert model(torch.ones(2, 4)).dtype == product().dtype == torch.float32
    with pytest.raises(AttributeError, match=r"_amp_state\.handle\._deactivate\(\)"):
        amp.shutdown()


def test_a_model_with_a_policy_is_refused_and_nothing_casts():
    model = small_model()
    with nc.apply(model, "bf16"):
        model(torch.ones(2, 4))
        with pytest.raises(PolicyError, match="has a policy already"):
            initialize(model)
    assert product().dtype == torch.float32
    assert initialize(model)(torch.ones(2, 4)).dtype == torch.float16


def _in_the_child(results):
    results.put(str(product().dtype))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="gpu: no fork here")
def test_a_forked_process_casts_nothing_outside_of_models():
    initialize(small_model())
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_in_the_child, args=(results,))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
    assert results.get() == "torch.float32"
    assert product().dtype == torch.float16


@halves
@pytest.mark.parametrize("how", ["backward", "grad", "imported grad", "scale_loss"])
def test_backward_passes_cast_nothing(how, half):
    weight = torch.randn(4, 4, requires_grad=True)
    model = small_model()
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    leaves = [*model.parameters(), weight]

    def loss():
        with amp.disable_casts():  # a product in float32, whose gradients are products in float32
            wide = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) @ weight
        return (model(torch.ones(3, 4)).float() * torch.tanh(wide)).square().sum()

    # O1's region, closed before the backward pass.
    initialize(model, half)
    policy = amp._amp_state.handle.casts.policy
    end_apex()
    with nc.autocast("cpu", policy=policy):
        with nc.autocast("cpu", enabled=False):
            wide = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) @ weight
        expected_loss = (model(torch.ones(3, 4)).float() * torch.tanh(wide)).square().sum()
    expected = torch.autograd.grad(expected_loss, leaves)

    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O1", verbosity=0, half_type=half, loss_scale=1.0
    )
    if how == "backward":
        loss().backward()
    elif how == "scale_loss":
        with amp.scale_loss(loss(), optimizer) as scaled:
            scaled.backward()
    found = [one.grad for one in leaves]
    if "grad" in how:
        found = {"grad": torch.autograd.grad, "imported grad": imported_grad}[how](loss(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert product().dtype == half


@halves
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["loose", "in the model"])
def test_recomputation_casts_as_the_first_time(reentrant, inside, half):
    block = small_model()

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    outer = initialize(Outer(), half)
    seen = []
    block[0].register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    x = torch.randn(2, 4, requires_grad=True)
    called = outer if inside else lambda x: checkpoint(block, x, use_reentrant=reentrant)
    called(x).float().sum().backward()
    assert seen == [half, half]
    checkpointed = [one.grad.clone() for one in block.parameters()]
    block.zero_grad()
    block(x).float().sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(checkpointed, block.parameters(), strict=True))


def test_disabled_casts_come_back_after_an_exception():
    model = initialize(small_model())

    def fail():
        with amp.disable_casts():
            assert product().dtype == torch.float32
            assert model(torch.ones(2, 4)).dtype == torch.float32
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert product().dtype == torch.float16
    assert model(torch.ones(2, 4)).dtype == torch.float16

"""Checkpoints under rules: what is computed again is what was computed, wherever backward runs."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.casting._weight_casts import forget_warnings
from narrowcast.errors import OrderError

rule = nc.rule
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OP_RULES = (rule.op("softmax", compute="fp16"), rule.op("gelu", compute="fp32"))
MODULE_RULES = (
    rule.module("norm", compute="fp32", output="bf16"),
    rule.module("value", compute="fp16", output="fp32"),
    rule.module("", op="exp", compute="fp32"),
)
POLICIES = {
    "op rules": nc.Policy(compute="bf16", rules=OP_RULES),
    "module rules": nc.Policy(compute="bf16", rules=MODULE_RULES),
    "both": nc.Policy(compute="bf16", rules=(*OP_RULES, *MODULE_RULES)),
    "another table": nc.Policy(compute="bf16", tables="cuda"),
    "in fp32": nc.Policy(compute="fp32", rules=OP_RULES),
}
WAYS = {"plain": None, "reentrant": True, "not reentrant": False}


class Block(nn.Module):
    """Attention by hand, so that a softmax and an exp are called, some of it under a checkpoint."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.query, self.value = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.3)
        self.use_reentrant = use_reentrant
        self.formats = []

    def forward(self, x):
        if self.use_reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)

    def inner(self, x):
        normed = self.norm(x)
        query = self.query(normed)
        weights = (query @ query.transpose(-1, -2)).softmax(-1)
        gate = torch.exp(-query.abs())
        value = self.value(normed)
        self.formats.append((normed.dtype, query.dtype, weights.dtype, gate.dtype, value.dtype))
        mixed = self.dropout(weights.to(value.dtype) @ value)
        return nn.functional.gelu(mixed * gate) + x


def in_another_thread(work):
    raised = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def gradients(use_reentrant, policy, backward):
    """Those of one step, and the formats of each forward; ``backward`` says where the backward runs."""
    block = Block(use_reentrant)
    x = torch.linspace(-2, 2, 96).reshape(2, 3, 16).requires_grad_()
    torch.manual_seed(1)
    with contextlib.ExitStack() as region:
        handle = region.enter_context(nc.apply(block, policy))
        assert handle.policy == policy
        loss = block(x).float().square().sum()
        if backward == "inside another region":
            forget_warnings()
            region.enter_context(nc.autocast("cpu", FP16))
            with pytest.warns(UserWarning, match="backward was called inside"):
                loss.backward()
        elif backward == "another thread":
            in_another_thread(loss.backward)
        else:
            loss.backward()
    return [x.grad, *(p.grad for p in block.parameters())], block.formats


@pytest.mark.parametrize("backward", ["outside", "another thread", "inside another region"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_the_gradients_are_those_of_the_plain_block(way, name, backward):
    if backward == "inside another region":
        # What backward itself computes is cast there, so both sides do it there.
        plain, formats = gradients(None, POLICIES[name], backward)
    else:
        plain, formats = gradients(None, POLICIES[name], "outside")
    checked, twice = gradients(WAYS[way], POLICIES[name], backward)
    assert twice == formats * 2
    for one, other in zip(checked, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("policy", ["op rules", "another table"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_region_of_rules_around_a_checkpoint(way, policy, inside):
    """The region that a person opens, and backward in it or after it."""

    def step(use_reentrant):
        block = Block(use_reentrant)
        x = torch.linspace(-2, 2, 96).reshape(2, 3, 16).requires_grad_()
        torch.manual_seed(1)
        forget_warnings()
        with nc.autocast("cpu", policy=POLICIES[policy]):
            loss = block(x).float().square().sum()
            if inside:
                with pytest.warns(UserWarning, match="backward was called inside"):
                    loss.backward()
        if not inside:
            loss.backward()
        return [x.grad, *(p.grad for p in block.parameters())], block.formats

    (plain, formats), (checked, twice) = step(None), step(WAYS[way])
    assert twice == formats * 2
    for one, other in zip(checked, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_a_region_in_fp32_around_a_checkpoint(way):
    """torch's own region is off there: what is recomputed would stay in the format that came."""

    def step(use_reentrant):
        block = Block(use_reentrant).to(BF16)
        x = torch.linspace(-2, 2, 96, dtype=BF16).reshape(2, 3, 16).requires_grad_()
        torch.manual_seed(1)
        with nc.autocast("cpu", FP32):
            loss = block(x).float().square().sum()
        loss.backward()
        return [x.grad, *(p.grad for p in block.parameters())], block.formats

    (plain, formats), (checked, twice) = step(None), step(WAYS[way])
    assert formats[0][1] == FP32
    assert twice == formats * 2
    for one, other in zip(checked, plain, strict=True):
        assert torch.equal(one, other)


def test_nested_checkpoints_of_both_kinds():
    class Two(nn.Module):
        def __init__(self, outer, inner):
            super().__init__()
            self.block = Block(inner)
            self.outer = outer

        def forward(self, x):
            if self.outer is None:
                return self.block(x)
            return checkpoint(self.block, x, use_reentrant=self.outer)

    def step(outer, inner):
        model = Two(outer, inner)
        rules = (*OP_RULES, rule.module("block.value", compute="fp16", output="fp32"))
        x = torch.linspace(-2, 2, 96).reshape(2, 3, 16).requires_grad_()
        torch.manual_seed(1)
        with nc.apply(model, nc.Policy(compute="bf16", rules=rules)):
            model(x).float().square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    plain = step(None, None)
    for outer, inner in [(False, False), (True, False), (False, True), (True, True)]:
        for one, other in zip(step(outer, inner), plain, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_a_policy_that_was_removed_before_backward_cannot_be_recomputed(way):
    """Without the hooks of its modules the forward would be another one, and without a word."""
    block = Block(WAYS[way])
    with nc.apply(block, POLICIES["module rules"]):
        out = block(torch.ones(2, 3, 16, requires_grad=True))
    with pytest.raises(OrderError, match="got one that was removed: go backward before remove"):
        out.float().sum().backward()
    plain = Block(None)
    with nc.apply(plain, POLICIES["module rules"]):
        out = plain(torch.ones(2, 3, 16, requires_grad=True))
    out.float().sum().backward()


def test_nothing_of_torch_stays_replaced():
    module = __import__("sys").modules["torch.utils.checkpoint"]
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator", "_get_autocast_kwargs")
    before = [getattr(module, name) for name in names]
    with nc.autocast("cpu", policy=POLICIES["op rules"]):
        assert all(getattr(module, name) is not one for name, one in zip(names, before, strict=True))
    assert [getattr(module, name) for name in names] == before

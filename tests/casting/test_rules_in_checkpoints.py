"""Checkpoints under rules: what is computed again is what was computed, wherever backward runs."""

import contextlib

import pytest
import torch
from casting_cases import BF16, FP16, FP32, Calls, assert_same, eager, in_threads, rules
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.casting.regions import _regions, _weight_casts
from narrowcast.errors import OrderError

rule = nc.rule
OP_RULES = (rule.op("softmax", compute="fp16"), rule.op("gelu", compute="fp32"))
MODULE_RULES = (
    rule.module("norm", compute="fp32", output="bf16"),
    rule.module("value", compute="fp16", output="fp32"),
    rule.module("", op="exp", compute="fp32"),
)
POLICIES = {
    "op rules": rules(*OP_RULES),
    "module rules": rules(*MODULE_RULES),
    "both": rules(*OP_RULES, *MODULE_RULES),
    "another table": rules(tables="cuda"),
    "in fp32": rules(*OP_RULES, compute="fp32"),
}
WAYS = {"plain": None, "reentrant": True, "not reentrant": False}
X = torch.linspace(-2, 2, 96).reshape(2, 3, 16)


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


def warned(work):
    _weight_casts._process.backward_warned = False
    with pytest.warns(UserWarning, match="backward was called inside"):
        work()


def gradients(block, region, backward="after it", x=X):
    """Those of one step, and the formats of each forward; ``backward`` says where the backward runs."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(region)
        loss = block(x).float().square().sum()
        if backward == "inside another region":
            stack.enter_context(nc.autocast("cpu", FP16))
            warned(loss.backward)
        elif backward == "inside":
            warned(loss.backward)
        elif backward == "another thread":
            in_threads(loss.backward)
        elif backward == "before the policy is removed":
            loss.backward()
    if backward == "after it":
        loss.backward()
    return [x.grad, *(p.grad for p in block.parameters())], block.formats


def assert_as_plain(way, run):
    """``run`` of a block under a checkpoint and of a plain one, in which the forward runs once."""
    (plain, formats), (checked, twice) = run(Block(None)), run(Block(WAYS[way]))
    assert twice == formats * 2
    assert_same(checked, plain)
    return formats[0]


ways = pytest.mark.parametrize("way", ["reentrant", "not reentrant"])


@ways
@pytest.mark.parametrize(
    "backward", ["before the policy is removed", "another thread", "inside another region"]
)
@pytest.mark.parametrize("name", POLICIES)
def test_the_gradients_are_those_of_the_plain_block(way, name, backward):
    assert_as_plain(way, lambda block: gradients(block, nc.apply(block, POLICIES[name]), backward))


@ways
@pytest.mark.parametrize("policy", ["op rules", "another table"])
@pytest.mark.parametrize("backward", ["after it", "inside"])
def test_a_region_of_rules_around_a_checkpoint(way, policy, backward):
    assert_as_plain(
        way, lambda block: gradients(block, nc.autocast("cpu", policy=POLICIES[policy]), backward)
    )


@ways
def test_a_region_in_fp32_around_a_checkpoint(way):
    """torch's own region is off there: what is recomputed would stay in the format that came."""
    formats = assert_as_plain(
        way, lambda block: gradients(block.to(BF16), nc.autocast("cpu", FP32), x=X.to(BF16))
    )
    assert formats[1] == FP32


@ways
def test_a_region_of_torch_around_a_checkpoint_is_back_inside_rules(way):
    """The checkpoint is bound for the sake of a region on another device."""
    block = Block(WAYS[way])
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", BF16), _regions.open_regions([("cuda", FP32, True, None)], True):
        loss = block(x).float().square().sum()
    with nc.autocast("cpu", policy=POLICIES["op rules"]):
        warned(loss.backward)
    assert block.formats[1] == block.formats[0]
    assert block.formats[0][1:3] == (BF16, BF16)


def test_nested_checkpoints_of_both_kinds():
    policy = rules(*OP_RULES, rule.module("block.value", compute="fp16", output="fp32"))

    def forward(self, x):
        if self.outer is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.outer)

    plain = eager(Calls(forward, block=Block(None), outer=None), policy, X)
    for outer, inner in [(False, False), (True, False), (False, True), (True, True)]:
        assert_same(eager(Calls(forward, block=Block(inner), outer=outer), policy, X), plain)


@ways
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

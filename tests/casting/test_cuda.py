"""Rules, recomputation and baked weights on a GPU, where backward runs in a thread of autograd's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, FP32, rules
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

pytestmark = pytest.mark.gpu


CALLS = {
    "linear": lambda x: F.linear(x, x),
    "bmm": lambda x: torch.bmm(x.view(2, 4, 8), x.view(2, 8, 4)),
    "conv2d": lambda x: F.conv2d(x.view(1, 1, 8, 8), x.view(8, 8)[:3, :3].reshape(1, 1, 3, 3)),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3),
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "cat": lambda x: torch.cat([x, x]),
    "exp": torch.exp,
    "add": lambda x: x + x.t(),
}


@pytest.mark.parametrize("given", [FP32, BF16])
@pytest.mark.parametrize("compute", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", CALLS)
def test_a_rule_is_a_cast_by_hand(name, compute, given):
    wanted = {"fp32": FP32, "fp16": FP16, "bf16": BF16}[compute]
    x = torch.linspace(-2, 3, 64, device="cuda").view(8, 8).to(given)
    by_hand = CALLS[name](x.to(wanted))
    with nc.autocast("cuda", policy=rules(nc.rule.op(name, compute=compute))):
        ours = CALLS[name](x)
    assert ours.dtype == by_hand.dtype
    assert torch.equal(ours, by_hand)


def network():
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 4)
    return nn.Sequential(*layers).cuda()


POLICIES = {
    "no rules": nc.Policy(compute="bf16"),
    "an operator": rules(nc.rule.op("linear", compute="fp16"), nc.rule.op("gelu", compute="fp32")),
    "a module": rules(nc.rule.module("0", compute="fp32"), nc.rule.module_type(nn.LayerNorm, compute="bf16")),
}


@pytest.mark.parametrize("recomputed", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_training_waits_for_nothing(policy, fused, recomputed, no_waiting):
    """And its gradients are those of ``apply``: autograd's thread recomputes in the region with its rules."""
    reference, model = network(), network()
    x = torch.linspace(-1, 1, 128, device="cuda").view(8, 16).requires_grad_()
    y = torch.arange(8, device="cuda") % 4
    nc.apply(reference, POLICIES[policy])
    # A region refuses rules that name modules. ``apply`` takes them, and nothing is recomputed then.
    uses_apply = recomputed is None or policy == "a module"
    if uses_apply:
        nc.apply(model, POLICIES[policy])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)

    def loss():
        if uses_apply:
            return F.cross_entropy(model(x), y)
        with nc.autocast("cuda", policy=POLICIES[policy]):
            return F.cross_entropy(checkpoint(model, x, use_reentrant=recomputed), y)

    F.cross_entropy(reference(x), y).backward()
    loss().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)

    # The first step makes the state of the optimizer, which may wait.
    optimizer.step()
    with no_waiting():
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()


@torch.no_grad()
def test_a_baked_transformer_computes_as_one_with_a_policy():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda().eval()
    reference, x = copy.deepcopy(model), torch.randn(2, 6, 32, device="cuda")
    nc.apply(reference, "bf16")
    handle = nc.bake(model, "bf16")
    assert "layers.1.linear1.weight" in handle.formats
    assert torch.equal(model(x), reference(x))
    handle.restore()

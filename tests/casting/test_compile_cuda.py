"""nc.compile on a GPU, by the table that PyTorch has for it."""

import pytest
import torch
from torch import nn

import narrowcast as nc

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8), nn.Softmax(-1)
    ).cuda()


POLICIES = [
    nc.Policy(compute="bf16"),
    nc.Policy(compute="fp16"),
    nc.Policy(compute="bf16", rules=(nc.rule.op("softmax", compute="fp16"),)),
    nc.Policy(compute="bf16", rules=(nc.rule.module_type(nn.LayerNorm, compute="fp32", output="bf16"),)),
]


def run(module, x):
    module.zero_grad()
    output = module(x)
    output.float().square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_as_eager_code(policy, backend):
    ours, theirs = model(), model()
    x = torch.randn(16, 32, device="cuda")
    with nc.apply(theirs, policy):
        expected = run(theirs, x)
    found = run(nc.compile(ours, policy, backend=backend), x)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        # Kernels sum in their own orders, and fused ones leave roundings of 8 bits out.
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-5, atol=2**-5 * b.abs().max().item())

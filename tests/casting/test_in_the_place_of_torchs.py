"""``torch.autocast = nc.autocast``: regions of a script and of libraries, in eager and compiled code."""

import pytest
import torch
from casting_cases import BF16, COMPILES, FP16, FP32, assert_same, eager, rules, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

pytestmark = COMPILES
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
RULES = rules(nc.rule.module("0", compute="fp32"), nc.rule.op("softmax", compute="fp16"))


@pytest.fixture(params=["torch", "torch.amp", "both"], autouse=True)
def assigned(request, monkeypatch):
    if request.param != "torch.amp":
        monkeypatch.setattr(torch, "autocast", nc.autocast)
    if request.param != "torch":
        monkeypatch.setattr(torch.amp, "autocast", nc.autocast)


def in_every_format(layer, x, autocast):
    with autocast("cpu", dtype=BF16):
        first = layer(x)
        with autocast("cpu", enabled=False):
            second = layer(x)
        with autocast("cpu", dtype=FP16):
            third = layer(x)
        with autocast("cpu", dtype=FP32):
            return first, second, third, layer(x.to(BF16))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_regions_in_compiled_code(backend):
    layer = nn.Linear(8, 8)
    compiled = torch.compile(in_every_format, backend=backend, fullgraph=True)
    for autocast in (torch.autocast, torch.amp.autocast):
        if autocast is nc.autocast:
            assert_same(compiled(layer, X, autocast), in_every_format(layer, X, autocast))
            decorated = autocast("cpu", dtype=BF16)(layer.forward)
            assert torch.compile(decorated, backend=backend)(X).dtype == decorated(X).dtype == BF16


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_policies_in_compiled_code(backend):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1))
    expected = eager(model, RULES, X)
    assert_same(trained(nc.compile(model, RULES, backend=backend), X), expected)
    with nc.apply(model, RULES):
        assert_same(trained(torch.compile(model, backend=backend, fullgraph=True), X), expected)
    with nc.autocast("cpu", policy=rules(*RULES.rules[1:])):
        assert torch.compile(model, backend=backend)(X).dtype == FP16


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_torchs(reentrant):
    layer = nn.Linear(8, 8)

    def forward(x):
        with nc.autocast("cpu", dtype=BF16):
            return checkpoint(layer, x, use_reentrant=reentrant)

    x = X.clone().requires_grad_()
    forward(x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    torch.compile(forward, backend="aot_eager", fullgraph=not reentrant)(x).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_region(strict):
    class Model(nn.Module):
        def forward(self, x):
            with nc.autocast("cpu", dtype=BF16):
                return x @ x.mT

    assert torch.export.export(Model(), (X,), strict=strict).module()(X).dtype == BF16

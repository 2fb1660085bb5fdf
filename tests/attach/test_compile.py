"""Compiled models and compiled functions: in mixed precision, without graph breaks of ours, and right."""

import shutil
import sys

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from scenarios import data, network

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.errors import UnsupportedError
from narrowcast.scaling import Dynamic

# torch's compiler warns of its own ways (torch.jit, the .grad of tensors that it looks at).
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _fresh_dynamo(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # inductor adds to it
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _module(model, backend):
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return lambda x, y: F.mse_loss(compiled(x), y)


def _in_place(model, backend):
    model.compile(backend=backend)
    return lambda x, y: F.mse_loss(model(x), y)


def _function(model, backend):
    return torch.compile(lambda x, y: F.mse_loss(model(x), y), backend=backend, fullgraph=True)


def _submodule(model, backend):
    model.middle = torch.compile(model.middle, backend=backend)
    return lambda x, y: F.mse_loss(model(x), y)


class Network(torch.nn.Module):
    """A class of its own: torch.compile leaves the frames of nn.Sequential itself alone."""

    def __init__(self):
        super().__init__()
        self.first, _, self.middle, _, self.last = network()

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def train(make, backend):
    model, (x, y) = Network(), data()
    loss_of = make(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    first = None
    for _ in range(6):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        assert loss.dtype == torch.float32
        loss.backward()
        first = first or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return torch.cat([g.reshape(-1) for g in first]), float(loss.detach())


WAYS = [(way, "eager") for way in (_module, _in_place, _function, _submodule)]
WAYS += [(way, "aot_eager") for way in (_module, _function)]
INDUCTOR = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
WAYS += [pytest.param(_module, "inductor", marks=[INDUCTOR, pytest.mark.long])]


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize(("make", "backend"), WAYS)
def test_a_compiled_model_trains_as_in_fp32(make, backend, policy):
    expected, expected_loss = train(make, backend)
    torch._dynamo.reset()
    with Attachment(policy, Dynamic(scale=2.0**8) if policy == "fp16" else None) as attached:
        found, loss = train(make, backend)
    error = float((found - expected).norm() / expected.norm())
    # As in test_scenarios: 48 independent roundings, so at most 7 roundoffs.
    assert 0 < error < 7 * {"bf16": 2.0**-8, "fp16": 2.0**-11}[policy]
    assert loss == pytest.approx(expected_loss, rel=7 * 2.0**-8)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert attached.left_alone is None
    assert attached.facts["steps"] == 6
    assert list(attached.recorder.devices) == ["cpu"]
    # What was compiled inside does not leak out of it.
    again, _ = train(make, backend)
    assert torch.equal(again, expected)


def test_a_function_compiled_as_a_whole_under_rules_is_refused():
    model = Network()
    step = torch.compile(lambda x: model(x).sum(), backend="aot_eager")
    policy = nc.Policy(compute="bf16").with_rules(nc.rule.op("tanh", compute="fp16"))
    with Attachment(policy), pytest.raises(Exception, match="is compiled as a whole") as caught:
        step(data()[0])
    assert isinstance(caught.value, UnsupportedError) or "UnsupportedError" in repr(caught.value)

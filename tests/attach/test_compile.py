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


class Chances(torch.nn.Module):
    """Returns direct results, in a dict, beside what is not one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(5, 4), torch.nn.Linear(4, 4)

    def forward(self, x, index):
        logits = self.last(torch.sigmoid(self.first(x)))
        taken = torch.log_softmax(logits, -1).gather(1, index)
        return {"chance": torch.sigmoid(logits)[:, 0], "taken": taken, "logits": logits}


def _compiled_function(model):
    def function(*inputs):
        return model(*inputs)

    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _compiled_model(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("compiled", [_compiled_function, _compiled_model])
def test_direct_results_are_computed_in_fp32(compiled, mode):
    model, x = Chances(), torch.randn(6, 5)
    index = torch.arange(6)[:, None] % 4
    with Attachment("bf16") as attached:
        call = compiled(model)
        with mode():
            found = call(x, index)
            again = call(x, index)
    logits = found["logits"].detach().clone().requires_grad_()
    assert torch.equal(logits, logits.bfloat16().float())
    chance, taken = torch.sigmoid(logits)[:, 0], torch.log_softmax(logits, -1).gather(1, index)
    assert torch.equal(found["chance"], chance)
    assert torch.equal(found["taken"], taken)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert not any("compiled" in note for note in attached.notes)
    if mode is torch.enable_grad:
        (found["chance"].sum() + found["taken"].sum()).backward()
        (chance.sum() + taken.sum()).backward()
        # That of the low logits, which the compiled backward sums over the rows in bf16.
        expected = logits.grad.sum(0)
        assert torch.allclose(model.last.bias.grad, expected, rtol=2**-6, atol=2**-6)


class Broken(Chances):
    def forward(self, x, index):
        torch._dynamo.graph_break()
        found = super().forward(x, index)
        torch._dynamo.graph_break()
        return found


@pytest.mark.parametrize("way", ["part", "in place", "graph break"])
def test_direct_results_of_other_compiled_code_are_told_of(way):
    class Outer(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *inputs):
            found = self.inner(*inputs)
            assert {one.dtype for one in found.values()} == {torch.bfloat16}
            return found

    model, x = Broken() if way == "graph break" else Chances(), torch.randn(6, 5)
    with Attachment("bf16") as attached:
        if way == "part":
            call = Outer(torch.compile(model, backend="aot_eager"))
        elif way == "graph break":
            call = torch.compile(model, backend="aot_eager")
        else:
            call = model
            model.compile(backend="aot_eager")
        for _ in range(2):
            found = call(x, torch.zeros(6, 1, dtype=torch.int64))
    assert torch.equal(found["chance"], found["chance"].bfloat16().float())
    kind = type(call).__name__
    notes = [note for note in attached.notes if note.startswith(f"{kind} calls sigmoid, softmax or log_")]
    assert len(notes) == 1


def test_a_compiled_model_that_returns_no_direct_result_is_not_told_of():
    class Logits(Chances):
        def forward(self, x):
            return self.last(torch.sigmoid(self.first(x)))

    with Attachment("bf16") as attached:
        assert _compiled_model(Logits())(torch.randn(6, 5)).dtype == torch.float32
    assert not any("compiled" in note for note in attached.notes)


def test_a_compiled_model_inside_another_stays_low():
    """Also after it was called by itself, where it returns fp32: each has a graph of its own."""
    model, x = Chances(), torch.randn(6, 5)
    index = torch.zeros(6, 1, dtype=torch.int64)

    class Outer(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *inputs):
            return {name: one.dtype for name, one in self.inner(*inputs).items()}

    with Attachment("bf16"):
        compiled = _compiled_model(model)
        alone = compiled(x, index)
        inside = Outer(compiled)(x, index)
    assert {one.dtype for one in alone.values()} == {torch.float32}
    assert set(inside.values()) == {torch.bfloat16}

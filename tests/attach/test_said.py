"""What a run says of scripts that it cannot cast, or that a low format may slow down."""

from collections import OrderedDict, UserDict

import pytest
import torch
from scenarios import notes_of
from torch import nn

import narrowcast as nc


class Results(dict):
    pass


class Rows(list):
    pass


class Returns(nn.Module):
    """Returns ``make`` of what its linear layer computes."""

    def __init__(self, make):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.make = make

    def forward(self, x):
        return self.make(self.linear(x))


class Yields(Returns):
    def forward(self, x):
        yield self.linear(x)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Returns(lambda y: Results(out=y)), "test_said.Results were not cast"),
        (Returns(lambda y: Rows([y])), "test_said.Rows were not cast"),
        (Returns(lambda y: {"in": [Rows([y])]}), "test_said.Rows were not cast"),
        (Returns(lambda y: UserDict(out=y)), "collections.UserDict were not cast"),
        (Yields(None), "what the generator Yields.forward yields is not cast"),
        (Returns(lambda y: OrderedDict(out=y)), None),
        (Returns(lambda y: Results(size=y.numel())), None),
    ],
)
def test_outputs_that_stay_low_are_in_the_notes(model, named):
    told = []
    for _ in range(2):  # each run has its own notes
        with nc.attached("bf16") as run:
            run.recorder._tell = told.append
            for _ in range(2):
                model(torch.ones(1, 2))
        found = notes_of(run)
        assert len(found) == (named is not None)
        assert all(named in note for note in found)
    told = [note for note in told if " on this CPU " not in note]
    assert told == found * 2


class TestCallsForEachBackward:
    def notes(self, calls, policy="bf16", backwards=2):
        model = nn.Linear(1, 1)
        x = torch.ones(1, 1)
        with nc.attached(policy) as run:
            for _ in range(backwards):
                calls(model, x).sum().backward()
        return [note for note in notes_of(run) if "solver" in note]

    def often(self, model, x, count=502):
        for _ in range(count):
            y = model(x)
        return y

    def test_they_are_noted_above_500(self):
        (note,) = self.notes(self.often)
        assert note.startswith("modules were called 502 times for each backward pass: if an adaptive solver")
        assert self.notes(lambda model, x: self.often(model, x, 500)) == []

    def test_not_in_fp32_and_not_those_without_gradients(self):
        def evaluates(model, x):
            with torch.no_grad():
                self.often(model, x)
            return model(x)

        assert self.notes(self.often, "fp32") == []
        assert self.notes(evaluates) == []

    def test_calls_in_a_backward_count(self):
        class Adjoint(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, model):
                ctx.often = lambda: self.often(model, torch.ones(1, 1))
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                ctx.often()
                return gradient * 2, None

        assert len(self.notes(lambda model, x: Adjoint.apply(model(x), model))) == 1
